//! Why a model could not be loaded or run.

use std::path::{Path, PathBuf};

use oscar_kernels::KernelError;

use crate::files::{FileError, on_one_line};
use crate::text::TextError;

/// Why a model could not be loaded or run.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
#[non_exhaustive]
pub enum ModelError {
    #[error(transparent)]
    File(#[from] FileError),
    #[error(transparent)]
    Kernel(#[from] KernelError),
    #[error("{}", with_path(path, source))]
    Text { path: PathBuf, source: TextError },
    #[error("{}: `{field}` is {name:?}, a model oscar does not know; supported families: {supported}", path.display())]
    UnsupportedArchitecture { path: PathBuf, field: &'static str, name: String, supported: String },
    #[error("{}: {problem}", path.display())]
    BadConfig { path: PathBuf, problem: String },
    #[error(
        "{}: the weights need {} on the device and {} are free: {} are missing",
        path.display(),
        gibibytes(*needed),
        gibibytes(*free),
        gibibytes(*missing)
    )]
    WeightsTooLarge { path: PathBuf, needed: usize, free: usize, missing: usize },
    #[error("{}: tensor `{}` has no place in a {family} model", path.display(), on_one_line(tensor))]
    UnexpectedTensor { path: PathBuf, tensor: String, family: &'static str },
    #[error("{}: tensor `{tensor}` is {got}, the model's description asks for {expected}", path.display())]
    TensorShape { path: PathBuf, tensor: String, expected: String, got: String },
}

fn gibibytes(bytes: usize) -> String {
    format!("{:.2} GiB", bytes as f64 / f64::from(1 << 30))
}

/// The error of a tokenizer with the file in front, unless it names one itself.
fn with_path(path: &Path, source: &TextError) -> String {
    match source {
        TextError::Read { .. }
        | TextError::TooLarge { .. }
        | TextError::File { .. }
        | TextError::ModelFile(_) => source.to_string(),
        other => format!("{}: {other}", path.display()),
    }
}
