//! Requests in, tokens out.
//!
//! An [`Engine`] owns a model and its KV cache and answers many requests at a time: [`Serve::submit`] takes a
//! [`Request`] and a function that is called with every [`Event`]; [`Serve::answer`] gives a blocking iterator instead,
//! and [`Engine::generate`] runs one prompt from start to end. Nothing here needs an async runtime. Whoever sits above
//! the engine is written against [`Serve`] and tested with a [`MockEngine`].
//!
//! ```no_run
//! # use std::sync::Arc;
//! # use oscar_engine::{Engine, EngineOptions, GenerateOptions, Request, Serve};
//! # use oscar_kernels::Backend;
//! # use oscar_model::{LoadedModel, source::ModelPath};
//! # fn example<B: Backend>(backend: Arc<B>) -> Result<(), Box<dyn std::error::Error>> {
//! let model = Arc::new(LoadedModel::load(&ModelPath::Gguf("model.gguf".into()), backend)?);
//! let engine = Engine::new(Arc::clone(&model), &EngineOptions::default())?;
//! let prompt = model.tokenizer().encode("The capital of France is", true)?;
//! let options = GenerateOptions { max_tokens: Some(16), ..GenerateOptions::default() };
//! for event in engine.answer(Request::new(prompt, options))? {
//!     print!("{}", event.text().unwrap_or_default());
//! }
//! # Ok(())
//! # }
//! ```
//!
//! One thread does the work (`scheduler`): each turn takes every answer in progress one token further in one batch and
//! does one bounded item of prompt work. Pages are owned by [`oscar_kv`]; this crate carries out what it says is to be
//! copied and sealed. Where the memory of the cache goes is in [`Budget`].

mod attention;
mod budget;
mod draw;
mod engine;
mod error;
mod event;
mod filter;
#[cfg(all(test, feature = "interleavings"))]
mod interleavings;
mod mock;
mod output;
mod penalties;
mod pooling;
mod request;
mod scheduler;
mod serve;
mod settings;
mod stop;
mod sync;

pub use attention::CustomAttention;
pub use budget::{Budget, PoolBudget};
pub use draw::draw;
pub use engine::Engine;
pub use error::EngineError;
pub use event::{Event, FinishReason, MatchedStop, PromptLogprob, Sink, Summary, Token};
pub use filter::{TokenFilter, TokenMask};
pub use mock::{MOCK_END, MockEngine, MockOptions};
pub use oscar_kernels::cpu::memory::trim as trim_memory;
pub use oscar_kv::{CacheEvent, KeptPage, KeptPrefix, Tier};
pub use pooling::Pooling;
pub use request::{GenerateOptions, MAX_TOP_LOGPROBS, Request, SamplingOptions};
pub use serve::{Answer, EngineInfo, EngineStats, KeptReply, RequestHandle, SequenceView, Serve};
pub use settings::{EngineOptions, KvOptions, PrefillMode};
