//! Why a request failed. The engine stays usable after each of these.

use oscar_kernels::KernelError;
use oscar_kv::PoolExhausted;
use oscar_model::text::TextError;

/// Why a request failed.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum EngineError {
    #[error("the prompt is empty")]
    EmptyPrompt,
    #[error("the prompt has {tokens} tokens, the context holds {context}")]
    PromptTooLong { tokens: usize, context: usize },
    #[error("{name} is {value}, expected {expected}")]
    BadOption { name: &'static str, value: String, expected: &'static str },
    #[error(transparent)]
    Pages(#[from] PoolExhausted),
    #[error(transparent)]
    Kernel(#[from] KernelError),
    #[error(transparent)]
    Text(#[from] TextError),
}
