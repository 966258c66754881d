//! The driver, its one device, and contexts.

use std::cell::Cell;
use std::ffi::{c_char, c_int, c_uint};
use std::ptr::null_mut;

use cudarc::driver::sys::{CUcontext, CUdevice, CUdevice_attribute as Attribute, CUresult};

use super::SUCCESS;
use crate::settings;

/// The version of CUDA's interface that these functions are those of.
const VERSION: c_int = 13_000;
/// The card has few multiprocessors, so that tests divide work among all of them.
const MULTIPROCESSORS: c_int = 8;
const NAME: &[u8] = b"no card at all\0";

/// The address of this is the handle of the one context.
static CONTEXT: u8 = 0;

thread_local! {
    static CURRENT: Cell<CUcontext> = const { Cell::new(null_mut()) };
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuInit(_flags: c_uint) -> CUresult {
    SUCCESS
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDriverGetVersion(version: *mut c_int) -> CUresult {
    // SAFETY: the caller gives memory for the answer, here and below.
    unsafe { *version = VERSION };
    SUCCESS
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetCount(count: *mut c_int) -> CUresult {
    // SAFETY: as above.
    unsafe { *count = 1 };
    SUCCESS
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGet(device: *mut CUdevice, ordinal: c_int) -> CUresult {
    if ordinal != 0 {
        return CUresult::CUDA_ERROR_INVALID_DEVICE;
    }
    // SAFETY: as above.
    unsafe { *device = 0 };
    SUCCESS
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetName(name: *mut c_char, length: c_int, _device: CUdevice) -> CUresult {
    let length = usize::try_from(length).unwrap_or(0).min(NAME.len());
    // SAFETY: the caller has room for so many characters.
    unsafe { std::ptr::copy_nonoverlapping(NAME.as_ptr().cast(), name, length) };
    SUCCESS
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetAttribute(
    value: *mut c_int,
    attribute: Attribute,
    _device: CUdevice,
) -> CUresult {
    let (major, minor) = settings::capability();
    // Shared memory as on sm_80, sm_89 and sm_90.
    let shared = match (major, minor) {
        (9.., _) => 227,
        (8, 0) => 163,
        _ => 99,
    };
    let number = match attribute {
        Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR => major,
        Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR => minor,
        Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT => MULTIPROCESSORS,
        Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN => shared << 10,
        Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR => (shared + 1) << 10,
        Attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE => 1 << 20,
        Attribute::CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED => 1,
        _ => return CUresult::CUDA_ERROR_NOT_SUPPORTED,
    };
    // SAFETY: as above.
    unsafe { *value = number };
    SUCCESS
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDevicePrimaryCtxRetain(context: *mut CUcontext, _device: CUdevice) -> CUresult {
    // SAFETY: as above.
    unsafe { *context = std::ptr::from_ref(&CONTEXT).cast_mut().cast() };
    SUCCESS
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDevicePrimaryCtxRelease_v2(_device: CUdevice) -> CUresult {
    SUCCESS
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuCtxGetCurrent(context: *mut CUcontext) -> CUresult {
    // SAFETY: as above.
    unsafe { *context = CURRENT.get() };
    SUCCESS
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuCtxSetCurrent(context: CUcontext) -> CUresult {
    CURRENT.set(context);
    SUCCESS
}

/// Whether the calling thread has a context, without which nothing can be allocated or launched.
pub(super) fn has_context() -> Result<(), CUresult> {
    if CURRENT.get().is_null() { Err(CUresult::CUDA_ERROR_INVALID_CONTEXT) } else { Ok(()) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuGetErrorName(error: CUresult, text: *mut *const c_char) -> CUresult {
    let name = match error {
        CUresult::CUDA_SUCCESS => c"CUDA_SUCCESS",
        CUresult::CUDA_ERROR_INVALID_VALUE => c"CUDA_ERROR_INVALID_VALUE",
        CUresult::CUDA_ERROR_OUT_OF_MEMORY => c"CUDA_ERROR_OUT_OF_MEMORY",
        CUresult::CUDA_ERROR_INVALID_CONTEXT => c"CUDA_ERROR_INVALID_CONTEXT",
        CUresult::CUDA_ERROR_NOT_FOUND => c"CUDA_ERROR_NOT_FOUND",
        CUresult::CUDA_ERROR_ILLEGAL_ADDRESS => c"CUDA_ERROR_ILLEGAL_ADDRESS",
        CUresult::CUDA_ERROR_LAUNCH_FAILED => c"CUDA_ERROR_LAUNCH_FAILED",
        CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED => c"CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
        CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED => c"CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
        _ => c"an error of the fake CUDA driver",
    };
    // SAFETY: as above; the text is never freed.
    unsafe { *text = name.as_ptr() };
    SUCCESS
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuGetErrorString(error: CUresult, text: *mut *const c_char) -> CUresult {
    // SAFETY: as above.
    unsafe { cuGetErrorName(error, text) }
}
