//! Measuring what a codec does to a model.
//!
//! | module | job |
//! |---|---|
//! | [`codecs`] | from a name on the command line to a codec |
//! | [`history`], [`evaluator`] | a model whose early positions are read back from a codec |
//! | [`divergence`] | KL, perplexity and agreement with the exact cache |
//! | [`ablation`] | the published recipe with one part changed |
//! | [`needle`], [`retrieval`] | prompts with needles, and models that answer them |
//! | [`bit_allocation`] | the bits of each layer's keys, by what they do to the model |
//! | [`probe`] | strings that a model copies from far back |
//! | [`codec_attention`] | a codec of the lab behind the engine, so that it can be served |
//! | [`served`] | answers of the engine, with the cache that serves |
//! | [`paged`] | a text over the pages and kernels of that cache |
//! | [`text`] | text when the user has none |
//! | [`report`] | results as one page |

pub mod ablation;
mod band_variants;
pub mod bit_allocation;
pub mod codec_attention;
pub mod codecs;
pub mod divergence;
pub mod evaluator;
pub mod history;
pub mod needle;
pub mod paged;
pub mod probe;
pub mod report;
pub mod retrieval;
pub mod served;
pub mod text;

use std::sync::Arc;

use oscar_codec::CodecError;
use oscar_engine::EngineError;
use oscar_kernels::KernelError;
use oscar_model::text::TextError;
use oscar_rotations::RotationError;

use crate::calibrate::CalibrateError;

/// Why a measurement ended early.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
#[non_exhaustive]
pub enum EvalError {
    #[error("{tokens} tokens are more than the {most} there is room for; ask for a shorter text")]
    Context { tokens: usize, most: usize },
    #[error(
        "the text has {tokens} tokens and {needed} are needed; give more text, or less --prefix and --skip"
    )]
    TextTooShort { tokens: usize, needed: usize },
    #[error("{0}")]
    Chat(String),
    #[error("the tokenizer joins the answer with the text before it, so that its probability cannot be told")]
    AnswerTokens,
    #[error("the logits are not finite")]
    NotFinite,
    #[error("`{spec}` is not a codec: {problem}")]
    Codec { spec: String, problem: String },
    #[error("`{spec}` needs rotations: run `oscar calibrate MODEL` or give --rotations FILE")]
    NoRotations { spec: String },
    #[error(transparent)]
    Encode(#[from] CodecError),
    #[error(transparent)]
    Kernel(#[from] KernelError),
    #[error(transparent)]
    Text(#[from] TextError),
    #[error("{0}")]
    Engine(Arc<EngineError>),
    #[error(transparent)]
    Calibrate(Box<CalibrateError>),
    #[error(transparent)]
    Rotations(Box<RotationError>),
}

// Boxed, because they are far larger than everything else.
impl From<CalibrateError> for EvalError {
    fn from(error: CalibrateError) -> EvalError {
        EvalError::Calibrate(Box::new(error))
    }
}

impl From<RotationError> for EvalError {
    fn from(error: RotationError) -> EvalError {
        EvalError::Rotations(Box::new(error))
    }
}

impl From<EngineError> for EvalError {
    fn from(error: EngineError) -> EvalError {
        EvalError::Engine(Arc::new(error))
    }
}
