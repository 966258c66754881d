//! The pages of a call in the order of a stream.

use std::ops::Range;

use crate::cpu::attention::Work;
use crate::cpu::attention::sealed::run::PAGES;
use crate::cpu::attention::sealed::weigh::prefetch;

use super::{LAG, LINE};

/// The number of the first slot. A multiple of [`PAGES`], so that a slot's place in its run is what is left of its number,
/// and enough for a look back from it.
pub(super) const FIRST: usize = 2 * PAGES;

/// Slots ahead of the current one that are known: the rest of its run and the next run.
const AHEAD: usize = 2 * PAGES - 1;

/// Slots that are remembered: those ahead, and back to the first whose values may still be read. A power of two.
const REMEMBERED: usize = 16;

const _: () = assert!(AHEAD + 1 + LAG + PAGES / 2 <= REMEMBERED && LAG + PAGES / 2 <= FIRST);

/// A place for a page.
#[derive(Clone, Copy)]
pub(super) struct Slot<'a> {
    /// Empty if there is none: a run at either end of the stream may have fewer than [`PAGES`].
    pub(super) page: &'a [u8],
    pub(super) head: usize,
}

/// Runs of [`PAGES`] slots, for one head after the other. Runs begin where the sequence has a multiple of [`PAGES`], so that
/// a row's result does not depend on what other rows see.
pub(super) struct Slots<'a> {
    slots: [Slot<'a>; REMEMBERED],
    /// Whether remembered slots have a page, the last one lowest.
    filled: u32,
    work: &'a Work<'a, u8>,
    heads: usize,
    pages: Range<usize>,
    /// Of the run that is filled now.
    batch: usize,
    head: usize,
    /// The first slot that is not known yet.
    next: usize,
}

impl<'a> Slots<'a> {
    /// All `pages` (numbers in the sequence) of all heads. The first slots are known.
    pub(super) fn new(work: &'a Work<'a, u8>, heads: usize, pages: Range<usize>) -> Slots<'a> {
        let nothing = Slot { page: &[], head: 0 };
        let batch = pages.start / PAGES;
        let mut slots = Slots {
            slots: [nothing; REMEMBERED],
            filled: 0,
            work,
            heads,
            pages,
            batch,
            head: 0,
            next: FIRST,
        };
        (0..AHEAD).for_each(|_| slots.advance());
        slots
    }

    /// Asks for the pages of the first run, side by side.
    pub(super) fn ask_for_first_run(&self) {
        let pages: [&[u8]; PAGES] = std::array::from_fn(|number| self.get(FIRST + number).page);
        let longest = pages.iter().map(|page| page.len()).max().unwrap_or(0);
        for line in (0..longest).step_by(LINE) {
            pages.iter().for_each(|page| prefetch(page.as_ptr().wrapping_add(line), LINE.min(page.len())));
        }
    }

    /// One past the last slot.
    pub(super) fn end(&self) -> usize {
        FIRST + self.heads * PAGES * (self.pages.end.div_ceil(PAGES) - self.pages.start / PAGES)
    }

    pub(super) fn heads(&self) -> usize {
        self.heads
    }

    /// Makes one more slot known.
    #[inline(always)]
    pub(super) fn advance(&mut self) {
        let number = self.batch * PAGES + self.next % PAGES;
        let page = match self.pages.contains(&number) {
            true => self.work.pages[(number - self.work.first_page) * self.heads + self.head],
            false => &[],
        };
        self.slots[self.next % REMEMBERED] = Slot { page, head: self.head };
        self.filled = self.filled << 1 | u32::from(!page.is_empty());
        self.next += 1;
        if self.next.is_multiple_of(PAGES) {
            self.head += 1;
            if self.head == self.heads {
                (self.head, self.batch) = (0, self.batch + 1);
            }
        }
    }

    /// A known slot that is still remembered.
    #[inline(always)]
    pub(super) fn get(&self, slot: usize) -> Slot<'a> {
        debug_assert!(slot < self.next && slot + REMEMBERED >= self.next);
        self.slots[slot % REMEMBERED]
    }

    /// Whether the next slot, the current one and `back` before it all have pages.
    #[inline(always)]
    pub(super) fn are_filled(&self, back: usize) -> bool {
        let mask = (1 << (back + 2)) - 1;
        self.filled >> (AHEAD - 1) & mask == mask
    }
}
