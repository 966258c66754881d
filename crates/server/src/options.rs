//! How a server is set up.

use std::time::Duration;

use crate::kv_events::KvEventAddress;
use crate::parse::{ReasoningFormat, ToolCallFormat};

/// The settings of a server.
#[derive(Clone, Debug)]
pub struct ServerOptions {
    /// The API key that clients must send; everybody is served when `None`.
    pub api_key: Option<String>,
    /// The web origins whose pages may send requests (CORS); `*` is all of them.
    pub allowed_origins: Vec<String>,
    /// Names of this server besides loopback names and addresses; `*` is any. Not looked at with an API key.
    pub allowed_hosts: Vec<String>,
    /// The most bytes of a request's body.
    pub body_bytes: usize,
    /// The most bytes of all large bodies that are being read at a time, and of what they are parsed to; others wait.
    pub all_bodies_bytes: usize,
    /// How long a client may take to send the head of a request, and how long a connection may be idle.
    pub header_timeout: Duration,
    /// How long a client may take to send a body.
    pub body_timeout: Duration,
    /// How long a client may take to read what was sent to it.
    pub write_timeout: Duration,
    /// The most connections at a time; others are answered with 503.
    pub connections: usize,
    /// How long requests in flight may go on after the server was told to stop.
    pub shutdown: Duration,
    /// How the model writes its reasoning, which stays in the content when `None`.
    pub reasoning_parser: Option<&'static ReasoningFormat>,
    /// How the model writes tool calls, which stay in the content when `None`.
    pub tool_call_parser: Option<&'static ToolCallFormat>,
    /// Whether control tokens that a message contains are read as such; otherwise they are text.
    pub parse_special_in_messages: bool,
    /// What happens to fields that a request does not have.
    pub unknown_fields: UnknownFields,
    /// The layout of the KV cache, which `/oscar/cache` and the web page show.
    pub cache: CacheShape,
    /// The address at which KV events are published, if they are, for routers that ask `/server_info`.
    pub kv_events: Option<KvEventAddress>,
}

impl Default for ServerOptions {
    fn default() -> Self {
        ServerOptions {
            api_key: None,
            allowed_origins: Vec::new(),
            allowed_hosts: Vec::new(),
            body_bytes: 32 << 20,
            all_bodies_bytes: 128 << 20,
            header_timeout: Duration::from_secs(15),
            body_timeout: Duration::from_secs(60),
            write_timeout: Duration::from_secs(60),
            connections: 4096,
            shutdown: Duration::from_secs(30),
            reasoning_parser: None,
            tool_call_parser: None,
            parse_special_in_messages: false,
            unknown_fields: UnknownFields::default(),
            cache: CacheShape::default(),
            kv_events: None,
        }
    }
}

/// What happens to a field that a request does not have and that is not known to change nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum UnknownFields {
    /// The request is refused, and the error names the field.
    #[default]
    Refuse,
    /// The request is answered as if the field were not there.
    Ignore,
}

/// Windows and page sizes of the KV cache; all are 0 where the engine does not say.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheShape {
    /// The number of pages at the start of a sequence that stay in bf16.
    pub sink_pages: usize,
    /// The number of pages before the one being filled that stay in bf16.
    pub recent_pages: usize,
    /// The bytes of a bf16 page, all layers together.
    pub exact_page_bytes: usize,
    /// The bytes of a sealed page, all layers together.
    pub sealed_page_bytes: usize,
    /// The bytes of a sealed page of the high tier, all layers together; 0 without that tier.
    pub high_page_bytes: usize,
    /// The bytes of a page of the prefill scratch.
    pub scratch_page_bytes: usize,
}
