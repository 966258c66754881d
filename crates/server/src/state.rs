//! What all requests share.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{SystemTime, UNIX_EPOCH};

use oscar_engine::{EngineError, Serve};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::grammar::{GrammarError, GrammarFactory};
use crate::http::{BodyBudget, BodyMemory};
use crate::in_flight::InFlightRequests;
use crate::metrics::Metrics;
use crate::options::ServerOptions;
use crate::protocol::{ApiError, FieldPolicy};
use crate::text::{ConversationMemory, ServedModel};

/// Texts of more bytes are rendered and tokenized on a thread of their own, not on those that serve connections: a template
/// over messages of one letter and the tokenizer take about a millisecond for so many bytes, and 8 to 16 for 16 KiB.
const SHORT_TEXT_BYTES: usize = 1 << 10;

/// Bodies of more bytes are parsed there too, which takes a fraction of that.
const SHORT_BODY_BYTES: usize = 16 << 10;

/// What an ordinary chat may have. Bodies of more are a matter of seconds.
const MEDIUM_BODY_BYTES: usize = 256 << 10;

/// The sizes of bodies whose work is done apart, each up to so many bytes, and so many bytes of their texts at a time or else
/// one text: a tokenizer takes a hundred times as much.
const LANES: [(usize, usize); 3] =
    [(SHORT_BODY_BYTES, 1 << 20), (MEDIUM_BODY_BYTES, 1 << 20), (usize::MAX, 4 << 20)];

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
    /// Bodies of some KiB are done in milliseconds, and must not wait for megabytes.
    lanes: [Lane; 3],
    /// Permits for compiling grammars, one for each core.
    compilers: Arc<Semaphore>,
    /// The memory for bodies that are being read or parsed.
    pub(crate) bodies: Arc<BodyBudget>,
}

/// How much is done at a time for bodies of one size.
struct Lane {
    /// Permits for parsing and tokenizing, one for each core.
    places: Arc<Semaphore>,
    /// A permit for each KiB of text that may be tokenized at a time.
    texts: Arc<Semaphore>,
    all_texts: usize,
}

impl Lane {
    fn new(cores: usize, text_bytes: usize) -> Lane {
        let all_texts = text_bytes >> 10;
        Lane {
            places: Arc::new(Semaphore::new(cores)),
            texts: Arc::new(Semaphore::new(all_texts)),
            all_texts,
        }
    }

    /// Waits until texts of so many bytes may be tokenized.
    async fn text(&self, bytes: usize) -> Result<OwnedSemaphorePermit, ApiError> {
        let share = u32::try_from((bytes >> 10).min(self.all_texts)).unwrap_or(u32::MAX);
        let share = Arc::clone(&self.texts).acquire_many_owned(share).await;
        share.map_err(|error| ApiError::internal(&error))
    }
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
            lanes: LANES.map(|(_, text_bytes)| Lane::new(cores, text_bytes)),
            compilers: Arc::new(Semaphore::new(cores)),
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

    /// How fields are checked that nobody reads.
    pub(crate) fn field_policy(&self) -> FieldPolicy {
        FieldPolicy { unknown: self.options.unknown_fields, drawn: self.model.sampling }
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

    /// The lane for bodies of this size.
    fn lane(&self, bytes: usize) -> &Lane {
        let lane = LANES.iter().position(|&(most, _)| bytes <= most);
        &self.lanes[lane.unwrap_or(LANES.len() - 1)]
    }

    /// Does work that must not hold up other connections on a thread of its own, when there is a place for it.
    async fn work_apart<T: Send + 'static>(
        self: &Arc<AppState>,
        places: &Arc<Semaphore>,
        work: impl FnOnce(&AppState) -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
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

    /// Compiles a grammar, which can take as long as tokenizing a long text.
    pub(crate) async fn compile<T: Send + 'static>(
        self: &Arc<AppState>,
        work: impl FnOnce(&AppState) -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        self.work_apart(&self.compilers, work).await
    }

    /// Does work on a body, whose memory is held as long as that takes, even when its client goes away.
    pub(crate) async fn encode_body<T: Send + 'static>(
        self: &Arc<AppState>,
        memory: BodyMemory,
        work: impl FnOnce(&AppState) -> Result<T, ApiError> + Send + 'static,
    ) -> Result<(T, BodyMemory), ApiError> {
        let len = memory.len();
        if len <= SHORT_TEXT_BYTES {
            return Ok((work(self)?, memory));
        }
        let lane = self.lane(len);
        let share = lane.text(memory.text_len()).await?;
        let work = move |app: &AppState| {
            let _share = share;
            Ok((work(app)?, memory))
        };
        self.work_apart(&lane.places, work).await
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
        self.work_apart(&self.lane(memory.len()).places, move |app| Ok((work(app)?, memory))).await
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

    use axum::body::Body;
    use axum::http::Request;
    use oscar_engine::{MockEngine, MockOptions};
    use serde_json::json;
    use tower::ServiceExt;

    use super::*;
    use crate::grammar::testing::tokenizer;
    use crate::routes::router;

    fn app() -> Arc<AppState> {
        let model = ServedModel::new("tiny", "tiny", "qwen3", Arc::new(tokenizer("default")), None);
        let engine = Arc::new(MockEngine::new(MockOptions::default()));
        Arc::new(AppState::new(engine, model, ServerOptions::default()))
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn work_holds_its_place_and_memory_when_nobody_waits_for_it() {
        let app = app();
        let lane = &app.lanes[2];
        let places = lane.places.available_permits();
        let memory = app.bodies.body(Duration::from_secs(1));
        let (begin, begun) = mpsc::channel();
        let (end, ended) = mpsc::channel::<()>();
        let (dropped, is_dropped) = mpsc::channel::<()>();
        let request = tokio::spawn({
            let app = Arc::clone(&app);
            async move {
                let mut memory = memory;
                memory.grow(1 << 20).await?;
                memory.hold_contents(1, 1 << 20).await?;
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
        assert_eq!(lane.texts.available_permits(), lane.all_texts - 1024);
        request.abort();
        assert!(request.await.unwrap_err().is_cancelled());
        assert!(is_dropped.recv().is_err(), "the request is gone");
        assert_eq!(lane.places.available_permits(), places - 1);
        assert_eq!(Arc::strong_count(&app.bodies), 2);
        drop(end);
        while lane.places.available_permits() < places || lane.texts.available_permits() < lane.all_texts {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    /// Sends a body, and gives the status of the answer if there is one soon.
    async fn status(app: &Arc<AppState>, path: &str, body: String, soon: Duration) -> Option<u16> {
        let request = Request::post(path).header("content-type", "application/json");
        let asked = router(Arc::clone(app)).oneshot(request.body(Body::from(body)).unwrap());
        tokio::time::timeout(soon, asked).await.ok().map(|answer| answer.unwrap().status().as_u16())
    }

    #[tokio::test]
    async fn every_text_waits_until_it_may_be_tokenized() {
        let app = app();
        let (soon, later) = (Duration::from_millis(200), Duration::from_secs(60));
        let held = app.lanes[2].text(usize::MAX).await.unwrap();
        let text = "word ".repeat(60_000);
        let messages = json!([{"role": "user", "content": text}]);
        let bodies = [
            ("/v1/chat/completions", json!({"messages": messages})),
            ("/v1/completions", json!({"prompt": text})),
            ("/v1/messages", json!({"messages": messages, "max_tokens": 1})),
            ("/v1/embeddings", json!({"input": text})),
            ("/v1/score", json!({"text_1": text, "text_2": "a"})),
            ("/generate", json!({"text": text})),
            ("/completion", json!({"prompt": text})),
            ("/tokenize", json!({"prompt": text})),
        ];
        for (path, body) in &bodies {
            assert_eq!(status(&app, path, body.to_string(), soon).await, None, "{path}");
        }
        // Token ids are no text.
        let ids = json!({"prompt": vec![5; 200_000]}).to_string();
        assert_eq!(status(&app, "/v1/completions", ids, later).await, Some(400));
        drop(held);
        for (path, body) in bodies {
            let expected = if path == "/tokenize" { 200 } else { 400 };
            assert_eq!(status(&app, path, body.to_string(), later).await, Some(expected), "{path}");
        }
    }

    /// Neither the threads nor the texts of giants are those of ordinary bodies, which are bounded too.
    #[tokio::test]
    async fn ordinary_bodies_do_not_wait_for_giants() {
        let app = app();
        let (soon, later) = (Duration::from_millis(200), Duration::from_secs(60));
        let everything = |lane: usize| {
            let lane = &app.lanes[lane];
            let (places, texts) = (lane.places.available_permits(), lane.all_texts);
            let take = |from: &Arc<Semaphore>, all| {
                Arc::clone(from).try_acquire_many_owned(u32::try_from(all).unwrap()).unwrap()
            };
            (take(&lane.places, places), take(&lane.texts, texts))
        };
        let prompt = |words: usize| json!({"prompt": "word ".repeat(words)}).to_string();
        let giants = everything(2);
        let form = json!({"prompt": "a", "max_tokens": 1, "regex": "a"}).to_string();
        for words in [4000, 50_000] {
            assert!(status(&app, "/v1/completions", prompt(words), later).await.is_some());
        }
        assert_eq!(status(&app, "/tokenize", prompt(60_000), soon).await, None);
        let ordinary = everything(1);
        assert_eq!(status(&app, "/tokenize", prompt(4000), soon).await, None);
        assert_eq!(status(&app, "/tokenize", prompt(1000), later).await, Some(200));
        assert!(status(&app, "/v1/completions", form, later).await.is_some());
        drop((giants, ordinary));
    }
}
