//! Calibration: from text to rotations, means, rounding rules and a certificate.
//!
//! | module | job |
//! |---|---|
//! | [`corpus`], [`sample`] | the text: the user's, or drawn from the model |
//! | [`observe`] | a model run layer by layer, showing queries, keys, values and attention outputs |
//! | [`observed`] | what calibration keeps of one layer |
//! | [`moments`] | their second moments in f64 |
//! | `eigen` | eigenvectors of a symmetric matrix |
//! | [`spread`] | the same text at positions all over the context |
//! | [`fit`] | rotations from moments: signs and compositions |
//! | [`bands`] | bands of keys by their strength |
//! | [`select`] | how each head is rounded, by the error of attention on held-out text |
//! | `layer` | the fit of one layer, its rules and its part of the certificate |
//! | `settings`, `state` | what is asked of a calibration, and what it has made so far |
//! | [`checkpoint`] | continuing after an interruption |
//! | [`run`] | the whole calibration |

pub mod bands;
pub mod checkpoint;
pub mod corpus;
mod eigen;
pub mod fit;
mod layer;
pub mod moments;
pub mod observe;
pub mod observed;
pub mod run;
pub mod sample;
pub mod select;
mod settings;
pub mod spread;
mod state;

use std::io;
use std::path::PathBuf;

use oscar_codec::CodecError;
use oscar_kernels::KernelError;
use oscar_model::text::TextError;
use oscar_rotations::RotationError;

pub use corpus::{Corpus, CorpusSource};
pub use run::calibrate;
pub use settings::{Calibration, ValueTarget};

/// Why a calibration ended early.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
#[non_exhaustive]
pub enum CalibrateError {
    #[error("{}: {source}", path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("{}: {bytes} bytes are more than the {most} that are read; split the file", path.display())]
    TooLarge { path: PathBuf, bytes: u64, most: u64 },
    #[error("{} line {line}: {problem}", path.display())]
    Record { path: PathBuf, line: usize, problem: String },
    #[error(
        "the text has {tokens} tokens and {needed} are needed, a held-out sequence included; give more text or ask \
         for fewer with --tokens"
    )]
    TooShort { tokens: usize, needed: usize },
    #[error(
        "the held-out sequence has {tokens} tokens, and {needed} are needed to have a history behind the windows; \
         ask for smaller --sink-tokens and --recent-tokens"
    )]
    NoHistory { tokens: usize, needed: usize },
    #[error("there is no text to calibrate on")]
    NoText,
    #[error("{0}")]
    Chat(String),
    #[error(
        "a moment is not finite at row {row}, column {column}: the model computes NaN or infinity on this text"
    )]
    Moment { row: usize, column: usize },
    #[error("the eigenvectors of a moment did not converge")]
    Eigenvectors,
    #[error("{}: {problem}; delete it to start again", path.display())]
    Checkpoint { path: PathBuf, problem: String },
    #[error("interrupted")]
    Interrupted,
    #[error("layer {layer}, head {head}: {source}")]
    Head { layer: usize, head: usize, source: CodecError },
    #[error(transparent)]
    Codec(#[from] CodecError),
    #[error(transparent)]
    Kernel(#[from] KernelError),
    #[error(transparent)]
    Text(#[from] TextError),
    #[error(transparent)]
    Rotations(#[from] RotationError),
}
