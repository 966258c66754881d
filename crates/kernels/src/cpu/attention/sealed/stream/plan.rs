//! What a step reads and writes.

use std::arch::x86_64::*;
use std::ptr;

use oscar_codec::PAGE_TOKENS;

use super::products::ROW_BYTES;
use super::{LAG, LINE, STEP, Stream};
use crate::cpu::attention::sealed::engine::LANES;
use crate::cpu::attention::sealed::run::PAGES;

/// The work of a step. Pointers are null where there is nothing to do.
pub(super) struct Step<const STEPS: usize> {
    /// The pages of the next run, and the first line that is asked for in each.
    pub(super) asked: [*const u8; PAGES],
    pub(super) first_line: usize,
    pub(super) unpacked_keys: *const u8,
    /// Query bytes.
    pub(super) left: *const i8,
    pub(super) key_sums: *mut i32,
    /// Scales and offsets of the page that is weighed, and the sums of its keys.
    pub(super) numbers: *const u16,
    pub(super) weighed_sums: *const i32,
    pub(super) weighed: usize,
    /// Its sums over tokens, and where its weights go.
    pub(super) lanes: *mut f32,
    pub(super) weighed_scaled: *mut f32,
    /// Values that are unpacked and weights that become bytes, as numbers and as bytes.
    pub(super) unpacked_values: [*const u8; STEPS],
    pub(super) scaled: [*const f32; STEPS],
    pub(super) split: [*mut i8; STEPS],
    /// Weights that are multiplied with values.
    pub(super) weights: [*const i8; STEPS],
    /// Whether they are the first of a pass.
    pub(super) clear: bool,
}

impl<const STEPS: usize> Step<STEPS> {
    /// Asks for a line of the next run, in one of its pages after the other.
    ///
    /// A core waits for 16 lines at most, but the second-level cache for many more: it fetches ahead by itself where lines
    /// are asked for in order, and in several pages at once. So these are asked for slowly, side by side.
    #[inline(always)]
    pub(super) fn ask(&self, number: usize) {
        let line = self.first_line + number / PAGES;
        let address = self.asked[number % PAGES].wrapping_add(line * LINE);
        // SAFETY: prefetching an address is harmless whatever it is.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(address.cast()) };
    }
}

impl<const STEPS: usize, const GROUPS: usize, const R: usize, const ALL: usize>
    Stream<'_, STEPS, GROUPS, R, ALL>
{
    /// The pages of a run, counted from its first, whose values are read in one of its slots.
    #[inline(always)]
    fn value_pages(slot: usize) -> [usize; STEPS] {
        let first = slot % PAGES % Self::PASS * STEPS;
        std::array::from_fn(|step| first + step)
    }

    /// The first channel of the pass that a slot belongs to.
    #[inline(always)]
    pub(super) fn first_channel(slot: usize) -> usize {
        slot % PAGES / Self::PASS * STEP
    }

    /// What the step of a slot has to do.
    #[inline(always)]
    pub(super) fn plan(&self, slot: usize) -> Step<STEPS> {
        let (weighed, unpacked, multiplied) = (slot - 1, slot + 1 - LAG, slot - LAG);
        let page = |slot: usize| match self.slots.get(slot).page {
            [] => ptr::null(),
            page => page.as_ptr(),
        };
        let after = |page: *const u8, bytes: usize| match page.is_null() {
            true => page,
            false => page.wrapping_add(bytes),
        };
        let (current, turn) = (self.slots.get(slot), slot % 2);
        // SAFETY: addresses inside the room.
        let (weights, scaled, sums) = unsafe {
            let room = self.room;
            (&raw mut (*room).weights, &raw mut (*room).scaled, &raw mut (*room).key_sums)
        };
        let weights_of = |page: usize| weights.cast::<i8>().wrapping_add(page * ALL * ROW_BYTES);
        let scaled_of = |page: usize| scaled.cast::<f32>().wrapping_add(page * ALL * PAGE_TOKENS);
        let sums_of = |turn: usize| sums.cast::<i32>().wrapping_add(turn * ALL * 2 * PAGE_TOKENS);
        let mut step = Step {
            // Where there is none, something that is in the cache already.
            asked: std::array::from_fn(|number| {
                match self.slots.get(slot / PAGES * PAGES + PAGES + number).page {
                    [] => current.page.as_ptr(),
                    page => page.as_ptr(),
                }
            }),
            first_line: slot % PAGES * Self::LINES / PAGES,
            unpacked_keys: page(slot + 1),
            left: ptr::null(),
            key_sums: sums_of(turn),
            numbers: after(page(weighed), 2 * Self::SIDE).cast(),
            weighed_sums: sums_of(1 - turn),
            weighed,
            lanes: self.lanes.wrapping_add(self.slots.get(weighed).head * ALL * 2 * LANES),
            weighed_scaled: scaled_of(weighed % PAGES),
            unpacked_values: [ptr::null(); STEPS],
            scaled: [ptr::null(); STEPS],
            split: [ptr::null_mut(); STEPS],
            weights: [ptr::null(); STEPS],
            clear: multiplied.is_multiple_of(Self::PASS),
        };
        if !current.page.is_empty() {
            step.left = self.queries.left(0, current.head, &(0..ALL)).bytes.as_ptr();
        }
        for (index, number) in Self::value_pages(unpacked).into_iter().enumerate() {
            let first = Self::first_channel(unpacked);
            let page = page(unpacked / PAGES * PAGES + number);
            step.unpacked_values[index] = after(page, Self::SIDE + size_of::<u32>() * first);
            if !page.is_null() && first == 0 {
                step.scaled[index] = scaled_of(number);
                step.split[index] = weights_of(number);
            }
        }
        for (index, number) in Self::value_pages(multiplied).into_iter().enumerate() {
            if !page(multiplied / PAGES * PAGES + number).is_null() {
                step.weights[index] = weights_of(number);
            }
        }
        step
    }
}
