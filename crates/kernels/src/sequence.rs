//! The sequences of a step with their page tables, checked against a cache once. Devices share this.

use std::ops::Range;

use oscar_codec::{ExactSlot, PAGE_TOKENS, PageWindows, SealedSlot};

use crate::backend::{Batch, CacheSpec, KernelError, Rope, SequenceRows};

/// Rows of one sequence inside a step.
pub(crate) struct StepSequence {
    /// First row of the batch that belongs to it.
    pub(crate) first_row: usize,
    /// Position of that row in the sequence.
    pub(crate) start: usize,
    /// How many rows there are.
    pub(crate) len: usize,
    /// Slots of bf16 pages.
    pub(crate) pages: Vec<Option<ExactSlot>>,
    /// What is read from sealed pages.
    sealed: Option<SealedTable>,
}

/// The sealed side of a page table.
struct SealedTable {
    pages: Vec<Option<SealedSlot>>,
    windows: PageWindows,
    exact_from: usize,
    sealed_until: usize,
    /// The pages are of the second codec.
    high: bool,
}

/// The sequences of a batch. Every page they read is there, and no page is written by two of them.
pub(crate) fn step_sequences(
    batch: &Batch<'_>,
    rope: &Rope,
    spec: &CacheSpec,
) -> Result<Vec<StepSequence>, KernelError> {
    let shape = |what, expected, got| Err(KernelError::Shape { what, expected, got });
    let rows: usize = batch.sequences.iter().map(|sequence| sequence.len).sum();
    if rows != batch.tokens.len() {
        return shape("tokens of a batch", rows, batch.tokens.len());
    }
    let rotary = 2 * rope.inverse_frequencies.len();
    if rotary > spec.geometry.head_dim {
        return shape("rotary channels, at most the head", spec.geometry.head_dim, rotary);
    }
    let mut sequences: Vec<StepSequence> = Vec::with_capacity(batch.sequences.len());
    let mut written: Vec<ExactSlot> = Vec::new();
    let mut first_row = 0;
    for rows in batch.sequences {
        let sequence = StepSequence::new(rows, first_row, spec)?;
        first_row += rows.len;
        written.extend(sequence.pages[sequence.written_pages()].iter().flatten());
        sequences.push(sequence);
    }
    written.sort_unstable();
    match written.windows(2).find(|pair| pair[0] == pair[1]) {
        Some(pair) => Err(KernelError::PageWrittenTwice { slot: pair[0].number() }),
        None => Ok(sequences),
    }
}

impl StepSequence {
    fn new(rows: &SequenceRows<'_>, first_row: usize, spec: &CacheSpec) -> Result<StepSequence, KernelError> {
        let needed = (rows.start + rows.len).div_ceil(PAGE_TOKENS);
        let pages = table(rows.pages, needed, spec.exact_slots(), ExactSlot::table_entry)?;
        let sealed = match (rows.sealed, &spec.sealed) {
            (Some(sealed), Some(spec)) => {
                let pages = table(sealed.pages, needed, spec.all_slots(), SealedSlot::table_entry)?;
                let mut high = pages.iter().flatten().map(|slot| slot.index() >= spec.slots);
                let first = high.next();
                if high.any(|high| Some(high) != first) {
                    return Err(KernelError::BadSetting(
                        "sealed pages of a sequence are of two codecs".to_owned(),
                    ));
                }
                Some(SealedTable {
                    pages,
                    windows: spec.windows,
                    exact_from: sealed.exact_from,
                    sealed_until: sealed.sealed_until,
                    high: first == Some(true),
                })
            }
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

    /// [`Self::check_readable`] of a layer in which a row sees `window` positions, all of them in bf16.
    pub(crate) fn check_window(&self, window: usize) -> Result<(), KernelError> {
        if self.len == 0 || self.pages.iter().all(Option::is_none) {
            return Ok(());
        }
        let first = (self.start + 1).saturating_sub(window) / PAGE_TOKENS;
        match (first..self.pages.len()).find(|&page| self.pages[page].is_none()) {
            Some(page) => Err(KernelError::PageMissing { page, tier: "the bf16 pool" }),
            None => Ok(()),
        }
    }

    /// Pages that queries of page `query_page` read sealed; all others up to their own are read exactly. Empty at 0
    /// if there are none.
    fn history_of_page(&self, query_page: usize) -> Range<usize> {
        let Some(sealed) = &self.sealed else { return 0..0 };
        let history = sealed.windows.history(query_page, sealed.exact_from, sealed.sealed_until);
        if history.is_empty() { 0..0 } else { history }
    }

    /// [`Self::history_of_page`] of the query at `position`.
    pub(crate) fn history(&self, position: usize) -> Range<usize> {
        self.history_of_page(position / PAGE_TOKENS)
    }

    /// Whether the query at `position` reads sealed pages of the second codec.
    pub(crate) fn reads_high(&self, position: usize) -> bool {
        self.sealed.as_ref().is_some_and(|sealed| sealed.high) && !self.history(position).is_empty()
    }

    /// Sealed slots of pages that are read sealed.
    pub(crate) fn sealed_slots(&self, pages: Range<usize>) -> &[Option<SealedSlot>] {
        self.sealed.as_ref().map_or(&[], |sealed| &sealed.pages[pages])
    }

    /// Sealed slots of all pages.
    pub(crate) fn all_sealed_slots(&self) -> &[Option<SealedSlot>] {
        self.sealed.as_ref().map_or(&[], |sealed| &sealed.pages)
    }

    /// Pages that this step writes to.
    pub(crate) fn written_pages(&self) -> Range<usize> {
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

#[cfg(test)]
mod tests {
    use oscar_codec::{KvGeometry, PageCodec};

    use super::*;
    use crate::backend::{HighSpec, RopeLayout, SealedRows, SealedSpec};

    #[test]
    fn sealed_pages_of_a_sequence_are_of_one_codec() {
        let geometry = KvGeometry { layers: 1, kv_heads: 1, head_dim: 16 };
        let codec = std::sync::Arc::new(PageCodec::fp8(geometry, None).unwrap());
        let mut spec = CacheSpec::exact(geometry, 1, 8);
        spec.sealed = Some(SealedSpec {
            codec: codec.clone(),
            slots: 4,
            windows: PageWindows { sink: 0, recent: 0 },
            sequence_pages: 3,
            high: Some(HighSpec { codec, slots: 3 }),
        });
        let rope = Rope { inverse_frequencies: vec![1.0; 2], magnitude: 1.0, layout: RopeLayout::Halves };
        let exact = ExactSlot::first(4);
        for (slots, fits) in
            [([1, 2], true), ([5, 6], true), ([1, 5], false), ([6, 2], false), ([5, 7], false)]
        {
            let mut pages: Vec<_> = slots.map(SealedSlot::new).to_vec();
            pages.push(None);
            let sealed = SealedRows { pages: &pages, exact_from: usize::MAX, sealed_until: 0 };
            let rows = SequenceRows { start: 130, len: 1, pages: &exact, sealed: Some(sealed) };
            let batch = Batch { tokens: &[0], sequences: &[rows] };
            assert_eq!(step_sequences(&batch, &rope, &spec).is_ok(), fits, "{slots:?}");
        }
    }

    #[test]
    fn a_page_is_written_by_one_sequence_and_by_none_without_rows() {
        let geometry = KvGeometry { layers: 1, kv_heads: 1, head_dim: 4 };
        let spec = CacheSpec::exact(geometry, 1, 3);
        let rope = Rope { inverse_frequencies: vec![1.0; 2], magnitude: 1.0, layout: RopeLayout::Halves };
        for (len, fits) in [(0, true), (1, false)] {
            let pages = ExactSlot::first(1);
            let other = SequenceRows::exact(6, 1, &pages);
            let sequences = [SequenceRows::exact(5, len, &pages), other];
            let batch = Batch { tokens: &vec![0; len + 1], sequences: &sequences };
            assert_eq!(step_sequences(&batch, &rope, &spec).is_ok(), fits, "{len} rows");
        }
    }
}
