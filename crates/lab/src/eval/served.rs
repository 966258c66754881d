//! A model that answers through the engine: what a user of a served cache gets.
//!
//! The context is a request of its own, and the question follows it as a prefix hit on all of its tokens. So question and
//! answer read the context as the cache has stored it, which is how the lab's codecs are measured too.

use std::sync::Arc;

use oscar_engine::{Engine, EngineError, EngineOptions, Event, GenerateOptions, Request, Serve};
use oscar_kernels::Backend;
use oscar_model::LoadedModel;

use super::EvalError;

/// An engine with the cache that serves, for measurements.
pub struct ServedCache<B: Backend> {
    engine: Engine<B>,
    name: String,
}

impl<B: Backend> ServedCache<B> {
    /// Starts an engine that answers one question at a time. The prefix tree holds one context and is emptied before the
    /// next one, so that no answer depends on what was asked before.
    pub fn new(
        model: Arc<LoadedModel<B>>,
        options: &EngineOptions,
        name: impl Into<String>,
    ) -> Result<ServedCache<B>, EvalError> {
        let mut options = EngineOptions { max_running: 1, ..options.clone() };
        options.kv.prefix_tree = true;
        Ok(ServedCache { engine: Engine::new(model, &options)?, name: name.into() })
    }

    /// Name of the cache in tables.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The engine that answers with this cache.
    pub fn engine(&self) -> &Engine<B> {
        &self.engine
    }

    /// Greedy answer to `question` after `context`, up to an end token or `max_tokens`. `progress` gets
    /// the number of tokens of the context that are done.
    pub fn answer(
        &self,
        context: &[u32],
        question: &[u32],
        max_tokens: usize,
        mut progress: impl FnMut(usize),
    ) -> Result<Vec<u32>, EvalError> {
        let ask = GenerateOptions { max_tokens: Some(max_tokens), ..GenerateOptions::default() };
        self.engine.reset();
        if context.is_empty() {
            let answer = self.engine.answer(Request::new(question, ask))?;
            return self.tokens(answer);
        }
        if question.is_empty() {
            return Err(EngineError::EmptyPrompt.into());
        }
        let read = GenerateOptions { max_tokens: Some(0), ..GenerateOptions::default() };
        for event in self.engine.answer(Request::new(context, read))? {
            match event {
                Event::Prefill { done, .. } => progress(done),
                Event::Failed { error, .. } => return Err(EvalError::Engine(error)),
                _ => {}
            }
        }
        self.tokens(self.engine.answer(Request::new([context, question].concat(), ask))?)
    }

    /// The mean log-probability of the tokens of `answer` after `prompt`, each after those before it. What the prefix tree
    /// holds of the prompt is not computed again.
    pub fn log_probability(&self, prompt: &[u32], answer: &[u32]) -> Result<f64, EvalError> {
        let score = GenerateOptions {
            max_tokens: Some(0),
            prompt_logprobs: Some(0),
            score_from: prompt.len(),
            ..GenerateOptions::default()
        };
        let summaries = self.engine.answer(Request::new([prompt, answer].concat(), score))?.wait();
        let summary = summaries.map_err(EvalError::Engine)?.into_iter().next();
        let scored = summary.map(|summary| summary.prompt_logprobs).unwrap_or_default();
        let sum: f64 = scored.iter().filter_map(|token| token.logprob).map(f64::from).sum();
        Ok(sum / answer.len() as f64)
    }

    fn tokens(&self, answer: oscar_engine::Answer) -> Result<Vec<u32>, EvalError> {
        let summaries = answer.wait().map_err(EvalError::Engine)?;
        let mut tokens = summaries.into_iter().next().map(|summary| summary.tokens).unwrap_or_default();
        // The lab's answers end before the end token.
        if tokens.last().is_some_and(|&last| self.engine.model().is_end(last)) {
            tokens.pop();
        }
        Ok(tokens)
    }
}
