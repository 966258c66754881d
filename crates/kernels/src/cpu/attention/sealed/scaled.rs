//! AMX: weights of a batch of pages, before they become bytes with one unit for all of them.

use std::arch::x86_64::*;

use oscar_codec::PAGE_TOKENS;

use super::engine::LANES;
use super::registers::{LARGER_MAGNITUDE, Page, REGISTERS, reduce_max, units};
use super::tiles::ROWS;
use super::weigh::{Shrinks, Sink};

/// Weights times scales of a batch.
pub(super) struct Scaled<'a> {
    /// The page that is weighed.
    pub(super) page: usize,
    pub(super) groups: usize,
    /// Rows there is room for.
    pub(super) rows: usize,
    /// `[page][group][rows][64 tokens]`.
    pub(super) numbers: &'a mut [f32],
    /// `[group][ROWS][LANES]`: the largest magnitudes so far.
    pub(super) largest: &'a mut [f32],
}

impl Scaled<'_> {
    /// The units of the rows of a group, and what their numbers are multiplied with to get integers.
    ///
    /// # Safety
    /// The CPU has AVX-512 F and VL.
    #[inline(always)]
    pub(super) unsafe fn units(&self, group: usize, rows: usize, steps: &mut [f32], inverses: &mut [f32]) {
        assert!(rows <= ROWS && steps.len() >= ROWS && inverses.len() >= ROWS);
        let largest = &self.largest[group * ROWS * LANES..][..ROWS * LANES];
        for first in (0..rows).step_by(4) {
            // SAFETY: rows `first..first + 4` are among `ROWS`, a multiple of four.
            unsafe {
                let row = |r: usize| _mm512_loadu_ps(largest.as_ptr().add((first + r) * LANES));
                let (step, inverse) = units(reduce_max([row(0), row(1), row(2), row(3)]));
                _mm_storeu_ps(steps.as_mut_ptr().add(first), step);
                _mm_storeu_ps(inverses.as_mut_ptr().add(first), inverse);
            }
        }
    }

    /// Makes the numbers of a row smaller, of all pages before the one that is weighed.
    pub(super) fn shrink_numbers(&mut self, row: usize, factor: f32) {
        for group in 0..self.groups {
            let largest = &mut self.largest[(group * ROWS + row) * LANES..][..LANES];
            largest.iter_mut().for_each(|number| *number *= factor);
            for page in 0..self.page {
                let at = ((page * self.groups + group) * self.rows + row) * PAGE_TOKENS;
                self.numbers[at..][..PAGE_TOKENS].iter_mut().for_each(|number| *number *= factor);
            }
        }
    }
}

impl Sink for Scaled<'_> {
    #[inline(always)]
    unsafe fn take<const R: usize>(
        &mut self,
        group: usize,
        first: usize,
        scaled: [Page; R],
        largest: [__m512; R],
    ) {
        let at = (self.page * self.groups + group) * self.rows + first;
        let numbers = &mut self.numbers[at * PAGE_TOKENS..][..R * PAGE_TOKENS];
        let kept = &mut self.largest[(group * ROWS + first) * LANES..][..R * LANES];
        for r in 0..R {
            // SAFETY: the caller's promises, and the lengths above.
            unsafe {
                for j in 0..REGISTERS {
                    _mm512_storeu_ps(numbers.as_mut_ptr().add(r * PAGE_TOKENS + j * LANES), scaled[r][j]);
                }
                let kept = kept.as_mut_ptr().add(r * LANES);
                let larger = _mm512_range_ps::<LARGER_MAGNITUDE>(_mm512_loadu_ps(kept), largest[r]);
                _mm512_storeu_ps(kept, larger);
            }
        }
    }
}

impl Shrinks for Scaled<'_> {
    fn shrink(&mut self, row: usize, factor: f32, values: &mut [f32]) {
        self.shrink_numbers(row, factor);
        values.iter_mut().for_each(|value| *value *= factor);
    }
}
