//! The generate loop of one sequence.

use std::ops::ControlFlow;
use std::sync::Arc;

use oscar_codec::PageFormat;
use oscar_kernels::Backend;
use oscar_kernels::backend::{Batch, SequenceRows};
use oscar_kv::{PAGE_TOKENS, PagePool, PageTable};
use oscar_model::text::StreamDecoder;
use oscar_model::{Activations, LoadedModel};

use crate::draw::fresh_seed;
use crate::error::EngineError;
use crate::event::{Event, FinishReason, Summary};
use crate::output::Output;
use crate::request::{GenerateOptions, Limits, Request};

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
            return Err(EngineError::bad_option("context", context, format!("1 to {most}, the model's own")));
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
        let vocabulary = self.model.config().vocab_size;
        let request = Request::new(prompt, options.clone());
        request.validate(&Limits { context: self.context, vocabulary, choices: 1 })?;
        let tokenizer = Arc::clone(self.model.tokenizer());
        let mut decoder = StreamDecoder::new(Arc::clone(&tokenizer));
        if options.new_text {
            decoder = decoder.from_start();
        }
        let seed = options.sampling.seed.unwrap_or_else(fresh_seed);
        let options = Arc::new(request.options);
        let mut output =
            Output::new(&options, seed, prompt, tokenizer.end_ids(), vocabulary, None, Box::new(decoder));
        output.start();
        output.cached_tokens = self.keep_common_prefix(prompt);
        if self.prefill(prompt, &mut on_event)?.is_break() {
            return Ok(output.summary(FinishReason::Cancelled));
        }
        if options.max_tokens == Some(0) {
            return Ok(output.summary(FinishReason::Length));
        }
        let finish = loop {
            output.prepare()?;
            let setting = output.setting(tokenizer.vocab_size());
            let drawn =
                self.model.model().backend().sample(self.activations.logits(), &[setting])?.remove(0)?;
            let id = drawn.token;
            let room = self.stored.len() < self.context;
            let (token, finish) = output.push(drawn, tokenizer.is_end(id), room)?;
            let broken_off = on_event(Event::Token { choice: 0, token }).is_break();
            match finish {
                Some(finish) => break finish,
                None if broken_off => break FinishReason::Cancelled,
                None => self.step(&[id])?,
            }
        };
        Ok(output.summary(finish))
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
        let total = prompt.len();
        while self.stored.len() < prompt.len() {
            let start = self.stored.len();
            let end = (start + self.prefill_chunk).min(prompt.len());
            self.step(&prompt[start..end])?;
            if on_event(Event::Prefill { done: end, total, cached: first }).is_break() {
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
}
