//! What can be wrong with a rotation file, each with the fix when there is one.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use oscar_codec::CodecError;
use oscar_kernels::KernelError;
use oscar_model::ModelError;
use oscar_model::source::SourceError;
use oscar_model::text::TextError;

use super::pickle::PickleError;

/// Why a rotation file was not read, written or used.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
#[non_exhaustive]
pub enum RotationError {
    #[error("{}: cannot {action}: {source}", path.display())]
    Io { path: PathBuf, action: &'static str, source: io::Error },
    #[error("{}: {problem}", path.display())]
    NotARotationFile { path: PathBuf, problem: String },
    #[error("{}: {what} is {size} bytes, more than the {limit} that are read", path.display())]
    TooLarge { path: PathBuf, what: String, size: u64, limit: u64 },
    #[error("{}: not a PyTorch archive: {problem}", path.display())]
    Archive { path: PathBuf, problem: String },
    #[error("{}: {source}", path.display())]
    Pickle { path: PathBuf, source: PickleError },
    #[error("{}: `{field}`: {problem}", path.display())]
    Field { path: PathBuf, field: String, problem: String },
    #[error("{}: tensor `{tensor}`: {problem}", path.display())]
    Tensor { path: PathBuf, tensor: String, problem: String },
    #[error("{}: tensor `{tensor}` holds a number that is not finite", path.display())]
    NotFinite { path: PathBuf, tensor: String },
    #[error(
        "{}: tensor `{tensor}` is not a rotation: its columns are {error:.1e} away from orthonormal, at most {limit:.0e} is read",
        path.display()
    )]
    NotOrthogonal { path: PathBuf, tensor: String, error: f64, limit: f64 },
    #[error("{}: version {found:?} of the rotation format; this program reads up to {supported}", path.display())]
    Version { path: PathBuf, found: String, supported: u32 },
    #[error("{}: rotations of layer {layer} are missing ({reason})", path.display())]
    MissingLayer { path: PathBuf, layer: usize, reason: String },
    #[error("{}: keys and values are swapped: {evidence}", path.display())]
    Swapped { path: PathBuf, evidence: String },
    #[error("{} and {} do not belong together: {problem}", keys.display(), values.display())]
    Pair { keys: PathBuf, values: PathBuf, problem: String },
    #[error("{}: no {wanted} rotations in this file", path.display())]
    NoScope { path: PathBuf, wanted: &'static str, fix: &'static str },
    #[error("{rotations} was made for another model: {problem}")]
    OtherModel { rotations: String, problem: String, can_force: bool },
    #[error(transparent)]
    Model(#[from] ModelError),
    #[error("{}: {source}", path.display())]
    Codec { path: PathBuf, source: CodecError },
    #[error("there are no rotations for {model}")]
    NoRotations { model: String },
    #[error("{codec}: {problem}")]
    Unfit { codec: String, problem: String },
    #[error(transparent)]
    Encoder(#[from] CodecError),
    #[error(transparent)]
    Kernel(#[from] KernelError),
    #[error(transparent)]
    Text(#[from] TextError),
    #[error(transparent)]
    Source(#[from] SourceError),
}

impl RotationError {
    /// What the user can do about it, in one line.
    pub fn fix(&self) -> Option<String> {
        let fix = match self {
            RotationError::NotARotationFile { .. } => {
                "give a .safetensors file of `oscar calibrate`, or a .pt file of the published format"
            }
            RotationError::Archive { .. } => {
                "the file may be cut off; download it again, or save it again with torch.save"
            }
            RotationError::Pickle { source: PickleError::Global { .. }, .. } => {
                "do not load this file with Python either unless you trust who made it; rotations are plain tensors \
                 saved with torch.save"
            }
            RotationError::Pickle { .. } => "download the file again, or save it again with torch.save",
            RotationError::NotOrthogonal { .. } => {
                "calibrate again with `oscar calibrate`; a file stored in bfloat16 must be made again in float32"
            }
            RotationError::NotFinite { .. } => "calibrate again with `oscar calibrate`",
            RotationError::Version { .. } => {
                "use the version of oscar that wrote the file, or calibrate again"
            }
            RotationError::Swapped { .. } => "give the key file first and the value file second",
            RotationError::NoScope { fix, .. } => fix,
            RotationError::OtherModel { can_force: true, .. } => {
                "calibrate this model with `oscar calibrate MODEL`, or use the rotations all the same with \
                 --force-rotations"
            }
            RotationError::OtherModel { can_force: false, .. } => {
                "calibrate this model with `oscar calibrate MODEL`"
            }
            RotationError::NoRotations { model } => {
                return Some(format!("run `oscar calibrate {model}`, or give --rotations FILE"));
            }
            RotationError::Source(error) => return error.fix(),
            _ => return None,
        };
        Some(fix.to_owned())
    }

    pub(crate) fn io(path: &Path, action: &'static str, source: io::Error) -> RotationError {
        RotationError::Io { path: path.to_owned(), action, source }
    }

    pub(crate) fn tensor(
        path: &Path,
        tensor: impl fmt::Display,
        problem: impl fmt::Display,
    ) -> RotationError {
        RotationError::Tensor {
            path: path.to_owned(),
            tensor: tensor.to_string(),
            problem: problem.to_string(),
        }
    }

    pub(crate) fn field(path: &Path, field: impl fmt::Display, problem: impl fmt::Display) -> RotationError {
        RotationError::Field { path: path.to_owned(), field: field.to_string(), problem: problem.to_string() }
    }
}
