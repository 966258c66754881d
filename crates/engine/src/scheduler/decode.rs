//! One token for every answer in progress, in one batch.

use std::sync::Arc;

use oscar_kernels::backend::{Batch, Sampled, Sampling, SealPage, SequenceRows};
use oscar_kernels::{Backend, KernelError};
use oscar_kv::{Append, SealWork};

use super::Scheduler;
use super::job::Running;
use super::prefill::sequence_rows;
use crate::error::EngineError;
use crate::event::{Event, FinishReason};

impl<B: Backend> Scheduler<B> {
    /// Takes every answer one token further.
    pub(super) fn decode(&mut self) {
        self.make_room_for_tokens();
        if self.running.is_empty() {
            return;
        }
        self.prepare_pages();
        let rows: Vec<usize> = (0..self.running.len()).collect();
        match self.forward(&rows) {
            Ok(()) => {
                for running in &mut self.running {
                    if let Some(append) = running.append.take() {
                        self.ledger.finish_append(&mut running.sequence, append);
                    }
                }
                let drawn = self.draw();
                self.take_tokens(drawn);
            }
            Err(_) => self.decode_one_by_one(),
        }
    }

    /// Room for one more token of every answer. When pages are short, younger requests make room for older ones.
    fn make_room_for_tokens(&mut self) {
        let mut index = 0;
        while index < self.running.len() {
            let running = &mut self.running[index];
            match self.ledger.append(&mut running.sequence, running.next) {
                Ok(append) => {
                    running.append = Some(append);
                    index += 1;
                }
                Err(shortage) => {
                    let order = running.order();
                    if self.make_room(order) {
                        continue;
                    }
                    // It is the youngest itself.
                    let running = self.running.remove(index);
                    if self.running.is_empty() && self.prefill.is_none() {
                        self.fail_running(running, EngineError::Shortage(shortage));
                    } else {
                        self.preempt(running);
                    }
                }
            }
        }
    }

    /// Copies and seals what the new tokens ask for. An answer whose pages cannot be sealed fails alone.
    fn prepare_pages(&mut self) {
        let appends = |running: &Running| running.append.as_ref().map(|Append { copy, seal }| (*copy, *seal));
        let copies: Vec<(u32, u32)> = self
            .running
            .iter()
            .filter_map(|running| appends(running)?.0)
            .map(|(from, to)| (from.slot(), to.slot()))
            .collect();
        let backend = Arc::clone(self.model.model().backend());
        let layers = self.model.config().layers;
        let mut failed: Vec<(usize, KernelError)> = Vec::new();
        if let Err(error) = backend.copy_pages(&copies, &mut self.cache) {
            // A slot that does not exist is an error in the bookkeeping; nobody's pages can be trusted.
            let error = Arc::new(EngineError::Kernel(error));
            for running in std::mem::take(&mut self.running) {
                self.fail_running(running, EngineError::Shared(Arc::clone(&error)));
            }
            return;
        }
        let mut work: Vec<(usize, SealWork)> = self
            .running
            .iter()
            .enumerate()
            .filter_map(|(index, running)| Some((index, appends(running)?.1?)))
            .collect();
        while !work.is_empty() {
            let pages: Vec<SealPage> = work.iter().map(|(_, work)| seal_page(work)).collect();
            match backend.seal(0..layers, &pages, &mut self.cache) {
                Ok(()) => break,
                Err(KernelError::Seal { page, layer, head, source }) if page < work.len() => {
                    let (index, _) = work.remove(page);
                    failed.push((index, KernelError::Seal { page, layer, head, source }));
                }
                Err(error) => {
                    let (index, _) = work.remove(0);
                    failed.push((index, error));
                }
            }
        }
        failed.sort_by_key(|&(index, _)| std::cmp::Reverse(index));
        for (index, error) in failed {
            let running = self.running.remove(index);
            self.fail_running(running, error.into());
        }
    }

    /// Runs the next token of some answers through the model; the logits are in the order of `answers`.
    fn forward(&mut self, answers: &[usize]) -> Result<(), KernelError> {
        let running = || answers.iter().map(|&index| &self.running[index]);
        let tokens: Vec<u32> = running().map(|running| running.next).collect();
        let sequences: Vec<SequenceRows<'_>> = running()
            .map(|Running { sequence, .. }| {
                sequence_rows(sequence, &(sequence.len() - 1..sequence.len()), usize::MAX, self.sealing)
            })
            .collect();
        let batch = Batch { tokens: &tokens, sequences: &sequences };
        let rows: Vec<usize> = (0..tokens.len()).collect();
        self.model.model().forward(&batch, &rows, &mut self.cache, &mut self.activations)
    }

    /// Draws the next token of every answer from the logits of the last step.
    fn draw(&mut self) -> Vec<Result<Sampled, EngineError>> {
        let prepared: Vec<Result<(), EngineError>> =
            self.running.iter_mut().map(|running| running.output.prepare()).collect();
        let settings: Vec<Sampling<'_>> =
            self.running.iter().map(|running| running.output.setting(self.vocabulary)).collect();
        match self.model.model().backend().sample(self.activations.logits(), &settings) {
            Ok(drawn) => prepared
                .into_iter()
                .zip(drawn)
                .map(|(prepared, drawn)| prepared.and(drawn.map_err(EngineError::from)))
                .collect(),
            Err(error) => {
                let error = Arc::new(EngineError::Kernel(error));
                settings.iter().map(|_| Err(EngineError::Shared(Arc::clone(&error)))).collect()
            }
        }
    }

    /// A batch failed as a whole: find out whose fault it is.
    fn decode_one_by_one(&mut self) {
        let mut index = 0;
        let mut drawn = Vec::new();
        while index < self.running.len() {
            match self.forward(&[index]) {
                Ok(()) => {
                    let running = &mut self.running[index];
                    if let Some(append) = running.append.take() {
                        self.ledger.finish_append(&mut running.sequence, append);
                    }
                    let backend = self.model.model().backend();
                    drawn.push(running.output.prepare().and_then(|()| {
                        let setting = running.output.setting(self.vocabulary);
                        Ok(backend.sample(self.activations.logits(), &[setting])?.remove(0)?)
                    }));
                    index += 1;
                }
                Err(error) => {
                    let running = self.running.remove(index);
                    self.fail_running(running, error.into());
                }
            }
        }
        self.take_tokens(drawn);
    }

    /// Hands out the drawn tokens, one for each of `running`, and ends what is complete.
    fn take_tokens(&mut self, drawn: Vec<Result<Sampled, EngineError>>) {
        let running = std::mem::take(&mut self.running);
        for (running, drawn) in running.into_iter().zip(drawn) {
            self.take_token(running, drawn);
        }
    }

    /// Hands out the token of one answer, which goes on running or ends.
    pub(super) fn take_token(&mut self, mut running: Running, drawn: Result<Sampled, EngineError>) {
        let taken = drawn.and_then(|drawn| {
            let id = drawn.token;
            let room = running.sequence.len() < self.context;
            let (token, finish) = running.output.push(drawn, self.model.is_end(id), room)?;
            running.next = id;
            Ok((token, finish))
        });
        match taken {
            Ok((token, finish)) => {
                self.counters.generated_tokens += 1;
                running.sink.send(Event::Token { choice: running.output.choice, token });
                match finish {
                    Some(finish) => self.finish_running(running, finish),
                    None => self.join(running),
                }
            }
            Err(error) => self.fail_running(running, error),
        }
    }

    /// An answer is complete or was broken off: the tree gets what was computed.
    pub(super) fn finish_running(&mut self, mut running: Running, finish: FinishReason) {
        if let Some(append) = running.append.take() {
            self.ledger.abandon_append(&mut running.sequence, append);
        }
        let Running { sink, output, sequence, .. } = running;
        self.retire(sequence);
        self.end(&sink, &output, finish);
    }

    pub(super) fn fail_running(&mut self, running: Running, error: EngineError) {
        let Running { sink, output, sequence, .. } = running;
        self.ledger.close(sequence);
        self.fail(&sink, output.choice, 1, Arc::new(error));
    }
}

pub(super) fn seal_page(work: &SealWork) -> SealPage {
    SealPage { exact: work.from, sealed: work.to.slot() }
}
