//! A value that one thread of a region makes while the others get ready for it.

use super::pool::pause;
use super::sync::{AtomicBool, OnceLock, Ordering};

/// A value that is made once and read by all threads.
pub(super) struct Handover<T> {
    value: OnceLock<T>,
    poisoned: AtomicBool,
}

impl<T> Handover<T> {
    pub(super) fn new() -> Handover<T> {
        Handover { value: OnceLock::new(), poisoned: AtomicBool::new(false) }
    }

    /// Makes the value, unless it is there. A panic in `make` ends the waiting of the others.
    pub(super) fn make(&self, make: impl FnOnce() -> T) -> &T {
        let unless_made = PoisonOnDrop(&self.poisoned);
        let value = self.value.get_or_init(make);
        std::mem::forget(unless_made);
        value
    }

    /// The value, if it is there.
    pub(super) fn get(&self) -> Option<&T> {
        self.value.get()
    }

    /// The value as soon as another thread has made it; none if that thread panicked.
    pub(super) fn wait(&self) -> Option<&T> {
        let mut spins = 0u32;
        loop {
            if let Some(value) = self.value.get() {
                return Some(value);
            }
            if self.poisoned.load(Ordering::Relaxed) {
                return None;
            }
            pause(&mut spins);
        }
    }

    pub(super) fn into_inner(self) -> Option<T> {
        self.value.into_inner()
    }
}

/// Marks a handover as poisoned when it is dropped, which happens only if making the value panics.
struct PoisonOnDrop<'a>(&'a AtomicBool);

impl Drop for PoisonOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::panic::{AssertUnwindSafe, catch_unwind};

    #[test]
    fn whoever_waits_gets_the_value_or_hears_that_there_is_none() {
        for panics in [false, true] {
            let handover = Handover::new();
            std::thread::scope(|scope| {
                let waiting = scope.spawn(|| handover.wait().copied());
                let made = catch_unwind(AssertUnwindSafe(|| {
                    *handover.make(|| if panics { panic!("no") } else { 7 })
                }));
                assert_eq!(made.is_err(), panics);
                assert_eq!(waiting.join().unwrap(), (!panics).then_some(7));
            });
            assert_eq!(handover.get().copied(), (!panics).then_some(7));
            assert_eq!(handover.into_inner(), (!panics).then_some(7));
        }
    }

    #[test]
    fn the_first_value_stays() {
        let handover = Handover::new();
        assert_eq!((*handover.make(|| 1), *handover.make(|| 2)), (1, 1));
    }
}
