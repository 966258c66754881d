//! The functions of `libcuda` and `libnvrtc` that `oscar-kernels` calls, with the signatures of their headers. Handles are
//! addresses of what this library has made.
//!
//! The driver allows calls from any thread; it is the caller's promise that pointers are those that the headers ask for.

// The names are those of the libraries.
#![allow(non_snake_case)]

mod compiler;
mod device;
mod memory;
mod modules;
mod streams;

use std::sync::Arc;

use cudarc::driver::sys::{CUresult, CUstream};

use crate::stream::Stream;

const SUCCESS: CUresult = CUresult::CUDA_SUCCESS;

/// What a call returns.
fn code(outcome: Result<(), CUresult>) -> CUresult {
    outcome.err().unwrap_or(SUCCESS)
}

/// A handle for something that is shared.
fn handle<T>(shared: Arc<T>) -> *mut T {
    Arc::into_raw(shared).cast_mut()
}

/// What a handle stands for, which stays as it is.
///
/// # Safety
/// The handle is one of [`handle`]'s that was not given back.
unsafe fn shared<T>(handle: *mut T) -> Arc<T> {
    // SAFETY: as the caller says.
    unsafe {
        Arc::increment_strong_count(handle.cast_const());
        Arc::from_raw(handle.cast_const())
    }
}

/// A stream by its handle.
///
/// # Safety
/// As [`shared`]. There is no default stream.
unsafe fn stream(handle: CUstream) -> Result<Arc<Stream>, CUresult> {
    if handle.is_null() {
        return Err(CUresult::CUDA_ERROR_INVALID_HANDLE);
    }
    // SAFETY: as the caller says.
    Ok(unsafe { shared(handle.cast::<Stream>()) })
}

/// Reports something on the error output and gives the code that it has.
fn refuse(what: &str, code: CUresult) -> CUresult {
    eprintln!("fake CUDA driver: {what}");
    code
}
