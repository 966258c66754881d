//! Streams, events, and graphs.

use std::ffi::{c_uint, c_ulonglong};
use std::sync::Arc;

use cudarc::driver::sys::{CUevent, CUgraph, CUgraphExec, CUresult, CUstream, CUstreamCaptureMode};

use super::{SUCCESS, code, handle, refuse, shared, stream};
use crate::stream::{Event, Stream, Work};

#[unsafe(no_mangle)]
unsafe extern "C" fn cuStreamCreate(created: *mut CUstream, _flags: c_uint) -> CUresult {
    // SAFETY: the caller gives memory for the answer, here and below.
    unsafe { *created = handle(Arc::new(Stream::default())).cast() };
    SUCCESS
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuStreamDestroy_v2(gone: CUstream) -> CUresult {
    // SAFETY: the handle is a stream's, here and below; this call gives it back.
    let Ok(stream) = (unsafe { stream(gone) }) else { return CUresult::CUDA_ERROR_INVALID_HANDLE };
    // What was asked for is done first.
    let outcome = code(stream.synchronise());
    // SAFETY: nobody uses the handle after this call.
    unsafe { Arc::decrement_strong_count(gone.cast::<Stream>().cast_const()) };
    outcome
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuStreamSynchronize(on: CUstream) -> CUresult {
    // SAFETY: as above.
    code(unsafe { stream(on) }.and_then(|stream| stream.synchronise()))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuStreamWaitEvent(on: CUstream, event: CUevent, _flags: c_uint) -> CUresult {
    // Everything before the event is done at once, which is early enough for whatever comes later on this stream.
    // SAFETY: the handles are a stream's and an event's.
    code(unsafe { stream(on) }.and_then(|_| unsafe { shared(event.cast::<Event>()) }.synchronise()))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuEventCreate(created: *mut CUevent, _flags: c_uint) -> CUresult {
    // SAFETY: as above.
    unsafe { *created = handle(Arc::new(Event::default())).cast() };
    SUCCESS
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuEventDestroy_v2(gone: CUevent) -> CUresult {
    // SAFETY: nobody uses the handle after this call.
    unsafe { Arc::decrement_strong_count(gone.cast::<Event>().cast_const()) };
    SUCCESS
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuEventRecord(event: CUevent, on: CUstream) -> CUresult {
    // SAFETY: as above.
    code(unsafe { stream(on) }.and_then(|stream| unsafe { shared(event.cast::<Event>()) }.record(&stream)))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuEventSynchronize(event: CUevent) -> CUresult {
    // SAFETY: as above.
    code(unsafe { shared(event.cast::<Event>()) }.synchronise())
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuStreamBeginCapture_v2(on: CUstream, _mode: CUstreamCaptureMode) -> CUresult {
    // SAFETY: as above.
    code(unsafe { stream(on) }.and_then(|stream| stream.begin_capture()))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuStreamEndCapture(on: CUstream, graph: *mut CUgraph) -> CUresult {
    // SAFETY: as above.
    match unsafe { stream(on) }.and_then(|stream| stream.end_capture()) {
        Ok(recorded) => {
            // SAFETY: as above.
            unsafe { *graph = handle(Arc::new(recorded)).cast() };
            SUCCESS
        }
        Err(code) => {
            // SAFETY: as above.
            unsafe { *graph = std::ptr::null_mut() };
            refuse("something was recorded that cannot be", code)
        }
    }
}

/// What a graph does.
type Recorded = Vec<Work>;

#[unsafe(no_mangle)]
unsafe extern "C" fn cuGraphInstantiateWithFlags(
    made: *mut CUgraphExec,
    graph: CUgraph,
    _flags: c_ulonglong,
) -> CUresult {
    // SAFETY: the handle is a graph's.
    let recorded = unsafe { shared(graph.cast::<Recorded>()) };
    // SAFETY: as above.
    unsafe { *made = handle(recorded).cast() };
    SUCCESS
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuGraphLaunch(graph: CUgraphExec, on: CUstream) -> CUresult {
    // SAFETY: the handles are a graph's and a stream's.
    let (recorded, stream) = unsafe { (shared(graph.cast::<Recorded>()), stream(on)) };
    code(stream.and_then(|stream| recorded.iter().try_for_each(|work| stream.push(work.clone()))))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuGraphExecDestroy(gone: CUgraphExec) -> CUresult {
    // SAFETY: nobody uses the handle after this call.
    unsafe { Arc::decrement_strong_count(gone.cast::<Recorded>().cast_const()) };
    SUCCESS
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuGraphDestroy(gone: CUgraph) -> CUresult {
    // SAFETY: as above.
    unsafe { Arc::decrement_strong_count(gone.cast::<Recorded>().cast_const()) };
    SUCCESS
}
