//! References that rise while sums of values are still on their way.
//!
//! When the reference of a row rises, everything summed before shrinks. Values of a run are added some steps after the runs
//! that follow it have been weighed, so they shrink when they have arrived: in the order, and with the rounding, of reading
//! one run after the other.

use super::slots::FIRST;
use crate::cpu::attention::sealed::run::PAGES;
use crate::cpu::attention::sealed::scaled::Scaled;
use crate::cpu::attention::sealed::weigh::Shrinks;

use super::STEP;

/// A rise that values have not followed yet.
struct Rise {
    /// In which it happened.
    run: usize,
    row: usize,
    first_channel: usize,
    factor: f32,
}

/// How far values have come, and what they have to follow.
pub(super) struct Late {
    rises: Vec<Rise>,
    /// The first run whose values are still on their way, for each pass.
    next: [usize; 2],
}

impl Default for Late {
    fn default() -> Self {
        Late { rises: Vec::new(), next: [FIRST / PAGES; 2] }
    }
}

impl Late {
    /// The values of a run have been added for the channels of a pass.
    #[inline(always)]
    pub(super) fn added(&mut self, run: usize, heads: usize, first: usize, d: usize, values: &mut [f32]) {
        self.next[first / STEP] = run + 1;
        if !self.rises.is_empty() {
            self.follow(run + heads, first, d, values);
        }
    }

    #[cold]
    fn follow(&mut self, run: usize, first: usize, d: usize, values: &mut [f32]) {
        self.rises.retain(|rise| {
            let due = rise.run == run && rise.first_channel == first;
            if due {
                shrink(values, rise.row * d + first, rise.factor);
            }
            !due
        });
    }
}

/// What shrinks when a row of a run follows its logits.
pub(super) struct OnTheWay<'s, 'a> {
    pub(super) scaled: Scaled<'a>,
    pub(super) late: &'s mut Late,
    pub(super) run: usize,
    pub(super) heads: usize,
}

impl Shrinks for OnTheWay<'_, '_> {
    fn shrink(&mut self, row: usize, factor: f32, values: &mut [f32]) {
        self.scaled.shrink_numbers(row, factor);
        for first_channel in (0..values.len()).step_by(STEP) {
            // The values of this head's run before are still on their way.
            if self.run >= self.late.next[first_channel / STEP] + self.heads {
                self.late.rises.push(Rise { run: self.run, row, first_channel, factor });
            } else {
                shrink(values, first_channel, factor);
            }
        }
    }
}

/// Multiplies the values of a pass.
fn shrink(values: &mut [f32], first: usize, factor: f32) {
    values[first..first + STEP].iter_mut().for_each(|value| *value *= factor);
}
