//! Tells an error that ends the work of the device from one that ends an operation.

use oscar_kernels::KernelError;

use crate::error::EngineError;

/// An error that can say whether the device is of any use after it.
pub(super) trait MayBeFatal: Into<EngineError> {
    fn is_fatal(&self) -> bool;
}

impl MayBeFatal for KernelError {
    fn is_fatal(&self) -> bool {
        KernelError::is_fatal(self)
    }
}

impl MayBeFatal for EngineError {
    fn is_fatal(&self) -> bool {
        EngineError::is_fatal(self)
    }
}

/// The outcome of an operation, or the error that ends the work of the device.
pub(super) fn unless_fatal<T, E: MayBeFatal>(outcome: Result<T, E>) -> Result<Result<T, E>, EngineError> {
    match outcome {
        Err(error) if error.is_fatal() => Err(error.into()),
        outcome => Ok(outcome),
    }
}

/// The outcomes of an operation on several rows, or the first error that ends the work of the device.
pub(super) fn unless_one_is_fatal<T, E: MayBeFatal>(
    outcomes: Vec<Result<T, E>>,
) -> Result<Vec<Result<T, E>>, EngineError> {
    outcomes.into_iter().map(unless_fatal).collect()
}
