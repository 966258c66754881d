//! Memory that belongs to one thread of a pool at a time.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Buffers that threads keep between tasks.
///
/// They hold no state that outlives a task, so it does not matter if one has panicked.
pub(super) struct PerThread<T>(Vec<CachePadded<Mutex<T>>>);

/// Something that one thread uses while others use its neighbours. Caches fetch lines in pairs, and what two cores write to
/// the same pair passes between them.
#[derive(Default)]
#[repr(align(128))]
pub(super) struct CachePadded<T>(pub(super) T);

impl<T: Default> PerThread<T> {
    pub(super) fn new(threads: usize) -> PerThread<T> {
        PerThread((0..threads).map(|_| CachePadded::default()).collect())
    }
}

impl<T> PerThread<T> {
    /// The buffer of a thread, which no other uses.
    pub(super) fn of(&self, thread: usize) -> MutexGuard<'_, T> {
        self.0[thread].0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
