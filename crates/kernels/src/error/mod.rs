//! What can go wrong on a device. Every other module may use this one, which uses none of them.

mod cuda;
mod feature;

use oscar_codec::CodecError;

pub use cuda::CudaError;
pub use feature::Feature;

use crate::dtype::DType;

/// What can go wrong in a backend.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
#[non_exhaustive]
pub enum KernelError {
    #[error("a {rows}x{cols} {dtype} matrix does not fit the bytes it was given")]
    MatrixOutOfBounds { rows: usize, cols: usize, dtype: DType },
    #[error("{what}: expected {expected}, got {got}")]
    Shape { what: &'static str, expected: usize, got: usize },
    #[error("token id {token} is outside the vocabulary of {vocab}")]
    TokenOutOfRange { token: u32, vocab: usize },
    #[error("page slot {slot} is outside the pool of {slots} pages")]
    PageOutOfRange { slot: u32, slots: usize },
    #[error("cannot allocate {bytes} bytes for {what}")]
    OutOfMemory { what: &'static str, bytes: usize },
    #[error("page {page} of {tier} is read but has no slot")]
    PageMissing { page: usize, tier: &'static str },
    #[error("sealing entry {page} of the list, layer {layer}, KV head {head}: {source}")]
    Seal { page: usize, layer: usize, head: usize, source: CodecError },
    #[error("{what} hold a value that is not finite at index {index}")]
    NotFinite { what: &'static str, index: usize },
    #[error("page slot {slot} is written by two sequences of one step")]
    PageWrittenTwice { slot: u32 },
    #[error(transparent)]
    Cuda(#[from] CudaError),
    #[error("the device is lost: {0}")]
    DeviceLost(String),
    #[error("{0}")]
    BadSetting(String),
    #[error("{0} are not supported on this device yet; run the model on the CPU (`--device cpu`)")]
    Unsupported(Feature),
}

impl KernelError {
    /// Whether the device is of no use any more: whatever is asked of it from now on fails as well. After any other error it
    /// goes on, running out of memory included.
    pub fn is_fatal(&self) -> bool {
        match self {
            KernelError::Cuda(error) => error.is_fatal(),
            KernelError::DeviceLost(_) => true,
            _ => false,
        }
    }
}

/// Two sizes that must be equal; `what` names them in the error.
pub(crate) fn expect(what: &'static str, expected: usize, got: usize) -> Result<(), KernelError> {
    if expected == got { Ok(()) } else { Err(KernelError::Shape { what, expected, got }) }
}
