//! The primitives that the engine's thread shares with those who ask it, in one place.
//!
//! They are those of the standard library. In the tests of the feature `interleavings` they are shuttle's, which runs all
//! threads on one and decides at random which of them goes on at each use of a primitive. `Arc` is the same in both.

#[cfg(not(all(test, feature = "interleavings")))]
mod primitives {
    pub(crate) use std::sync::{Mutex, MutexGuard, atomic, mpsc};
    pub(crate) use std::thread;
}

#[cfg(all(test, feature = "interleavings"))]
mod primitives {
    pub(crate) use shuttle::sync::{Mutex, MutexGuard, atomic, mpsc};
    pub(crate) use shuttle::thread;
}

pub(crate) use primitives::{Mutex, MutexGuard, atomic, mpsc, thread};
