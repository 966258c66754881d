//! The server: OpenAI's, Anthropic's, SGLang's and llama.cpp's HTTP interfaces in front of anything that is
//! [`oscar_engine::Serve`].
//!
//! A request's way:
//!
//! | module | job |
//! |---|---|
//! | `http` | connections and their limits, shutdown, API keys, JSON bodies, server-sent events |
//! | `routes` | which path leads where, and what each route answers, whole or streamed |
//! | `protocol` | wire types: the requests of each interface, sampling parameters, errors that name the field |
//! | `text` | chat template, tokenizer, and the token ids of recent conversations |
//! | `requests`, `in_flight` | to the engine and back; which requests can be aborted |
//! | `parse` | parsers of reasoning and tool calls in what the model writes |
//! | `families` | what the parsers know about each family of models, one file each |
//! | `grammar` | guided decoding: answers by a JSON schema, regular expression, grammar or forced tool call |
//! | `kv_events` | what is in the prefix tree, published for cache-aware routers |
//! | `metrics` | metrics for Prometheus |
//! | `page` | the web page at `/` |
//! | `options`, `state` | the settings of a server, and what its requests share |

mod families;
mod grammar;
mod http;
mod in_flight;
mod kv_events;
mod metrics;
mod options;
mod page;
mod parse;
mod protocol;
mod requests;
mod routes;
mod state;
mod text;
mod tiers;

use std::sync::Arc;

use axum::Router;
use oscar_engine::Serve;

pub use families::UnknownParser;
pub use grammar::{Constraint, ForcedCalls, GrammarError, GrammarFactory, StructuralTag, TagStructure};
pub use http::Ended;
pub use kv_events::{Endpoint, KvEventAddress, KvEventError, KvEventOptions, KvEventPublisher};
pub use options::{CacheShape, ServerOptions, UnknownFields};
pub use parse::{ChannelReader, ReasoningFormat, Tool, ToolCallFormat};
pub use text::ServedModel;

use crate::state::AppState;

/// A server of one model. [`Server::serve`] listens; [`Server::router`] is for programs with a listener of their own.
pub struct Server {
    app: Arc<AppState>,
}

impl Server {
    /// Puts the HTTP interfaces in front of an engine and its model.
    pub fn new(engine: Arc<dyn Serve>, model: ServedModel, options: ServerOptions) -> Server {
        Server { app: Arc::new(AppState::new(engine, model, options)) }
    }

    /// The router of all routes, for programs that have a listener of their own, and for tests.
    pub fn router(&self) -> Router {
        routes::router(Arc::clone(&self.app))
    }

    /// The number of requests in flight, for tests and for programs that have a listener of their own.
    pub fn requests_in_progress(&self) -> usize {
        self.app.in_flight.len()
    }

    /// Whether new requests are refused because the server is shutting down, for the same.
    pub fn is_draining(&self) -> bool {
        self.app.is_draining()
    }
}
