//! Requests in, tokens out.
//!
//! One sequence at a time for now: [`Engine::generate`] runs a prompt and streams what the model says. Keys and
//! values of the last sequence are kept, so a prompt that continues it (the next turn of a chat) computes only
//! what is new.

mod budget;
mod draw;
mod engine;
mod error;
mod event;
mod filter;
mod mock;
mod output;
mod penalties;
mod request;
mod scheduler;
mod serve;
mod settings;
mod stop;

pub use budget::{Budget, Share};
pub use draw::draw;
pub use engine::Engine;
pub use error::EngineError;
pub use event::{Event, FinishReason, MatchedStop, PromptLogprob, Sink, Summary, Token};
pub use filter::{TokenFilter, TokenMask};
pub use mock::{MOCK_END, MockEngine, MockOptions};
pub use request::{GenerateOptions, MAX_TOP_LOGPROBS, Request, SamplingOptions};
pub use serve::{Answer, EngineInfo, EngineStats, RequestHandle, SequenceView, Serve};
pub use settings::{EngineOptions, KvOptions, PrefillMode};
