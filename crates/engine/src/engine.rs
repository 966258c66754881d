//! The generate loop of one sequence.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::{Duration, Instant};

use oscar_codec::PageFormat;
use oscar_kernels::Backend;
use oscar_kernels::backend::{Batch, Sampling, SequenceRows};
use oscar_kv::{PAGE_TOKENS, PagePool, PageTable};
use oscar_model::text::StreamDecoder;
use oscar_model::{Activations, LoadedModel};

use crate::draw::{draw, fresh_seed};
use crate::error::EngineError;
use crate::request::{Event, FinishReason, GenerateOptions, Summary};
use crate::stop::StopFilter;

/// Context when the user does not ask for one; longer ones cost memory that most runs never use.
const DEFAULT_CONTEXT: usize = 32 * 1024;

// The bookkeeping and the page formats count tokens on their own.
const _: () = assert!(PAGE_TOKENS == oscar_codec::PAGE_TOKENS);

/// Settings of an engine.
#[derive(Clone, Debug)]
pub struct EngineOptions {
    /// Tokens a sequence may have; the model's own limit, up to 32K, when `None`.
    pub context: Option<usize>,
    /// Prompt tokens computed in one pass.
    pub prefill_chunk: usize,
}

impl Default for EngineOptions {
    fn default() -> Self {
        EngineOptions { context: None, prefill_chunk: 512 }
    }
}

/// A model with a KV cache, running one sequence at a time.
pub struct Engine<B: Backend> {
    model: Arc<LoadedModel<B>>,
    context: usize,
    prefill_chunk: usize,
    pool: PagePool,
    cache: B::Cache,
    activations: Activations<B>,
    /// Tokens whose keys and values are in the cache.
    stored: Vec<u32>,
    table: PageTable,
}

impl<B: Backend> Engine<B> {
    /// Makes room for one sequence. Cache memory is reserved and becomes resident as it is used.
    pub fn new(model: Arc<LoadedModel<B>>, options: &EngineOptions) -> Result<Engine<B>, EngineError> {
        let most = model.config().max_context;
        let context = options.context.unwrap_or(most.min(DEFAULT_CONTEXT));
        if context == 0 || context > most {
            let value = context.to_string();
            return Err(EngineError::BadOption {
                name: "context",
                value,
                expected: "1 up to the model's context",
            });
        }
        let prefill_chunk = options.prefill_chunk.clamp(1, context);
        let pool = PagePool::new(context.div_ceil(PAGE_TOKENS));
        let cache = model.model().cache(pool.slots())?;
        let activations = model.model().activations(prefill_chunk, 1)?;
        let (stored, table) = (Vec::new(), PageTable::new());
        Ok(Engine { model, context, prefill_chunk, pool, cache, activations, stored, table })
    }

    /// The model.
    pub fn model(&self) -> &Arc<LoadedModel<B>> {
        &self.model
    }

    /// Tokens a sequence may have.
    pub fn context(&self) -> usize {
        self.context
    }

    /// Bytes of KV pages in use.
    pub fn kv_bytes(&self) -> usize {
        self.table.slots().len() * self.model.config().kv_geometry().page_bytes(PageFormat::Bf16)
    }

    /// Forgets the kept sequence.
    pub fn reset(&mut self) {
        self.rewind(0);
    }

    /// Runs a prompt and streams the answer to `on_event`, which may break it off.
    pub fn generate(
        &mut self,
        prompt: &[u32],
        options: &GenerateOptions,
        mut on_event: impl FnMut(Event) -> ControlFlow<()>,
    ) -> Result<Summary, EngineError> {
        options.sampling.validate()?;
        if prompt.is_empty() {
            return Err(EngineError::EmptyPrompt);
        }
        if prompt.len() > self.context {
            return Err(EngineError::PromptTooLong { tokens: prompt.len(), context: self.context });
        }
        let begin = Instant::now();
        let mut summary = Summary {
            finish: FinishReason::Length,
            prompt_tokens: prompt.len(),
            cached_tokens: self.keep_common_prefix(prompt),
            tokens: Vec::new(),
            logprobs: Vec::new(),
            seed: options.sampling.seed.unwrap_or_else(fresh_seed),
            first_token: Duration::ZERO,
            decode: Duration::ZERO,
        };
        if self.prefill(prompt, &mut on_event)?.is_break() {
            summary.finish = FinishReason::Cancelled;
            return Ok(summary);
        }
        if options.max_tokens == Some(0) {
            return Ok(summary);
        }
        let tokenizer = self.model.tokenizer();
        let mut decoder = StreamDecoder::new(Arc::clone(tokenizer));
        if options.new_text {
            decoder = decoder.from_start();
        }
        let mut stops = StopFilter::new(&options.stop);
        let mut emit = |text: String| {
            if text.is_empty() { ControlFlow::Continue(()) } else { on_event(Event::Text(text)) }
        };
        summary.finish = loop {
            let token = self.sample(options, &mut summary)?;
            if summary.tokens.len() == 1 {
                summary.first_token = begin.elapsed();
            }
            if !options.ignore_end && self.model.is_end(token) {
                break FinishReason::End;
            }
            if let Some(piece) = decoder.push(token)? {
                let filtered = stops.push(&piece);
                if emit(filtered.text).is_break() {
                    break FinishReason::Cancelled;
                }
                if filtered.stopped {
                    break FinishReason::Stop;
                }
            }
            if options.max_tokens.is_some_and(|most| summary.tokens.len() >= most) {
                break FinishReason::Length;
            }
            if self.stored.len() >= self.context {
                break FinishReason::Context;
            }
            self.step(&[token])?;
        };
        summary.decode = begin.elapsed() - summary.first_token;
        if summary.finish != FinishReason::Stop && summary.finish != FinishReason::Cancelled {
            let rest = decoder.finish().unwrap_or_default();
            let filtered = stops.push(&rest);
            let held = if filtered.stopped { String::new() } else { stops.finish() };
            let _ = emit(filtered.text + &held);
        }
        Ok(summary)
    }

    /// Keeps what the prompt shares with the stored sequence and drops the rest. The last prompt token is always
    /// computed, because its logits are needed.
    fn keep_common_prefix(&mut self, prompt: &[u32]) -> usize {
        let common = self.stored.iter().zip(prompt).take_while(|(a, b)| a == b).count();
        self.rewind(common.min(prompt.len() - 1));
        self.stored.len()
    }

    fn rewind(&mut self, tokens: usize) {
        self.stored.truncate(tokens);
        self.table.truncate(tokens, &mut self.pool);
    }

    /// Computes the prompt from the stored tokens on, and the logits of its last token.
    fn prefill(
        &mut self,
        prompt: &[u32],
        on_event: &mut impl FnMut(Event) -> ControlFlow<()>,
    ) -> Result<ControlFlow<()>, EngineError> {
        let first = self.stored.len();
        let total = prompt.len() - first;
        while self.stored.len() < prompt.len() {
            let start = self.stored.len();
            let end = (start + self.prefill_chunk).min(prompt.len());
            self.step(&prompt[start..end])?;
            if on_event(Event::Prefill { done: end - first, total }).is_break() {
                return Ok(ControlFlow::Break(()));
            }
        }
        Ok(ControlFlow::Continue(()))
    }

    /// Appends tokens to the sequence; leaves the logits of the last one in the activations.
    fn step(&mut self, tokens: &[u32]) -> Result<(), EngineError> {
        let start = self.stored.len();
        self.table.reserve(start + tokens.len(), &mut self.pool)?;
        let rows = SequenceRows::exact(start, tokens.len(), self.table.slots());
        let batch = Batch { tokens, sequences: &[rows] };
        self.model.model().forward(&batch, &[tokens.len() - 1], &mut self.cache, &mut self.activations)?;
        self.stored.extend_from_slice(tokens);
        Ok(())
    }

    fn sample(&self, options: &GenerateOptions, summary: &mut Summary) -> Result<u32, EngineError> {
        let sampling = &options.sampling;
        let setting = Sampling {
            temperature: sampling.temperature,
            top_k: sampling.top_k,
            top_p: sampling.top_p,
            min_p: sampling.min_p,
            vocabulary: self.model.tokenizer().vocab_size(),
            draw: draw(summary.seed, summary.tokens.len() as u64),
        };
        let drawn = self.model.model().backend().sample(self.activations.logits(), &[setting])?[0];
        summary.tokens.push(drawn.token);
        summary.logprobs.push(drawn.logprob);
        Ok(drawn.token)
    }
}
