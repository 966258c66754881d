//! HTTP below the routes: connections and their limits, the API key, JSON bodies, server-sent events.

mod auth;
mod body;
mod listen;
mod memory;
mod origin;
mod plain;
pub(crate) mod sse;

pub(crate) use auth::ApiKey;
#[cfg(test)]
pub(crate) use body::parse;
pub(crate) use body::{JsonBody, OptionalJsonBody, check_content_type, parse_fields};
pub use listen::Ended;
pub(crate) use listen::HEAD_BYTES;
pub(crate) use memory::{BodyBudget, BodyMemory, KeptMemory};
pub(crate) use origin::{TrustedSites, changes_something};
