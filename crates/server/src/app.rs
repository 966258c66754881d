//! What all requests share, and how the server is set up.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use oscar_engine::Serve;
use tokio::sync::Semaphore;

use crate::error::ApiError;
use crate::grammar::{GrammarError, GrammarFactory};
use crate::kv_events::KvEventAddress;
use crate::metrics::Metrics;
use crate::ongoing::Ongoing;
use crate::parse::{ReasoningFormat, ToolCallFormat};
use crate::text::{Memory, ServedModel};

/// Texts longer than this are encoded beside the threads that serve connections.
const LONG_TEXT_BYTES: usize = 16 << 10;

/// Settings of a server.
#[derive(Clone, Debug)]
pub struct ServerOptions {
    /// The key clients must show; anyone may ask when `None`.
    pub api_key: Option<String>,
    /// Web origins whose pages may ask; `*` is all of them.
    pub allowed_origins: Vec<String>,
    /// Largest body.
    pub body_bytes: usize,
    /// Longest time a client may take for the head of a request, and a connection may be idle.
    pub header_timeout: Duration,
    /// Longest time a client may take for a body.
    pub body_timeout: Duration,
    /// Longest time a client may take to read what was sent.
    pub write_timeout: Duration,
    /// Open connections; more are answered with 503.
    pub connections: usize,
    /// How long answers in progress may go on after the server was told to stop.
    pub shutdown: Duration,
    /// How the model writes its reasoning, which stays in the content when `None`.
    pub reasoning_parser: Option<&'static ReasoningFormat>,
    /// How the model writes tool calls, which stay in the content when `None`.
    pub tool_call_parser: Option<&'static ToolCallFormat>,
    /// How the cache is laid out, for the picture of it.
    pub cache: CacheShape,
    /// Where changes of the prefix tree are told, if they are.
    pub kv_events: Option<KvEventAddress>,
}

impl Default for ServerOptions {
    fn default() -> Self {
        ServerOptions {
            api_key: None,
            allowed_origins: Vec::new(),
            body_bytes: 32 << 20,
            header_timeout: Duration::from_secs(15),
            body_timeout: Duration::from_secs(60),
            write_timeout: Duration::from_secs(60),
            connections: 4096,
            shutdown: Duration::from_secs(30),
            reasoning_parser: None,
            tool_call_parser: None,
            cache: CacheShape::default(),
            kv_events: None,
        }
    }
}

/// Sizes of the cache's pages; all 0 where nobody knows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheShape {
    /// Pages at the start of a sequence that stay in bf16.
    pub sink_pages: usize,
    /// Pages before the one being filled that stay in bf16.
    pub recent_pages: usize,
    /// Bytes of a bf16 page, all layers.
    pub exact_page_bytes: usize,
    /// Bytes of a sealed page, all layers.
    pub sealed_page_bytes: usize,
    /// Bytes of a page of the prefill scratch.
    pub scratch_page_bytes: usize,
}

/// What all requests share.
pub(crate) struct App {
    pub(crate) engine: Arc<dyn Serve>,
    pub(crate) model: ServedModel,
    pub(crate) options: ServerOptions,
    pub(crate) ongoing: Ongoing,
    pub(crate) memory: Memory,
    pub(crate) metrics: Metrics,
    /// Names what an answer depends on besides the request.
    pub(crate) fingerprint: String,
    pub(crate) started: SystemTime,
    pub(crate) grammars: OnceLock<Result<GrammarFactory, GrammarError>>,
    draining: AtomicBool,
    /// Long texts that may be encoded at a time.
    encoders: Semaphore,
}

impl App {
    pub(crate) fn new(engine: Arc<dyn Serve>, model: ServedModel, options: ServerOptions) -> App {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        App {
            fingerprint: format!("oscar-{}-{}", env!("CARGO_PKG_VERSION"), engine.info().kv),
            metrics: Metrics::new(&model.name),
            engine,
            model,
            options,
            ongoing: Ongoing::default(),
            memory: Memory::default(),
            started: SystemTime::now(),
            grammars: OnceLock::new(),
            draining: AtomicBool::new(false),
            encoders: Semaphore::new(cores),
        }
    }

    /// Takes no more requests.
    pub(crate) fn drain(&self) {
        self.draining.store(true, Ordering::SeqCst);
    }

    /// Whether requests are refused because the server is going down.
    pub(crate) fn is_draining(&self) -> bool {
        self.draining.load(Ordering::SeqCst)
    }

    /// Grammars over this model's vocabulary; made when the first is asked for.
    pub(crate) fn new_grammars(&self) -> Result<GrammarFactory, GrammarError> {
        GrammarFactory::new(self.model.tokenizer())
    }

    /// Does work on a text of `bytes`. Long ones must not hold up other connections, nor take all cores.
    pub(crate) async fn encode<T: Send + 'static>(
        self: &Arc<App>,
        bytes: usize,
        work: impl FnOnce(&App) -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        if bytes <= LONG_TEXT_BYTES {
            return work(self);
        }
        let _place = self.encoders.acquire().await.map_err(|error| ApiError::internal(&error))?;
        let app = Arc::clone(self);
        let done = tokio::task::spawn_blocking(move || work(&app)).await;
        done.map_err(|error| ApiError::internal(&error))?
    }
}

/// Seconds since 1970.
pub(crate) fn unix_seconds(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}
