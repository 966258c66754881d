//! The interface between an engine and what is above it: requests go in, events come out.
//!
//! No runtime is needed: events are handed to a function on the engine's thread, and [`Answer`] is a blocking
//! iterator for those who want one.

use std::sync::{Arc, PoisonError};

use oscar_kv::{KeptPrefix, LedgerStats, Tier};

use crate::error::EngineError;
use crate::event::{Event, Sink, Summary};
use crate::request::Request;
use crate::sync::atomic::{AtomicUsize, Ordering};
use crate::sync::mpsc::{self, Receiver};
use crate::sync::{Mutex, MutexGuard};

/// What is called with the answer of [`Serve::find_kept`].
pub type KeptReply = Box<dyn FnOnce(KeptPrefix) + Send>;

/// Something that answers requests: an engine, or a mock of one.
pub trait Serve: Send + Sync {
    /// Takes a request; its events go to `sink`. An error means that no event will come.
    fn submit(&self, request: Request, sink: Sink) -> Result<RequestHandle, EngineError>;

    /// The limits and settings of the engine, which do not change.
    fn info(&self) -> &EngineInfo;

    /// How busy the engine is and what it has done so far.
    fn stats(&self) -> EngineStats;

    /// Why the engine answers nobody any more: the device failed, so that only a new process can use it. All requests have
    /// failed with the same [`EngineError::DeviceFailed`], or are about to, and new ones are refused with it. `None` as long
    /// as all is well.
    fn failure(&self) -> Option<EngineError> {
        None
    }

    /// Forgets cached prompts that no request uses.
    fn flush(&self);

    /// Finds what is kept of a text for requests with this salt; nothing, if the engine has no cache. `reply` is called
    /// once, on the engine's thread, or never if the engine has stopped.
    fn find_kept(&self, _tokens: Vec<u32>, _cache_salt: Option<String>, reply: KeptReply) {
        reply(KeptPrefix::default());
    }

    /// [`Self::submit`] with an iterator over the events.
    fn answer(&self, request: Request) -> Result<Answer, EngineError> {
        let choices = request.options.n;
        let (sink, events) = channel();
        let handle = self.submit(request, sink)?;
        Ok(Answer { handle, events, open: choices })
    }
}

impl<S: Serve + ?Sized> Serve for Arc<S> {
    fn submit(&self, request: Request, sink: Sink) -> Result<RequestHandle, EngineError> {
        (**self).submit(request, sink)
    }

    fn info(&self) -> &EngineInfo {
        (**self).info()
    }

    fn stats(&self) -> EngineStats {
        (**self).stats()
    }

    fn failure(&self) -> Option<EngineError> {
        (**self).failure()
    }

    fn flush(&self) {
        (**self).flush();
    }

    fn find_kept(&self, tokens: Vec<u32>, cache_salt: Option<String>, reply: KeptReply) {
        (**self).find_kept(tokens, cache_salt, reply);
    }
}

fn channel() -> (Sink, Receiver<Event>) {
    let (sender, events) = mpsc::channel();
    // Whoever does not listen any more has nothing to be told.
    let sink = Box::new(move |event| drop(sender.send(event)));
    (sink, events)
}

/// What decides whether a request is taken. Those who submit share it with the thread that does the work.
#[derive(Default)]
pub(crate) struct Admission {
    /// Requests that wait to be admitted.
    queued: AtomicUsize,
    /// What made the device useless, if something has.
    failure: Mutex<Option<Arc<EngineError>>>,
}

impl Admission {
    /// Adds a request to those that wait, unless `most` wait already or none can be answered any more.
    pub(crate) fn reserve(&self, most: usize) -> Result<(), EngineError> {
        if let Some(failure) = self.failure() {
            return Err(failure);
        }
        // In one step: whoever is refused must not be counted, not even for a moment, or somebody else is refused for it.
        let one_more = |queued| (queued < most).then_some(queued + 1);
        let counted = self.queued.fetch_update(Ordering::SeqCst, Ordering::SeqCst, one_more);
        counted.map(drop).map_err(|queued| EngineError::QueueFull { queued })
    }

    /// A request waits, or waits again.
    pub(crate) fn add(&self) {
        self.queued.fetch_add(1, Ordering::SeqCst);
    }

    /// A request waits no more.
    pub(crate) fn remove(&self) {
        self.queued.fetch_sub(1, Ordering::SeqCst);
    }

    /// Requests that wait.
    pub(crate) fn queued(&self) -> usize {
        self.queued.load(Ordering::SeqCst)
    }

    /// Lets nobody in any more because of this error. The first one stays.
    pub(crate) fn close(&self, cause: Arc<EngineError>) {
        self.lock_failure().get_or_insert(cause);
    }

    /// Why nobody is let in any more.
    pub(crate) fn failure(&self) -> Option<EngineError> {
        self.lock_failure().clone().map(EngineError::DeviceFailed)
    }

    fn lock_failure(&self) -> MutexGuard<'_, Option<Arc<EngineError>>> {
        self.failure.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What a handle can do to its request.
pub(crate) trait Control: Send + Sync {
    /// Breaks off a request that has not ended.
    fn cancel(&self, id: u64);
}

/// A request that was submitted. Dropping the handle cancels the request.
pub struct RequestHandle {
    id: u64,
    control: Arc<dyn Control>,
}

impl RequestHandle {
    pub(crate) fn new(id: u64, control: Arc<dyn Control>) -> RequestHandle {
        RequestHandle { id, control }
    }

    /// Number of the request, unique within its engine.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// Breaks off the request: answers that have not ended finish as cancelled.
    pub fn cancel(&self) {
        self.control.cancel(self.id);
    }
}

impl Drop for RequestHandle {
    fn drop(&mut self) {
        self.control.cancel(self.id);
    }
}

impl std::fmt::Debug for RequestHandle {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("RequestHandle").field("id", &self.id).finish_non_exhaustive()
    }
}

/// A blocking iterator over the events of a request. It ends when every choice has ended; dropping it cancels the request.
#[derive(Debug)]
pub struct Answer {
    handle: RequestHandle,
    events: Receiver<Event>,
    open: usize,
}

impl Answer {
    /// Breaks off the request: answers that have not ended finish as cancelled.
    pub fn cancel(&self) {
        self.handle.cancel();
    }

    /// Waits for the end: the summary of each choice, in order.
    pub fn wait(mut self) -> Result<Vec<Summary>, Arc<EngineError>> {
        let mut summaries = Vec::new();
        for event in self.by_ref() {
            match event {
                Event::Finished { choice, summary } => summaries.push((choice, *summary)),
                Event::Failed { error, .. } => return Err(error),
                Event::Prefill { .. } | Event::Scored { .. } | Event::Token { .. } => {}
            }
        }
        if self.open > 0 {
            return Err(Arc::new(EngineError::Stopped));
        }
        summaries.sort_by_key(|&(choice, _)| choice);
        Ok(summaries.into_iter().map(|(_, summary)| summary).collect())
    }
}

impl Iterator for Answer {
    type Item = Event;

    fn next(&mut self) -> Option<Event> {
        if self.open == 0 {
            return None;
        }
        let event = self.events.recv().ok()?;
        self.open -= usize::from(event.is_last());
        Some(event)
    }
}

/// The limits and settings of an engine.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct EngineInfo {
    /// Tokens that a sequence may have, prompt and answer together.
    pub context: usize,
    /// Token ids that a prompt may hold: rows of the embedding.
    pub vocabulary: usize,
    /// Numbers in the embedding of a prompt.
    pub hidden_size: usize,
    /// Answers that may run at a time.
    pub max_running: usize,
    /// Requests that may wait.
    pub max_queued: usize,
    /// Prompt tokens that are computed in one pass.
    pub prefill_chunk: usize,
    /// The same request gets the same tokens, whatever else runs.
    pub deterministic: bool,
    /// Whether prompts and answers are kept for later requests.
    pub prefix_cache: bool,
    /// The name of the format in which keys and values are stored.
    pub kv: String,
    /// Bits per stored key or value element of a sequence that fills the context, windows and scales included.
    pub bits_per_element: f64,
    /// Tokens that the cache can hold.
    pub capacity_tokens: usize,
    /// Tokens that a sequence with its history in bf16 may have, if requests may choose that tier.
    pub bf16_context: Option<usize>,
    /// Tokens that a sequence of the high tier may have, if requests may choose that tier.
    pub high_context: Option<usize>,
}

/// How busy an engine is and what it has done since it started.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct EngineStats {
    /// Requests that wait to begin.
    pub queued: usize,
    /// Requests whose prompt is being read.
    pub prefilling: usize,
    /// Answers that are being generated.
    pub running: usize,
    /// Requests that were submitted.
    pub requests: u64,
    /// Answers that were completed.
    pub finished: u64,
    /// Answers that were cancelled by the caller.
    pub cancelled: u64,
    /// Answers that could not be completed.
    pub failed: u64,
    /// Times that a request lost its pages to an older one.
    pub preemptions: u64,
    /// Pages of histories in bf16 that were sealed for want of pages.
    pub demoted_pages: u64,
    /// Prompt tokens of all requests that have begun.
    pub prompt_tokens: u64,
    /// Prompt tokens of those requests that came from the prefix tree.
    pub cached_tokens: u64,
    /// Prompts that were computed in one batch with others.
    pub batched_prompts: u64,
    /// Tokens that were sampled.
    pub generated_tokens: u64,
    /// How many pages of each pool are in use, and by whom.
    pub cache: LedgerStats,
    /// What the cache holds for each prompt in progress and each running answer.
    pub sequences: Vec<SequenceView>,
}

/// What is in the cache for one answer or prompt.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SequenceView {
    /// The number of the request, as [`RequestHandle::id`] says.
    pub request: u64,
    /// The number of the answer within its request.
    pub choice: usize,
    /// Tokens whose keys and values are in the cache.
    pub tokens: usize,
    /// Tokens of the sequence that came from the prefix tree.
    pub cached_tokens: usize,
    /// How exactly its history is kept.
    pub tier: Tier,
    /// Pages in bf16: the sink, the recent window and the page that is being filled, and the history where it is bf16.
    pub exact_pages: usize,
    /// Sealed pages; those of a window may be in bf16 too.
    pub sealed_pages: usize,
}

/// A listener that the answers of one request share.
#[derive(Clone)]
pub(crate) struct SharedSink(Arc<Mutex<Sink>>);

impl SharedSink {
    pub(crate) fn new(sink: Sink) -> SharedSink {
        SharedSink(Arc::new(Mutex::new(sink)))
    }

    /// Sends an event. A sink that panics is the caller's fault and must not take the engine with it.
    pub(crate) fn send(&self, event: Event) {
        let sink = Arc::clone(&self.0);
        let call = move || {
            // A sink that has panicked once is not called again.
            if let Ok(mut sink) = sink.lock() {
                sink(event);
            }
        };
        let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(call));
    }
}
