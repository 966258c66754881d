//! Page tables of one sequence of a step, checked against the cache once.

use std::ops::Range;

use oscar_codec::{ExactSlot, PAGE_TOKENS, PageWindows, SealedSlot};

use super::cache::Cache;
use crate::backend::{KernelError, SequenceRows};

/// Rows of one sequence inside a step.
pub(super) struct StepSequence {
    /// First row of the batch that belongs to it.
    pub(super) first_row: usize,
    /// Position of that row in the sequence.
    pub(super) start: usize,
    /// How many rows there are.
    pub(super) len: usize,
    /// Slots of bf16 pages.
    pub(super) pages: Vec<Option<ExactSlot>>,
    /// What is read from sealed pages.
    sealed: Option<SealedTable>,
}

/// The sealed side of a page table.
struct SealedTable {
    pages: Vec<Option<SealedSlot>>,
    windows: PageWindows,
    exact_from: usize,
    sealed_until: usize,
}

impl StepSequence {
    pub(super) fn new(
        rows: &SequenceRows<'_>,
        first_row: usize,
        cache: &Cache,
    ) -> Result<StepSequence, KernelError> {
        let needed = (rows.start + rows.len).div_ceil(PAGE_TOKENS);
        let pages = table(rows.pages, needed, cache.exact_slots(), ExactSlot::table_entry)?;
        let sealed = match (rows.sealed, &cache.spec().sealed) {
            (Some(sealed), Some(spec)) => Some(SealedTable {
                pages: table(sealed.pages, needed, spec.slots, SealedSlot::table_entry)?,
                windows: spec.windows,
                exact_from: sealed.exact_from,
                sealed_until: sealed.sealed_until,
            }),
            (Some(_), None) => return Err(KernelError::PageMissing { page: 0, tier: "the sealed pool" }),
            (None, _) => None,
        };
        let sequence = StepSequence { first_row, start: rows.start, len: rows.len, pages, sealed };
        sequence.check_readable()?;
        Ok(sequence)
    }

    /// A page that is read must be there: the dummy would be read as garbage without a word.
    fn check_readable(&self) -> Result<(), KernelError> {
        let padded = self.pages.iter().all(Option::is_none);
        if self.len == 0 || (padded && self.sealed.is_none()) {
            return Ok(());
        }
        let last = self.start + self.len - 1;
        let mut previous = None;
        for query_page in self.start / PAGE_TOKENS..=last / PAGE_TOKENS {
            let history = self.history_of_page(query_page);
            // Neighbouring pages of queries read almost the same; look at what changed.
            if previous.as_ref() == Some(&history) {
                continue;
            }
            if let Some(sealed) = &self.sealed {
                let missing = history.clone().find(|&page| sealed.pages[page].is_none());
                if let Some(page) = missing {
                    return Err(KernelError::PageMissing { page, tier: "the sealed pool" });
                }
            }
            let exact = (0..history.start).chain(history.end..query_page + 1);
            if let Some(page) = exact.into_iter().find(|&page| self.pages[page].is_none()) {
                return Err(KernelError::PageMissing { page, tier: "the bf16 pool" });
            }
            previous = Some(history);
        }
        Ok(())
    }

    /// Pages that queries of page `query_page` read sealed; all others up to their own are read exactly. Empty at 0
    /// if there are none.
    fn history_of_page(&self, query_page: usize) -> Range<usize> {
        let Some(sealed) = &self.sealed else { return 0..0 };
        let history = sealed.windows.history(query_page, sealed.exact_from, sealed.sealed_until);
        if history.is_empty() { 0..0 } else { history }
    }

    /// [`Self::history_of_page`] of the query at `position`.
    pub(super) fn history(&self, position: usize) -> Range<usize> {
        self.history_of_page(position / PAGE_TOKENS)
    }

    /// Sealed slots of pages that are read sealed.
    pub(super) fn sealed_slots(&self, pages: Range<usize>) -> &[Option<SealedSlot>] {
        self.sealed.as_ref().map_or(&[], |sealed| &sealed.pages[pages])
    }

    /// Sealed slots of all pages.
    pub(super) fn all_sealed_slots(&self) -> &[Option<SealedSlot>] {
        self.sealed.as_ref().map_or(&[], |sealed| &sealed.pages)
    }

    /// Pages that this step writes to.
    pub(super) fn written_pages(&self) -> Range<usize> {
        let first = self.start / PAGE_TOKENS;
        let end = if self.len == 0 { first } else { (self.start + self.len).div_ceil(PAGE_TOKENS) };
        first..end
    }
}

/// The first `needed` slots of a page table, each inside its pool.
fn table<Slot: Copy>(
    pages: &[Option<Slot>],
    needed: usize,
    slots: usize,
    entry: impl Fn(Option<Slot>) -> u32,
) -> Result<Vec<Option<Slot>>, KernelError> {
    let Some(pages) = pages.get(..needed) else {
        return Err(KernelError::Shape { what: "pages of a sequence", expected: needed, got: pages.len() });
    };
    if let Some(slot) = pages.iter().map(|&slot| entry(slot)).find(|&slot| slot as usize >= slots) {
        return Err(KernelError::PageOutOfRange { slot, slots });
    }
    Ok(pages.to_vec())
}
