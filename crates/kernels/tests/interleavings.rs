//! The worker pool and the handover of a value, in every order of events that the memory model allows.
//!
//! The two files are compiled once more, with loom's primitives in the place of those in `cpu/sync.rs`. Loom runs each
//! model below again and again until it has seen all interleavings with at most a few preemptions, every value
//! that a relaxed load may return included, and reports data races, deadlocks and failed assertions. Arguments choose:
//! a model runs if its name contains one of them.
#![allow(unsafe_code)]

/// What `cpu/sync.rs` gives the library, as loom has it.
mod sync {
    pub(crate) use loom::cell::UnsafeCell;
    pub(crate) use loom::hint::spin_loop;
    pub(crate) use loom::sync::Mutex;
    pub(crate) use loom::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence};
    pub(crate) use loom::thread::{Builder, JoinHandle, Thread, park, yield_now};

    use std::sync::PoisonError;

    /// A worker looks once more, then parks: both ways out of waiting are tried.
    pub(crate) struct SpinLimit(u32);

    impl SpinLimit {
        pub(crate) fn new() -> SpinLimit {
            SpinLimit(0)
        }

        pub(crate) fn reached(&mut self) -> bool {
            self.0 += 1;
            self.0 > 1
        }
    }

    /// The standard library's cell, which loom does not have: a lock for those who make the value and a flag that
    /// publishes it.
    pub(crate) struct OnceLock<T> {
        making: Mutex<()>,
        made: AtomicBool,
        value: std::sync::OnceLock<T>,
    }

    impl<T> OnceLock<T> {
        pub(crate) fn new() -> OnceLock<T> {
            OnceLock {
                making: Mutex::new(()),
                made: AtomicBool::new(false),
                value: std::sync::OnceLock::new(),
            }
        }

        pub(crate) fn get(&self) -> Option<&T> {
            if self.made.load(Ordering::Acquire) { self.value.get() } else { None }
        }

        pub(crate) fn get_or_init(&self, make: impl FnOnce() -> T) -> &T {
            let _making = self.making.lock().unwrap_or_else(PoisonError::into_inner);
            let value = self.value.get_or_init(make);
            self.made.store(true, Ordering::Release);
            value
        }

        pub(crate) fn into_inner(self) -> Option<T> {
            self.value.into_inner()
        }
    }
}

#[allow(dead_code, unused_imports, reason = "the models use a part of it, and its unit tests are left out")]
#[path = "../src/cpu/handover.rs"]
mod handover;
#[allow(dead_code, unreachable_pub, unused_imports, reason = "as above, and it is public in the library")]
#[path = "../src/cpu/pool.rs"]
mod pool;

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::time::Instant;

use handover::Handover;
use loom::cell::UnsafeCell;
use loom::sync::{Arc, Notify};
use pool::Pool;

/// Preemptions per interleaving: enough for every pair of events of two threads to come in both orders.
const PREEMPTIONS: usize = 3;

fn main() {
    let models: [(&str, usize, fn()); 7] = [
        ("regions_hand_over_what_they_write", PREEMPTIONS, regions_hand_over_what_they_write),
        ("a_sleeping_worker_is_woken", PREEMPTIONS, a_sleeping_worker_is_woken),
        ("two_workers_share_the_tasks", 2, two_workers_share_the_tasks),
        ("two_callers_take_turns", 2, two_callers_take_turns),
        ("a_panic_reaches_the_caller", PREEMPTIONS, a_panic_reaches_the_caller),
        ("a_value_reaches_whoever_waits", PREEMPTIONS, a_value_reaches_whoever_waits),
        ("a_panic_ends_the_waiting", PREEMPTIONS, a_panic_ends_the_waiting),
    ];
    // One of the models has thousands of panics that it expects.
    let print = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        if panic.payload_as_str() != Some("a worker thread panicked") {
            print(panic);
        }
    }));
    let chosen: Vec<String> =
        std::env::args().skip(1).filter(|argument| !argument.starts_with('-')).collect();
    for (name, preemptions, model) in models {
        if !chosen.is_empty() && !chosen.iter().any(|part| name.contains(part.as_str())) {
            continue;
        }
        let (begin, runs) = (Instant::now(), std::sync::Arc::new(std::sync::atomic::AtomicUsize::new(0)));
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(preemptions);
        let counted = std::sync::Arc::clone(&runs);
        builder.check(move || {
            counted.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            model();
        });
        let runs = runs.load(std::sync::atomic::Ordering::Relaxed);
        println!("{name}: {runs} interleavings in {:.1} s", begin.elapsed().as_secs_f64());
    }
}

/// Numbers that tasks write without any synchronisation of their own. Loom reports two accesses that nothing orders.
struct Slots(Vec<UnsafeCell<usize>>);

// SAFETY: loom runs one thread at a time, and reports what would be a race.
unsafe impl Sync for Slots {}

impl Slots {
    fn new(len: usize) -> Slots {
        Slots((0..len).map(|_| UnsafeCell::new(0)).collect())
    }

    fn add(&self, index: usize) {
        // SAFETY: loom checks that nobody else has access.
        self.0[index].with_mut(|slot| unsafe { *slot += 1 });
    }

    fn values(&self) -> Vec<usize> {
        // SAFETY: loom checks that nobody writes.
        self.0.iter().map(|slot| slot.with(|slot| unsafe { *slot })).collect()
    }
}

fn regions_hand_over_what_they_write() {
    let pool = Pool::new(2);
    let slots = Slots::new(2);
    for round in 1..=2 {
        pool.for_each(2, |task| slots.add(task));
        assert_eq!(slots.values(), [round, round]);
    }
}

fn a_sleeping_worker_is_woken() {
    let pool = Pool::new(2);
    let begun = Notify::new();
    // The first task, which is the caller's, waits for the second: if nobody wakes the worker, nobody goes on.
    pool.for_each(2, |task| if task == 0 { begun.wait() } else { begun.notify() });
}

fn two_workers_share_the_tasks() {
    let pool = Pool::new(3);
    let slots = Slots::new(3);
    pool.for_each(3, |task| slots.add(task));
    assert_eq!(slots.values(), [1, 1, 1]);
}

fn two_callers_take_turns() {
    let pool = Arc::new(Pool::new(2));
    let other = Arc::clone(&pool);
    let region = |pool: &Pool| {
        let slots = Slots::new(2);
        pool.for_each(2, |task| slots.add(task));
        assert_eq!(slots.values(), [1, 1]);
    };
    let caller = loom::thread::spawn(move || region(&other));
    region(&pool);
    caller.join().expect("the other caller");
}

fn a_panic_reaches_the_caller() {
    let pool = Pool::new(2);
    // Without the message of a panic, which would be printed thousands of times.
    let on_purpose = |task: usize| {
        if task == 1 {
            resume_unwind(Box::new("on purpose"))
        }
    };
    assert!(catch_unwind(AssertUnwindSafe(|| pool.for_each(2, on_purpose))).is_err());
    // Loom's locks cannot be used after a panic, so that the pool goes on is tested with real threads.
}

/// One thread makes a value and the worker waits for it, as a projection does with its activations.
fn hand_over(make: impl Fn() -> usize + Sync) -> std::thread::Result<Vec<usize>> {
    let pool = Pool::new(2);
    let (handover, slots) = (Handover::new(), Slots::new(2));
    let task = |thread: usize, task: usize| {
        let value = if thread == 0 { Some(handover.make(&make)) } else { handover.wait() };
        if value == Some(&7) {
            slots.add(task);
        }
    };
    // The worker may have taken all tasks, and wait.
    let after = |thread: usize| {
        if thread == 0 {
            handover.make(&make);
        }
    };
    catch_unwind(AssertUnwindSafe(|| pool.for_each_in_ranges(2, |thread| thread + 1, task, after)))
        .map(|()| slots.values())
}

fn a_value_reaches_whoever_waits() {
    assert_eq!(hand_over(|| 7).expect("no panic"), [1, 1]);
}

fn a_panic_ends_the_waiting() {
    assert!(hand_over(|| resume_unwind(Box::new("on purpose"))).is_err());
}
