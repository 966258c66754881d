//! The tables of one step, checked against the cache, and the rule of visibility.

use oscar_codec::{PAGE_TOKENS, PageWindows};
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

/// Rows of one sequence.
#[derive(Debug)]
pub(super) struct Sequence {
    start: usize,
    len: usize,
    pages: Vec<u32>,
    sealed: Option<Sealed>,
}

#[derive(Debug)]
struct Sealed {
    pages: Vec<u32>,
    windows: PageWindows,
    exact_from: usize,
    sealed_until: usize,
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
        let mut written: Vec<u32> = sequences.iter().flat_map(Sequence::written_slots).collect();
        written.sort_unstable();
        if let Some(pair) = written.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(KernelError::PageWrittenTwice { slot: pair[0] });
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
        let table = |pages: &[u32]| {
            let got = pages.len();
            let short = KernelError::Shape { what: "pages of a sequence", expected: needed, got };
            pages.get(..needed).map(<[u32]>::to_vec).ok_or(short)
        };
        let sealed = match (rows.sealed, cache.windows) {
            (None, _) => None,
            (Some(_), None) => return Err(KernelError::PageMissing { page: 0, tier: "the sealed pool" }),
            (Some(sealed), Some(windows)) => Some(Sealed {
                pages: table(sealed.pages)?,
                windows,
                exact_from: sealed.exact_from,
                sealed_until: sealed.sealed_until,
            }),
        };
        let sequence = Sequence { start: rows.start, len: rows.len, pages: table(rows.pages)?, sealed };
        // Whatever any row reads must be there.
        let last_page = (rows.start + rows.len).saturating_sub(1) / PAGE_TOKENS;
        for query_page in rows.start / PAGE_TOKENS..=last_page {
            for page in 0..=query_page {
                match sequence.sealed_slot(page, query_page) {
                    Some(slot) => check_slot(slot, cache.sealed_slots()),
                    None => check_slot(sequence.pages[page], cache.exact_slots()),
                }
                .map_err(|error| match error {
                    KernelError::PageMissing { .. } => KernelError::PageMissing { page, tier: "a sequence" },
                    error => error,
                })?;
            }
        }
        Ok(sequence)
    }

    /// The sealed slot from which a query in `query_page` reads `page`; `None` if it reads the bf16 page.
    fn sealed_slot(&self, page: usize, query_page: usize) -> Option<u32> {
        let Sealed { pages, windows, exact_from, sealed_until } = self.sealed.as_ref()?;
        // A second telling of `PageWindows::history`, so that a mistake in one of them shows.
        let in_window = page + windows.recent >= query_page || page >= *exact_from;
        let reads_sealed = page >= windows.sink && page < query_page && (!in_window || page < *sealed_until);
        reads_sealed.then(|| pages[page])
    }

    fn written_slots(&self) -> impl Iterator<Item = u32> {
        let first = self.start / PAGE_TOKENS;
        let end = if self.len == 0 { first } else { (self.start + self.len).div_ceil(PAGE_TOKENS) };
        self.pages[first..end].iter().copied()
    }

    pub(super) fn store(&self, layer: usize, position: usize, row: u64, cache: &mut HashCache) {
        cache.store(layer, self.pages[position / PAGE_TOKENS], position % PAGE_TOKENS, row);
    }

    /// The hash of everything that a query at `position` may see.
    pub(super) fn visible(&self, layer: usize, position: usize, cache: &HashCache) -> u64 {
        let query_page = position / PAGE_TOKENS;
        (0..=query_page).fold(mix(7, position as u64), |hash, page| {
            let rows = if page < query_page { PAGE_TOKENS } else { position % PAGE_TOKENS + 1 };
            mix(
                hash,
                match self.sealed_slot(page, query_page) {
                    Some(slot) => cache.sealed(layer, slot),
                    None => cache.exact(layer, self.pages[page], rows),
                },
            )
        })
    }
}
