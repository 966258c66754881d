//! Computing prompts, a bounded item of work at a time.
//!
//! A prompt whose pages are going to be sealed runs layer by layer: all its chunks through one layer, then the next,
//! with the hidden states of all chunks kept in between, so that bf16 pages of only one layer are ever needed. Other
//! prompts run chunk by chunk through all layers.

use std::ops::Range;

use oscar_codec::PAGE_TOKENS;
use oscar_kernels::Backend;
use oscar_kernels::backend::{Batch, Sampling, SealPage, SealedRows, SequenceRows};
use oscar_kv::{Extend, Extension, SealWork, Sequence, Shortage};
use oscar_model::PagedSealing;

use super::Scheduler;
use super::decode::seal_page;
use super::job::Job;
use crate::error::EngineError;
use crate::event::{Event, PromptLogprob};

/// A request whose tokens are being computed.
pub(super) struct Prefill<B: Backend> {
    pub(super) job: Job,
    pub(super) sequence: Sequence,
    pub(super) work: Option<Work<B>>,
    /// Pages were written for it since it was admitted.
    begun: bool,
}

/// One extension of the sequence.
pub(super) struct Work<B: Backend> {
    pub(super) extension: Extension,
    /// Consecutive rows, in order.
    pub(super) chunks: Vec<Chunk<B>>,
    layer_major: bool,
    /// Pages that are sealed when a layer is done with all rows.
    pub(super) seal_after: Vec<SealPage>,
    /// Next unit.
    layer: usize,
    chunk: usize,
}

/// Consecutive rows of a prompt.
pub(super) struct Chunk<B: Backend> {
    rows: Range<usize>,
    /// Pages that must be sealed before these rows read.
    pub(super) seal_before: Vec<SealPage>,
    /// Tables and hidden states between layers.
    kept: Option<(B::Step, B::Buffer)>,
}

/// What came of an item of work.
pub(super) enum Progress {
    /// There is more to do.
    More,
    /// All tokens are in the cache; the logits of the last one are there if they are wanted.
    Done,
    /// Pages are missing.
    Short(Shortage),
}

impl<B: Backend> Prefill<B> {
    pub(super) fn new(job: Job, sequence: Sequence) -> Prefill<B> {
        Prefill { job, sequence, work: None, begun: false }
    }

    /// Whether anything was computed for it.
    pub(super) fn begun(&self) -> bool {
        self.begun
    }
}

impl<B: Backend> Scheduler<B> {
    /// Works on a prompt until `allowance` (rows times layers) is used up.
    pub(super) fn advance(
        &mut self,
        prefill: &mut Prefill<B>,
        allowance: &mut usize,
    ) -> Result<Progress, EngineError> {
        loop {
            if prefill.work.is_none() && !self.next_extension(prefill)? {
                return Ok(Progress::Done);
            }
            if let Some(shortage) = self.shortage.take() {
                return Ok(Progress::Short(shortage));
            }
            let finished = self.run_unit(prefill, allowance)?;
            if finished && let Some(work) = prefill.work.take() {
                self.ledger.finish_extension(&mut prefill.sequence, work.extension);
            }
            if finished && self.remaining(prefill).is_none() {
                return Ok(Progress::Done);
            }
            if *allowance == 0 {
                self.report(prefill);
                return Ok(Progress::More);
            }
        }
    }

    /// The tokens of the next extension and how they are computed.
    pub(super) fn remaining(&self, prefill: &Prefill<B>) -> Option<(Range<usize>, Extend)> {
        let start = prefill.sequence.len();
        let segment = prefill.job.segments.iter().find(|segment| segment.end > start)?;
        Some((start..segment.end, segment.mode))
    }

    /// Takes the pages of the next extension; `false` if there is none to do. A shortage is left in `self.shortage`.
    pub(super) fn next_extension(&mut self, prefill: &mut Prefill<B>) -> Result<bool, EngineError> {
        let Some((range, mode)) = self.remaining(prefill) else { return Ok(false) };
        let extension =
            match self.ledger.extend(&mut prefill.sequence, &prefill.job.tokens[range.clone()], mode) {
                Ok(extension) => extension,
                Err(shortage) => {
                    self.shortage = Some(shortage);
                    return Ok(true);
                }
            };
        prefill.begun = true;
        let copies: Vec<(u32, u32)> =
            extension.copies.iter().map(|(from, to)| (from.slot(), to.slot())).collect();
        let scratch = self.ledger.slots().exact as u32;
        self.scratch_used |= extension.seal.iter().any(|work| work.from >= scratch);
        let work = self.plan(range, extension);
        let work = prefill.work.insert(work);
        self.model.model().backend().copy_pages(&copies, &mut self.cache)?;
        if work.layer_major {
            self.embed_chunks(&prefill.job.tokens, &prefill.sequence, work)?;
        }
        Ok(true)
    }

    fn plan(&self, rows: Range<usize>, extension: Extension) -> Work<B> {
        let recent = self.ledger.options().windows.recent;
        let scratch_from = self.ledger.slots().exact as u32;
        let (before, after): (Vec<SealWork>, Vec<SealWork>) =
            extension.seal.iter().partition(|work| work.page < extension.exact_from);
        let mut before = before.iter().peekable();
        let chunk_rows = self.chunk_rows;
        let mut chunks = Vec::new();
        for start in rows.clone().step_by(chunk_rows) {
            let rows = start..(start + chunk_rows).min(rows.end);
            let last_page = (rows.end - 1) / PAGE_TOKENS;
            let mut seal_before = Vec::new();
            while let Some(work) = before.next_if(|work| work.page + recent < last_page) {
                seal_before.push(seal_page(work));
            }
            chunks.push(Chunk { rows, seal_before, kept: None });
        }
        let seal_after: Vec<SealPage> = before.chain(&after).map(seal_page).collect();
        let scratch = extension.seal.iter().any(|work| work.from >= scratch_from);
        let layer_major = chunks.len() > 1 && (scratch || !seal_after.is_empty());
        Work { extension, chunks, layer_major, seal_after, layer: 0, chunk: 0 }
    }

    /// Fills the hidden states of all chunks.
    fn embed_chunks(
        &mut self,
        tokens: &[u32],
        sequence: &Sequence,
        work: &mut Work<B>,
    ) -> Result<(), EngineError> {
        let model = self.model.model();
        for chunk in &mut work.chunks {
            let rows = sequence_rows(sequence, &chunk.rows, work.extension.exact_from, self.sealing);
            let batch = Batch { tokens: &tokens[chunk.rows.clone()], sequences: &[rows] };
            let step = model.begin_step(&batch, &self.cache)?;
            let mut hidden = model.backend().buffer(chunk.rows.len(), model.config().hidden_size)?;
            std::mem::swap(self.activations.hidden_mut(), &mut hidden);
            let embedded = model.embed(&batch, &step, &mut self.activations);
            std::mem::swap(self.activations.hidden_mut(), &mut hidden);
            embedded?;
            chunk.kept = Some((step, hidden));
        }
        Ok(())
    }

    /// Runs one chunk through one layer or all of them; `true` if that was the last of its extension.
    fn run_unit(&mut self, prefill: &mut Prefill<B>, allowance: &mut usize) -> Result<bool, EngineError> {
        let Prefill { job, sequence, work: Some(work), .. } = prefill else { return Ok(true) };
        let layers = self.model.config().layers;
        let last_chunk = work.chunk + 1 == work.chunks.len();
        let chunk = &mut work.chunks[work.chunk];
        let (range, kept) = match chunk.kept.take() {
            Some(kept) => (work.layer..work.layer + 1, Some(kept)),
            None => (0..layers, None),
        };
        *allowance = allowance.saturating_sub(chunk.rows.len() * range.len());
        let mut attention = PagedSealing::<B> {
            cache: &mut self.cache,
            before: &chunk.seal_before,
            after: if last_chunk { &work.seal_after } else { &[] },
        };
        let model = self.model.model();
        let last_layer = range.end == layers;
        match kept {
            Some((step, mut hidden)) => {
                std::mem::swap(self.activations.hidden_mut(), &mut hidden);
                let mut ran = model
                    .run_layers(range, &step, &mut attention, &mut self.activations)
                    .map_err(EngineError::from);
                let rows = chunk.rows.clone();
                if last_layer && ran.is_ok() {
                    ran = self.read_logits(job, rows);
                }
                std::mem::swap(self.activations.hidden_mut(), &mut hidden);
                ran?;
                if !last_layer {
                    work.chunks[work.chunk].kept = Some((step, hidden));
                }
                work.chunk = if last_chunk { 0 } else { work.chunk + 1 };
                work.layer += usize::from(last_chunk);
                Ok(last_chunk && last_layer)
            }
            None => {
                let rows = sequence_rows(sequence, &chunk.rows, work.extension.exact_from, self.sealing);
                let batch = Batch { tokens: &job.tokens[chunk.rows.clone()], sequences: &[rows] };
                let step = model.begin_step(&batch, attention.cache)?;
                model.embed(&batch, &step, &mut self.activations)?;
                model.run_layers(range, &step, &mut attention, &mut self.activations)?;
                let rows = chunk.rows.clone();
                work.chunk += 1;
                self.read_logits(job, rows)?;
                Ok(last_chunk)
            }
        }
    }

    /// Reads what is wanted of the last hidden states of some rows: probabilities of the prompt, and in the end the
    /// logits of the last row for every choice.
    fn read_logits(&mut self, job: &mut Job, rows: Range<usize>) -> Result<(), EngineError> {
        let model = self.model.model();
        let vocabulary = self.vocabulary;
        if let Some(count) = job.output.options().prompt_logprobs
            && job.next.is_none()
        {
            let positions: Vec<usize> = rows.clone().filter(|&row| row + 1 < job.tokens.len()).collect();
            for block in positions.chunks(self.max_running) {
                let wanted: Vec<usize> = block.iter().map(|position| position - rows.start).collect();
                model.logits(&wanted, &mut self.activations)?;
                let score = |&position: &usize| Sampling {
                    given: Some(job.tokens[position + 1]),
                    vocabulary,
                    logprobs: Some(count),
                    ..Sampling::default()
                };
                let settings: Vec<Sampling<'_>> = block.iter().map(score).collect();
                for scored in model.backend().sample(self.activations.logits(), &settings)? {
                    let scored = scored?;
                    let (logprob, top) = (scored.logprob, scored.top);
                    job.output.prompt_logprobs.push(PromptLogprob { token: scored.token, logprob, top });
                }
            }
        }
        if rows.end == job.tokens.len() && job.next.is_none() {
            let last = vec![rows.len() - 1; job.choices];
            model.logits(&last, &mut self.activations)?;
        }
        Ok(())
    }

    /// Tells how far the prompt is.
    pub(super) fn report(&self, prefill: &Prefill<B>) {
        let Prefill { job, sequence, work, .. } = prefill;
        // A sequence that is taken up again has told before.
        if job.next.is_some() {
            return;
        }
        let (mut done, total) = (sequence.len(), job.tokens.len());
        if let Some(work) = work {
            let layers = self.model.config().layers;
            let chunk = work
                .chunks
                .get(work.chunk)
                .map_or(work.extension.len, |chunk| chunk.rows.start - work.extension.start);
            done = work.extension.start;
            done += if work.layer_major {
                (work.extension.len * work.layer + chunk) / layers.max(1)
            } else {
                chunk
            };
        }
        job.sink.send(Event::Prefill { done, total, cached: job.output.cached_tokens });
    }

    /// Gives up what is in progress; the sequence is as it was before.
    pub(super) fn abandon(&mut self, prefill: Prefill<B>) -> (Job, Sequence) {
        let Prefill { job, mut sequence, work, .. } = prefill;
        if let Some(work) = work {
            self.ledger.abandon_extension(&mut sequence, work.extension);
        }
        (job, sequence)
    }
}

/// The rows of a sequence as the backend wants them.
pub(super) fn sequence_rows<'a>(
    sequence: &'a Sequence,
    rows: &Range<usize>,
    exact_from: usize,
    sealing: bool,
) -> SequenceRows<'a> {
    let sealed = sealing.then(|| SealedRows {
        pages: sequence.sealed_slots(),
        exact_from,
        sealed_until: sequence.sealed_until(),
    });
    SequenceRows { start: rows.start, len: rows.len(), pages: sequence.exact_slots(), sealed }
}
