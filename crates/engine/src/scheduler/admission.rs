//! From the queue to an answer in progress: who may begin, what happens when there is no room, and the first tokens.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use oscar_kernels::Backend;
use oscar_kernels::backend::Sampling;
use oscar_kv::{Sequence, Shortage};

use super::Scheduler;
use super::job::{Job, Running, Segment, can_resume_at, split_at};
use super::prefill::{Prefill, Progress};
use crate::error::EngineError;
use crate::event::{Event, FinishReason, PromptLogprob};
use crate::output::Output;
use crate::serve::SharedSink;

/// A prompt in the cache whose answers are about to begin.
pub(super) struct Begun {
    id: u64,
    arrival: u64,
    sink: SharedSink,
    segments: Vec<Segment>,
    outputs: Vec<Output>,
    sequence: Sequence,
}

impl<B: Backend> Scheduler<B> {
    /// Does prompt work worth one chunk through all layers.
    pub(super) fn prefill_item(&mut self) {
        let mut allowance = self.chunk_rows * self.model.config().layers;
        while allowance > 0 {
            if self.prefill.is_none() && self.prefill_together(&mut allowance) {
                continue;
            }
            let Some(mut prefill) = self.prefill.take().or_else(|| self.admit()) else { return };
            match self.advance(&mut prefill, &mut allowance) {
                Ok(Progress::More) => self.prefill = Some(prefill),
                Ok(Progress::Done) => {
                    self.release_scratch();
                    self.begin_answers(prefill);
                }
                Ok(Progress::Short(shortage)) => {
                    if !self.find_room(prefill, shortage) {
                        return;
                    }
                }
                Err(error) => self.fail_prefill(prefill, error),
            }
        }
    }

    /// The memory that a prompt has passed through is worth more elsewhere.
    pub(super) fn release_scratch(&mut self) {
        if std::mem::take(&mut self.scratch_used) {
            self.model.model().backend().release_scratch(&mut self.cache);
        }
    }

    /// The next request whose prompt is computed, if one may begin.
    pub(super) fn admit(&mut self) -> Option<Prefill<B>> {
        let choices = self.waiting.front()?.choices;
        let crowded = self.crowded && !self.running.is_empty();
        if crowded || self.running.len() + choices > self.max_running {
            return None;
        }
        let mut job = self.waiting.pop_front()?;
        if std::mem::take(&mut job.counted) {
            self.uncount();
        }
        let whole = job.output.options().prompt_logprobs.is_some() && job.next.is_none();
        let sequence = if job.next.is_some() {
            let can_resume_at = |length| can_resume_at(&job.segments, length);
            self.ledger.reopen(job.salt, &job.tokens, can_resume_at)
        } else {
            let wanted = if whole { &job.tokens[..1] } else { &job.tokens[..] };
            self.ledger.open(job.salt, wanted)
        };
        job.output.start();
        // What a request finds of itself when it is taken up again was not there before it.
        if job.next.is_none() && job.output.preemptions == 0 {
            job.output.cached_tokens = sequence.len();
        }
        if whole {
            let first = PromptLogprob { token: job.tokens[0], logprob: None, top: Vec::new() };
            job.output.prompt_logprobs = vec![first];
        }
        Some(Prefill::new(job, sequence))
    }

    /// A prompt needs pages that are not there. `true` if it is worth another try at once.
    fn find_room(&mut self, mut prefill: Prefill<B>, shortage: Shortage) -> bool {
        let order = prefill.job.order();
        let begun = prefill.begun();
        if begun && self.make_room(order) {
            self.prefill = Some(prefill);
            return true;
        }
        if self.running.is_empty() {
            // Nobody will give anything back. What it shares with the tree may be in the way of what it needs.
            if !begun && !prefill.sequence.is_empty() {
                let fresh = self.ledger.open(prefill.job.salt, &[]);
                self.ledger.close(std::mem::replace(&mut prefill.sequence, fresh));
                self.ledger.flush();
                if prefill.job.next.is_none() {
                    prefill.job.output.cached_tokens = 0;
                }
                self.prefill = Some(prefill);
                return true;
            }
            self.fail_prefill(prefill, EngineError::Shortage(shortage));
            return true;
        }
        if begun {
            self.prefill = Some(prefill);
        } else {
            let (mut job, sequence) = self.abandon(prefill);
            self.retire(sequence);
            job.counted = true;
            self.shared.waiting.fetch_add(1, Ordering::SeqCst);
            self.wait(job);
            self.crowded = true;
        }
        false
    }

    /// A prompt is in the cache and its logits are there: its answers begin, or go on where they were.
    fn begin_answers(&mut self, prefill: Prefill<B>) {
        if let Some(begun) = self.settle_prompt(prefill) {
            self.draw_first(vec![begun]);
        }
    }

    /// A prompt is in the cache: the tree gets it. What is to be drawn for it, if anything.
    pub(super) fn settle_prompt(&mut self, prefill: Prefill<B>) -> Option<Begun> {
        let (job, mut sequence) = self.abandon(prefill);
        let Job { id, arrival, sink, output, choices, tokens, mut segments, next, .. } = job;
        if !self.insert(&mut sequence, false) {
            self.ledger.close(sequence);
            let error = EngineError::NotFinite;
            self.fail(&sink, output.choice, choices, Arc::new(error));
            return None;
        }
        if let Some(next) = next {
            self.join(Running { id, arrival, sink, output, sequence, segments, next, append: None });
            return None;
        }
        let (total, cached) = (tokens.len(), output.cached_tokens);
        split_at(&mut segments, cached);
        self.counters.prompt_tokens += total as u64;
        self.counters.cached_tokens += cached as u64;
        sink.send(Event::Prefill { done: total, total, cached });
        if !output.prompt_logprobs.is_empty() {
            sink.send(Event::Scored { prompt: output.prompt_logprobs.as_slice().into() });
        }
        let options = Arc::clone(output.options());
        let mut outputs: Vec<Output> =
            (1..choices).map(|choice| output.fork(choice, self.decoder(&options))).collect();
        outputs.insert(0, output);
        if options.max_tokens == Some(0) {
            self.retire(sequence);
            for output in outputs {
                self.end(&sink, &output, FinishReason::Length);
            }
            return None;
        }
        Some(Begun { id, arrival, sink, segments, outputs, sequence })
    }

    /// Draws the first token of every answer; the logits are in their order.
    pub(super) fn draw_first(&mut self, mut begun: Vec<Begun>) {
        let outputs = begun.iter_mut().flat_map(|begun| &mut begun.outputs);
        let prepared: Vec<Result<(), EngineError>> = outputs.map(Output::prepare).collect();
        let outputs = begun.iter().flat_map(|begun| &begun.outputs);
        let settings: Vec<Sampling<'_>> = outputs.map(|output| output.setting(self.vocabulary)).collect();
        let drawn = match self.model.model().backend().sample(self.activations.logits(), &settings) {
            Ok(drawn) => drawn,
            Err(error) => return self.fail_begun(begun, error.into()),
        };
        let drawn = prepared.into_iter().zip(drawn);
        let mut drawn = drawn.map(|(prepared, drawn)| prepared.and(drawn.map_err(EngineError::from)));
        for Begun { id, arrival, sink, segments, outputs, sequence } in begun {
            let forks: Vec<Sequence> = (1..outputs.len()).map(|_| self.ledger.fork(&sequence)).collect();
            let sequences = std::iter::once(sequence).chain(forks);
            let drawn: Vec<_> = drawn.by_ref().take(outputs.len()).collect();
            for ((output, sequence), drawn) in outputs.into_iter().zip(sequences).zip(drawn) {
                let (sink, segments) = (sink.clone(), segments.clone());
                let running =
                    Running { id, arrival, sink, output, sequence, segments, next: 0, append: None };
                self.take_token(running, drawn);
            }
        }
    }

    /// No answer of some prompts can begin.
    pub(super) fn fail_begun(&mut self, begun: Vec<Begun>, error: EngineError) {
        let error = Arc::new(error);
        for Begun { sink, outputs, sequence, .. } in begun {
            self.ledger.close(sequence);
            self.fail(&sink, 0, outputs.len(), Arc::clone(&error));
        }
    }

    pub(super) fn fail_prefill(&mut self, prefill: Prefill<B>, error: EngineError) {
        let (job, sequence) = self.abandon(prefill);
        self.ledger.close(sequence);
        self.release_scratch();
        self.fail(&job.sink, job.output.choice, job.choices, Arc::new(error));
    }
}
