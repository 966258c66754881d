//! Worker threads for the decode loop.
//!
//! A decode step is hundreds of parallel regions of tens of microseconds, so waking a sleeping thread for each
//! would cost as much as the work. Workers spin for a moment after each region and park only when nothing comes.
//! The calling thread works too; a pool of one thread runs everything inline.
//!
//! Nobody waits for a worker that has not begun. When another process holds a core, the worker there may come
//! milliseconds late; by then the caller has done the work alone and closed the region.

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;

use super::sync::{
    AtomicBool, AtomicU32, AtomicU64, Builder, JoinHandle, Mutex, Ordering, SpinLimit, Thread, UnsafeCell,
    fence, park, spin_loop, yield_now,
};

/// States of a [`ThreadSlot`]. The caller opens it and, when it has no more work, closes it again unless it is taken.
const CLOSED: u32 = 0;
/// There is a region, and the worker may take part.
const OPEN: u32 = 1;
/// The worker takes part. It closes the slot when it leaves.
const TAKEN: u32 = 2;
/// The pool ends, and the worker leaves.
const ENDED: u32 = 3;

/// A region of work: called with the index of each thread that takes part.
type Region = dyn Fn(usize) + Sync;

/// A thread's place in the present region. All that a worker needs to begin lies on one cache line, which is what
/// passes between two cores; neighbouring slots are two lines apart, because lines are fetched in pairs.
#[repr(align(128))]
struct ThreadSlot {
    state: AtomicU32,
    /// Whether the worker has parked or is about to.
    sleeping: AtomicBool,
    panicked: AtomicBool,
    /// Tasks of this thread's share.
    tasks: TaskRange,
    /// The present region. Written only while the slot is closed.
    region: UnsafeCell<Option<*const Region>>,
}

// SAFETY: `region` is written only by the thread that holds `Pool::lead`, while the slot is closed. A worker reads it
// only between taking the open slot, whose opening comes after the write, and closing it. The pointer is to a `Sync`
// closure that outlives the region, because `run` does not return before every slot is closed.
unsafe impl Sync for ThreadSlot {}
// SAFETY: as above; nothing in it is tied to a thread.
unsafe impl Send for ThreadSlot {}

/// Tasks that are left of a thread's share.
struct TaskRange(AtomicU64);

impl TaskRange {
    fn empty() -> TaskRange {
        TaskRange(AtomicU64::new(0))
    }

    fn set(&self, tasks: Range<usize>) {
        assert!(u32::try_from(tasks.end).is_ok(), "{} tasks", tasks.end);
        self.0.store(TaskRange::pack(tasks.start as u64, tasks.end as u64), Ordering::Relaxed);
    }

    fn pack(start: u64, end: u64) -> u64 {
        start << 32 | end
    }

    /// Takes the first task, as the thread it belongs to.
    fn first(&self) -> Option<usize> {
        self.take(|start, end| (start, TaskRange::pack(start + 1, end)))
    }

    /// Takes the last task, as another thread: what is left stays in one piece.
    fn last(&self) -> Option<usize> {
        self.take(|start, end| (end - 1, TaskRange::pack(start, end - 1)))
    }

    fn take(&self, choose: impl Fn(u64, u64) -> (u64, u64)) -> Option<usize> {
        let mut taken = 0;
        let left = |range: u64| {
            let (start, end) = (range >> 32, range & u64::from(u32::MAX));
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
    /// One per thread; the first is the caller's.
    slots: Arc<[ThreadSlot]>,
    workers: Vec<(JoinHandle<()>, Thread)>,
    /// Held by the thread that runs a region: regions of one pool never overlap.
    lead: Mutex<()>,
}

impl Pool {
    /// A pool of `threads` threads, the caller included; fewer if the system cannot start so many.
    pub fn new(threads: usize) -> Pool {
        let slot = || ThreadSlot {
            state: AtomicU32::new(CLOSED),
            sleeping: AtomicBool::new(false),
            panicked: AtomicBool::new(false),
            tasks: TaskRange::empty(),
            region: UnsafeCell::new(None),
        };
        let slots: Arc<[ThreadSlot]> = (0..threads.max(1)).map(|_| slot()).collect();
        let start = |index| {
            let slots = Arc::clone(&slots);
            let builder = Builder::new().name(format!("oscar-{index}"));
            let handle = builder.spawn(move || work(&slots[index], index)).ok()?;
            let thread = handle.thread().clone();
            Some((handle, thread))
        };
        let workers = (1..threads.max(1)).map_while(start).collect();
        Pool { slots, workers, lead: Mutex::new(()) }
    }

    /// Threads the system lets this process use.
    pub fn default_threads() -> usize {
        std::thread::available_parallelism().map_or(1, usize::from)
    }

    /// Number of threads, the caller included.
    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Calls `task` for every index in `0..tasks`. Each thread has a range of them, because neighbouring tasks read
    /// neighbouring memory, and helps others when it is done, so that uneven tasks and a busy core balance out.
    pub fn for_each(&self, tasks: usize, task: impl Fn(usize) + Sync) {
        self.for_each_worker(tasks, |_, index| task(index));
    }

    /// [`Self::for_each`] with the index of the thread as first argument, for buffers that each thread keeps.
    pub fn for_each_worker(&self, tasks: usize, task: impl Fn(usize, usize) + Sync) {
        let threads = self.threads();
        self.for_each_in_ranges(tasks, |thread| tasks * (thread + 1) / threads, task, |_| {});
    }

    /// [`Self::for_each_worker`] where the range of a thread ends before task `end(thread)`, and begins where the one of the
    /// thread before it ends; the last one must end with the last task. Every thread that takes part calls `after` with its
    /// index once it finds no more task to begin: others may still be at theirs, but none is left that nobody has begun.
    pub fn for_each_in_ranges(
        &self,
        tasks: usize,
        end: impl Fn(usize) -> usize,
        task: impl Fn(usize, usize) + Sync,
        after: impl Fn(usize) + Sync,
    ) {
        if tasks <= 1 || self.workers.is_empty() {
            (0..tasks).for_each(|index| task(0, index));
            return after(0);
        }
        let slots = &self.slots[..self.threads()];
        assert_eq!(end(slots.len() - 1), tasks, "the last range ends with the last task");
        self.run(&|thread| end(thread).min(tasks), &|worker| {
            while let Some(index) = slots[worker].tasks.first() {
                task(worker, index);
            }
            for other in 1..slots.len() {
                while let Some(index) = slots[(worker + other) % slots.len()].tasks.last() {
                    task(worker, index);
                }
            }
            after(worker);
        });
    }

    /// Runs `region` on this thread and on every worker that comes before this thread is done with it.
    ///
    /// A panic in any thread is raised again here, after all threads have left the region.
    fn run(&self, end: &dyn Fn(usize) -> usize, region: &(dyn Fn(usize) + Sync)) {
        // A poisoned lock only says that an earlier region panicked; the pool itself is in order.
        let _lead = self.lead.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let threads = self.threads();
        // SAFETY: only the lifetime changes; the region is not used after this function returns (see `ThreadSlot`).
        let erased: *const Region =
            unsafe { std::mem::transmute::<&(dyn Fn(usize) + Sync), &'static Region>(region) };
        // Whoever comes first helps the others, so all ranges are set before the first slot is opened.
        let mut start = 0;
        for (thread, slot) in self.slots[..threads].iter().enumerate() {
            let end = end(thread).max(start);
            slot.tasks.set(start..end);
            start = end;
            // SAFETY: we hold `lead`, and the last region did not end before all slots were closed.
            slot.region.with_mut(|region| unsafe { *region = Some(erased) });
        }
        let others = &self.slots[1..threads];
        others.iter().for_each(|slot| slot.state.store(OPEN, Ordering::Release));
        // Either the worker sees the open slot before it parks, or we see that it sleeps.
        fence(Ordering::SeqCst);
        for (slot, (_, thread)) in others.iter().zip(&self.workers) {
            if slot.sleeping.load(Ordering::Relaxed) {
                thread.unpark();
            }
        }
        let outcome = catch_unwind(AssertUnwindSafe(|| region(0)));
        let mut panicked = false;
        for slot in others {
            close(slot);
            panicked |= slot.panicked.swap(false, Ordering::Relaxed);
        }
        if let Err(panic) = outcome {
            resume_unwind(panic);
        }
        assert!(!panicked, "a worker thread panicked");
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        for (slot, (handle, thread)) in self.slots[1..].iter().zip(self.workers.drain(..)) {
            slot.state.store(ENDED, Ordering::SeqCst);
            thread.unpark();
            // A worker catches panics of its regions, so joining cannot fail in a way that matters here.
            let _ = handle.join();
        }
    }
}

/// Closes a slot that nobody has taken, or waits until its worker has.
fn close(slot: &ThreadSlot) {
    if slot.state.compare_exchange(OPEN, CLOSED, Ordering::Acquire, Ordering::Acquire).is_ok() {
        return;
    }
    let mut spins = 0u32;
    while slot.state.load(Ordering::Acquire) == TAKEN {
        pause(&mut spins);
    }
}

/// A moment of waiting for a thread that is at work. If it has lost its core in the middle of that, it needs ours: every now
/// and then it is given away.
pub(super) fn pause(spins: &mut u32) {
    *spins = spins.wrapping_add(1);
    if spins.is_multiple_of(1024) { yield_now() } else { spin_loop() }
}

fn work(slot: &ThreadSlot, index: usize) {
    while wait(slot) {
        if slot.state.compare_exchange(OPEN, TAKEN, Ordering::Acquire, Ordering::Relaxed).is_err() {
            continue;
        }
        // SAFETY: we have taken the slot, so the region was set before it opened and stays until we close it.
        let region = slot.region.with(|region| unsafe { &*(*region).expect("an open slot has a region") });
        if catch_unwind(AssertUnwindSafe(|| region(index))).is_err() {
            slot.panicked.store(true, Ordering::Relaxed);
        }
        slot.state.store(CLOSED, Ordering::Release);
    }
}

/// Waits for an open slot; `false` when the pool ends.
fn wait(slot: &ThreadSlot) -> bool {
    let mut limit = SpinLimit::new();
    loop {
        match slot.state.load(Ordering::Relaxed) {
            OPEN => return true,
            ENDED => return false,
            _ => {}
        }
        if limit.reached() {
            slot.sleeping.store(true, Ordering::Relaxed);
            fence(Ordering::SeqCst);
            if slot.state.load(Ordering::Relaxed) == CLOSED {
                // `unpark` before `park` makes `park` return at once, so a slot opened just now is not missed.
                park();
            }
            slot.sleeping.store(false, Ordering::Relaxed);
        } else {
            spin_loop();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;
    use std::time::{Duration, Instant};

    use super::*;

    #[test]
    fn every_index_runs_once() {
        for threads in [1, 2, 3, 8] {
            let pool = Pool::new(threads);
            for tasks in [0, 1, 2, 7, if cfg!(miri) { 50 } else { 1000 }] {
                let counts: Vec<AtomicUsize> = (0..tasks).map(|_| AtomicUsize::new(0)).collect();
                pool.for_each(tasks, |index| {
                    counts[index].fetch_add(1, Ordering::Relaxed);
                });
                assert!(counts.iter().all(|count| count.load(Ordering::Relaxed) == 1), "{threads} {tasks}");
            }
        }
    }

    #[test]
    fn uneven_ranges_cover_every_index_once() {
        let pool = Pool::new(3);
        for ends in [[0, 0, 7], [7, 7, 7], [1, 6, 7], [2, 2, 7]] {
            let counts: Vec<AtomicUsize> = (0..7).map(|_| AtomicUsize::new(0)).collect();
            pool.for_each_in_ranges(
                7,
                |thread| ends[thread],
                |_, index| {
                    counts[index].fetch_add(1, Ordering::Relaxed);
                },
                |_| {},
            );
            assert!(counts.iter().all(|count| count.load(Ordering::Relaxed) == 1), "{ends:?}");
        }
    }

    #[test]
    fn what_comes_after_waits_for_no_task_that_nobody_has_begun() {
        let soon = |what: &str, done: &dyn Fn() -> bool| {
            let begin = Instant::now();
            while !done() {
                assert!(begin.elapsed() < Duration::from_secs(30), "{what}");
                yield_now();
            }
        };
        for threads in [1, 2, 3] {
            let pool = Pool::new(threads);
            for tasks in [0, 1, 2, 9] {
                let (begun, callers) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
                let helped = AtomicBool::new(false);
                pool.for_each_in_ranges(
                    tasks,
                    // All tasks are the last thread's: others come to what follows only after they have helped.
                    |thread| if thread + 1 == threads { tasks } else { 0 },
                    |thread, _| {
                        begun.fetch_add(1, Ordering::SeqCst);
                        match thread {
                            0 => helped.store(true, Ordering::SeqCst),
                            _ => soon("the caller helps", &|| {
                                helped.load(Ordering::SeqCst) || begun.load(Ordering::SeqCst) == tasks
                            }),
                        }
                    },
                    |thread| {
                        soon("every task begins", &|| begun.load(Ordering::SeqCst) == tasks);
                        callers.lock().unwrap().push(thread);
                    },
                );
                let mut callers = callers.into_inner().unwrap();
                callers.sort_unstable();
                // Once on each thread that came, and always on this one.
                assert_eq!(callers.first(), Some(&0), "{threads} {tasks}");
                assert!(callers.is_sorted_by(|a, b| a < b) && callers.len() <= threads, "{callers:?}");
            }
        }
    }

    #[test]
    fn a_range_is_taken_from_both_ends() {
        let range = TaskRange::empty();
        range.set(3..7);
        assert_eq!(
            [range.first(), range.last(), range.last(), range.first()],
            [Some(3), Some(6), Some(5), Some(4)]
        );
        assert_eq!((range.first(), range.last()), (None, None));
        range.set(5..5);
        assert_eq!(range.first(), None);
    }

    #[test]
    fn two_threads_share_a_run_without_a_gap() {
        let (range, tasks) = (TaskRange::empty(), if cfg!(miri) { 500 } else { 200_000 });
        range.set(0..tasks);
        let taken: Vec<Vec<usize>> = std::thread::scope(|scope| {
            let own = scope.spawn(|| std::iter::from_fn(|| range.first()).collect());
            let other = scope.spawn(|| std::iter::from_fn(|| range.last()).collect());
            [own, other].map(|thread| thread.join().unwrap()).into()
        });
        assert!(taken[0].iter().copied().eq(0..taken[0].len()));
        assert!(taken[1].iter().copied().eq((taken[0].len()..tasks).rev()));
    }

    #[test]
    fn many_short_regions_and_pauses() {
        let pool = Pool::new(3);
        let total = AtomicUsize::new(0);
        let rounds = if cfg!(miri) { 20 } else { 5000 };
        for round in 0..rounds {
            pool.for_each(3, |_| {
                total.fetch_add(1, Ordering::Relaxed);
            });
            if round % (rounds / 10) == 0 {
                std::thread::sleep(Duration::from_millis(2));
            }
        }
        assert_eq!(total.load(Ordering::Relaxed), 3 * rounds);
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
                yield_now();
            }
        });
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_lives() {
        let pool = Pool::new(2);
        // Whichever thread takes the bad task.
        for bad in (0..64).step_by(if cfg!(miri) { 16 } else { 1 }) {
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
                    for _ in 0..if cfg!(miri) { 4 } else { 100 } {
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
