//! The server: what clients send, and what the model says to them.
//!
//! OpenAI's, Anthropic's and SGLang's HTTP interfaces in front of anything that is [`oscar_engine::Serve`]. A request's way:
//!
//! | module | job |
//! |---|---|
//! | `listen` | connections and their limits, the end of the server |
//! | `router`, `auth` | paths, keys, request ids |
//! | `body`, `protocol` | JSON in, with errors that name the field |
//! | `text` | prompts, chats, token ids |
//! | `answers`, `ongoing` | to the engine and back, without anybody waiting for anybody |
//! | `routes`, `frames`, `logprobs` | what is sent back: whole or as server-sent events |
//! | `grammar`, `form` | answers that must look like something |
//! | `parse`, `families` | reasoning and tool calls in what the model wrote |
//! | `metrics` | numbers for Prometheus |
//! | `kv_events` | what is in the prefix tree, for routers |
//! | `page` | the web page at `/` |

mod answers;
mod app;
mod auth;
mod body;
mod error;
mod families;
mod form;
mod frames;
mod grammar;
mod kv_events;
mod listen;
mod logprobs;
mod metrics;
mod ongoing;
mod page;
mod parse;
mod protocol;
mod router;
mod routes;
mod text;

use std::sync::Arc;

use axum::Router;
use oscar_engine::Serve;

pub use app::{CacheShape, ServerOptions};
pub use families::UnknownParser;
pub use grammar::{Constraint, ForcedCalls, GrammarError, GrammarFactory};
pub use kv_events::{Endpoint, KvEventAddress, KvEventError, KvEventOptions, KvEventPublisher};
pub use listen::Ended;
pub use parse::{ReasoningFormat, Tool, ToolCallFormat};
pub use text::ServedModel;

use crate::app::App;

/// A server that is not listening yet.
pub struct Server {
    app: Arc<App>,
}

impl Server {
    /// A server of one model.
    pub fn new(engine: Arc<dyn Serve>, model: ServedModel, options: ServerOptions) -> Server {
        Server { app: Arc::new(App::new(engine, model, options)) }
    }

    /// All routes, for those who bring their own listener.
    pub fn router(&self) -> Router {
        router::router(Arc::clone(&self.app))
    }

    /// Requests that are on their way.
    pub fn requests_in_progress(&self) -> usize {
        self.app.ongoing.len()
    }

    /// Whether the server takes no more requests because it is going down.
    pub fn is_draining(&self) -> bool {
        self.app.is_draining()
    }
}
