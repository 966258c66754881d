//! Carries out what the policy plans: page copies, seals, forward passes and sampling on a device.
//!
//! The executor decides nothing. It owns the device's side of the cache and the activations, and reports for every plan
//! whether, or for which rows, it could be carried out.

mod ahead;
mod decode;
mod prefill;

pub(super) use prefill::PromptOutput;

use std::sync::Arc;

use oscar_codec::{ExactSlot, HostCopy};
use oscar_kernels::backend::{Batch, Draw, Sampled, Sampling, SealPage};
use oscar_kernels::{Backend, KernelError};
use oscar_model::{Activations, LoadedModel, PagedSealing};

use super::answers::Answers;
use super::plan::{AnswerId, DecodeRow, FirstTokens};
use crate::attention::CustomAttention;
use crate::error::EngineError;
use ahead::Ahead;

/// A model, its cache and its activations on a device.
pub(super) struct Executor<B: Backend> {
    model: Arc<LoadedModel<B>>,
    cache: B::Cache,
    activations: Activations<B>,
    /// Rows whose logits fit into the activations.
    logit_rows: usize,
    /// Tables and hidden states of the chunks of a prompt that is computed layer by layer.
    chunks: Vec<Option<(B::Step, B::Buffer)>>,
    /// Replaces attention over the cache, if there is one.
    attention: Option<Box<dyn CustomAttention<B>>>,
    /// The next decode step, if the device is computing it already.
    ahead: Option<Ahead<B>>,
    /// Steps whose tokens were computed ahead.
    #[cfg(test)]
    pub(super) taken_ahead: u64,
}

impl<B: Backend> Executor<B> {
    pub(super) fn new(
        model: Arc<LoadedModel<B>>,
        cache: B::Cache,
        activations: Activations<B>,
        logit_rows: usize,
        attention: Option<Box<dyn CustomAttention<B>>>,
    ) -> Executor<B> {
        Executor {
            model,
            cache,
            activations,
            logit_rows,
            chunks: Vec::new(),
            attention,
            ahead: None,
            #[cfg(test)]
            taken_ahead: 0,
        }
    }

    /// Runs a batch through all layers; its hidden states are in the activations.
    fn run_layers(&mut self, batch: &Batch<'_>, rules: LayerRules<'_>) -> Result<(), KernelError> {
        let model = self.model.model();
        let step = model.begin_step(batch, &self.cache)?;
        model.embed(batch, &step, &mut self.activations)?;
        let layers = 0..model.config().layers;
        let LayerRules { seal_before, seal_after, exact_until } = rules;
        if let Some(attention) = self.attention.as_deref_mut() {
            let [rows] = batch.sequences else {
                let (expected, got) = (1, batch.sequences.len());
                return Err(KernelError::Shape { what: "sequences of a step", expected, got });
            };
            let mut attention = attention.for_step(&mut self.cache, rows, exact_until);
            return model.run_layers(layers, &step, &mut *attention, &mut self.activations);
        }
        let mut attention = PagedSealing { cache: &mut self.cache, before: seal_before, after: seal_after };
        model.run_layers(layers, &step, &mut attention, &mut self.activations)
    }

    /// Seals pages, all layers.
    pub(super) fn seal(&mut self, pages: &[SealPage]) -> Result<(), KernelError> {
        let layers = self.model.config().layers;
        self.model.model().backend().seal(0..layers, pages, &mut self.cache)
    }

    /// Copies pages between the device and the host.
    pub(super) fn copy_host_pages(&mut self, copies: &[HostCopy]) -> Result<(), KernelError> {
        self.model.model().backend().copy_host_pages(copies, &mut self.cache)
    }

    fn copy_pages(&mut self, copies: &[(ExactSlot, ExactSlot)]) -> Result<(), KernelError> {
        self.model.model().backend().copy_pages(copies, &mut self.cache)
    }

    /// Samples the first token of answers that begin.
    pub(super) fn sample_first(
        &mut self,
        first: &FirstTokens,
        answers: &mut Answers,
    ) -> Vec<Result<Sampled, EngineError>> {
        self.ahead = None;
        if let Some(rows) = &first.rows
            && let Err(error) = self.model.model().logits(rows, &mut self.activations)
        {
            return fail_all(error, first.answers.len()).collect();
        }
        self.sample(&first.answers, &[], answers)
    }

    /// Samples a token for each answer from the logits of the last step, which are in the same order. The next step begins
    /// meanwhile if `next_after` are the rows of this one.
    fn sample(
        &mut self,
        ids: &[AnswerId],
        next_after: &[&DecodeRow<'_>],
        answers: &mut Answers,
    ) -> Vec<Result<Sampled, EngineError>> {
        let prepared: Vec<Result<(), EngineError>> = ids.iter().map(|&id| answers.prepare(id)).collect();
        let settings: Vec<Sampling<'_>> = ids.iter().map(|&id| answers.sampling(id)).collect();
        let place = self.activations.place_of_logits();
        let model = Arc::clone(&self.model);
        let backend = model.model().backend();
        let drawn = backend.begin_draws(self.activations.logits(), &settings).and_then(|draws| {
            if !next_after.is_empty() {
                self.ahead = self.begin_ahead(&draws, next_after, answers)?;
            }
            backend.finish_draws(draws, self.activations.logits_at(place), &settings)
        });
        match drawn {
            Ok(drawn) => {
                self.forget_unless_passed_on(&drawn);
                let sampled = prepared.into_iter().zip(drawn);
                sampled
                    .map(|(prepared, Draw { sampled, .. })| prepared.and(sampled.map_err(EngineError::from)))
                    .collect()
            }
            Err(error) => {
                self.ahead = None;
                fail_all(error, ids.len()).collect()
            }
        }
    }

    /// Gives back the hidden states and scratch pages of prompts that are done or were given up.
    pub(super) fn release_prefill(&mut self) {
        self.chunks.clear();
        self.model.model().backend().release_scratch(&mut self.cache);
    }
}

/// What happens in the layers besides the forward pass.
#[derive(Clone, Copy, Default)]
struct LayerRules<'a> {
    /// Pages that are sealed after a layer's rows are written and before they attend.
    seal_before: &'a [SealPage],
    /// Pages that are sealed when a layer's rows have attended.
    seal_after: &'a [SealPage],
    /// Rows below this position belong to a prompt; custom attention computes them exactly.
    exact_until: usize,
}

/// The same error for everybody who took part.
fn fail_all<T>(error: KernelError, count: usize) -> impl Iterator<Item = Result<T, EngineError>> {
    let error = Arc::new(EngineError::Kernel(error));
    (0..count).map(move |_| Err(EngineError::Shared(Arc::clone(&error))))
}
