//! The tokens of prompts, in chunks or several prompts in one pass.

use std::ops::Range;

use oscar_kernels::backend::{Batch, Sampling, SequenceRows};
use oscar_kernels::{Backend, KernelError};
use oscar_model::PagedSealing;

use super::super::plan::{BatchPlan, ChunkPlan, ExtensionPlan, PromptRows, WantedRows};
use super::{Executor, LayerRules};
use crate::error::EngineError;
use crate::event::PromptLogprob;
use crate::pooling::HiddenRows;

/// What was read of the rows of a prompt.
pub(in super::super) struct PromptOutput {
    pub(in super::super) scores: Vec<PromptLogprob>,
    pub(in super::super) hidden: HiddenRows,
}

impl<B: Backend> Executor<B> {
    /// Copies pages and fills the hidden states of all chunks of a prompt that is computed layer by layer.
    pub(in super::super) fn start_extension(&mut self, plan: &ExtensionPlan<'_>) -> Result<(), KernelError> {
        self.ahead = None;
        self.chunks.clear();
        self.copy_pages(&plan.copies)?;
        plan.chunks.iter().try_for_each(|chunk| self.embed_chunk(chunk))
    }

    /// Keeps the hidden states of one more chunk, made of its tokens.
    fn embed_chunk(&mut self, chunk: &PromptRows<'_>) -> Result<(), KernelError> {
        let model = self.model.model();
        let batch = Batch { tokens: chunk.tokens, sequences: &[chunk.rows] };
        let step = model.begin_step(&batch, &self.cache)?;
        let mut hidden = model.backend().buffer(chunk.tokens.len(), model.config().hidden_size)?;
        std::mem::swap(self.activations.hidden_mut(), &mut hidden);
        let embedded = model.embed(&batch, &step, &mut self.activations);
        std::mem::swap(self.activations.hidden_mut(), &mut hidden);
        embedded?;
        self.chunks.push(Some((step, hidden)));
        Ok(())
    }

    /// Runs one chunk through some layers or all of them. Returns what is asked for of the prompt's own tokens.
    pub(in super::super) fn prefill_chunk(
        &mut self,
        plan: &ChunkPlan<'_>,
    ) -> Result<PromptOutput, EngineError> {
        self.ahead = None;
        let PromptRows { tokens, rows } = &plan.prompt;
        let (seal_before, seal_after) = (plan.seal_before, plan.seal_after);
        let Some(index) = plan.kept else {
            // The row that an answer begins from reads the prompt as the answer will.
            let exact_until = rows.start + rows.len - usize::from(plan.wanted.last_row > 0);
            let batch = Batch { tokens, sequences: &[*rows] };
            self.run_layers(&batch, LayerRules { seal_before, seal_after, exact_until })?;
            return self.read_rows(&plan.wanted, tokens.len());
        };
        if plan.embeds {
            self.chunks.clear();
            self.embed_chunk(&plan.prompt)?;
        }
        let model = self.model.model();
        let last_layer = plan.layers.end == model.config().layers;
        let mut attention =
            PagedSealing::<B> { cache: &mut self.cache, before: seal_before, after: seal_after };
        let Some((step, mut hidden)) = self.chunks.get_mut(index).and_then(Option::take) else {
            return Err(KernelError::BadSetting(format!("chunk {index} has no hidden states")).into());
        };
        std::mem::swap(self.activations.hidden_mut(), &mut hidden);
        let ran = model
            .run_layers(plan.layers.clone(), &step, &mut attention, &mut self.activations)
            .map_err(EngineError::from)
            .and_then(|()| self.read_rows(&plan.wanted, tokens.len()));
        std::mem::swap(self.activations.hidden_mut(), &mut hidden);
        if !last_layer {
            self.chunks[index] = Some((step, hidden));
        }
        ran
    }

    /// Reads what is wanted of the last hidden states of `rows` rows.
    fn read_rows(&mut self, wanted: &WantedRows<'_>, rows: usize) -> Result<PromptOutput, EngineError> {
        let hidden = self.hidden_rows(&wanted.hidden)?;
        let model = self.model.model();
        let vocabulary = self.model.tokenizer().vocab_size();
        let mut scores = Vec::with_capacity(wanted.scored.len());
        for (block, tokens) in wanted.scored.chunks(self.logit_rows).enumerate() {
            let first = wanted.scored_after + block * self.logit_rows;
            let wanted_rows: Vec<usize> = (first..first + tokens.len()).collect();
            model.logits(&wanted_rows, &mut self.activations)?;
            let score = |&token: &u32| Sampling {
                given: Some(token),
                vocabulary,
                logprobs: Some(wanted.alternatives),
                ..Sampling::default()
            };
            let settings: Vec<Sampling<'_>> = tokens.iter().map(score).collect();
            for scored in model.backend().sample(self.activations.logits(), &settings)? {
                let scored = scored?;
                let (logprob, top) = (scored.logprob, scored.top);
                scores.push(PromptLogprob { token: scored.token, logprob, top });
            }
        }
        if wanted.last_row > 0 {
            model.logits(&vec![rows - 1; wanted.last_row], &mut self.activations)?;
        }
        Ok(PromptOutput { scores, hidden })
    }

    /// The last hidden states of some rows.
    fn hidden_rows(&self, rows: &Range<usize>) -> Result<HiddenRows, KernelError> {
        if rows.is_empty() {
            return Ok(HiddenRows::default());
        }
        let values = self.model.model().final_hidden(rows.clone(), &self.activations)?;
        Ok(HiddenRows { count: rows.len(), values })
    }

    /// Runs all rows of some prompts through all layers. Returns the hidden states that are asked for, in their order.
    pub(in super::super) fn prefill_batch(
        &mut self,
        plan: &BatchPlan<'_>,
    ) -> Result<Vec<HiddenRows>, KernelError> {
        self.ahead = None;
        self.copy_pages(&plan.copies)?;
        let tokens: Vec<u32> = plan.prompts.iter().flat_map(|prompt| prompt.tokens).copied().collect();
        let sequences: Vec<SequenceRows<'_>> = plan.prompts.iter().map(|prompt| prompt.rows).collect();
        let exact_until = sequences.first().map_or(0, |rows| rows.start + rows.len - 1);
        let batch = Batch { tokens: &tokens, sequences: &sequences };
        let (seal_before, seal_after) = (&plan.seal_before, &plan.seal_after);
        self.run_layers(&batch, LayerRules { seal_before, seal_after, exact_until })?;
        plan.hidden.iter().map(|(_, rows)| self.hidden_rows(rows)).collect()
    }
}
