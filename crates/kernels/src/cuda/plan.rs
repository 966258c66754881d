//! A ragged batch cut into work of about equal cost for every block of a launch.
//!
//! A unit is what one output needs: a sequence, a KV head and a range of its query heads. Its tiles, sealed and bf16, are
//! cut into segments; a block works through a list of them, and every segment leaves one partial result. A plan holds for
//! all layers of a step.

use std::ops::Range;

use crate::error::CudaError;
use bytemuck::{Pod, Zeroable};
use oscar_codec::{ExactSlot, PAGE_TOKENS, SealedSlot};

/// Partial results of one unit, at most: the merge holds a factor for each in shared memory.
pub(crate) const MOST_PARTIALS: usize = 256;

/// Tokens of a sequence, at most.
const MOST_TOKENS: usize = 1 << 24;

/// The result of a segment is a partial result of its unit.
pub(crate) const PARTIAL: i32 = 0;
/// The result is left in shared memory for the next segment of the block, which is of the same unit.
pub(crate) const LEFT: i32 = 1;
/// The result is merged with what the segment before has left, and both are one partial result of the unit.
pub(crate) const TAKEN: i32 = 2;

/// A run of tiles of one kind; the kernel's `Segment`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct Segment {
    /// 0: bf16 tiles, 1: sealed tiles.
    pub kind: i32,
    /// Row of the batch.
    pub sequence: i32,
    /// The KV head that is read.
    pub head: i32,
    /// First query head of the group.
    pub first_row: i32,
    /// The number of query heads that read it.
    pub rows: i32,
    /// First tile, counted over tiles of this kind.
    pub begin: i32,
    /// One past the last tile.
    pub end: i32,
    /// Where the partial result goes.
    pub partial: i32,
    /// The number of the unit that the segment is a part of, or -1 where there is no work.
    pub unit: i32,
    /// The first partial result of the unit.
    pub first_partial: i32,
    /// Partial results of the unit.
    pub partials: i32,
    /// Pages before these are bf16.
    pub sink_pages: i32,
    /// Pages from here on are bf16.
    pub history_end: i32,
    /// Tokens of the sequence.
    pub tokens: i32,
    /// What becomes of its result: see [`PARTIAL`], [`LEFT`] and [`TAKEN`].
    pub result: i32,
    /// The next segment of the same block, or -1.
    pub next: i32,
}

/// One sequence of a decode step.
#[derive(Clone, Copy, Debug)]
pub struct DecodeSequence<'a> {
    /// Row of the batch; rows of a plan ascend, and what becomes of rows between them is not the plan's matter.
    pub row: usize,
    /// Tokens that the query sees, its own included.
    pub tokens: usize,
    /// Pages that are read in bf16 at the start.
    pub sink_pages: usize,
    /// Pages `sink_pages..history_end` are read sealed, the others in bf16.
    pub history_end: usize,
    /// The slot of every page that is there in bf16.
    pub exact: &'a [Option<ExactSlot>],
    /// The slot of every page that is sealed; as far as pages are read sealed.
    pub sealed: &'a [Option<SealedSlot>],
}

impl DecodeSequence<'_> {
    /// Pages that are read sealed; all others are read in bf16.
    fn history(&self) -> Range<usize> {
        self.sink_pages..self.history_end.max(self.sink_pages)
    }

    /// The slot of a page in the pool it is read from, 0 (the dummy) if it has none.
    fn table_entry(&self, page: usize) -> u32 {
        if self.history().contains(&page) {
            SealedSlot::table_entry(self.sealed[page])
        } else {
            ExactSlot::table_entry(self.exact[page])
        }
    }
}

/// How tiles are divided among blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Split {
    /// The same work for all blocks, whatever the batch: fastest.
    Balanced,
    /// Segments of so many pages, counted from the start of a sequence: a result does not depend on what else is in the
    /// batch, to the bit.
    Fixed {
        /// Pages of a segment.
        pages: usize,
    },
}

/// What a plan needs to know of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlanShape {
    /// The number of KV heads.
    pub kv_heads: usize,
    /// Query heads per KV head.
    pub group: usize,
    /// Query heads that a block has room for.
    pub rows: usize,
    /// Warps of a block, which take tiles in turn.
    pub warps: usize,
    /// Blocks of a launch.
    pub blocks: usize,
    /// What a segment costs besides its tiles, in turns of all warps.
    pub turns: usize,
    /// Sealed tiles of a segment, at most, for each warp; more where a unit would have too many segments.
    pub most_tiles: usize,
    /// Tiles of a bf16 page and bytes of each.
    pub exact: (usize, usize),
    /// Tiles of a sealed page and bytes of each.
    pub sealed: (usize, usize),
}

/// The tables of a launch.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// The first segment of every block, then all others. A block without work has one of unit -1.
    pub segments: Vec<Segment>,
    /// The number of partial results.
    pub partials: usize,
    /// First partial result of each unit, and the end.
    pub first_partial: Vec<i32>,
    /// The slots of each sequence, `[row][page]`.
    pub table: Vec<i32>,
    /// Pages of a row of the table.
    pub table_width: usize,
    /// Slots from the first to the last that is read: of bf16 pages, of sealed ones.
    pub slots: [Range<usize>; 2],
    /// The number after that of the last sealed page of any sequence.
    pub history_pages: usize,
    /// Bytes of pages that a launch reads.
    pub bytes: usize,
    /// Rows of the batch up to the last one that is planned here.
    pub rows: usize,
}

/// Tiles of one kind of one unit.
struct Piece {
    segment: Segment,
    tiles: usize,
    bytes: usize,
}

impl Plan {
    /// Cuts a batch into segments.
    pub fn new(shape: &PlanShape, split: Split, sequences: &[DecodeSequence<'_>]) -> Result<Plan, CudaError> {
        let mut plan = Plan::default();
        let pages = sequences.iter().map(|sequence| sequence.exact.len()).max().unwrap_or(0);
        // Recorded launches hold for a width, so it changes seldom.
        plan.table_width = pages.next_power_of_two().max(16);
        let mut units = Vec::new();
        for (index, sequence) in sequences.iter().enumerate() {
            plan.take_slots(sequence)?;
            units.extend(unit_pieces(shape, index, sequence));
        }
        plan.bytes = units.iter().flatten().map(|piece| piece.tiles * piece.bytes).sum();
        let cuts = match split {
            Split::Balanced => balanced(shape, &units),
            Split::Fixed { pages } => fixed(shape, pages.max(1), &units),
        };
        plan.lay_out(shape.blocks, units.len(), cuts, split);
        Ok(plan)
    }

    fn take_slots(&mut self, sequence: &DecodeSequence<'_>) -> Result<(), CudaError> {
        if sequence.row < self.rows {
            let (expected, got) = (self.rows, sequence.row);
            return Err(CudaError::Shape { what: "row of a sequence, at least", expected, got });
        }
        self.rows = sequence.row + 1;
        self.table.resize(sequence.row * self.table_width, 0);
        let pages = sequence.tokens.div_ceil(PAGE_TOKENS);
        let (exact, sealed) = (sequence.exact.len(), sequence.sealed.len());
        if exact < pages {
            return Err(CudaError::Shape { what: "slots of a sequence", expected: pages, got: exact });
        }
        let history = sequence.history();
        if sealed < history.end && !history.is_empty() {
            let expected = history.end;
            return Err(CudaError::Shape { what: "sealed slots of a sequence", expected, got: sealed });
        }
        let too_many = (0..exact).any(|page| sequence.table_entry(page) > i32::MAX as u32);
        if sequence.tokens > MOST_TOKENS || too_many {
            return Err(CudaError::Unsupported("more than 2^24 tokens or 2^31 slots".into()));
        }
        let full = sequence.tokens / PAGE_TOKENS;
        if sequence.history_end > full && sequence.history_end > sequence.sink_pages {
            // A sealed page holds 64 tokens, and all are read.
            return Err(CudaError::Shape {
                what: "full pages of a sequence",
                expected: sequence.history_end,
                got: full,
            });
        }
        if !history.is_empty() {
            self.history_pages = self.history_pages.max(history.end);
        }
        for page in 0..pages {
            let slots = &mut self.slots[usize::from(history.contains(&page))];
            cover(slots, sequence.table_entry(page) as usize);
        }
        self.table.extend((0..exact).map(|page| sequence.table_entry(page) as i32));
        self.table.resize(self.rows * self.table_width, 0);
        Ok(())
    }

    /// `cuts`: segments in the order of their units, each with its block.
    fn lay_out(&mut self, blocks: usize, units: usize, cuts: Vec<(usize, Segment)>, split: Split) {
        let mut by_block: Vec<Vec<Segment>> = vec![Vec::new(); blocks];
        let mut counts = vec![0; units];
        for (block, mut segment) in cuts {
            // Two segments of a unit in a block leave one partial result, except where results may not depend on what
            // else is in the batch.
            let before = by_block[block].last_mut().filter(|before| {
                split == Split::Balanced && before.unit == segment.unit && before.result == PARTIAL
            });
            if let Some(before) = before {
                (segment.partial, segment.result) = (before.partial, TAKEN);
                before.result = LEFT;
            } else {
                segment.partial = self.partials as i32;
                counts[segment.unit as usize] += 1;
                self.partials += 1;
            }
            by_block[block].push(segment);
        }
        let mut first = 0;
        self.first_partial = std::iter::once(0)
            .chain(counts.into_iter().map(|count: i32| {
                first += count;
                first
            }))
            .collect();
        for segment in by_block.iter_mut().flatten() {
            let [first, end] = [0, 1].map(|next| self.first_partial[segment.unit as usize + next]);
            (segment.first_partial, segment.partials) = (first, end - first);
        }
        // A block finds its first segment without looking anything up.
        self.segments = vec![Segment { unit: -1, next: -1, ..Segment::default() }; blocks];
        for (block, segments) in by_block.into_iter().enumerate() {
            let mut place = block;
            for (index, segment) in segments.into_iter().enumerate() {
                if index > 0 {
                    self.segments[place].next = self.segments.len() as i32;
                    place = self.segments.len();
                    self.segments.push(Segment::default());
                }
                self.segments[place] = Segment { next: -1, ..segment };
            }
        }
    }
}

/// Makes a range of slots reach to one more.
pub(super) fn cover(slots: &mut Range<usize>, slot: usize) {
    *slots = match slots.start == slots.end {
        true => slot..slot + 1,
        false => slots.start.min(slot)..slots.end.max(slot + 1),
    };
}

/// The units of a sequence, each with its sealed and its bf16 tiles.
fn unit_pieces(shape: &PlanShape, index: usize, sequence: &DecodeSequence<'_>) -> Vec<[Piece; 2]> {
    let history_end = sequence.history_end.max(sequence.sink_pages);
    let parts = shape.group.div_ceil(shape.rows);
    // Parts that differ little: nine rows are five and four.
    let rows = shape.group.div_ceil(parts.max(1));
    let sealed_pages = history_end - sequence.sink_pages;
    let (sealed_pages, history_end) =
        if sealed_pages == 0 { (0, sequence.sink_pages) } else { (sealed_pages, history_end) };
    let exact_tokens = sequence.tokens - sealed_pages * PAGE_TOKENS;
    let exact_tiles = exact_tokens.div_ceil(PAGE_TOKENS / shape.exact.0);
    let units = shape.kv_heads * parts;
    (0..units)
        .map(|unit| {
            let (head, part) = (unit / parts, unit % parts);
            let segment = Segment {
                sequence: sequence.row as i32,
                head: head as i32,
                first_row: (part * rows) as i32,
                rows: rows.min(shape.group - part * rows) as i32,
                unit: (index * units + unit) as i32,
                sink_pages: sequence.sink_pages as i32,
                history_end: history_end as i32,
                tokens: sequence.tokens as i32,
                ..Segment::default()
            };
            let sealed = Piece {
                segment: Segment { kind: 1, ..segment },
                tiles: sealed_pages * shape.sealed.0,
                bytes: shape.sealed.1,
            };
            [sealed, Piece { segment, tiles: exact_tiles, bytes: shape.exact.1 }]
        })
        .collect()
}

/// What a segment costs besides its tiles, in bytes read meanwhile: filling and draining the pipeline, the partial result.
fn overhead(shape: &PlanShape) -> usize {
    shape.turns * shape.warps * shape.sealed.1.max(shape.exact.1)
}

/// Walks all units and goes on to the next block when one has its share.
fn balanced(shape: &PlanShape, units: &[[Piece; 2]]) -> Vec<(usize, Segment)> {
    let overhead = overhead(shape);
    let pieces = || units.iter().flatten().filter(|piece| piece.tiles > 0);
    // Where one block ends and the next begins, a piece is cut in two, and that costs once more.
    let mut left: usize = pieces().map(|piece| piece.tiles * piece.bytes + overhead).sum();
    left += (shape.blocks - 1) * overhead;
    let mut cuts = Vec::new();
    let (mut block, mut share) = (0, left.div_ceil(shape.blocks));
    for unit in units {
        if unit.iter().all(|piece| piece.tiles == 0) {
            // No tokens, but somebody must write the zeros.
            cuts.push((block, unit[1].segment));
        }
        for piece in unit {
            // Four fifths of the partial results for sealed tiles, the rest for bf16, where there are both.
            let most = match (unit.iter().any(|piece| piece.tiles == 0), piece.segment.kind) {
                (true, _) => MOST_PARTIALS - 1,
                (false, 1) => MOST_PARTIALS * 4 / 5,
                (false, _) => MOST_PARTIALS / 5 - 1,
            };
            let least = shape.warps.max(piece.tiles.div_ceil(most));
            let mut begin = 0;
            while begin < piece.tiles {
                let remaining = piece.tiles - begin;
                if share < overhead + least.min(remaining) * piece.bytes / 2 && block + 1 < shape.blocks {
                    block += 1;
                    // Nothing was cut.
                    left = left.saturating_sub(if begin == 0 { overhead } else { 0 });
                    share = left.div_ceil(shape.blocks - block);
                }
                let room = share.saturating_sub(overhead) / piece.bytes;
                let mut take = room.next_multiple_of(shape.warps).max(least);
                if take + shape.warps / 2 >= remaining || block + 1 == shape.blocks {
                    take = remaining;
                }
                take = take.min((shape.most_tiles * shape.warps).max(least));
                let segment = Segment { begin: begin as i32, end: (begin + take) as i32, ..piece.segment };
                cuts.push((block, segment));
                let cost = overhead + take * piece.bytes;
                share = share.saturating_sub(cost);
                left = left.saturating_sub(cost);
                begin += take;
            }
        }
    }
    cuts
}

/// Cuts at fixed places; the heaviest segments go first, each to the block with the least work.
fn fixed(shape: &PlanShape, pages: usize, units: &[[Piece; 2]]) -> Vec<(usize, Segment)> {
    let mut cuts = Vec::new();
    let mut costs = Vec::new();
    for unit in units {
        if unit.iter().all(|piece| piece.tiles == 0) {
            costs.push(0);
            cuts.push((0, unit[1].segment));
        }
        for piece in unit {
            let per_page = if piece.segment.kind == 1 { shape.sealed.0 } else { shape.exact.0 };
            // Long sequences get longer segments, which depends on their own length alone.
            let fewest = piece.tiles.div_ceil(per_page).div_ceil(MOST_PARTIALS / 2);
            let pages = pages.max(fewest);
            let pages = pages.min((shape.most_tiles * shape.warps / per_page).max(fewest));
            for begin in (0..piece.tiles).step_by(pages * per_page) {
                let end = (begin + pages * per_page).min(piece.tiles);
                costs.push((end - begin) * piece.bytes + overhead(shape));
                cuts.push((0, Segment { begin: begin as i32, end: end as i32, ..piece.segment }));
            }
        }
    }
    let mut order: Vec<usize> = (0..cuts.len()).collect();
    order.sort_by_key(|&cut| std::cmp::Reverse(costs[cut]));
    let mut blocks: std::collections::BinaryHeap<_> =
        (0..shape.blocks).map(|block| std::cmp::Reverse((0, block))).collect();
    for cut in order {
        if let Some(std::cmp::Reverse((load, block))) = blocks.pop() {
            cuts[cut].0 = block;
            blocks.push(std::cmp::Reverse((load + costs[cut], block)));
        }
    }
    cuts
}

#[cfg(test)]
#[path = "plan_tests.rs"]
mod tests;
