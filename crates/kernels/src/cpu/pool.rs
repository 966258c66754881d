//! Worker threads for the decode loop.
//!
//! A decode step is hundreds of parallel regions of tens of microseconds, so waking a sleeping thread for each
//! would cost as much as the work. Workers spin for a moment after each region and park only when nothing comes.
//! The calling thread works too; a pool of one thread runs everything inline.

use std::cell::UnsafeCell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{JoinHandle, Thread};
use std::time::{Duration, Instant};

/// How long an idle worker spins before it parks.
const SPIN: Duration = Duration::from_micros(200);

/// A region of work: called once on every worker with the worker's index.
type Region = dyn Fn(usize) + Sync;

struct Shared {
    /// Number of regions published so far; a change is the signal to start.
    published: AtomicUsize,
    /// Workers still inside the present region.
    running: AtomicUsize,
    /// The present region. Written only while no worker runs.
    region: UnsafeCell<Option<*const Region>>,
    panicked: AtomicBool,
    stop: AtomicBool,
}

// SAFETY: `region` is written only by the thread that holds `Pool::lead`, before the release store to `published`
// and after every worker has left the previous region, so no worker reads it during the write. The pointer it holds
// is to a `Sync` closure that outlives the region, because `run` does not return before all workers are done.
unsafe impl Sync for Shared {}
// SAFETY: as above; nothing in it is tied to a thread.
unsafe impl Send for Shared {}

/// A fixed set of worker threads.
pub struct Pool {
    shared: Arc<Shared>,
    workers: Vec<(JoinHandle<()>, Thread)>,
    /// Held by the thread that runs a region: regions of one pool never overlap.
    lead: Mutex<()>,
}

impl Pool {
    /// A pool of `threads` threads, the caller included.
    pub fn new(threads: usize) -> Pool {
        let shared = Arc::new(Shared {
            published: AtomicUsize::new(0),
            running: AtomicUsize::new(0),
            region: UnsafeCell::new(None),
            panicked: AtomicBool::new(false),
            stop: AtomicBool::new(false),
        });
        let workers = (1..threads.max(1))
            .map(|index| {
                let shared = Arc::clone(&shared);
                let handle = std::thread::Builder::new()
                    .name(format!("oscar-{index}"))
                    .spawn(move || work(&shared, index))
                    .expect("the system can start a thread");
                let thread = handle.thread().clone();
                (handle, thread)
            })
            .collect();
        Pool { shared, workers, lead: Mutex::new(()) }
    }

    /// Threads the system lets this process use.
    pub fn default_threads() -> usize {
        std::thread::available_parallelism().map_or(1, usize::from)
    }

    /// Number of threads, the caller included.
    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Runs `region` once on every thread, with the thread's index, and waits for all of them.
    ///
    /// A panic in any thread is raised again here, after all threads have left the region.
    pub fn run(&self, region: &(dyn Fn(usize) + Sync)) {
        if self.workers.is_empty() {
            return region(0);
        }
        // A poisoned lock only says that an earlier region panicked; the pool itself is in order.
        let _lead = self.lead.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let shared = &*self.shared;
        // SAFETY: only the lifetime changes; the region is not used after this function returns (see `Shared`).
        let erased: *const Region =
            unsafe { std::mem::transmute::<&(dyn Fn(usize) + Sync), &'static Region>(region) };
        // SAFETY: we hold `lead` and `running` is zero, so no worker reads the cell.
        unsafe { *shared.region.get() = Some(erased) };
        shared.running.store(self.workers.len(), Ordering::Relaxed);
        shared.published.fetch_add(1, Ordering::SeqCst);
        for (_, thread) in &self.workers {
            thread.unpark();
        }
        let outcome = catch_unwind(AssertUnwindSafe(|| region(0)));
        let mut spins = 0u32;
        while shared.running.load(Ordering::Acquire) != 0 {
            spins = spins.wrapping_add(1);
            // A worker that lost its core needs ours: give it away now and then.
            if spins.is_multiple_of(4096) { std::thread::yield_now() } else { std::hint::spin_loop() }
        }
        if let Err(panic) = outcome {
            shared.panicked.store(false, Ordering::Relaxed);
            resume_unwind(panic);
        }
        if shared.panicked.swap(false, Ordering::Relaxed) {
            panic!("a worker thread panicked");
        }
    }

    /// Calls `task` for every index in `0..tasks`. Threads take the next index as they get free, so uneven tasks
    /// and a busy core balance out.
    pub fn for_each(&self, tasks: usize, task: impl Fn(usize) + Sync) {
        self.for_each_worker(tasks, |_, index| task(index));
    }

    /// [`Self::for_each`] with the index of the thread as first argument, for buffers that each thread keeps.
    pub fn for_each_worker(&self, tasks: usize, task: impl Fn(usize, usize) + Sync) {
        if tasks <= 1 || self.workers.is_empty() {
            return (0..tasks).for_each(|index| task(0, index));
        }
        let next = AtomicUsize::new(0);
        self.run(&|worker| {
            loop {
                let index = next.fetch_add(1, Ordering::Relaxed);
                if index >= tasks {
                    break;
                }
                task(worker, index);
            }
        });
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        self.shared.published.fetch_add(1, Ordering::SeqCst);
        for (handle, thread) in self.workers.drain(..) {
            thread.unpark();
            // A worker catches panics of its regions, so joining cannot fail in a way that matters here.
            let _ = handle.join();
        }
    }
}

fn work(shared: &Shared, index: usize) {
    let mut seen = 0;
    loop {
        let idle = Instant::now();
        let mut spins = 0u32;
        while shared.published.load(Ordering::Acquire) == seen {
            spins = spins.wrapping_add(1);
            if spins.is_multiple_of(256) && idle.elapsed() > SPIN {
                // `unpark` before `park` makes `park` return at once, so a region published just now is not missed.
                std::thread::park();
            } else {
                std::hint::spin_loop();
            }
        }
        seen += 1;
        if shared.stop.load(Ordering::SeqCst) {
            return;
        }
        // SAFETY: `published` moved, so the cell was written before and stays until `running` is zero again.
        let region = unsafe { &*(*shared.region.get()).expect("a published region is set") };
        if catch_unwind(AssertUnwindSafe(|| region(index))).is_err() {
            shared.panicked.store(true, Ordering::Relaxed);
        }
        shared.running.fetch_sub(1, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_index_runs_once() {
        for threads in [1, 2, 3, 8] {
            let pool = Pool::new(threads);
            for tasks in [0, 1, 2, 7, 1000] {
                let counts: Vec<AtomicUsize> = (0..tasks).map(|_| AtomicUsize::new(0)).collect();
                pool.for_each(tasks, |index| {
                    counts[index].fetch_add(1, Ordering::Relaxed);
                });
                assert!(counts.iter().all(|count| count.load(Ordering::Relaxed) == 1), "{threads} {tasks}");
            }
        }
    }

    #[test]
    fn many_short_regions_and_pauses() {
        let pool = Pool::new(3);
        let total = AtomicUsize::new(0);
        for round in 0..2000 {
            pool.run(&|_| {
                total.fetch_add(1, Ordering::Relaxed);
            });
            if round % 500 == 0 {
                std::thread::sleep(Duration::from_millis(2));
            }
        }
        assert_eq!(total.load(Ordering::Relaxed), 6000);
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_lives() {
        let pool = Pool::new(2);
        for bad in 0..2 {
            let outcome = catch_unwind(AssertUnwindSafe(|| {
                pool.run(&|index| assert_ne!(index, bad, "on purpose"));
            }));
            assert!(outcome.is_err());
        }
        let total = AtomicUsize::new(0);
        pool.for_each(10, |index| {
            total.fetch_add(index, Ordering::Relaxed);
        });
        assert_eq!(total.load(Ordering::Relaxed), 45);
    }

    #[test]
    fn several_callers_take_turns() {
        let pool = Pool::new(2);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..100 {
                        let total = AtomicUsize::new(0);
                        pool.for_each(16, |index| {
                            total.fetch_add(index, Ordering::Relaxed);
                        });
                        assert_eq!(total.load(Ordering::Relaxed), 120);
                    }
                });
            }
        });
    }
}
