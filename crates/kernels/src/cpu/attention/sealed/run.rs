//! AMX: the pages that are read together, and how the next ones are asked for meanwhile.

use std::ops::Range;

use oscar_codec::PAGE_TOKENS;

use super::batch::sees;
use super::weigh;
use crate::cpu::attention::Work;

/// Pages of a batch.
pub(super) const PAGES: usize = 4;

/// Parts in which a page is asked for.
const PARTS: usize = 8;

/// Bytes of a cache line.
const LINE: usize = 64;

/// Pages of a batch for one head.
pub(super) struct Run<'a> {
    pub(super) head: usize,
    /// Of the sequence.
    pub(super) numbers: Range<usize>,
    /// As many as there are numbers.
    pub(super) pages: [&'a [u8]; PAGES],
    pub(super) work: &'a Work<'a, u8>,
}

impl<'a> Run<'a> {
    /// No pages.
    pub(super) fn new(work: &'a Work<'a, u8>) -> Run<'a> {
        Run { head: 0, numbers: 0..0, pages: [&[]; PAGES], work }
    }

    /// Makes it a run of other pages. In place: a copy of what was just written waits until all of it has left the queue
    /// of stores, which is long here.
    #[inline(always)]
    pub(super) fn set(&mut self, heads: usize, head: usize, numbers: Range<usize>) {
        for (page, number) in self.pages.iter_mut().zip(numbers.clone()) {
            *page = self.work.pages[(number - self.work.first_page) * heads + head];
        }
        (self.head, self.numbers) = (head, numbers);
    }

    pub(super) fn len(&self) -> usize {
        self.numbers.len()
    }

    /// Position of the first token of a page.
    pub(super) fn start(&self, page: usize) -> usize {
        (self.numbers.start + page) * PAGE_TOKENS
    }

    /// Whether some rows see all of these pages.
    pub(super) fn is_seen_by(&self, rows: &Range<usize>) -> bool {
        sees(&self.work.spans[rows.clone()], &self.numbers)
    }

    /// Asks for one of [`PARTS`] parts of a page.
    ///
    /// All lines at once would fill the queue for them and stop everything else. In a plain loop of such reads and some
    /// arithmetic, pages from memory then took 40 ns longer than from the cache, and 15 with a few lines here and there.
    #[inline(always)]
    pub(super) fn fetch(&self, page_bytes: usize, page: usize, part: usize) {
        if page < self.len() {
            let len = page_bytes.div_ceil(PARTS).next_multiple_of(LINE);
            weigh::prefetch(self.pages[page].as_ptr().wrapping_add(part * len), len);
        }
    }

    /// Asks for all pages from `first` on.
    pub(super) fn fetch_from(&self, first: usize) {
        let pages = self.pages.get(first..self.len()).unwrap_or_default();
        pages.iter().for_each(|page| weigh::prefetch(page.as_ptr(), page.len()));
    }
}
