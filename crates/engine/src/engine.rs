//! The engine as its users see it: a handle to the thread that does the work.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Instant;

use oscar_kernels::{Backend, KernelError};
use oscar_kv::CacheEvent;
use oscar_model::LoadedModel;

use crate::attention::CustomAttention;
use crate::budget::Budget;
use crate::error::EngineError;
use crate::event::{Event, FinishReason, Sink, Summary};
use crate::request::{GenerateOptions, Limits, Request, salt_of};
use crate::scheduler::{Command, Core, MakeAttention, Shared, Submitted, Worker, cache_event_channel};
use crate::serve::{Control, EngineInfo, EngineStats, KeptReply, RequestHandle, Serve, SharedSink};
use crate::settings::{EngineOptions, KvOptions};
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::sync::mpsc;
use crate::sync::thread::{Builder, JoinHandle};

/// A model with a KV cache that answers many requests at a time.
pub struct Engine<B: Backend> {
    model: Arc<LoadedModel<B>>,
    shared: Arc<Shared>,
    info: EngineInfo,
    budget: Budget,
    limits: Limits,
    next_id: AtomicU64,
    thread: Option<JoinHandle<()>>,
}

impl<B: Backend> Engine<B> {
    /// Makes the cache and starts the engine's thread. Cache memory is reserved and becomes resident as it is used.
    pub fn new(model: Arc<LoadedModel<B>>, options: &EngineOptions) -> Result<Engine<B>, EngineError> {
        Engine::start(model, options, None)
    }

    /// An engine whose attention is not the cache's own: `make` is given the number of bf16 slots of the cache. It runs one
    /// answer at a time over bf16 pages that no other request shares, and the options must say so.
    pub fn with_attention<A: CustomAttention<B> + 'static>(
        model: Arc<LoadedModel<B>>,
        options: &EngineOptions,
        make: impl FnOnce(usize) -> Result<A, KernelError>,
    ) -> Result<Engine<B>, EngineError> {
        let refuse = |name, value: &dyn ToString, expected| {
            Err(EngineError::bad_option(name, value.to_string(), format!("{expected} with custom attention")))
        };
        match options {
            EngineOptions { max_running: 2.., .. } => refuse("max_running", &options.max_running, "1"),
            EngineOptions { kv: KvOptions { codec: Some(_), .. }, .. } => refuse("codec", &"given", "none"),
            EngineOptions { kv: KvOptions { prefix_tree: true, .. }, .. } => {
                refuse("prefix_tree", &true, "false")
            }
            _ => {
                let make: MakeAttention<'_, B> = Box::new(|slots| Ok(Box::new(make(slots)?)));
                Engine::start(model, options, Some(make))
            }
        }
    }

    fn start(
        model: Arc<LoadedModel<B>>,
        options: &EngineOptions,
        attention: Option<MakeAttention<'_, B>>,
    ) -> Result<Engine<B>, EngineError> {
        if options.deterministic && !model.model().backend().is_deterministic() {
            let expected = "a backend that computes every row alike, whatever else is in the batch";
            return Err(EngineError::bad_option("deterministic", true, expected));
        }
        let (sender, commands) = mpsc::channel();
        let shared = Arc::new(Shared::new(sender));
        let (core, budget) =
            Core::build(Arc::clone(&model), options, Arc::clone(&shared.admission), attention)?;
        let (vocabulary, max_running) = (model.config().vocab_size, options.max_running);
        let info = EngineInfo {
            context: budget.context,
            vocabulary,
            hidden_size: model.config().hidden_size,
            max_running,
            max_queued: options.max_queued,
            prefill_chunk: options.prefill_chunk.min(budget.context),
            deterministic: options.deterministic,
            prefix_cache: options.kv.prefix_tree,
            kv: budget.kv.clone(),
            bits_per_element: budget.bits_per_element,
            capacity_tokens: budget.capacity_tokens(),
            bf16_context: budget.bf16_context,
            high_context: budget.high_context,
        };
        let (contexts, deterministic) = (budget.contexts(), options.deterministic);
        let limits = Limits { contexts, vocabulary, choices: max_running, deterministic };
        let worker = Worker::new(core, commands, Arc::clone(&shared));
        let thread = Builder::new()
            .name("oscar-engine".to_owned())
            .spawn(move || worker.run())
            .map_err(|_| EngineError::Stopped)?;
        let (next_id, thread) = (AtomicU64::new(1), Some(thread));
        Ok(Engine { model, shared, info, budget, limits, next_id, thread })
    }

    /// The model that the engine runs.
    pub fn model(&self) -> &Arc<LoadedModel<B>> {
        &self.model
    }

    /// Tokens that a sequence may have, prompt and answer together.
    pub fn context(&self) -> usize {
        self.budget.context
    }

    /// The sizes of the page pools and what they cost.
    pub fn budget(&self) -> &Budget {
        &self.budget
    }

    /// Bytes of KV pages in use, the prefix tree's included.
    pub fn kv_bytes(&self) -> usize {
        let cache = self.fresh_stats().cache;
        let Budget { exact, sealed, scratch, .. } = &self.budget;
        cache.exact.used() * exact.page_bytes
            + cache.sealed.used() * sealed.page_bytes
            + cache.scratch.used() * scratch.page_bytes
    }

    /// [`Serve::stats`] as of now: waits for the step in progress.
    pub fn fresh_stats(&self) -> EngineStats {
        let (reply, answer) = mpsc::channel();
        let sent = self.send(Command::Report(reply));
        sent.ok().and_then(|()| answer.recv().ok()).unwrap_or_else(|| self.shared.stats().clone())
    }

    /// Empties the prefix tree and waits until that is done.
    pub fn reset(&self) {
        let (done, wait) = mpsc::channel();
        if self.send(Command::Flush(done)).is_ok() {
            let _ = wait.recv();
        }
    }

    /// What changes in the prefix tree from now on, in order, beginning with what is there. Whoever takes it too slowly
    /// is told everything anew, beginning with [`CacheEvent::Cleared`]; the engine never waits. There is one
    /// subscriber at a time.
    pub fn cache_events(&self) -> mpsc::Receiver<Vec<CacheEvent>> {
        let (sender, events) = cache_event_channel();
        // An engine that has stopped tells nothing: the other end is dropped with the command.
        let _ = self.send(Command::Subscribe(sender));
        events
    }

    /// Runs one prompt and hands every event but the last to `on_event`, which may break it off. Waits for the end.
    pub fn generate(
        &self,
        prompt: &[u32],
        options: &GenerateOptions,
        mut on_event: impl FnMut(Event) -> ControlFlow<()>,
    ) -> Result<Summary, EngineError> {
        let mut answer = self.answer(Request::new(prompt, GenerateOptions { n: 1, ..options.clone() }))?;
        let mut broken_off = false;
        while let Some(event) = answer.next() {
            match event {
                Event::Finished { mut summary, .. } => {
                    if broken_off {
                        summary.finish = FinishReason::Cancelled;
                    }
                    return Ok(*summary);
                }
                Event::Failed { error, .. } => {
                    return Err(Arc::try_unwrap(error).unwrap_or_else(EngineError::Shared));
                }
                event if !broken_off => {
                    broken_off = on_event(event).is_break();
                    if broken_off {
                        answer.cancel();
                    }
                }
                _ => {}
            }
        }
        Err(EngineError::Stopped)
    }

    fn send(&self, command: Command) -> Result<(), EngineError> {
        self.shared.commands.send(command).map_err(|_| EngineError::Stopped)
    }
}

impl<B: Backend> Drop for Engine<B> {
    fn drop(&mut self) {
        let _ = self.shared.commands.send(Command::Stop);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Control for Shared {
    fn cancel(&self, id: u64) {
        let _ = self.commands.send(Command::Cancel(id));
    }
}

impl<B: Backend> Serve for Engine<B> {
    fn submit(&self, request: Request, sink: Sink) -> Result<RequestHandle, EngineError> {
        let at = Instant::now();
        let admission = &self.shared.admission;
        let admissible =
            request.validate(&self.limits).and_then(|()| admission.reserve(self.info.max_queued));
        admissible.inspect_err(|error| tracing::debug!(%error, "a request is refused"))?;
        let id = self.next_id.fetch_add(1, Ordering::SeqCst);
        let sink = SharedSink::new(sink);
        let sent = self.send(Command::Submit(Box::new(Submitted { id, at, request, sink })));
        // Nobody will take it out of the queue, and the next one is to hear the same and not that the queue is full.
        sent.inspect_err(|_| admission.remove())?;
        Ok(RequestHandle::new(id, Arc::clone(&self.shared) as Arc<dyn Control>))
    }

    fn info(&self) -> &EngineInfo {
        &self.info
    }

    fn stats(&self) -> EngineStats {
        self.shared.stats().clone()
    }

    fn failure(&self) -> Option<EngineError> {
        self.shared.admission.failure()
    }

    fn flush(&self) {
        let (done, _) = mpsc::channel();
        let _ = self.send(Command::Flush(done));
    }

    fn find_kept(&self, tokens: Vec<u32>, cache_salt: Option<String>, reply: KeptReply) {
        let salt = salt_of(cache_salt.as_deref());
        let _ = self.send(Command::FindKept { tokens, salt, reply });
    }
}
