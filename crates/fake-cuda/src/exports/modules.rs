//! Modules, their functions, and launches.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::Arc;

use cudarc::driver::sys::{
    CUfunction, CUfunction_attribute as Attribute, CUlaunchConfig, CUmodule, CUresult, CUstream,
};

use super::device::has_context;
use super::{SUCCESS, code, handle, refuse, shared, stream};
use crate::function::{Function, Launch};
use crate::module::Module;
use crate::stream::Work;

/// Threads of a block, at most.
const MOST_THREADS: u64 = 1024;

#[unsafe(no_mangle)]
unsafe extern "C" fn cuModuleLoadData(loaded: *mut CUmodule, image: *const c_void) -> CUresult {
    // SAFETY: the caller gives machine code, which says how long it is.
    match unsafe { Module::load(image.cast()) } {
        Ok(module) => {
            // SAFETY: the caller gives memory for the answer, here and below.
            unsafe { *loaded = handle(Arc::new(module)).cast() };
            SUCCESS
        }
        Err(fault) => refuse(&fault, CUresult::CUDA_ERROR_INVALID_IMAGE),
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuModuleUnload(gone: CUmodule) -> CUresult {
    // Functions of it keep what they need.
    // SAFETY: nobody uses the handle after this call.
    unsafe { Arc::decrement_strong_count(gone.cast::<Module>().cast_const()) };
    SUCCESS
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuModuleGetFunction(
    found: *mut CUfunction,
    module: CUmodule,
    name: *const c_char,
) -> CUresult {
    // SAFETY: the handle is a module's, and the name a text.
    let (module, name) = unsafe { (shared(module.cast::<Module>()), CStr::from_ptr(name)) };
    match Function::find(&module, &name.to_string_lossy()) {
        Ok(Some(function)) => {
            // As on a card, a function lives as long as its module; this one lives on.
            // SAFETY: as above.
            unsafe { *found = handle(Arc::new(function)).cast() };
            SUCCESS
        }
        Ok(None) => refuse(&format!("the source has no kernel {name:?}"), CUresult::CUDA_ERROR_NOT_FOUND),
        Err(fault) => refuse(&fault, CUresult::CUDA_ERROR_NOT_SUPPORTED),
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuFuncSetAttribute(
    function: CUfunction,
    attribute: Attribute,
    value: c_int,
) -> CUresult {
    // SAFETY: the handle is a function's.
    let function = unsafe { shared(function.cast::<Function>()) };
    match (attribute, usize::try_from(value)) {
        (Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, Ok(bytes)) => {
            function.allow_shared_memory(bytes);
            SUCCESS
        }
        _ => CUresult::CUDA_ERROR_INVALID_VALUE,
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuFuncGetAttribute(
    value: *mut c_int,
    _attribute: Attribute,
    _function: CUfunction,
) -> CUresult {
    // Registers and local memory, of which there are none here.
    // SAFETY: as above.
    unsafe { *value = 0 };
    SUCCESS
}

/// # Safety
/// The handles are a function's and a stream's, and there is one parameter of the function's size.
unsafe fn launch(
    function: CUfunction,
    grid: [c_uint; 3],
    block: [c_uint; 3],
    shared_memory: c_uint,
    on: CUstream,
    parameters: *mut *mut c_void,
) -> CUresult {
    // SAFETY: as the caller says.
    let function = unsafe { shared(function.cast::<Function>()) };
    let threads: u64 = block.iter().map(|&side| u64::from(side)).product();
    if grid.contains(&0) || threads == 0 || threads > MOST_THREADS || grid[1] > 65_535 || grid[2] > 65_535 {
        let what = format!("kernel {}: a grid of {grid:?} blocks of {block:?} threads", function.name);
        return refuse(&what, CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    if !function.has_shared_memory(shared_memory as usize) {
        let what =
            format!("kernel {}: {shared_memory} bytes of shared memory were not asked for", function.name);
        return refuse(&what, CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    // SAFETY: as the caller says. The bytes between fields are copied as they are.
    let argument = unsafe {
        let mut argument = vec![0; function.argument_bytes()];
        std::ptr::copy_nonoverlapping((*parameters).cast::<u8>(), argument.as_mut_ptr(), argument.len());
        argument
    };
    let launch = Launch { function, argument, grid: grid.map(|side| side as usize) };
    // SAFETY: as the caller says.
    let stream = has_context().and_then(|()| unsafe { stream(on) });
    code(stream.and_then(|stream| stream.push(Work::Launch(launch))))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuLaunchKernel(
    function: CUfunction,
    grid_x: c_uint,
    grid_y: c_uint,
    grid_z: c_uint,
    block_x: c_uint,
    block_y: c_uint,
    block_z: c_uint,
    shared_memory: c_uint,
    on: CUstream,
    parameters: *mut *mut c_void,
    _extra: *mut *mut c_void,
) -> CUresult {
    let (grid, block) = ([grid_x, grid_y, grid_z], [block_x, block_y, block_z]);
    // SAFETY: the caller's promise.
    unsafe { launch(function, grid, block, shared_memory, on, parameters) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuLaunchKernelEx(
    config: *const CUlaunchConfig,
    function: CUfunction,
    parameters: *mut *mut c_void,
    _extra: *mut *mut c_void,
) -> CUresult {
    // SAFETY: the caller gives a configuration.
    let config = unsafe { &*config };
    let grid = [config.gridDimX, config.gridDimY, config.gridDimZ];
    let block = [config.blockDimX, config.blockDimY, config.blockDimZ];
    // Whether launches may overlap does not matter where they come one after the other.
    // SAFETY: the caller's promise.
    unsafe { launch(function, grid, block, config.sharedMemBytes, config.hStream, parameters) }
}
