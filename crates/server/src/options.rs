//! How a server is set up.

use std::time::Duration;

use crate::kv_events::KvEventAddress;
use crate::parse::{ReasoningFormat, ToolCallFormat};

/// The settings of a server.
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
