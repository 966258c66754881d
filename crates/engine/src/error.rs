//! Why a request failed. The engine stays usable after each of these but [`EngineError::DeviceFailed`].

use std::sync::Arc;

use oscar_codec::CodecError;
use oscar_kernels::KernelError;
use oscar_kv::{KvError, Shortage, Tier};
use oscar_model::text::TextError;

/// Why a request failed, or why an engine could not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs)]
pub enum EngineError {
    #[error("the prompt is empty")]
    EmptyPrompt,
    #[error("the prompt has {tokens} tokens, the context holds {context}")]
    PromptTooLong { tokens: usize, context: usize },
    #[error(
        "the prompt has {tokens} tokens, and a sequence with kv_precision {tier} holds {most}, where the context holds {context}"
    )]
    HistoryTooLong { tier: Tier, tokens: usize, most: usize, context: usize },
    #[error("token {token} of the prompt is outside the vocabulary of {vocabulary}")]
    TokenOutOfRange { token: u32, vocabulary: usize },
    #[error("{name} is {value}, expected {expected}")]
    BadOption { name: &'static str, value: String, expected: String },
    #[error("{queued} requests are waiting already, as many as may wait")]
    QueueFull { queued: usize },
    #[error(
        "a context of {context} tokens needs {needed} bytes of KV memory ({parts}), and there are {memory}: {} are missing",
        needed.saturating_sub(*memory)
    )]
    MemoryTooSmall { context: usize, needed: usize, memory: usize, parts: String },
    #[error("the KV cache is too small for this request: {0}")]
    Shortage(#[from] Shortage),
    #[error(transparent)]
    Kv(#[from] KvError),
    #[error("the codec of the cache: {0}")]
    Codec(#[from] CodecError),
    #[error("{0}")]
    Shared(Arc<EngineError>),
    #[error("the engine has stopped")]
    Stopped,
    /// What is within happened first; whoever asks from then on gets this too.
    #[error("the device failed: {0}; the engine has stopped and has to be started again")]
    DeviceFailed(Arc<EngineError>),
    #[error("the model computed keys or values that are not finite")]
    NotFinite,
    #[error("the filter of allowed tokens failed: {0}")]
    Filter(String),
    #[error(transparent)]
    Kernel(#[from] KernelError),
    #[error(transparent)]
    Text(#[from] TextError),
}

impl EngineError {
    /// Whether the device is of no use any more, and with it the engine.
    pub fn is_fatal(&self) -> bool {
        match self {
            EngineError::Kernel(error) => error.is_fatal(),
            EngineError::Shared(error) => error.is_fatal(),
            EngineError::DeviceFailed(_) => true,
            _ => false,
        }
    }

    pub(crate) fn bad_option(
        name: &'static str,
        value: impl ToString,
        expected: impl ToString,
    ) -> EngineError {
        EngineError::BadOption { name, value: value.to_string(), expected: expected.to_string() }
    }
}
