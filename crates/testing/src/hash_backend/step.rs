//! The tables of one step, checked against the cache, and the rule of visibility.

use oscar_codec::{ExactSlot, PAGE_TOKENS, PageWindows, SealedSlot};
use oscar_kernels::KernelError;
use oscar_kernels::backend::{Batch, SequenceRows};

use super::cache::{HashCache, check_slot};
use super::mix;

/// The tokens and page tables of one step.
#[derive(Debug)]
pub struct HashStep {
    pub(super) tokens: Vec<u32>,
    sequences: Vec<Sequence>,
}

/// The rows of a step that belong to one sequence.
#[derive(Debug)]
pub(super) struct Sequence {
    start: usize,
    len: usize,
    pages: Vec<Option<ExactSlot>>,
    sealed: Option<Sealed>,
}

#[derive(Debug)]
struct Sealed {
    pages: Vec<Option<SealedSlot>>,
    windows: PageWindows,
    exact_from: usize,
    sealed_until: usize,
}

/// Where a query reads a page.
enum Source {
    Exact(ExactSlot),
    Sealed(SealedSlot),
}

impl HashStep {
    pub(super) fn new(batch: &Batch<'_>, cache: &HashCache) -> Result<HashStep, KernelError> {
        let rows: usize = batch.sequences.iter().map(|sequence| sequence.len).sum();
        if rows != batch.tokens.len() {
            let got = batch.tokens.len();
            return Err(KernelError::Shape { what: "tokens of a batch", expected: rows, got });
        }
        let sequences: Vec<Sequence> =
            batch.sequences.iter().map(|rows| Sequence::new(rows, cache)).collect::<Result<_, _>>()?;
        let mut written: Vec<ExactSlot> = sequences.iter().flat_map(Sequence::written_slots).collect();
        written.sort_unstable();
        if let Some(pair) = written.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(KernelError::PageWrittenTwice { slot: pair[0].number() });
        }
        Ok(HashStep { tokens: batch.tokens.to_vec(), sequences })
    }

    /// Calls `f` with every row of the step, its sequence and its position.
    pub(super) fn for_each_row(&self, mut f: impl FnMut(usize, &Sequence, usize)) {
        let mut row = 0;
        for sequence in &self.sequences {
            for position in sequence.start..sequence.start + sequence.len {
                f(row, sequence, position);
                row += 1;
            }
        }
    }
}

impl Sequence {
    fn new(rows: &SequenceRows<'_>, cache: &HashCache) -> Result<Sequence, KernelError> {
        let needed = (rows.start + rows.len).div_ceil(PAGE_TOKENS);
        let sealed = match (rows.sealed, cache.windows) {
            (None, _) => None,
            (Some(_), None) => return Err(KernelError::PageMissing { page: 0, tier: "the sealed pool" }),
            (Some(sealed), Some(windows)) => Some(Sealed {
                pages: table(sealed.pages, needed)?,
                windows,
                exact_from: sealed.exact_from,
                sealed_until: sealed.sealed_until,
            }),
        };
        let pages = table(rows.pages, needed)?;
        let sequence = Sequence { start: rows.start, len: rows.len, pages, sealed };
        // Whatever any row reads must be there.
        let last_page = (rows.start + rows.len).saturating_sub(1) / PAGE_TOKENS;
        for query_page in rows.start / PAGE_TOKENS..=last_page {
            for page in 0..=query_page {
                match sequence.source(page, query_page) {
                    Some(Source::Exact(slot)) => check_slot(slot.number(), cache.exact_slots())?,
                    Some(Source::Sealed(slot)) => check_slot(slot.number(), cache.sealed_slots())?,
                    None => return Err(KernelError::PageMissing { page, tier: "a sequence" }),
                }
            }
        }
        Ok(sequence)
    }

    /// Where a query in `query_page` reads `page`; `None` if the page is not there.
    fn source(&self, page: usize, query_page: usize) -> Option<Source> {
        let exact = || self.pages[page].map(Source::Exact);
        let Some(Sealed { pages, windows, exact_from, sealed_until }) = &self.sealed else { return exact() };
        // A second telling of `PageWindows::history`, so that a mistake in one of them shows.
        let in_window = page + windows.recent >= query_page || page >= *exact_from;
        let reads_sealed = page >= windows.sink && page < query_page && (!in_window || page < *sealed_until);
        if reads_sealed { pages[page].map(Source::Sealed) } else { exact() }
    }

    fn written_slots(&self) -> impl Iterator<Item = ExactSlot> {
        let first = self.start / PAGE_TOKENS;
        let end = if self.len == 0 { first } else { (self.start + self.len).div_ceil(PAGE_TOKENS) };
        self.pages[first..end].iter().copied().flatten()
    }

    pub(super) fn store(&self, layer: usize, position: usize, row: u64, cache: &mut HashCache) {
        let slot = self.pages[position / PAGE_TOKENS].expect("checked when the step began");
        cache.store(layer, slot, position % PAGE_TOKENS, row);
    }

    /// The hash of everything that a query at `position` may see.
    pub(super) fn visible(&self, layer: usize, position: usize, cache: &HashCache) -> u64 {
        let query_page = position / PAGE_TOKENS;
        (0..=query_page).fold(mix(7, position as u64), |hash, page| {
            let rows = if page < query_page { PAGE_TOKENS } else { position % PAGE_TOKENS + 1 };
            let seen = match self.source(page, query_page).expect("checked when the step began") {
                Source::Exact(slot) => cache.exact(layer, slot, rows),
                Source::Sealed(slot) => cache.sealed(layer, slot),
            };
            mix(hash, seen)
        })
    }
}

impl Sequence {
    /// The hash of the last `window` positions up to `position`, all in bf16; else the page that is not there.
    pub(super) fn visible_window(
        &self,
        layer: usize,
        position: usize,
        window: usize,
        cache: &HashCache,
    ) -> Result<u64, usize> {
        let first = (position + 1).saturating_sub(window);
        (first / PAGE_TOKENS..=position / PAGE_TOKENS).try_fold(mix(9, position as u64), |hash, page| {
            let start = page * PAGE_TOKENS;
            let rows = first.saturating_sub(start)..(position + 1 - start).min(PAGE_TOKENS);
            let slot = self.pages[page].ok_or(page)?;
            Ok(mix(hash, cache.exact_rows(layer, slot, rows)))
        })
    }
}

/// The first `needed` entries of a page table.
fn table<Slot: Copy>(pages: &[Option<Slot>], needed: usize) -> Result<Vec<Option<Slot>>, KernelError> {
    let got = pages.len();
    let short = KernelError::Shape { what: "pages of a sequence", expected: needed, got };
    pages.get(..needed).map(<[Option<Slot>]>::to_vec).ok_or(short)
}
