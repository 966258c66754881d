//! Carries out what the policy plans: page copies, seals, forward passes and sampling on a device.
//!
//! The executor decides nothing. It owns the device's side of the cache and the activations, and reports for every plan
//! whether, or for which rows, it could be carried out.

mod decode;
mod prefill;

use std::sync::Arc;

use oscar_codec::ExactSlot;
use oscar_kernels::backend::{Sampled, Sampling, SealPage};
use oscar_kernels::{Backend, KernelError};
use oscar_model::{Activations, LoadedModel};

use super::answers::Answers;
use super::plan::{AnswerId, FirstTokens};
use crate::error::EngineError;

/// A model, its cache and its activations on a device.
pub(super) struct Executor<B: Backend> {
    model: Arc<LoadedModel<B>>,
    cache: B::Cache,
    activations: Activations<B>,
    /// Rows whose logits fit into the activations.
    logit_rows: usize,
    /// Tables and hidden states of the chunks of a prompt that is computed layer by layer.
    chunks: Vec<Option<(B::Step, B::Buffer)>>,
}

impl<B: Backend> Executor<B> {
    pub(super) fn new(
        model: Arc<LoadedModel<B>>,
        cache: B::Cache,
        activations: Activations<B>,
        logit_rows: usize,
    ) -> Executor<B> {
        Executor { model, cache, activations, logit_rows, chunks: Vec::new() }
    }

    /// Seals pages, all layers.
    pub(super) fn seal(&mut self, pages: &[SealPage]) -> Result<(), KernelError> {
        let layers = self.model.config().layers;
        self.model.model().backend().seal(0..layers, pages, &mut self.cache)
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
        if let Some(rows) = &first.rows
            && let Err(error) = self.model.model().logits(rows, &mut self.activations)
        {
            return fail_all(error, first.answers.len()).collect();
        }
        self.sample(&first.answers, answers)
    }

    /// Samples a token for each answer from the logits of the last step, which are in the same order.
    fn sample(&self, ids: &[AnswerId], answers: &mut Answers) -> Vec<Result<Sampled, EngineError>> {
        let prepared: Vec<Result<(), EngineError>> = ids.iter().map(|&id| answers.prepare(id)).collect();
        let settings: Vec<Sampling<'_>> = ids.iter().map(|&id| answers.sampling(id)).collect();
        match self.model.model().backend().sample(self.activations.logits(), &settings) {
            Ok(sampled) => prepared
                .into_iter()
                .zip(sampled)
                .map(|(prepared, sampled)| prepared.and(sampled.map_err(EngineError::from)))
                .collect(),
            Err(error) => fail_all(error, ids.len()).collect(),
        }
    }

    /// Gives back the hidden states and scratch pages of prompts that are done or were given up.
    pub(super) fn release_prefill(&mut self) {
        self.chunks.clear();
        self.model.model().backend().release_scratch(&mut self.cache);
    }
}

/// The same error for everybody who took part.
fn fail_all<T>(error: KernelError, count: usize) -> impl Iterator<Item = Result<T, EngineError>> {
    let error = Arc::new(EngineError::Kernel(error));
    (0..count).map(move |_| Err(EngineError::Shared(Arc::clone(&error))))
}
