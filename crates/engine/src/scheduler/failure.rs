//! What happens when the device fails for good.
//!
//! Most errors of a device are those of one operation, and whoever asked for it fails with it. After some every later
//! operation fails as well ([`KernelError::is_fatal`](oscar_kernels::KernelError::is_fatal)). Then nothing is tried again:
//! everything in progress and everything that waits fails with one error that names the cause, those who submit are refused
//! with the same, and nothing is asked of the device any more.

use std::sync::Arc;

use oscar_kernels::Backend;

use super::core::Core;
use crate::error::EngineError;

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
