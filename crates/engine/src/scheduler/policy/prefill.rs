//! Prompts, a bounded amount of work at a time.
//!
//! A prompt whose pages are going to be sealed runs layer by layer: all its chunks through one layer, then the next, with the
//! hidden states of all chunks kept in between, so that bf16 pages of only one layer are ever needed. Other prompts run chunk
//! by chunk through all layers.

use std::ops::Range;

use oscar_codec::PAGE_TOKENS;
use oscar_kernels::KernelError;
use oscar_kernels::backend::SealPage;
use oscar_kv::{Extension, PrefillMode, SealWork, Sequence, Shortage};

use super::super::plan::{AnswerId, BatchPlan, ChunkPlan, Decision, ExtensionPlan, PromptRows, WantedRows};
use super::super::segment::demoted_at;
use super::publication::{AfterPublication, seal_page};
use super::request::Waiting;
use super::{Choice, Policy, Rules, StepKind};
use crate::error::EngineError;

/// A request whose tokens are being computed.
#[derive(Debug)]
pub(super) struct Prefill {
    pub(super) request: Waiting,
    pub(super) sequence: Sequence,
    pub(super) work: Option<Work>,
    /// Pages were taken for it since it was admitted.
    pub(super) begun: bool,
}

/// One extension of a sequence, cut into chunks.
#[derive(Debug)]
pub(super) struct Work {
    pub(super) extension: Extension,
    /// The rows of the prompt in consecutive pieces.
    chunks: Vec<Chunk>,
    layer_major: bool,
    /// Pages that are sealed when a layer is done with all rows.
    seal_after: Vec<SealPage>,
    /// Its pages were copied and its hidden states prepared.
    started: bool,
    /// Layer and chunk that come next.
    layer: usize,
    chunk: usize,
    /// The layers of the next piece.
    layers: Range<usize>,
}

/// Consecutive rows of a prompt.
#[derive(Debug)]
struct Chunk {
    rows: Range<usize>,
    /// Pages that must be sealed before these rows read.
    seal_before: Vec<SealPage>,
}

impl Prefill {
    pub(super) fn new(request: Waiting, sequence: Sequence) -> Prefill {
        Prefill { request, sequence, work: None, begun: false }
    }

    /// The tokens of the next extension and how they are computed.
    pub(super) fn remaining(&self) -> Option<(Range<usize>, PrefillMode)> {
        let start = self.sequence.len();
        let segment = self.request.segments.iter().find(|segment| segment.end > start)?;
        Some((start..segment.end, segment.mode))
    }

    /// Whether its history was demoted at this place when it was computed before.
    pub(super) fn demotion_is_due(&self) -> bool {
        self.demoted_until() > self.sequence.sealed_until()
    }

    /// The page below which its history is demoted before the next token is computed.
    pub(super) fn demoted_until(&self) -> usize {
        demoted_at(&self.request.segments, self.sequence.len())
    }
}

impl Work {
    /// Whether it is computed in pieces beside running answers.
    fn is_long(&self) -> bool {
        self.chunks.len() > 1
    }

    /// Chooses the layers through which the next chunk runs: one of a prompt that is computed layer by layer, of others as many as
    /// `allowance` has room for, at least one. Returns rows times layers.
    fn choose_piece(&mut self, rules: &Rules, allowance: usize) -> usize {
        let rows = self.chunks[self.chunk].rows.len();
        let left = rules.layers - self.layer;
        let count = match (self.layer_major, self.is_long() && !rules.whole_chunks) {
            (true, _) => 1,
            (false, true) => allowance.div_ceil(rows).clamp(1, left),
            (false, false) => left,
        };
        self.layers = self.layer..self.layer + count;
        rows * count
    }

    /// Goes on to what comes after the next piece; true if that was the last one.
    fn advance(&mut self, layers: usize) -> bool {
        if self.layer_major {
            self.chunk += 1;
            if self.chunk == self.chunks.len() {
                (self.chunk, self.layer) = (0, self.layer + 1);
            }
            return self.layer == layers;
        }
        self.layer = self.layers.end;
        if self.layer == layers {
            (self.chunk, self.layer) = (self.chunk + 1, 0);
        }
        self.chunk == self.chunks.len()
    }
}

impl Policy {
    /// Looks for prompt work within what is left of this turn.
    pub(super) fn choose_prefill(&mut self) -> Choice {
        if self.allowance == 0 {
            return Choice::Nothing;
        }
        if self.prefill.is_none() && self.gather_batch() {
            return Choice::Step(StepKind::Batch);
        }
        let Some(mut prefill) = self.prefill.take().or_else(|| self.admit()) else { return Choice::Nothing };
        if prefill.work.is_none() {
            match self.repeat_demotion(&mut prefill) {
                Ok(false) => {}
                Ok(true) => {
                    self.prefill = Some(prefill);
                    return Choice::Again;
                }
                Err(shortage) => {
                    return if self.find_pages(prefill, shortage) { Choice::Again } else { Choice::Nothing };
                }
            }
            match self.extend(&mut prefill) {
                Ok(true) => {}
                Ok(false) => {
                    self.finish_prompt(prefill, None);
                    return Choice::Again;
                }
                Err(shortage) => {
                    return if self.find_pages(prefill, shortage) { Choice::Again } else { Choice::Nothing };
                }
            }
        }
        let started = prefill.work.as_ref().is_none_or(|work| work.started);
        if started && let Some(work) = &mut prefill.work {
            let long = work.is_long();
            if long && self.long_allowance == 0 {
                self.prefill = Some(prefill);
                return Choice::Nothing;
            }
            let rows = work.choose_piece(&self.rules, self.long_allowance);
            if long {
                self.long_allowance = self.long_allowance.saturating_sub(rows);
                self.long_rows += rows;
            }
            self.allowance = self.allowance.saturating_sub(rows);
        }
        self.prefill = Some(prefill);
        Choice::Step(if started { StepKind::Chunk } else { StepKind::StartExtension })
    }

    /// Takes the pages of the next extension of a prompt; false if all its tokens are in the cache.
    pub(super) fn extend(&mut self, prefill: &mut Prefill) -> Result<bool, Shortage> {
        let Some((range, mode)) = prefill.remaining() else { return Ok(false) };
        let tokens = &prefill.request.tokens[range.clone()];
        let extension = self.ledger.extend(&mut prefill.sequence, tokens, mode)?;
        prefill.begun = true;
        prefill.work = Some(self.plan_work(range, extension));
        Ok(true)
    }

    fn plan_work(&mut self, rows: Range<usize>, extension: Extension) -> Work {
        let recent = self.ledger.options().windows.recent;
        let scratch_from = self.ledger.slots().exact;
        let (before, after): (Vec<SealWork>, Vec<SealWork>) =
            extension.seal.iter().partition(|work| work.page < extension.exact_from);
        let mut before = before.iter().peekable();
        let chunk_rows = self.rules.chunk_rows;
        let mut chunks = Vec::new();
        for start in rows.clone().step_by(chunk_rows) {
            let rows = start..(start + chunk_rows).min(rows.end);
            let last_page = (rows.end - 1) / PAGE_TOKENS;
            let mut seal_before = Vec::new();
            while let Some(work) = before.next_if(|work| work.page + recent < last_page) {
                seal_before.push(seal_page(work));
            }
            chunks.push(Chunk { rows, seal_before });
        }
        let seal_after: Vec<SealPage> = before.chain(&after).map(seal_page).collect();
        let scratch = extension.seal.iter().any(|work| work.from.index() >= scratch_from);
        self.scratch_used |= scratch;
        let layer_major = chunks.len() > 1 && (scratch || !seal_after.is_empty());
        let layers = 0..self.rules.layers;
        Work { extension, chunks, layer_major, seal_after, started: false, layer: 0, chunk: 0, layers }
    }

    fn prompt_rows<'a>(&self, prefill: &'a Prefill, work: &Work, rows: &Range<usize>) -> PromptRows<'a> {
        let exact_from = work.extension.exact_from;
        PromptRows {
            tokens: &prefill.request.tokens[rows.clone()],
            rows: self.sequence_rows(&prefill.sequence, rows.start, rows.len(), exact_from),
        }
    }

    /// The first answer to the prompt in progress.
    pub(crate) fn prompt_in_progress(&self) -> Option<AnswerId> {
        self.prefill.as_ref().map(|prefill| prefill.request.answer())
    }

    /// The prompt in progress and its extension.
    fn current(&self) -> (&Prefill, &Work) {
        let prefill = self.prefill.as_ref().expect("there is a prompt in progress");
        (prefill, prefill.work.as_ref().expect("the prompt has an extension"))
    }

    pub(super) fn extension_plan(&self) -> ExtensionPlan<'_> {
        let (prefill, work) = self.current();
        let chunks = work.chunks.iter().filter(|_| work.layer_major);
        ExtensionPlan {
            copies: work.extension.copies.clone(),
            chunks: chunks.map(|chunk| self.prompt_rows(prefill, work, &chunk.rows)).collect(),
        }
    }

    /// The pages and hidden states of an extension were prepared, or could not be.
    pub(crate) fn extension_started(&mut self, outcome: Result<(), KernelError>) {
        let Some(mut prefill) = self.prefill.take() else { return };
        match outcome {
            Ok(()) => {
                prefill.work.iter_mut().for_each(|work| work.started = true);
                self.prefill = Some(prefill);
            }
            Err(error) => self.fail_prefill(prefill, error.into()),
        }
    }

    pub(super) fn chunk_plan(&self) -> ChunkPlan<'_> {
        let (prefill, work) = self.current();
        let chunk = &work.chunks[work.chunk];
        let layers = work.layers.clone();
        let last_chunk = work.chunk + 1 == work.chunks.len();
        let request = &prefill.request;
        let mut wanted = WantedRows::default();
        if layers.end == self.rules.layers && request.next.is_none() {
            wanted = request.wants.of_rows(&chunk.rows, &request.tokens);
            wanted.last_row = if chunk.rows.end == request.tokens.len() { request.choices } else { 0 };
        }
        ChunkPlan {
            prompt: self.prompt_rows(prefill, work, &chunk.rows),
            kept: match work.layer_major {
                true => Some(work.chunk),
                // The hidden states of this chunk are the only ones.
                false => (layers != (0..self.rules.layers)).then_some(0),
            },
            embeds: !work.layer_major && layers.start == 0,
            layers,
            seal_before: &chunk.seal_before,
            seal_after: if last_chunk { &work.seal_after } else { &[] },
            wanted,
        }
    }

    /// A chunk was computed, or could not be.
    pub(crate) fn chunk_computed(&mut self, outcome: Result<(), EngineError>) {
        let Some(mut prefill) = self.prefill.take() else { return };
        if let Err(error) = outcome {
            return self.fail_prefill(prefill, error);
        }
        let finished = prefill.work.as_mut().is_none_or(|work| work.advance(self.rules.layers));
        if finished && let Some(work) = prefill.work.take() {
            self.ledger.finish_extension(&mut prefill.sequence, work.extension);
            if prefill.remaining().is_none() && !prefill.demotion_is_due() {
                return self.finish_prompt(prefill, None);
            }
        }
        if self.allowance == 0 || self.long_allowance == 0 {
            self.report_progress(&prefill);
        }
        self.prefill = Some(prefill);
    }

    fn report_progress(&mut self, prefill: &Prefill) {
        let Prefill { request, sequence, work, .. } = prefill;
        // A request that was preempted has reported before.
        if request.next.is_some() {
            return;
        }
        let done = work.as_ref().map_or(sequence.len(), |work| {
            let start = work.extension.start;
            let chunk =
                work.chunks.get(work.chunk).map_or(work.extension.len, |chunk| chunk.rows.start - start);
            let layers = self.rules.layers.max(1);
            start + if work.layer_major { (work.extension.len * work.layer + chunk) / layers } else { chunk }
        });
        self.decisions.push(Decision::Progress { request: request.id, done, total: request.tokens.len() });
    }

    pub(super) fn batch_plan(&self) -> BatchPlan<'_> {
        let mut plan = BatchPlan {
            prompts: Vec::with_capacity(self.batch.len()),
            copies: Vec::new(),
            seal_before: Vec::new(),
            seal_after: Vec::new(),
            hidden: Vec::new(),
        };
        let mut first_row = 0;
        for (prefill, work) in self.batch.iter().filter_map(|prefill| Some((prefill, prefill.work.as_ref()?)))
        {
            let positions = work.extension.start..work.extension.start + work.extension.len;
            let pooled = prefill.request.wants.pooled_rows(&positions, prefill.request.tokens.len());
            if !pooled.is_empty() {
                let rows = first_row + pooled.start..first_row + pooled.end;
                plan.hidden.push((prefill.request.answer(), rows));
            }
            first_row += positions.len();
            plan.prompts.push(self.prompt_rows(prefill, work, &positions));
            plan.copies.extend_from_slice(&work.extension.copies);
            plan.seal_before.extend(work.chunks.iter().flat_map(|chunk| &chunk.seal_before));
            plan.seal_after.extend(&work.seal_after);
        }
        plan
    }

    /// All rows of some prompts were computed in one pass, or none of them: then each is tried again by itself, so that one
    /// that fails harms nobody else.
    pub(crate) fn batch_computed(&mut self, outcome: Result<(), KernelError>) {
        let batch = std::mem::take(&mut self.batch);
        match outcome {
            Ok(()) => {
                self.batched_prompts += batch.len() as u64;
                let mut end = 0;
                for mut prefill in batch {
                    if let Some(work) = prefill.work.take() {
                        end += work.extension.len;
                        self.ledger.finish_extension(&mut prefill.sequence, work.extension);
                    }
                    self.finish_prompt(prefill, Some(end - 1));
                }
            }
            Err(error) => {
                tracing::debug!(%error, prompts = batch.len(), "a batch of prompts failed; each is tried alone");
                for mut prefill in batch {
                    prefill.request.alone = true;
                    self.put_back(prefill);
                }
            }
        }
        self.release |= self.scratch_used;
    }

    /// All tokens of a prompt are in the cache: the tree gets it, and then its answers begin.
    fn finish_prompt(&mut self, prefill: Prefill, row: Option<usize>) {
        let (prompt, sequence) = self.abandon(prefill);
        self.publish(sequence, false, AfterPublication::Start { prompt, row });
    }

    /// Takes the pages of a prompt in progress, which will be computed again.
    pub(super) fn preempt_prompt(&mut self, prefill: Prefill) {
        let (mut waiting, sequence) = self.abandon(prefill);
        waiting.preempted = true;
        self.count_preemption(waiting.answer(), sequence.len());
        self.wait(waiting);
        self.publish(sequence, false, AfterPublication::Close);
    }

    pub(super) fn fail_prefill(&mut self, prefill: Prefill, error: EngineError) {
        let (request, sequence) = self.abandon(prefill);
        self.ledger.close(sequence);
        self.fail(request.answer(), request.choices, error);
    }

    /// Gives up what is in progress for a prompt; its sequence is as it was before.
    pub(super) fn abandon(&mut self, prefill: Prefill) -> (Waiting, Sequence) {
        let Prefill { request, mut sequence, work, .. } = prefill;
        self.release |= self.scratch_used;
        if let Some(work) = work {
            self.release |= work.started && (work.layer_major || work.layer > 0);
            self.ledger.abandon_extension(&mut sequence, work.extension);
        }
        (request, sequence)
    }
}
