//! The softmax of a step: the operations of `weigh`, in the same order, cut into parts.

use std::arch::x86_64::*;

use oscar_codec::PAGE_TOKENS;

use super::instructions::now;
use super::late::OnTheWay;
use super::plan::Step;
use super::room::Room;
use super::{PARTS, Stream};
use crate::cpu::attention::SoftmaxState;
use crate::cpu::attention::sealed::batch::running;
use crate::cpu::attention::sealed::engine::LANES;
use crate::cpu::attention::sealed::registers::{LARGER_MAGNITUDE, REGISTERS, exp2, join, load_pair};
use crate::cpu::attention::sealed::run::PAGES;
use crate::cpu::attention::sealed::scaled::Scaled;
use crate::cpu::attention::sealed::weigh::{self, SLACK};

/// The softmax of `R` rows and a page on its way.
pub(super) struct Weighing<const R: usize> {
    /// Relative to the reference.
    logits: [[__m512; REGISTERS]; R],
    /// What is summed over tokens in lanes.
    total: [__m512; R],
    offset: [__m512; R],
    largest: [__m512; R],
}

impl<const R: usize> Weighing<R> {
    /// # Safety
    /// The CPU has AVX-512F.
    #[inline(always)]
    pub(super) unsafe fn new() -> Self {
        // SAFETY: the instruction set of this module is there.
        let zero = unsafe { _mm512_setzero_ps() };
        Weighing { logits: [[zero; REGISTERS]; R], total: [zero; R], offset: [zero; R], largest: [zero; R] }
    }

    /// Whether any logit is above the limit of its row.
    ///
    /// # Safety
    /// The CPU has AVX-512F.
    #[inline(always)]
    unsafe fn is_above(&self, limit: &[f32]) -> bool {
        let mut above = 0;
        for r in 0..R {
            // SAFETY: the instruction set of this module is there.
            unsafe {
                let largest = weigh::largest(&self.logits[r]);
                above |= _mm512_cmp_ps_mask::<_CMP_GT_OQ>(largest, _mm512_set1_ps(limit[r]));
            }
        }
        above != 0
    }
}

impl<const STEPS: usize, const GROUPS: usize, const R: usize, const ALL: usize>
    Stream<'_, STEPS, GROUPS, R, ALL>
{
    /// Prepares for the softmax of a run.
    #[inline(always)]
    pub(super) fn begin_run(&mut self, head: usize, state: &SoftmaxState) {
        let first = head * ALL;
        // SAFETY: nothing else borrows the room now.
        let room = unsafe { &mut *self.room };
        room.largest[..ALL].fill([0.0; LANES]);
        for row in 0..ALL {
            room.steps[row] = self.queries.steps[first + row];
            room.totals[row] = self.queries.totals[first + row];
            let max = state.max[row];
            // A row that has seen nothing must not subtract -∞ from -∞, and takes whatever it sees as its reference.
            let none = max == f32::NEG_INFINITY;
            room.reference[row] = if none { 0.0 } else { max };
            room.limit[row] = if none { max } else { SLACK };
        }
    }

    /// The units of a run whose pages have all been weighed.
    #[inline(always)]
    pub(super) fn end_run(&mut self, run: usize) {
        // SAFETY: nothing else borrows the room now, and the instruction set of this module is there.
        unsafe {
            let Room { scaled, largest, units, inverses, .. } = &mut *self.room;
            scaled_numbers(0, scaled, largest).units(0, ALL, &mut units[run % 2], inverses);
        }
    }

    /// A part of the softmax of a group of rows: the logits of 16 tokens, or their weights.
    ///
    /// # Safety
    /// As [`Self::part`].
    #[inline(always)]
    pub(super) unsafe fn weigh(
        &mut self,
        group: usize,
        phase: usize,
        step: &Step<STEPS>,
        weighing: &mut Weighing<R>,
        state: &mut SoftmaxState,
    ) {
        let first = group * R;
        // SAFETY: rows, lanes and numbers of a page are there.
        unsafe {
            if phase < REGISTERS {
                let (scale, offset) = load_pair::<false>(step.numbers.add(phase * LANES));
                for r in 0..R {
                    let unit = _mm512_set1_ps((*self.room).steps[first + r]);
                    let total = _mm512_set1_ps((*self.room).totals[first + r]);
                    let sums = step.weighed_sums.add((first + r) * 2 * PAGE_TOKENS + phase * LANES);
                    let logit = _mm512_fmsub_ps(
                        join(sums, PAGE_TOKENS),
                        _mm512_mul_ps(scale, unit),
                        _mm512_fmadd_ps(offset, total, _mm512_set1_ps((*self.room).reference[first + r])),
                    );
                    weighing.logits[r][phase] = now(logit);
                }
                return;
            }
            let lanes = step.lanes.add(first * 2 * LANES);
            let largest = (&raw mut (*self.room).largest).cast::<f32>().add(first * LANES);
            if phase == REGISTERS {
                if weighing.is_above(&(&(*self.room).limit)[first..first + R]) {
                    let mut largest = [0.0; R];
                    for r in 0..R {
                        largest[r] = _mm512_reduce_max_ps(weigh::largest(&weighing.logits[r]));
                    }
                    let rises = self.raise(first, step.weighed, largest, state);
                    for r in 0..R {
                        for logits in &mut weighing.logits[r] {
                            *logits = _mm512_sub_ps(*logits, _mm512_set1_ps(rises[r]));
                        }
                    }
                }
                for r in 0..R {
                    let lanes = lanes.add(r * 2 * LANES);
                    weighing.total[r] = _mm512_loadu_ps(lanes);
                    weighing.offset[r] = _mm512_loadu_ps(lanes.add(LANES));
                    weighing.largest[r] = _mm512_loadu_ps(largest.add(r * LANES));
                }
            }
            let j = phase - REGISTERS;
            let (scale, offset) = load_pair::<false>(step.numbers.add(2 * PAGE_TOKENS + j * LANES));
            let scaled = step.weighed_scaled.add(first * PAGE_TOKENS + j * LANES);
            for r in 0..R {
                let weight = exp2(weighing.logits[r][j]);
                weighing.total[r] = now(_mm512_add_ps(weighing.total[r], weight));
                weighing.offset[r] = now(_mm512_fmadd_ps(weight, offset, weighing.offset[r]));
                let number = _mm512_mul_ps(weight, scale);
                weighing.largest[r] = now(_mm512_range_ps::<LARGER_MAGNITUDE>(weighing.largest[r], number));
                _mm512_storeu_ps(scaled.add(r * PAGE_TOKENS), number);
            }
            if phase == PARTS - 1 {
                for r in 0..R {
                    let lanes = lanes.add(r * 2 * LANES);
                    _mm512_storeu_ps(lanes, weighing.total[r]);
                    _mm512_storeu_ps(lanes.add(LANES), weighing.offset[r]);
                    _mm512_storeu_ps(largest.add(r * LANES), weighing.largest[r]);
                }
            }
        }
    }

    /// Lets the references of a group of rows follow logits that have left them behind. Returns by how much they rise.
    #[cold]
    #[inline(never)]
    fn raise(
        &mut self,
        first: usize,
        weighed: usize,
        largest: [f32; R],
        state: &mut SoftmaxState,
    ) -> [f32; R] {
        let slot = self.slots.get(weighed);
        // SAFETY: nothing else borrows the lanes and the room now.
        let (room, lanes) = unsafe { (&mut *self.room, self.all_lanes()) };
        let mut running = running(&self.shape, 0..ALL, Self::D, slot.head * ALL, lanes, state);
        let Room { scaled, largest: all, reference, limit, .. } = room;
        let mut shrinks = OnTheWay {
            scaled: scaled_numbers(weighed % PAGES, scaled, all),
            late: &mut self.late,
            run: weighed / PAGES,
            heads: self.slots.heads(),
        };
        std::array::from_fn(|r| {
            let row = first + r;
            let rise = weigh::raise(largest[r], limit[row], row, 1, &mut running, &mut shrinks);
            if running.max[row] != f32::NEG_INFINITY {
                (reference[row], limit[row]) = (running.max[row], SLACK);
            }
            rise
        })
    }
}

/// The numbers of a run.
fn scaled_numbers<'s, const ALL: usize>(
    page: usize,
    numbers: &'s mut [[[f32; PAGE_TOKENS]; ALL]],
    largest: &'s mut [[f32; LANES]],
) -> Scaled<'s> {
    let numbers = numbers.as_flattened_mut().as_flattened_mut();
    Scaled { page, groups: 1, rows: ALL, numbers, largest: largest.as_flattened_mut() }
}
