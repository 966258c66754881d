//! Device memory, pinned memory of the host, and copies.

use std::alloc::{Layout, alloc, dealloc};
use std::collections::BTreeMap;
use std::ffi::{c_uchar, c_uint, c_void};
use std::sync::{Mutex, MutexGuard, PoisonError};

use cudarc::driver::sys::{CUdeviceptr, CUresult, CUstream};

use super::device::has_context;
use super::{SUCCESS, code, refuse, stream};
use crate::memory::memory;
use crate::stream::{HostAddress, Work};

/// Pinned memory: where it begins, and its bytes.
static PINNED: Mutex<BTreeMap<usize, usize>> = Mutex::new(BTreeMap::new());

fn pinned() -> MutexGuard<'static, BTreeMap<usize, usize>> {
    PINNED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether memory of the host is pinned as a whole.
fn is_pinned(address: usize, bytes: usize) -> bool {
    let pinned = pinned();
    let before = pinned.range(..=address).next_back();
    before.is_some_and(|(begin, held)| address - begin + bytes <= *held)
}

fn pinned_layout(bytes: usize) -> Option<Layout> {
    Layout::from_size_align(bytes.max(1), 4096).ok()
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> CUresult {
    let (of_free, of_total) = memory().free_and_total();
    // SAFETY: the caller gives memory for both answers.
    unsafe {
        *free = of_free;
        *total = of_total;
    }
    SUCCESS
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemAllocAsync(address: *mut CUdeviceptr, bytes: usize, on: CUstream) -> CUresult {
    // SAFETY: the handle is a stream's.
    let allowed = has_context().and_then(|()| unsafe { stream(on) }?.allows_allocation());
    if let Err(code) = allowed {
        return refuse("memory is allocated while launches are recorded, or after a failure", code);
    }
    let mut found = memory().allocate(bytes);
    if found.is_none() {
        // What is freed by then is free, as it is for a card.
        // SAFETY: as above.
        let waited = unsafe { stream(on) }.and_then(|stream| stream.synchronise());
        if let Err(code) = waited {
            return code;
        }
        found = memory().allocate(bytes);
    }
    match found {
        None => CUresult::CUDA_ERROR_OUT_OF_MEMORY,
        Some(found) => {
            // SAFETY: the caller gives memory for the answer.
            unsafe { *address = found };
            SUCCESS
        }
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemFreeAsync(address: CUdeviceptr, on: CUstream) -> CUresult {
    // SAFETY: the handle is a stream's.
    code(unsafe { stream(on) }.and_then(|stream| stream.push(Work::Free { at: address })))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemsetD8Async(
    at: CUdeviceptr,
    value: c_uchar,
    bytes: usize,
    on: CUstream,
) -> CUresult {
    // SAFETY: as above.
    code(unsafe { stream(on) }.and_then(|stream| stream.push(Work::Fill { at, value, bytes })))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemcpyHtoDAsync_v2(
    to: CUdeviceptr,
    from: *const c_void,
    bytes: usize,
    on: CUstream,
) -> CUresult {
    let work = if is_pinned(from.addr(), bytes) {
        Work::UploadPinned { from: HostAddress(from.cast_mut().cast()), to, bytes }
    } else {
        // Memory that is not pinned is read before the call returns.
        // SAFETY: the caller says that so many bytes are there.
        let bytes = unsafe { std::slice::from_raw_parts(from.cast::<u8>(), bytes) }.to_vec();
        Work::Upload { bytes, to }
    };
    // SAFETY: the handle is a stream's.
    code(unsafe { stream(on) }.and_then(|stream| stream.push(work)))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemcpyDtoHAsync_v2(
    to: *mut c_void,
    from: CUdeviceptr,
    bytes: usize,
    on: CUstream,
) -> CUresult {
    let waits = !is_pinned(to.addr(), bytes);
    let work = Work::Download { from, to: HostAddress(to.cast()), bytes };
    // SAFETY: as above.
    code(unsafe { stream(on) }.and_then(|stream| {
        stream.push(work)?;
        // A copy to memory that is not pinned is over when the call returns.
        if waits { stream.synchronise() } else { Ok(()) }
    }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemcpyDtoDAsync_v2(
    to: CUdeviceptr,
    from: CUdeviceptr,
    bytes: usize,
    on: CUstream,
) -> CUresult {
    // SAFETY: as above.
    code(unsafe { stream(on) }.and_then(|stream| stream.push(Work::Copy { from, to, bytes })))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemHostAlloc(address: *mut *mut c_void, bytes: usize, _flags: c_uint) -> CUresult {
    let Some(layout) = pinned_layout(bytes) else { return CUresult::CUDA_ERROR_INVALID_VALUE };
    // SAFETY: the size is not zero.
    let found = unsafe { alloc(layout) };
    if found.is_null() {
        return CUresult::CUDA_ERROR_OUT_OF_MEMORY;
    }
    // Whoever reads it before something was copied to it finds out.
    // SAFETY: so many bytes were allocated, and the caller gives memory for the answer.
    unsafe {
        found.write_bytes(0xff, bytes);
        *address = found.cast();
    }
    pinned().insert(found.addr(), bytes);
    SUCCESS
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemFreeHost(address: *mut c_void) -> CUresult {
    let Some(layout) = pinned().remove(&address.addr()).and_then(pinned_layout) else {
        return refuse("memory is freed that was not pinned", CUresult::CUDA_ERROR_INVALID_VALUE);
    };
    // SAFETY: it was allocated with this layout, and is nobody's any more.
    unsafe { dealloc(address.cast(), layout) };
    SUCCESS
}
