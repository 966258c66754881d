//! What happens when the device fails for good.
//!
//! Most errors of a device are those of one operation, and whoever asked for it fails with it. After some every later
//! operation fails as well ([`KernelError::is_fatal`](oscar_kernels::KernelError::is_fatal)). Then nothing is tried again:
//! everything in progress and everything that waits fails with one error that names the cause, those who submit are refused
//! with the same, and nothing is asked of the device any more.

use std::sync::Arc;

use oscar_kernels::{Backend, KernelError};

use super::core::Core;
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

impl<B: Backend> Core<B> {
    /// Ends the work of the device: it has failed with an error after which it is of no use.
    pub(super) fn fail_device(&mut self, error: EngineError) {
        let cause = Arc::new(error);
        tracing::error!(error = %cause, "the device failed: all requests fail, and no more are taken");
        self.failure = Some(Arc::clone(&cause));
        // Whoever hears of it and asks again at once is refused.
        self.admission.close(Arc::clone(&cause));
        self.fail_everything(cause);
        // Nobody can read these pages any more, and those who follow the prefix tree are told so.
        let ledger = self.policy.ledger_mut();
        ledger.flush();
        ledger.forget_host_pages();
    }

    /// Fails everything in progress and everything that waits.
    pub(super) fn fail_everything(&mut self, cause: Arc<EngineError>) {
        self.policy.fail_everything(&|| EngineError::DeviceFailed(Arc::clone(&cause)));
        self.announce();
    }
}
