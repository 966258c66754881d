//! Recorded decode steps: a few hundred launches become one.
//!
//! A recording holds the addresses of everything its launches use, so it is good for as long as none of them has moved. That
//! is what its signature says: the tables of the step and their sizes, and how often scratch memory was replaced.

use std::sync::Arc;

use cudarc::driver::sys::{CUgraphInstantiate_flags as Flags, CUstreamCaptureMode as Mode};
use cudarc::driver::{CudaGraph, CudaStream};

use crate::backend::KernelError;
use crate::error::CudaError;

/// Recordings that are kept for one set of tables.
const MOST: usize = 16;

/// Everything that a recording depends on.
pub(super) type Signature = Vec<u64>;

/// The recordings of one set of tables, the latest last.
#[derive(Default)]
pub(super) struct Recordings {
    known: Vec<(Signature, Recording)>,
}

/// What is known of a signature.
enum Recording {
    /// It was run once, so all memory that it needs is there.
    Seen,
    /// It can be replayed.
    Made(Replay),
    /// It cannot be recorded.
    Refused,
}

/// A recorded step.
struct Replay(CudaGraph);

// SAFETY: a graph may be used from any thread, by one at a time; recordings are behind a lock.
unsafe impl Send for Replay {}

/// What is to be done with a step.
pub(super) enum Next {
    /// Nothing: it was replayed.
    Done,
    /// Run the recording that there is.
    Run,
    /// Run it while it is recorded.
    Record,
}

impl Recordings {
    /// Replays a step if there is a recording of it.
    pub(super) fn replay(&mut self, signature: &Signature) -> Result<Next, CudaError> {
        match self.known.iter().find(|(known, _)| known == signature) {
            Some((_, Recording::Made(replay))) => {
                replay.0.launch()?;
                Ok(Next::Done)
            }
            Some((_, Recording::Seen)) => Ok(Next::Record),
            Some((_, Recording::Refused)) => Ok(Next::Run),
            None => {
                if self.known.len() == MOST {
                    self.known.remove(0);
                }
                self.known.push((signature.clone(), Recording::Seen));
                Ok(Next::Run)
            }
        }
    }

    /// Keeps what [`record`] has made.
    pub(super) fn keep(&mut self, signature: &Signature, graph: Option<CudaGraph>) -> Result<(), CudaError> {
        if let Some(graph) = &graph {
            graph.launch()?;
        }
        if let Some((_, known)) = self.known.iter_mut().find(|(known, _)| known == signature) {
            *known = graph.map_or(Recording::Refused, |graph| Recording::Made(Replay(graph)));
        }
        Ok(())
    }
}

/// Records what `body` launches instead of running it. `None` if the driver refuses to record it; nothing has run then.
pub(super) fn record(
    stream: &Arc<CudaStream>,
    body: &mut dyn FnMut() -> Result<(), KernelError>,
) -> Result<Option<CudaGraph>, KernelError> {
    stream.begin_capture(Mode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).map_err(CudaError::Driver)?;
    let ran = body();
    // A recording must end whatever happened.
    let graph = stream.end_capture(Flags(0));
    ran?;
    Ok(graph.ok().flatten())
}
