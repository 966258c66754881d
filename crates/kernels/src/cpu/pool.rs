//! Worker threads for the decode loop.
//!
//! A decode step is hundreds of parallel regions of tens of microseconds, so waking a sleeping thread for each
//! would cost as much as the work. Workers spin for a moment after each region and park only when nothing comes.
//! The calling thread works too; a pool of one thread runs everything inline.
//!
//! Nobody waits for a worker that has not begun. When another process holds a core, the worker there may come
//! milliseconds late; by then the caller has done the work alone and closed the region.

use std::cell::UnsafeCell;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{JoinHandle, Thread};
use std::time::{Duration, Instant};

/// How long an idle worker spins before it parks.
const SPIN: Duration = Duration::from_micros(200);

/// Bits of [`Shared::gate`] below the region number: the workers inside, and whether more may enter.
const CLOSED: u64 = 1 << 31;
const INSIDE: u64 = CLOSED - 1;
const REGION: u64 = 1 << 32;

/// A region of work: called with the index of each thread that takes part.
type Region = dyn Fn(usize) + Sync;

struct Shared {
    /// Number of the present region, a closed flag, and how many workers have entered it.
    gate: AtomicU64,
    /// Workers that have left the present region.
    left: AtomicU32,
    /// The present region. Written only while the gate is closed and nobody is inside.
    region: UnsafeCell<Option<*const Region>>,
    panicked: AtomicBool,
    stop: AtomicBool,
}

// SAFETY: `region` is written only by the thread that holds `Pool::lead`, while the gate is closed and every worker
// that had entered has left. A worker reads it only after it has entered through the open gate, whose opening comes
// after the write. The pointer it holds is to a `Sync` closure that outlives the region, because `run` does not
// return before the gate is closed and all workers inside have left.
unsafe impl Sync for Shared {}
// SAFETY: as above; nothing in it is tied to a thread.
unsafe impl Send for Shared {}

/// Tasks that are left of a thread's share, on a cache line of their own.
#[repr(align(64))]
struct Run(AtomicU64);

impl Run {
    fn new(tasks: Range<usize>) -> Run {
        assert!(u32::try_from(tasks.end).is_ok(), "{} tasks", tasks.end);
        Run(AtomicU64::new(Run::pack(tasks.start as u64, tasks.end as u64)))
    }

    fn pack(start: u64, end: u64) -> u64 {
        start << 32 | end
    }

    /// Takes the first task, as the thread it belongs to.
    fn first(&self) -> Option<usize> {
        self.take(|start, end| (start, Run::pack(start + 1, end)))
    }

    /// Takes the last task, as another thread: what is left stays in one piece.
    fn last(&self) -> Option<usize> {
        self.take(|start, end| (end - 1, Run::pack(start, end - 1)))
    }

    fn take(&self, choose: impl Fn(u64, u64) -> (u64, u64)) -> Option<usize> {
        let mut taken = 0;
        let left = |run: u64| {
            let (start, end) = (run >> 32, run & u64::from(u32::MAX));
            (start < end).then(|| {
                let (task, rest) = choose(start, end);
                taken = task;
                rest
            })
        };
        self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, left).ok().map(|_| taken as usize)
    }
}

/// A fixed set of worker threads.
pub struct Pool {
    shared: Arc<Shared>,
    workers: Vec<(JoinHandle<()>, Thread)>,
    /// Held by the thread that runs a region: regions of one pool never overlap.
    lead: Mutex<()>,
}

impl Pool {
    /// A pool of `threads` threads, the caller included; fewer if the system cannot start so many.
    pub fn new(threads: usize) -> Pool {
        let shared = Arc::new(Shared {
            gate: AtomicU64::new(CLOSED),
            left: AtomicU32::new(0),
            region: UnsafeCell::new(None),
            panicked: AtomicBool::new(false),
            stop: AtomicBool::new(false),
        });
        let start = |index| {
            let shared = Arc::clone(&shared);
            let builder = std::thread::Builder::new().name(format!("oscar-{index}"));
            let handle = builder.spawn(move || work(&shared, index)).ok()?;
            let thread = handle.thread().clone();
            Some((handle, thread))
        };
        let workers = (1..threads.max(1)).map_while(start).collect();
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

    /// Calls `task` for every index in `0..tasks`. Each thread has a run of them, because neighbouring tasks read
    /// neighbouring memory, and helps others when it is done, so that uneven tasks and a busy core balance out.
    pub fn for_each(&self, tasks: usize, task: impl Fn(usize) + Sync) {
        self.for_each_worker(tasks, |_, index| task(index));
    }

    /// [`Self::for_each`] with the index of the thread as first argument, for buffers that each thread keeps.
    pub fn for_each_worker(&self, tasks: usize, task: impl Fn(usize, usize) + Sync) {
        if tasks <= 1 || self.workers.is_empty() {
            return (0..tasks).for_each(|index| task(0, index));
        }
        let threads = self.threads();
        let runs: Vec<Run> = (0..threads)
            .map(|thread| Run::new(tasks * thread / threads..tasks * (thread + 1) / threads))
            .collect();
        self.run(&|worker| {
            while let Some(index) = runs[worker].first() {
                task(worker, index);
            }
            for other in 1..threads {
                while let Some(index) = runs[(worker + other) % threads].last() {
                    task(worker, index);
                }
            }
        });
    }

    /// Runs `region` on this thread and on every worker that comes before this thread is done with it.
    ///
    /// A panic in any thread is raised again here, after all threads have left the region.
    fn run(&self, region: &(dyn Fn(usize) + Sync)) {
        // A poisoned lock only says that an earlier region panicked; the pool itself is in order.
        let _lead = self.lead.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let shared = &*self.shared;
        // SAFETY: only the lifetime changes; the region is not used after this function returns (see `Shared`).
        let erased: *const Region =
            unsafe { std::mem::transmute::<&(dyn Fn(usize) + Sync), &'static Region>(region) };
        // SAFETY: we hold `lead`, the gate is closed and the last region's workers have left.
        unsafe { *shared.region.get() = Some(erased) };
        shared.left.store(0, Ordering::Relaxed);
        let number = shared.gate.load(Ordering::Relaxed) / REGION;
        shared.gate.store(number.wrapping_add(1).wrapping_mul(REGION), Ordering::SeqCst);
        for (_, thread) in &self.workers {
            thread.unpark();
        }
        let outcome = catch_unwind(AssertUnwindSafe(|| region(0)));
        let entered = shared.gate.fetch_or(CLOSED, Ordering::SeqCst) & INSIDE;
        let mut spins = 0u32;
        while u64::from(shared.left.load(Ordering::Acquire)) != entered {
            spins = spins.wrapping_add(1);
            // A worker that lost its core in the middle of a task needs ours: give it away now and then.
            if spins.is_multiple_of(1024) { std::thread::yield_now() } else { std::hint::spin_loop() }
        }
        let panicked = shared.panicked.swap(false, Ordering::Relaxed);
        if let Err(panic) = outcome {
            resume_unwind(panic);
        }
        assert!(!panicked, "a worker thread panicked");
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        for (handle, thread) in self.workers.drain(..) {
            thread.unpark();
            // A worker catches panics of its regions, so joining cannot fail in a way that matters here.
            let _ = handle.join();
        }
    }
}

fn work(shared: &Shared, index: usize) {
    let mut last = 0;
    while let Some(gate) = wait(shared, last) {
        last = gate / REGION;
        if !enter(shared, gate) {
            continue;
        }
        // SAFETY: we have entered, so the region was set before the gate opened and stays until we leave.
        let region = unsafe { &*(*shared.region.get()).expect("an open region is set") };
        if catch_unwind(AssertUnwindSafe(|| region(index))).is_err() {
            shared.panicked.store(true, Ordering::Relaxed);
        }
        shared.left.fetch_add(1, Ordering::Release);
    }
}

/// Waits for a region after number `last`; `None` when the pool ends.
fn wait(shared: &Shared, last: u64) -> Option<u64> {
    let idle = Instant::now();
    let mut spins = 0u32;
    loop {
        let gate = shared.gate.load(Ordering::SeqCst);
        if gate / REGION != last && gate & CLOSED == 0 {
            return Some(gate);
        }
        if shared.stop.load(Ordering::SeqCst) {
            return None;
        }
        spins = spins.wrapping_add(1);
        if spins.is_multiple_of(256) && idle.elapsed() > SPIN {
            // `unpark` before `park` makes `park` return at once, so a region opened just now is not missed.
            std::thread::park();
        } else {
            std::hint::spin_loop();
        }
    }
}

/// Enters the region that `gate` belongs to, unless it has been closed meanwhile.
fn enter(shared: &Shared, mut gate: u64) -> bool {
    let region = gate / REGION;
    while gate / REGION == region && gate & CLOSED == 0 {
        match shared.gate.compare_exchange_weak(gate, gate + 1, Ordering::SeqCst, Ordering::SeqCst) {
            Ok(_) => return true,
            Err(now) => gate = now,
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicUsize;

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
    fn a_run_is_taken_from_both_ends() {
        let run = Run::new(3..7);
        assert_eq!([run.first(), run.last(), run.last(), run.first()], [Some(3), Some(6), Some(5), Some(4)]);
        assert_eq!((run.first(), run.last()), (None, None));
        assert_eq!(Run::new(5..5).first(), None);
    }

    #[test]
    fn two_threads_share_a_run_without_a_gap() {
        let run = Run::new(0..200_000);
        let taken: Vec<Vec<usize>> = std::thread::scope(|scope| {
            let own = scope.spawn(|| std::iter::from_fn(|| run.first()).collect());
            let other = scope.spawn(|| std::iter::from_fn(|| run.last()).collect());
            [own, other].map(|thread| thread.join().unwrap()).into()
        });
        assert!(taken[0].iter().copied().eq(0..taken[0].len()));
        assert!(taken[1].iter().copied().eq((taken[0].len()..200_000).rev()));
    }

    #[test]
    fn many_short_regions_and_pauses() {
        let pool = Pool::new(3);
        let total = AtomicUsize::new(0);
        for round in 0..5000 {
            pool.for_each(3, |_| {
                total.fetch_add(1, Ordering::Relaxed);
            });
            if round % 500 == 0 {
                std::thread::sleep(Duration::from_millis(2));
            }
        }
        assert_eq!(total.load(Ordering::Relaxed), 15_000);
    }

    #[test]
    fn workers_take_part() {
        let pool = Pool::new(2);
        // Two tasks that wait for each other cannot both run on one thread.
        let (first, second) = (AtomicBool::new(false), AtomicBool::new(false));
        pool.for_each(2, |index| {
            let (mine, other) = if index == 0 { (&first, &second) } else { (&second, &first) };
            mine.store(true, Ordering::SeqCst);
            while !other.load(Ordering::SeqCst) {
                std::thread::yield_now();
            }
        });
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_lives() {
        let pool = Pool::new(2);
        // Whichever thread takes the bad task.
        for bad in 0..64 {
            let outcome = catch_unwind(AssertUnwindSafe(|| {
                pool.for_each(64, |index| assert_ne!(index, bad, "on purpose"));
            }));
            assert!(outcome.is_err(), "{bad}");
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
