//! Requests in, tokens out.
//!
//! One sequence at a time for now: [`Engine::generate`] runs a prompt and streams what the model says. Keys and
//! values of the last sequence are kept, so a prompt that continues it (the next turn of a chat) computes only
//! what is new.

mod draw;
mod engine;
mod error;
mod request;
mod stop;

pub use draw::draw;
pub use engine::{Engine, EngineOptions};
pub use error::EngineError;
pub use request::{Event, FinishReason, GenerateOptions, SamplingOptions, Summary};
