//! Short prompts that wait together are computed together, in one pass over the weights.
//!
//! All or nothing within one turn: either every one of them is in the cache afterwards, or each waits again to be
//! computed alone, so that one which fails harms nobody else. Prompts that could share pages not computed yet are left
//! to come one after the other.

use std::sync::atomic::Ordering;

use oscar_codec::PAGE_TOKENS;
use oscar_kernels::backend::{Batch, SealPage, SequenceRows};
use oscar_kernels::{Backend, KernelError};
use oscar_model::PagedSealing;

use super::Scheduler;
use super::admission::Begun;
use super::job::Job;
use super::prefill::{Prefill, sequence_rows};
use crate::error::EngineError;

impl<B: Backend> Scheduler<B> {
    /// Computes the first few waiting prompts if they fit into what is left of this turn. `false` if there are not at
    /// least two of them; one that was admitted is then the prompt in progress.
    pub(super) fn prefill_together(&mut self, allowance: &mut usize) -> bool {
        let layers = self.model.config().layers.max(1);
        let mut together = self.gather(*allowance / layers);
        if together.len() < 2 {
            self.prefill = together.pop();
            return false;
        }
        let rows = |prefill: &Prefill<B>| prefill.work.as_ref().map_or(0, |work| work.extension.len);
        *allowance = allowance.saturating_sub(together.iter().map(rows).sum::<usize>() * layers);
        match self.forward_together(&together) {
            Ok(()) => {
                self.counters.batched_prompts += together.len() as u64;
                self.begin_together(together);
            }
            Err(_) => {
                for mut prefill in together {
                    prefill.job.alone = true;
                    self.put_back(prefill);
                }
            }
        }
        self.release_scratch();
        true
    }

    /// Admits prompts from the front of the queue as long as their rows fit.
    fn gather(&mut self, most_rows: usize) -> Vec<Prefill<B>> {
        let mut together: Vec<Prefill<B>> = Vec::new();
        let mut rows = 0;
        while self.waiting.get(1).is_some() || !together.is_empty() {
            if !self.waiting.front().is_some_and(is_plain) {
                break;
            }
            let full = self.running.len() + together.len() >= self.max_running;
            // When pages were short, one at a time until somebody is done.
            if full || self.crowded && !together.is_empty() {
                break;
            }
            let Some(mut prefill) = self.admit() else { break };
            let length = match self.remaining(&prefill) {
                Some((range, _)) if range.end == prefill.job.tokens.len() => range.len(),
                _ => usize::MAX,
            };
            let fits = rows + length.min(most_rows + 1) <= most_rows;
            if !fits || together.iter().any(|other| will_share(&prefill, other)) {
                self.put_back(prefill);
                break;
            }
            let extended = self.next_extension(&mut prefill);
            if extended.is_err() || self.shortage.take().is_some() {
                // What stands in its way is told when it is tried alone.
                self.put_back(prefill);
                break;
            }
            rows += length;
            together.push(prefill);
        }
        together
    }

    /// A prompt that was admitted waits again, as if nothing had been done.
    fn put_back(&mut self, prefill: Prefill<B>) {
        let (mut job, sequence) = self.abandon(prefill);
        self.ledger.close(sequence);
        job.counted = true;
        self.shared.waiting.fetch_add(1, Ordering::SeqCst);
        self.wait(job);
    }

    /// Runs all rows of some prompts through all layers.
    fn forward_together(&mut self, together: &[Prefill<B>]) -> Result<(), KernelError> {
        let works = || together.iter().filter_map(|prefill| Some((prefill, prefill.work.as_ref()?)));
        let mut tokens = Vec::new();
        let mut sequences: Vec<SequenceRows<'_>> = Vec::new();
        let (mut before, mut after): (Vec<SealPage>, Vec<SealPage>) = Default::default();
        for (Prefill { job, sequence, .. }, work) in works() {
            let rows = work.extension.start..work.extension.start + work.extension.len;
            tokens.extend_from_slice(&job.tokens[rows.clone()]);
            sequences.push(sequence_rows(sequence, &rows, work.extension.exact_from, self.sealing));
            before.extend(work.chunks.iter().flat_map(|chunk| &chunk.seal_before));
            after.extend(&work.seal_after);
        }
        let model = self.model.model();
        let batch = Batch { tokens: &tokens, sequences: &sequences };
        let step = model.begin_step(&batch, &self.cache)?;
        model.embed(&batch, &step, &mut self.activations)?;
        let mut attention = PagedSealing::<B> { cache: &mut self.cache, before: &before, after: &after };
        model.run_layers(0..self.model.config().layers, &step, &mut attention, &mut self.activations)
    }

    /// All rows of some prompts are computed: their answers begin.
    fn begin_together(&mut self, together: Vec<Prefill<B>>) {
        let (mut begun, mut last_rows, mut end): (Vec<Begun>, Vec<usize>, usize) = Default::default();
        for mut prefill in together {
            if let Some(work) = prefill.work.take() {
                end += work.extension.len;
                self.ledger.finish_extension(&mut prefill.sequence, work.extension);
            }
            if let Some(ready) = self.settle_prompt(prefill) {
                begun.push(ready);
                last_rows.push(end - 1);
            }
        }
        if begun.is_empty() {
            return;
        }
        match self.model.model().logits(&last_rows, &mut self.activations) {
            Ok(()) => self.draw_first(begun),
            Err(error) => self.fail_begun(begun, EngineError::Kernel(error)),
        }
    }
}

/// One answer to a new prompt, and nothing else wanted of it.
fn is_plain(job: &Job) -> bool {
    let options = job.output.options();
    job.next.is_none() && job.choices == 1 && !job.alone && options.prompt_logprobs.is_none()
}

/// Whether a prompt would find at least one more page in the prefix tree if another were computed first.
fn will_share<B: Backend>(prefill: &Prefill<B>, other: &Prefill<B>) -> bool {
    let next_page = (prefill.sequence.len() / PAGE_TOKENS + 1) * PAGE_TOKENS;
    let (tokens, others) = (&prefill.job.tokens, &other.job.tokens);
    prefill.job.salt == other.job.salt
        && tokens.len().min(others.len()) >= next_page
        && tokens[..next_page] == others[..next_page]
}
