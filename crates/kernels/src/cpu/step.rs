//! Tables that hold for a whole step, checked against the cache once.

use std::ops::Range;

use oscar_codec::{ExactSlot, PAGE_TOKENS, PageWindows, SealedSlot};

use super::attend::PlanCell;
use super::cache::Cache;
use crate::backend::{Batch, KernelError, Rope, RopeLayout, SequenceRows};

/// Tables that hold for a whole step.
pub struct Step {
    pub(super) tokens: Vec<u32>,
    pub(super) sequences: Vec<StepSequence>,
    /// Rotary pairs per head.
    pub(super) pairs: usize,
    pub(super) layout: RopeLayout,
    /// Cosines and sines, `pairs` per row.
    pub(super) cos: Vec<f32>,
    pub(super) sin: Vec<f32>,
    /// How attention is cut.
    pub(super) plan: PlanCell,
}

/// Rows of one sequence inside a step.
pub(super) struct StepSequence {
    pub(super) first_row: usize,
    pub(super) start: usize,
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
    fn new(rows: &SequenceRows<'_>, first_row: usize, cache: &Cache) -> Result<StepSequence, KernelError> {
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

impl Step {
    pub(super) fn new(batch: &Batch<'_>, rope: &Rope, cache: &Cache) -> Result<Step, KernelError> {
        let geometry = cache.spec().geometry;
        let rows: usize = batch.sequences.iter().map(|sequence| sequence.len).sum();
        if rows != batch.tokens.len() {
            return Err(KernelError::Shape {
                what: "tokens of a batch",
                expected: rows,
                got: batch.tokens.len(),
            });
        }
        let pairs = rope.inverse_frequencies.len();
        if 2 * pairs > geometry.head_dim {
            return Err(KernelError::Shape {
                what: "rotary channels, at most the head",
                expected: geometry.head_dim,
                got: 2 * pairs,
            });
        }
        let mut step = Step {
            tokens: batch.tokens.to_vec(),
            sequences: Vec::with_capacity(batch.sequences.len()),
            pairs,
            layout: rope.layout,
            cos: Vec::with_capacity(rows * pairs),
            sin: Vec::with_capacity(rows * pairs),
            plan: PlanCell::default(),
        };
        let mut written: Vec<ExactSlot> = Vec::new();
        let mut first_row = 0;
        for rows in batch.sequences {
            let sequence = StepSequence::new(rows, first_row, cache)?;
            for position in rows.start..rows.start + rows.len {
                for frequency in &rope.inverse_frequencies {
                    let (sin, cos) = (position as f32 * frequency).sin_cos();
                    step.cos.push(cos * rope.magnitude);
                    step.sin.push(sin * rope.magnitude);
                }
            }
            first_row += rows.len;
            let slots = &sequence.pages[sequence.written_pages()];
            written.extend(slots.iter().flatten());
            step.sequences.push(sequence);
        }
        written.sort_unstable();
        if let Some(pair) = written.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(KernelError::PageWrittenTwice { slot: pair[0].number() });
        }
        let slots = cache.spec().slots;
        let exact = step.sequences.iter().flat_map(|sequence| sequence.pages.iter().flatten());
        let exact = exact.map(|slot| slot.index() + 1).filter(|&end| end <= slots);
        let sealed = step.sequences.iter().filter_map(|sequence| sequence.sealed.as_ref());
        let sealed = sealed.flat_map(|table| table.pages.iter().flatten()).map(|slot| slot.index() + 1);
        cache.settle(exact.max().unwrap_or(0), sealed.max().unwrap_or(0));
        Ok(step)
    }

    pub(super) fn rows(&self) -> usize {
        self.tokens.len()
    }
}

#[cfg(test)]
mod tests {
    use oscar_codec::KvGeometry;

    use super::*;
    use crate::backend::{CacheSpec, RopeLayout};
    use crate::cpu::isa::Isa;

    #[test]
    fn a_page_is_written_by_one_sequence_and_by_none_without_rows() {
        let geometry = KvGeometry { layers: 1, kv_heads: 1, head_dim: 4 };
        let spec = CacheSpec { geometry, slots: 3, scratch_slots: 0, sealed: None };
        let cache = Cache::new(Isa::Scalar, &spec).unwrap();
        let rope = Rope { inverse_frequencies: vec![1.0; 2], magnitude: 1.0, layout: RopeLayout::Halves };
        for (len, fits) in [(0, true), (1, false)] {
            let pages = ExactSlot::first(1);
            let other = SequenceRows::exact(6, 1, &pages);
            let sequences = [SequenceRows::exact(5, len, &pages), other];
            let batch = Batch { tokens: &vec![0; len + 1], sequences: &sequences };
            assert_eq!(Step::new(&batch, &rope, &cache).is_ok(), fits, "{len} rows");
        }
    }
}
