//! The run-time compiler: a program is its text and options, and machine code is both of them.

use std::ffi::{CStr, c_char, c_int};

use cudarc::nvrtc::sys::{nvrtcProgram, nvrtcResult};

use crate::module::machine_code;

const SUCCESS: nvrtcResult = nvrtcResult::NVRTC_SUCCESS;

/// A program; its code is there once it was compiled.
struct Program {
    text: String,
    code: Vec<u8>,
}

/// # Safety
/// The handle is a program's that was not destroyed.
unsafe fn program<'a>(handle: nvrtcProgram) -> &'a mut Program {
    // SAFETY: as the caller says; a program is used by one thread at a time.
    unsafe { &mut *handle.cast::<Program>() }
}

/// A version that no compiler has: code in a folder of compiled kernels is named after it.
#[unsafe(no_mangle)]
unsafe extern "C" fn nvrtcVersion(major: *mut c_int, minor: *mut c_int) -> nvrtcResult {
    // SAFETY: the caller gives memory for the answers, here and below.
    unsafe {
        *major = 0;
        *minor = 1;
    }
    SUCCESS
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvrtcCreateProgram(
    created: *mut nvrtcProgram,
    source: *const c_char,
    _name: *const c_char,
    _header_count: c_int,
    _headers: *const *const c_char,
    _header_names: *const *const c_char,
) -> nvrtcResult {
    // SAFETY: the source is a text.
    let text = unsafe { CStr::from_ptr(source) }.to_string_lossy().into_owned();
    let program = Box::new(Program { text, code: Vec::new() });
    // SAFETY: as above.
    unsafe { *created = Box::into_raw(program).cast() };
    SUCCESS
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvrtcCompileProgram(
    of: nvrtcProgram,
    count: c_int,
    options: *const *const c_char,
) -> nvrtcResult {
    // SAFETY: the handle is a program's, and so many texts are there.
    let (program, options) =
        unsafe { (program(of), std::slice::from_raw_parts(options, usize::try_from(count).unwrap_or(0))) };
    // SAFETY: as above.
    let option = |&option: &*const c_char| unsafe { CStr::from_ptr(option) }.to_string_lossy().into_owned();
    program.code = machine_code(&options.iter().map(option).collect::<Vec<_>>(), &program.text);
    SUCCESS
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvrtcDestroyProgram(of: *mut nvrtcProgram) -> nvrtcResult {
    // SAFETY: the program was made by `nvrtcCreateProgram`, and nobody uses it after this call.
    drop(unsafe { Box::from_raw((*of).cast::<Program>()) });
    SUCCESS
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvrtcGetCUBINSize(of: nvrtcProgram, size: *mut usize) -> nvrtcResult {
    // SAFETY: as above.
    unsafe { *size = program(of).code.len() };
    SUCCESS
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvrtcGetCUBIN(of: nvrtcProgram, code: *mut c_char) -> nvrtcResult {
    // SAFETY: the caller has asked for the size and made room for so many bytes.
    unsafe {
        let made = &program(of).code;
        std::ptr::copy_nonoverlapping(made.as_ptr().cast(), code, made.len());
    }
    SUCCESS
}
