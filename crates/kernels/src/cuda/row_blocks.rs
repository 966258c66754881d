//! The rows of a step that has several of a sequence, cut into blocks of neighbouring rows, and their page tables.

use std::ops::Range;

use bytemuck::{Pod, Zeroable};
use oscar_codec::{ExactSlot, PAGE_TOKENS, SealedSlot};

use super::plan::cover;
use crate::error::CudaError;

/// Neighbouring rows of one sequence; the kernel's `Item`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub(super) struct Item {
    table: i32,
    pages: i32,
    first_row: i32,
    first_position: i32,
    tokens: i32,
    least_end: i32,
    most_end: i32,
    padding: i32,
}

#[cfg(test)]
impl Item {
    /// Its rows of the batch, with their positions.
    pub(super) fn rows(self) -> impl Iterator<Item = (usize, usize)> {
        (0..self.tokens)
            .map(move |token| ((self.first_row + token) as usize, (self.first_position + token) as usize))
    }

    /// Where the tables have the slot of a page.
    pub(super) fn entry(self, page: usize, sealed: bool) -> usize {
        self.table as usize + if sealed { self.pages as usize } else { 0 } + page
    }
}

/// Rows of one sequence, as attention of many rows takes them.
#[derive(Clone, Debug)]
pub struct PrefillSequence<'a> {
    /// Row of the batch of the first one; they ascend, and what becomes of rows between them is not the plan's matter.
    pub first_row: usize,
    /// The position of the first row.
    pub start: usize,
    /// Slots of bf16 pages, up to the page of the last row.
    pub exact: &'a [Option<ExactSlot>],
    /// Slots of sealed pages.
    pub sealed: &'a [Option<SealedSlot>],
    /// Of each row: positions from the sink up to here are read from sealed pages, all others up to its own from bf16 pages.
    pub ends: Vec<usize>,
}

/// What the kernel reads of a step.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct RowBlocks {
    pub(super) items: Vec<Item>,
    /// The page tables of all sequences: bf16 slots, then as many sealed slots.
    pub(super) tables: Vec<u32>,
    /// Of each row of the batch: where its history ends.
    pub(super) ends: Vec<i32>,
    /// Slots from the first to the last that is named: of bf16 pages, of sealed ones.
    pub(super) slots: [Range<usize>; 2],
    /// Pages of the longest history, those of the sink included.
    pub(super) history_pages: usize,
}

impl RowBlocks {
    /// Cuts the rows of all sequences into blocks of up to `at_once`.
    pub(super) fn new(sequences: &[PrefillSequence<'_>], at_once: usize) -> Result<RowBlocks, CudaError> {
        let RowBlocks { mut items, mut tables, mut ends, mut slots, mut history_pages } =
            RowBlocks::default();
        let small = |number: usize| i32::try_from(number).unwrap_or(i32::MAX);
        for sequence in sequences {
            let (table, pages) = (tables.len(), sequence.exact.len());
            let needed = (sequence.start + sequence.ends.len()).div_ceil(PAGE_TOKENS);
            if pages < needed {
                return Err(CudaError::Shape { what: "pages of a sequence", expected: needed, got: pages });
            }
            if sequence.first_row < ends.len() {
                let (expected, got) = (ends.len(), sequence.first_row);
                return Err(CudaError::Shape { what: "first row of a sequence, at least", expected, got });
            }
            ends.resize(sequence.first_row, 0);
            let exact = sequence.exact.iter().map(|&slot| ExactSlot::table_entry(slot));
            let sealed = sequence.sealed.iter().take(pages);
            // A row of padding reads the dummy.
            exact.clone().for_each(|slot| cover(&mut slots[0], slot as usize));
            sealed.clone().flatten().for_each(|slot| cover(&mut slots[1], slot.index()));
            let sealed = sealed.map(|&slot| SealedSlot::table_entry(slot));
            tables.extend(exact);
            tables.extend(sealed);
            tables.resize(table + 2 * pages, 0);
            let end = sequence.ends.iter().copied().max().unwrap_or(0);
            history_pages = history_pages.max(end.div_ceil(PAGE_TOKENS));
            for (block, here) in sequence.ends.chunks(at_once).enumerate() {
                let first = block * at_once;
                let here = here.iter().map(|&end| small(end));
                items.push(Item {
                    table: small(table),
                    pages: small(pages),
                    first_row: small(sequence.first_row + first),
                    first_position: small(sequence.start + first),
                    tokens: small(here.len()),
                    least_end: here.clone().min().unwrap_or(0),
                    most_end: here.clone().max().unwrap_or(0),
                    padding: 0,
                });
                ends.extend(here);
            }
        }
        if i32::try_from(tables.len()).is_err() {
            return Err(CudaError::Unsupported(format!("{} pages in one step", tables.len() / 2)));
        }
        // Blocks with the most to read begin first.
        items.sort_by_key(|item| std::cmp::Reverse(item.first_position));
        Ok(RowBlocks { items, tables, ends, slots, history_pages })
    }
}

#[cfg(test)]
mod tests {
    use oscar_random::Random;

    use super::*;

    /// A page of one kind, as `Turn` of `many_rows.cu`.
    #[derive(Clone, Copy, Debug)]
    struct Turn {
        page: i32,
        sealed: bool,
    }

    /// The kernel's way through the pages of a block, in its words.
    struct Walk {
        item: Item,
        sink: i32,
        window: i32,
    }

    impl Walk {
        fn last(&self) -> i32 {
            self.item.first_position + self.item.tokens - 1
        }

        fn first(&self, page: i32) -> Turn {
            Turn { page, sealed: page * 64 >= self.sink && page * 64 < self.item.most_end }
        }

        fn begin(&self) -> Turn {
            self.first((self.item.first_position - self.window + 1).max(0) / 64)
        }

        fn next(&self, turn: Turn) -> Turn {
            if turn.sealed && turn.page * 64 + 64 > self.item.least_end {
                return Turn { page: turn.page, sealed: false };
            }
            self.first(turn.page + 1)
        }

        fn seen_by_all(&self, turn: Turn) -> bool {
            let begin = turn.page * 64;
            if turn.sealed {
                return begin + 64 <= self.item.least_end;
            }
            begin + 64 <= self.item.first_position + 1
                && (begin < self.sink || begin >= self.item.most_end)
                && begin > self.last() - self.window
        }

        /// Positions of a turn that the row at `position` sees.
        fn seen(&self, turn: Turn, position: i32, end: i32) -> Vec<i32> {
            let first = turn.page * 64;
            if self.seen_by_all(turn) {
                return (first..first + 64).collect();
            }
            let from = if turn.sealed || first < self.sink { 0 } else { end - first };
            let begin = from.max(position - self.window + 1 - first);
            let until = if turn.sealed { end - first } else { position - first + 1 };
            (0..64).filter(|key| (begin..until).contains(key)).map(|key| first + key).collect()
        }
    }

    /// What a row reads: positions from sealed pages, and positions from bf16 pages.
    fn read(walk: &Walk, position: i32, end: i32) -> [Vec<i32>; 2] {
        let mut read = [Vec::new(), Vec::new()];
        let mut turn = walk.begin();
        while turn.page <= walk.last() / 64 {
            read[usize::from(!turn.sealed)].extend(walk.seen(turn, position, end));
            turn = walk.next(turn);
        }
        read
    }

    #[test]
    fn every_row_reads_every_position_it_sees_once() {
        let mut random = Random::new(11);
        let mut below = |most: usize| (random.next_u64() % most as u64) as usize;
        for _ in 0..300 {
            let sink = 64 * below(3);
            let window = if below(3) == 0 { Some(1 + below(400)) } else { None };
            let at_once = [1, 16, 42, 128][below(4)];
            let mut first_row = 0;
            let mut pages = Vec::new();
            for _ in 0..1 + below(3) {
                let (start, rows) = (below(700), 1 + below(300));
                // Histories grow page by page, or by tokens where pages stand in for them; with a window there is none.
                let step = [1, 64][below(2)];
                let recent = below(200);
                let mut ends = Vec::new();
                for position in start..start + rows {
                    let end = (position + 1).saturating_sub(recent) / step * step;
                    ends.push(if window.is_some() || end < sink { 0 } else { end });
                }
                pages.push((first_row, start, ExactSlot::first((start + rows).div_ceil(64)), ends));
                first_row += rows;
            }
            let sequences: Vec<PrefillSequence<'_>> = pages
                .iter()
                .map(|(first_row, start, exact, ends)| PrefillSequence {
                    first_row: *first_row,
                    start: *start,
                    exact,
                    sealed: &[],
                    ends: ends.clone(),
                })
                .collect();
            let blocks = RowBlocks::new(&sequences, at_once).unwrap();
            let mut rows_seen = vec![0; first_row];
            for item in &blocks.items {
                let walk = Walk {
                    item: *item,
                    sink: sink as i32,
                    window: window.map_or(1 << 30, |window| window as i32),
                };
                assert!(item.tokens as usize <= at_once && item.pages * 64 > walk.last());
                for token in 0..item.tokens {
                    let (row, position) = ((item.first_row + token) as usize, item.first_position + token);
                    rows_seen[row] += 1;
                    let end = blocks.ends[row];
                    let first = (position - walk.window + 1).max(0);
                    let history = (sink as i32).max(first)..end;
                    let rest = (first..=position).filter(|at| !history.contains(at));
                    let expected = [history.clone().collect::<Vec<_>>(), rest.collect()];
                    assert_eq!(
                        read(&walk, position, end),
                        expected,
                        "{item:?}, row {row}, end {end}, sink {sink}"
                    );
                }
            }
            assert!(rows_seen.iter().all(|&times| times == 1));
        }
    }

    #[test]
    fn tables_that_do_not_cover_the_rows_are_refused() {
        let exact = ExactSlot::first(2);
        let sequence = |first_row, ends: usize| PrefillSequence {
            first_row,
            start: 100,
            exact: &exact,
            sealed: &[],
            ends: vec![0; ends],
        };
        assert!(RowBlocks::new(&[sequence(0, 28)], 16).is_ok());
        assert!(RowBlocks::new(&[sequence(0, 29)], 16).is_err());
        assert!(RowBlocks::new(&[sequence(0, 5), sequence(4, 5)], 16).is_err());
        // Rows of others lie between.
        let blocks = RowBlocks::new(&[sequence(1, 2), sequence(5, 2)], 16).unwrap();
        assert_eq!(blocks.ends.len(), 7);
        let rows: Vec<_> = blocks.items.iter().flat_map(|item| item.rows()).map(|(row, _)| row).collect();
        assert_eq!(rows, [1, 2, 5, 6]);
        let blocks = RowBlocks::new(&[sequence(0, 28)], 16).unwrap();
        assert_eq!((blocks.slots, blocks.items.len(), blocks.tables.len()), ([1..3, 0..0], 2, 4));
    }
}
