//! Streams: work in the order in which it was asked for, none of it done before somebody waits.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cudarc::driver::sys::CUresult;

use crate::function::Launch;
use crate::memory::{Access, Fault, memory};
use crate::settings;

/// Bytes on their way from the host, beyond which a stream goes on by itself.
const MOST_UPLOADED: usize = 64 << 20;

/// The same for the number of things to be done.
const MOST_WORK: usize = 1 << 14;

/// An address of the host in pinned memory.
#[derive(Clone, Copy)]
pub(crate) struct HostAddress(pub(crate) *mut u8);

// SAFETY: pinned memory stays until it is freed, which waits for all streams.
unsafe impl Send for HostAddress {}
// SAFETY: it is a number until a stream uses it, one thread at a time.
unsafe impl Sync for HostAddress {}

/// Something that a stream does.
#[derive(Clone)]
pub(crate) enum Work {
    Launch(Launch),
    /// Bytes that were at the host when the copy was asked for.
    Upload {
        bytes: Vec<u8>,
        to: u64,
    },
    /// From pinned memory, as it is when the copy happens.
    UploadPinned {
        from: HostAddress,
        to: u64,
        bytes: usize,
    },
    Download {
        from: u64,
        to: HostAddress,
        bytes: usize,
    },
    Copy {
        from: u64,
        to: u64,
        bytes: usize,
    },
    Fill {
        at: u64,
        value: u8,
        bytes: usize,
    },
    Free {
        at: u64,
    },
}

impl Work {
    /// Whether it may be part of a graph: neither host memory nor allocations are recorded.
    fn can_be_recorded(&self) -> bool {
        matches!(self, Work::Launch(_) | Work::Copy { .. } | Work::Fill { .. })
    }

    fn run(&self) -> Result<(), Fault> {
        let access = Access::new();
        match self {
            Work::Launch(launch) => {
                launch.run().map_err(|fault| format!("kernel {}: {fault}", launch.function.name))
            }
            // SAFETY: the bytes are those of a vector.
            Work::Upload { bytes, to } => unsafe { access.upload(bytes.as_ptr(), *to, bytes.len()) },
            // SAFETY: pinned memory of so many bytes, as was looked up when the copy was asked for.
            Work::UploadPinned { from, to, bytes } => unsafe { access.upload(from.0, *to, *bytes) },
            // SAFETY: pinned memory as above, or memory of a caller that waits.
            Work::Download { from, to, bytes } => unsafe { access.download(*from, to.0, *bytes) },
            Work::Copy { from, to, bytes } => access.copy(*from, *to, *bytes),
            Work::Fill { at, value, bytes } => access.fill(*at, *value, *bytes),
            Work::Free { at } => memory().free(*at),
        }
    }
}

/// What is recorded instead of being done.
enum Capture {
    Going(Vec<Work>),
    /// Something was asked for that cannot be recorded.
    Invalid,
}

#[derive(Default)]
struct State {
    queue: VecDeque<Work>,
    /// Things done so far.
    done: u64,
    uploaded: usize,
    capture: Option<Capture>,
    /// Set by the first thing that fails; from then on every call does.
    failed: Option<CUresult>,
}

/// A stream.
#[derive(Default)]
pub(crate) struct Stream {
    state: Mutex<State>,
}

type Outcome = Result<(), CUresult>;

impl State {
    fn check(&self) -> Outcome {
        self.failed.map_or(Ok(()), Err)
    }

    /// Does everything up to a number of things.
    fn run_until(&mut self, end: u64) -> Outcome {
        while self.done < end {
            self.check()?;
            let Some(work) = self.queue.pop_front() else { break };
            self.done += 1;
            if let Work::Launch(launch) = &work
                && settings::must_fail(&launch.function.name)
            {
                self.failed = Some(CUresult::CUDA_ERROR_LAUNCH_FAILED);
                continue;
            }
            if let Err(fault) = work.run() {
                eprintln!("fake CUDA driver: {fault}");
                self.failed = Some(CUresult::CUDA_ERROR_ILLEGAL_ADDRESS);
            }
        }
        if self.queue.is_empty() {
            self.uploaded = 0;
        }
        self.check()
    }

    fn run_all(&mut self) -> Outcome {
        self.run_until(self.done + self.queue.len() as u64)
    }
}

impl Stream {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Asks for something to be done, or records it.
    pub(crate) fn push(&self, work: Work) -> Outcome {
        let mut state = self.lock();
        state.check()?;
        match &mut state.capture {
            Some(Capture::Going(recorded)) if work.can_be_recorded() => {
                recorded.push(work);
                return Ok(());
            }
            Some(capture) => {
                *capture = Capture::Invalid;
                return Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
            }
            None => {}
        }
        if let Work::Upload { bytes, .. } = &work {
            state.uploaded += bytes.len();
        }
        state.queue.push_back(work);
        if state.uploaded > MOST_UPLOADED || state.queue.len() > MOST_WORK {
            return state.run_all();
        }
        Ok(())
    }

    /// Whether memory can be allocated in the order of this stream, which is not recorded.
    pub(crate) fn allows_allocation(&self) -> Outcome {
        let mut state = self.lock();
        state.check()?;
        state.refuse_capture()
    }

    /// Does everything that was asked for.
    pub(crate) fn synchronise(&self) -> Outcome {
        let mut state = self.lock();
        state.refuse_capture()?;
        state.run_all()
    }

    /// The number that things done will have reached when all is done that was asked for so far.
    pub(crate) fn mark(&self) -> Result<u64, CUresult> {
        let mut state = self.lock();
        state.refuse_capture()?;
        state.check()?;
        Ok(state.done + state.queue.len() as u64)
    }

    /// Does everything up to a mark.
    pub(crate) fn reach(&self, mark: u64) -> Outcome {
        self.lock().run_until(mark)
    }

    /// Begins to record.
    pub(crate) fn begin_capture(&self) -> Outcome {
        let mut state = self.lock();
        state.check()?;
        if state.capture.is_some() {
            return Err(CUresult::CUDA_ERROR_ILLEGAL_STATE);
        }
        state.capture = Some(Capture::Going(Vec::new()));
        Ok(())
    }

    /// What was recorded.
    pub(crate) fn end_capture(&self) -> Result<Vec<Work>, CUresult> {
        match self.lock().capture.take() {
            Some(Capture::Going(recorded)) => Ok(recorded),
            Some(Capture::Invalid) => Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED),
            None => Err(CUresult::CUDA_ERROR_ILLEGAL_STATE),
        }
    }
}

impl State {
    /// Waiting is no part of a recording.
    fn refuse_capture(&mut self) -> Outcome {
        match &mut self.capture {
            Some(capture) => {
                *capture = Capture::Invalid;
                Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)
            }
            None => Ok(()),
        }
    }
}

/// An event: a place in the order of a stream, once it was recorded.
#[derive(Default)]
pub(crate) struct Event {
    place: Mutex<Option<(Arc<Stream>, u64)>>,
}

impl Event {
    pub(crate) fn record(&self, stream: &Arc<Stream>) -> Outcome {
        let mark = stream.mark()?;
        *self.place.lock().unwrap_or_else(PoisonError::into_inner) = Some((stream.clone(), mark));
        Ok(())
    }

    /// Waits for what comes before the event in its stream.
    pub(crate) fn synchronise(&self) -> Outcome {
        let place = self.place.lock().unwrap_or_else(PoisonError::into_inner).clone();
        place.map_or(Ok(()), |(stream, mark)| stream.reach(mark))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_happens_before_somebody_waits() {
        let (stream, event) = (Arc::new(Stream::default()), Event::default());
        let address = memory().allocate(4).unwrap();
        let mut host = [0_u8; 4];
        stream.push(Work::Upload { bytes: vec![1, 2, 3, 4], to: address }).unwrap();
        stream.push(Work::Download { from: address, to: HostAddress(host.as_mut_ptr()), bytes: 4 }).unwrap();
        event.record(&stream).unwrap();
        stream.push(Work::Fill { at: address, value: 9, bytes: 4 }).unwrap();
        assert_eq!(host, [0; 4]);
        event.synchronise().unwrap();
        assert_eq!(host, [1, 2, 3, 4]);
        assert_eq!(
            Access::new().read::<u8>(address, 4).unwrap(),
            [1, 2, 3, 4],
            "what comes after the event waits"
        );
        stream.synchronise().unwrap();
        assert_eq!(Access::new().read::<u8>(address, 4).unwrap(), [9; 4]);
        memory().free(address).unwrap();
    }

    #[test]
    fn what_fails_ends_the_stream() {
        let stream = Stream::default();
        stream.push(Work::Fill { at: 12345, value: 0, bytes: 1 }).unwrap();
        assert_eq!(stream.synchronise(), Err(CUresult::CUDA_ERROR_ILLEGAL_ADDRESS));
        assert_eq!(stream.push(Work::Free { at: 1 }), Err(CUresult::CUDA_ERROR_ILLEGAL_ADDRESS));
    }

    #[test]
    fn recordings_hold_no_memory_of_the_host_and_do_not_wait() {
        let address = memory().allocate(4).unwrap();
        let stream = Stream::default();
        stream.begin_capture().unwrap();
        stream.push(Work::Fill { at: address, value: 7, bytes: 4 }).unwrap();
        assert_eq!(stream.end_capture().unwrap().len(), 1);
        stream.synchronise().unwrap();
        assert_ne!(Access::new().get::<u8>(address).unwrap(), 7, "it was recorded, not done");
        for refused in [
            (|stream, to| Stream::push(stream, Work::Upload { bytes: vec![1], to }))
                as fn(&Stream, u64) -> Outcome,
            |stream, _| stream.synchronise(),
            |stream, _| stream.allows_allocation(),
        ] {
            stream.begin_capture().unwrap();
            assert_eq!(refused(&stream, address), Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED));
            assert!(stream.end_capture().is_err());
        }
        memory().free(address).unwrap();
    }
}
