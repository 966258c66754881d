//! What can go wrong between here and a card.

use cudarc::driver::DriverError;
use cudarc::driver::sys::CUresult;

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
    #[error(
        "{bytes} bytes for {what} do not fit on the card: {free} are free, {} are missing", bytes.saturating_sub(*free)
    )]
    OutOfMemory { what: &'static str, bytes: usize, free: usize },
    #[error("cuBLASLt failed: {0}")]
    Blas(String),
    #[error("{0}")]
    Unsupported(String),
}

impl CudaError {
    /// Whether the card is of no use to this process any more: every later call fails as well, and only a new process can go
    /// on. All other errors are those of one call, running out of memory among them.
    pub fn is_fatal(&self) -> bool {
        matches!(self, CudaError::Driver(DriverError(code)) if ends_context(*code))
    }
}

/// Whether a context can do nothing more after this code. The description of `CUresult` in the CUDA driver API says of most of
/// these that "any further CUDA work will return the same error" and that the process must be started again; of an assertion
/// that the context cannot be used any more. With the others the context is gone (`DEINITIALIZED`, `INVALID_CONTEXT`,
/// `CONTEXT_IS_DESTROYED`), or the card, its memory or its link is (`DEVICE_UNAVAILABLE`, `NO_DEVICE`, `ECC_UNCORRECTABLE`,
/// `NVLINK_UNCORRECTABLE`, `MPS_CLIENT_TERMINATED`). `UNKNOWN` is what a card gives that fell off the bus.
fn ends_context(code: CUresult) -> bool {
    matches!(
        code,
        CUresult::CUDA_ERROR_DEINITIALIZED
            | CUresult::CUDA_ERROR_DEVICE_UNAVAILABLE
            | CUresult::CUDA_ERROR_NO_DEVICE
            | CUresult::CUDA_ERROR_INVALID_CONTEXT
            | CUresult::CUDA_ERROR_ECC_UNCORRECTABLE
            | CUresult::CUDA_ERROR_NVLINK_UNCORRECTABLE
            | CUresult::CUDA_ERROR_CONTAINED
            | CUresult::CUDA_ERROR_ILLEGAL_ADDRESS
            | CUresult::CUDA_ERROR_LAUNCH_TIMEOUT
            | CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED
            | CUresult::CUDA_ERROR_ASSERT
            | CUresult::CUDA_ERROR_HARDWARE_STACK_ERROR
            | CUresult::CUDA_ERROR_ILLEGAL_INSTRUCTION
            | CUresult::CUDA_ERROR_MISALIGNED_ADDRESS
            | CUresult::CUDA_ERROR_INVALID_ADDRESS_SPACE
            | CUresult::CUDA_ERROR_INVALID_PC
            | CUresult::CUDA_ERROR_LAUNCH_FAILED
            | CUresult::CUDA_ERROR_TENSOR_MEMORY_LEAK
            | CUresult::CUDA_ERROR_MPS_CLIENT_TERMINATED
            | CUresult::CUDA_ERROR_EXTERNAL_DEVICE
            | CUresult::CUDA_ERROR_UNKNOWN
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    // Nothing here is printed: the driver's library, which knows the texts of its codes, may not be there.

    #[test]
    fn a_context_does_not_outlive_these_codes() {
        for code in [
            CUresult::CUDA_ERROR_ILLEGAL_ADDRESS,
            CUresult::CUDA_ERROR_LAUNCH_FAILED,
            CUresult::CUDA_ERROR_ECC_UNCORRECTABLE,
            CUresult::CUDA_ERROR_ASSERT,
            CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED,
            CUresult::CUDA_ERROR_DEINITIALIZED,
        ] {
            assert!(CudaError::Driver(DriverError(code)).is_fatal(), "code {}", code as u32);
        }
    }

    #[test]
    fn errors_of_one_call_are_not_fatal() {
        for code in [
            CUresult::CUDA_ERROR_INVALID_VALUE,
            CUresult::CUDA_ERROR_OUT_OF_MEMORY,
            CUresult::CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES,
            CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED,
            CUresult::CUDA_ERROR_NOT_READY,
        ] {
            assert!(!CudaError::Driver(DriverError(code)).is_fatal(), "code {}", code as u32);
        }
        let full = CudaError::OutOfMemory { what: "weights", bytes: 900, free: 500 };
        assert!(!full.is_fatal());
        assert_eq!(
            full.to_string(),
            "900 bytes for weights do not fit on the card: 500 are free, 400 are missing"
        );
        assert!(!CudaError::Blas("CUBLAS_STATUS_NOT_SUPPORTED".to_owned()).is_fatal());
    }
}
