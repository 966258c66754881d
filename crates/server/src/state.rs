//! What all requests share.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{SystemTime, UNIX_EPOCH};

use oscar_engine::{EngineError, Serve};
use tokio::sync::Semaphore;

use crate::grammar::{GrammarError, GrammarFactory};
use crate::http::{BodyBudget, BodyMemory};
use crate::in_flight::InFlightRequests;
use crate::metrics::Metrics;
use crate::options::ServerOptions;
use crate::protocol::ApiError;
use crate::text::{ConversationMemory, ServedModel};

/// Texts of more bytes are rendered and tokenized on a thread of their own, not on those that serve connections: a template
/// over messages of one letter and the tokenizer take about a millisecond for so many bytes, and 8 to 16 for 16 KiB.
const SHORT_TEXT_BYTES: usize = 1 << 10;

/// Bodies of more bytes are parsed there too, which takes a fraction of that.
const SHORT_BODY_BYTES: usize = 16 << 10;

/// So many bytes of long texts are tokenized at a time, or else one text: a tokenizer takes a hundred times as much.
const TOKENIZED_BYTES: usize = 4 << 20;

/// What all requests share.
pub(crate) struct AppState {
    pub(crate) engine: Arc<dyn Serve>,
    pub(crate) model: ServedModel,
    pub(crate) options: ServerOptions,
    pub(crate) in_flight: InFlightRequests,
    pub(crate) memory: ConversationMemory,
    pub(crate) metrics: Metrics,
    /// The `system_fingerprint` of answers: what they depend on besides the request.
    pub(crate) fingerprint: String,
    pub(crate) started: SystemTime,
    pub(crate) grammars: OnceLock<Result<GrammarFactory, GrammarError>>,
    draining: AtomicBool,
    /// Permits for parsing and tokenizing long texts, one for each core, and as many for texts of some KiB, which are done
    /// in milliseconds and must not wait for megabytes.
    encoders: Arc<Semaphore>,
    short_encoders: Arc<Semaphore>,
    /// A permit for each KiB of long texts that may be tokenized at a time.
    tokenized: Arc<Semaphore>,
    /// The memory for bodies that are being read or parsed.
    pub(crate) bodies: Arc<BodyBudget>,
}

impl AppState {
    pub(crate) fn new(engine: Arc<dyn Serve>, model: ServedModel, options: ServerOptions) -> AppState {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        AppState {
            bodies: BodyBudget::new(options.all_bodies_bytes, options.body_bytes),
            fingerprint: format!("oscar-{}-{}", env!("CARGO_PKG_VERSION"), engine.info().kv),
            metrics: Metrics::new(&model.name),
            // Ids that were drawn would make an answer depend on what the server has said before.
            memory: ConversationMemory::new(!engine.info().deterministic),
            engine,
            model,
            options,
            in_flight: InFlightRequests::default(),
            started: SystemTime::now(),
            grammars: OnceLock::new(),
            draining: AtomicBool::new(false),
            encoders: Arc::new(Semaphore::new(cores)),
            short_encoders: Arc::new(Semaphore::new(cores)),
            tokenized: Arc::new(Semaphore::new(TOKENIZED_BYTES >> 10)),
        }
    }

    /// Makes the server refuse new requests.
    pub(crate) fn drain(&self) {
        self.draining.store(true, Ordering::SeqCst);
    }

    /// Whether new requests are refused because the server is shutting down.
    pub(crate) fn is_draining(&self) -> bool {
        self.draining.load(Ordering::SeqCst)
    }

    /// Says why no request can be served any more, if so: the device has failed, or the server is shutting down.
    pub(crate) fn check_serving(&self) -> Result<(), ApiError> {
        match self.engine.failure() {
            Some(failure) => Err(failure.into()),
            None if self.is_draining() => Err(ApiError::shutting_down()),
            None => Ok(()),
        }
    }

    /// Builds the grammar factory for this model's vocabulary, which is done when the first request needs it.
    pub(crate) fn new_grammars(&self) -> Result<GrammarFactory, GrammarError> {
        GrammarFactory::new(self.model.tokenizer())
    }

    /// Refuses a batch of more prompts than the engine can take, before anything is done for it.
    pub(crate) fn check_batch(&self, prompts: usize, field: &str) -> Result<(), ApiError> {
        let most = self.engine.info().max_queued;
        if prompts > most {
            let message =
                format!("{field} has {prompts} prompts, at most {most} may wait (--max-queued-requests)");
            return Err(ApiError::bad_field(field, message));
        }
        // A single prompt costs little until the engine refuses it, and may have faults that are worth naming.
        let queued = self.engine.stats().queued;
        if prompts > 1 && queued + prompts > most {
            return Err(EngineError::QueueFull { queued }.into());
        }
        Ok(())
    }

    /// Does work on a text of `bytes`, such as tokenizing it, which must not hold up other connections.
    pub(crate) async fn encode<T: Send + 'static>(
        self: &Arc<AppState>,
        bytes: usize,
        work: impl FnOnce(&AppState) -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        if bytes <= SHORT_TEXT_BYTES {
            return work(self);
        }
        let places = if bytes <= SHORT_BODY_BYTES { &self.short_encoders } else { &self.encoders };
        let place = Arc::clone(places).acquire_owned().await;
        let place = place.map_err(|error| ApiError::internal(&error))?;
        let app = Arc::clone(self);
        let work = move || {
            // The client may be gone, and this thread goes on.
            let _place = place;
            work(&app)
        };
        tokio::task::spawn_blocking(work).await.map_err(|error| ApiError::internal(&error))?
    }

    /// Does work on a body, whose memory is held as long as that takes, even when its client goes away.
    pub(crate) async fn encode_body<T: Send + 'static>(
        self: &Arc<AppState>,
        memory: BodyMemory,
        work: impl FnOnce(&AppState) -> Result<T, ApiError> + Send + 'static,
    ) -> Result<(T, BodyMemory), ApiError> {
        let len = memory.len();
        let work = move |app: &AppState| Ok((work(app)?, memory));
        if len <= SHORT_BODY_BYTES {
            return self.encode(len, work).await;
        }
        let share = u32::try_from((len >> 10).min(TOKENIZED_BYTES >> 10)).unwrap_or(u32::MAX);
        let share = Arc::clone(&self.tokenized).acquire_many_owned(share).await;
        let share = share.map_err(|error| ApiError::internal(&error))?;
        let work = move |app: &AppState| {
            let _share = share;
            work(app)
        };
        self.encode(len, work).await
    }

    /// The same for work that is much less than tokenizing, such as parsing.
    pub(crate) async fn parse_body<T: Send + 'static>(
        self: &Arc<AppState>,
        memory: BodyMemory,
        work: impl FnOnce(&AppState) -> Result<T, ApiError> + Send + 'static,
    ) -> Result<(T, BodyMemory), ApiError> {
        if memory.len() <= SHORT_BODY_BYTES {
            return Ok((work(self)?, memory));
        }
        self.encode(memory.len(), move |app| Ok((work(app)?, memory))).await
    }
}

/// The time in seconds since 1970.
pub(crate) fn unix_seconds(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

    use oscar_engine::{MockEngine, MockOptions};

    use super::*;
    use crate::grammar::testing::tokenizer;

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn work_holds_its_place_and_memory_when_nobody_waits_for_it() {
        let model = ServedModel::new("tiny", "tiny", "qwen3", Arc::new(tokenizer("default")), None);
        let engine = Arc::new(MockEngine::new(MockOptions::default()));
        let app = Arc::new(AppState::new(engine, model, ServerOptions::default()));
        let places = app.encoders.available_permits();
        let memory = app.bodies.body(Duration::from_secs(1));
        let (begin, begun) = mpsc::channel();
        let (end, ended) = mpsc::channel::<()>();
        let (dropped, is_dropped) = mpsc::channel::<()>();
        let request = tokio::spawn({
            let app = Arc::clone(&app);
            async move {
                let mut memory = memory;
                memory.grow(1 << 20).await?;
                let work = move |_: &AppState| {
                    begin.send(()).unwrap();
                    let _ = ended.recv();
                    Ok(())
                };
                let done = app.encode_body(memory, work).await;
                drop(dropped);
                done
            }
        });
        tokio::task::spawn_blocking(move || begun.recv().unwrap()).await.unwrap();
        // The budget itself, and the body's share of it.
        assert_eq!(Arc::strong_count(&app.bodies), 2);
        // A megabyte of what may be tokenized at a time.
        let tokenized = TOKENIZED_BYTES >> 10;
        assert_eq!(app.tokenized.available_permits(), tokenized - 1024);
        request.abort();
        assert!(request.await.unwrap_err().is_cancelled());
        assert!(is_dropped.recv().is_err(), "the request is gone");
        assert_eq!(app.encoders.available_permits(), places - 1);
        assert_eq!(Arc::strong_count(&app.bodies), 2);
        drop(end);
        while app.encoders.available_permits() < places || app.tokenized.available_permits() < tokenized {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }
}
