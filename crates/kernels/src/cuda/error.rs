//! What can go wrong between here and a card.

use cudarc::driver::DriverError;

/// An error of the CUDA side.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
#[non_exhaustive]
pub enum CudaError {
    #[error("{library} cannot be loaded: {fix}")]
    LibraryMissing { library: &'static str, fix: &'static str },
    #[error("there is no CUDA device {ordinal}: the driver sees {count}")]
    NoDevice { ordinal: usize, count: usize },
    #[error("{name} has compute capability {major}.{minor}; the kernels need 8.0 or later")]
    TooOld { name: String, major: i32, minor: i32 },
    #[error("the CUDA driver failed: {0}")]
    Driver(#[from] DriverError),
    #[error("kernel {name} does not compile for {architecture}:\n{log}")]
    Compile { name: String, architecture: String, log: String },
    #[error("{what}: expected {expected}, got {got}")]
    Shape { what: &'static str, expected: usize, got: usize },
    #[error("page slot {slot} is outside the pool of {slots} pages, or the dummy")]
    PageOutOfRange { slot: u32, slots: usize },
    #[error("page slot {slot} is written twice in one launch")]
    PageWrittenTwice { slot: u32 },
    #[error("{bytes} bytes for {what} do not fit on the card: {free} are free")]
    OutOfMemory { what: &'static str, bytes: usize, free: usize },
    #[error("cuBLASLt failed: {0}")]
    Blas(String),
    #[error("{0}")]
    Unsupported(String),
}
