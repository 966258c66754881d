//! Results of a head that come in parts, one from each item that reads some of its pages.
//!
//! Threads that find no more item to begin put together what is complete, while others still read: parts of different
//! heads are complete at different times.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{PoisonError, RwLock};

use super::plan::{Output, Plan};
use crate::cpu::attention::SoftmaxState;
use crate::cpu::per_thread::CachePadded;
use crate::cpu::pool::pause;

/// Softmax of the rows of each head of an item.
pub(super) type HeadStates = Vec<SoftmaxState>;

/// In place of the number of missing parts: some thread puts them together, or has done so.
const TAKEN: usize = usize::MAX;

/// Memory for the parts of a layer; kept between layers and steps.
#[derive(Default)]
pub(in crate::cpu) struct PartialStates {
    items: Vec<CachePadded<RwLock<HeadStates>>>,
    missing: Vec<AtomicUsize>,
}

impl PartialStates {
    /// Makes buffers for the items of a plan, none of which has been read.
    pub(super) fn prepare<'a>(&'a mut self, plan: &'a Plan) -> Parts<'a> {
        self.items.resize_with(self.items.len().max(plan.items.len()), CachePadded::default);
        self.missing.resize_with(plan.outputs.len(), AtomicUsize::default);
        for (missing, output) in self.missing.iter_mut().zip(&plan.outputs) {
            *missing.get_mut() = output.parts;
        }
        Parts { plan, items: &self.items, missing: &self.missing }
    }
}

/// The parts of a layer.
pub(super) struct Parts<'a> {
    plan: &'a Plan,
    items: &'a [CachePadded<RwLock<HeadStates>>],
    /// How many parts of each output have not been read.
    missing: &'a [AtomicUsize],
}

impl Parts<'_> {
    /// Calls `read` with the states of an item. The item counts as read also if that panics, because others wait for it; the
    /// panic is the end of the whole step.
    pub(super) fn fill(&self, index: usize, read: impl FnOnce(&mut HeadStates)) {
        let item = &self.plan.items[index];
        let block = &self.plan.blocks[item.block];
        let first = block.outputs + item.heads.start - block.heads.start;
        let _read = Read(&self.missing[first..first + item.heads.len()]);
        read(&mut self.items[index].0.write().unwrap_or_else(PoisonError::into_inner));
    }

    /// Calls `finish` with outputs that have all their parts and that no other thread has taken, until none is left, and
    /// waits for those that others still read. Every item must have been begun by a thread that ends it.
    ///
    /// The threads begin at different outputs, each at those whose values it has likely rotated: it has the matrices.
    pub(super) fn for_each_complete(
        &self,
        thread: usize,
        threads: usize,
        mut finish: impl FnMut(&Output, &[&SoftmaxState]),
    ) {
        let first = self.missing.len() * thread / threads;
        let mut spins = 0u32;
        loop {
            let mut waiting = false;
            for index in (first..self.missing.len()).chain(0..first) {
                let missing = &self.missing[index];
                match missing.load(Ordering::Relaxed) {
                    TAKEN => {}
                    0 => {
                        // Acquires what the readers of the parts released.
                        if missing.compare_exchange(0, TAKEN, Ordering::Acquire, Ordering::Relaxed).is_ok() {
                            self.finish(&self.plan.outputs[index], &mut finish);
                        }
                    }
                    _ => waiting = true,
                }
            }
            if !waiting {
                return;
            }
            pause(&mut spins);
        }
    }

    fn finish(&self, output: &Output, finish: &mut impl FnMut(&Output, &[&SoftmaxState])) {
        let items = self.plan.blocks[output.block].items.clone();
        let parts = items.filter(|&index| self.plan.items[index].heads.contains(&output.head));
        let parts: Vec<_> = parts
            .map(|index| {
                let states = self.items[index].0.read().unwrap_or_else(PoisonError::into_inner);
                (output.head - self.plan.items[index].heads.start, states)
            })
            .collect();
        let parts: Vec<&SoftmaxState> = parts.iter().map(|(head, states)| &states[*head]).collect();
        finish(output, &parts);
    }
}

/// Counts an item as read for each of its heads when it goes.
struct Read<'a>(&'a [AtomicUsize]);

impl Drop for Read<'_> {
    fn drop(&mut self) {
        self.0.iter().for_each(|missing| {
            missing.fetch_sub(1, Ordering::Release);
        });
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::sync::Mutex;

    use super::super::plan::Item;
    use super::*;
    use crate::cpu::pool::Pool;

    /// Items of three heads: two of all, and one or two more of each.
    fn plan() -> Plan {
        let item = |heads| Item { block: 0, heads, pages: 0..1 };
        Plan::of_one_block([0..3, 0..3, 0..1, 1..2, 2..3, 2..3].map(item).into())
    }

    fn fill(states: &mut HeadStates, plan: &Plan, index: usize) {
        states.clear();
        let heads = plan.items[index].heads.len();
        states.resize_with(heads, SoftmaxState::default);
        states.iter_mut().for_each(|state| state.reset(index + 1, 2));
    }

    #[test]
    fn every_output_is_put_together_once_of_all_its_parts() {
        let plan = plan();
        let mut memory = PartialStates::default();
        for threads in [1, 2, 3] {
            let pool = Pool::new(threads);
            for _ in 0..if cfg!(miri) { 2 } else { 200 } {
                let (parts, done) = (memory.prepare(&plan), Mutex::new(Vec::new()));
                pool.for_each_in_ranges(
                    plan.items.len(),
                    |thread| plan.items.len() * (thread + 1) / threads,
                    |_, index| parts.fill(index, |states| fill(states, &plan, index)),
                    |thread| {
                        parts.for_each_complete(thread, threads, |output, states| {
                            // The rows of a state say which item it is of.
                            let items: Vec<usize> = states.iter().map(|state| state.rows() - 1).collect();
                            done.lock().unwrap().push((output.head, items));
                        });
                    },
                );
                let mut done = done.into_inner().unwrap();
                done.sort_unstable();
                assert_eq!(done, [(0, vec![0, 1, 2]), (1, vec![0, 1, 3]), (2, vec![0, 1, 4, 5])]);
            }
        }
    }

    #[test]
    fn nobody_waits_for_an_item_that_panicked() {
        let plan = plan();
        let mut memory = PartialStates::default();
        let pool = Pool::new(2);
        for bad in 0..plan.items.len() {
            let parts = memory.prepare(&plan);
            let outcome = catch_unwind(AssertUnwindSafe(|| {
                pool.for_each_in_ranges(
                    plan.items.len(),
                    |thread| plan.items.len() * (thread + 1) / 2,
                    |_, index| {
                        parts.fill(index, |states| {
                            fill(states, &plan, index);
                            assert_ne!(index, bad, "on purpose");
                        });
                    },
                    |thread| parts.for_each_complete(thread, 2, |_, _| {}),
                );
            }));
            assert!(outcome.is_err(), "{bad}");
        }
    }
}
