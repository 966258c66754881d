//! The primitives with which threads of this backend wait for each other, in one place.
//!
//! [`pool`](super::pool) and `handover` take them from here and from nowhere else. `tests/interleavings.rs` compiles the
//! same two files with primitives of the same names from loom, which runs them in every order that the memory model
//! allows. In the library they are those of the standard library, and nothing is added to them.

pub(super) use std::hint::spin_loop;
pub(super) use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence};
pub(super) use std::sync::{Mutex, OnceLock};
pub(super) use std::thread::{Builder, JoinHandle, Thread, park, yield_now};

use std::time::{Duration, Instant};

/// How long an idle worker spins before it parks.
const SPIN: Duration = Duration::from_micros(200);

/// A cell whose accesses are closures, so that a checker sees where each begins and ends.
pub(super) struct UnsafeCell<T>(std::cell::UnsafeCell<T>);

impl<T> UnsafeCell<T> {
    pub(super) fn new(value: T) -> UnsafeCell<T> {
        UnsafeCell(std::cell::UnsafeCell::new(value))
    }

    /// Hands out a pointer to read from.
    #[inline]
    pub(super) fn with<R>(&self, read: impl FnOnce(*const T) -> R) -> R {
        read(self.0.get())
    }

    /// Hands out a pointer to write to.
    #[inline]
    pub(super) fn with_mut<R>(&self, write: impl FnOnce(*mut T) -> R) -> R {
        write(self.0.get())
    }
}

/// How long a worker that finds nothing to do spins before it should park.
pub(super) struct SpinLimit {
    since: Instant,
    spins: u32,
}

impl SpinLimit {
    pub(super) fn new() -> SpinLimit {
        SpinLimit { since: Instant::now(), spins: 0 }
    }

    /// Counts one more look that found nothing. The clock is read only now and then, because that takes longer than a look.
    #[inline]
    pub(super) fn reached(&mut self) -> bool {
        self.spins = self.spins.wrapping_add(1);
        self.spins.is_multiple_of(256) && self.since.elapsed() > SPIN
    }
}
