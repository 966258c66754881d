//! 2-bit and 4-bit pages on AMX, several at a time.
//!
//! Storing a tile of sums takes longer than computing it. So the sums of values stay in tiles over a batch of pages, for
//! which the weights of a row have one unit in all of them: first the logits and weights of all pages of a batch, as
//! numbers, then the bytes of the weights and the values. References of the softmax may rise in the middle of a batch; what
//! was weighed before then shrinks, as all sums do.
//!
//! What was just stored row by row cannot be loaded as a tile before all of it has reached the cache, so a page is unpacked
//! before the softmax over another one. There is one buffer for unpacked codes where one product serves all rows: more
//! would push pages out of the first-level cache.

use std::arch::x86_64::*;
use std::ops::Range;

use oscar_codec::{PAGE_TOKENS, ScaleType, Side};

use super::codes::{Buffers, Queries};
use super::engine::{LANES, Running, Shape, Sums, Words};
use super::equal_groups;
use super::registers::{REGISTERS, split};
use super::run::{PAGES, Run};
use super::scaled::Scaled;
use super::tiles::{COLUMNS, MOST_TILES, Products, ROWS, key_bytes, unpack, value_bytes};
use super::{stream, weigh};
use crate::cpu::attention::{SoftmaxState, Span, Work};
use crate::cpu::gemm::aligned::AlignedScratch;

/// Attends all rows of all heads to all pages.
///
/// # Safety
/// The CPU has AMX with products of bytes ([`super::tiles::is_available`]) and AVX-512, and nothing else on this thread
/// uses tiles until the end of the call.
pub(super) unsafe fn attend(
    shape: Shape,
    work: &Work<'_, u8>,
    buffers: &mut Buffers,
    tiles: &mut AlignedScratch,
    states: &mut [SoftmaxState],
) {
    let (heads, rows) = (states.len(), work.spans.len());
    let first = work.first_page.max(work.first_seen() / PAGE_TOKENS);
    let end = (work.first_page + work.pages.len() / heads).min(work.end().div_ceil(PAGE_TOKENS));
    if first >= end {
        return;
    }
    let pages = first..end;
    // Loops of known length have little left to compute but what is in them. These are the shapes of most models.
    let channels = [64, 128].into_iter().find(|&channels| shape == Shape::plain(channels, shape.scale_type));
    let whole = shape.scale_type == ScaleType::F16 && sees(work.spans, &pages);
    // SAFETY: the caller's promise.
    unsafe {
        match (channels, rows) {
            (Some(64), 3) if whole => stream::attend::<1, 1, 3, 3>(work, pages, buffers, tiles, states),
            (Some(64), 4) if whole => stream::attend::<1, 2, 2, 4>(work, pages, buffers, tiles, states),
            (Some(128), 4) if whole => stream::attend::<2, 2, 2, 4>(work, pages, buffers, tiles, states),
            (Some(128), 6) if whole => stream::attend::<2, 2, 3, 6>(work, pages, buffers, tiles, states),
            (Some(128), 8) if whole => stream::attend::<2, 4, 2, 8>(work, pages, buffers, tiles, states),
            (Some(64), _) => attend_shape::<64>(shape, work, pages, buffers, tiles, states),
            (Some(128), _) => attend_shape::<128>(shape, work, pages, buffers, tiles, states),
            _ => attend_shape::<0>(shape, work, pages, buffers, tiles, states),
        }
    }
}

/// [`attend`] for 2-bit pages of one group of `CHANNELS` channels, or for any if it is 0.
///
/// # Safety
/// As [`attend`]; the shape is the known one.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,gfni")]
unsafe fn attend_shape<const CHANNELS: usize>(
    shape: Shape,
    work: &Work<'_, u8>,
    pages: Range<usize>,
    buffers: &mut Buffers,
    tiles: &mut AlignedScratch,
    states: &mut [SoftmaxState],
) {
    let (heads, rows) = (states.len(), work.spans.len());
    // Batches are cut where the sequence is, so that a row's result does not depend on what other rows see.
    let batch = |first: usize| first..((first / PAGES + 1) * PAGES).min(pages.end);
    // This run and the next, in turn.
    let mut runs = [Run::new(work), Run::new(work)];
    runs[0].set(heads, 0, batch(pages.start));
    runs[0].fetch_from(0);
    let group = equal_groups(rows, ROWS);
    // SAFETY: the caller's promise.
    let products = unsafe { Products::new(group) };
    let mut reader = Reader::<CHANNELS>::new(products, shape, work, rows > group, buffers, tiles);
    let mut turn = 0;
    while !runs[turn].numbers.is_empty() {
        let [run, next] = &mut runs;
        let (run, next) = if turn == 0 { (run, next) } else { (next, run) };
        match run.head + 1 < heads {
            true => next.set(heads, run.head + 1, run.numbers.clone()),
            false => next.set(heads, 0, batch(run.numbers.end)),
        }
        for (index, begin) in (0..rows).step_by(group).enumerate() {
            let rows = begin..(begin + group).min(rows);
            // SAFETY: the instructions are there.
            unsafe { reader.read(run, next, rows, index == 0, &mut states[run.head]) };
        }
        turn = 1 - turn;
    }
    for (head, state) in states.iter_mut().enumerate() {
        let running = running(&shape, 0..rows, work.d, head * rows, reader.lanes, state);
        weigh::finish(&shape, running);
    }
}

/// The queries of a call, and buffers for a batch.
struct Reader<'a, const CHANNELS: usize> {
    products: Products,
    shape: Shape,
    queries: Queries<'a>,
    /// Whether several products serve the rows of a head: then a batch stays unpacked.
    keep: bool,
    /// Unpacked codes, of one page or of [`PAGES`].
    keys: &'a mut [u8],
    values: &'a mut [u8],
    /// Whether the first keys of the next run are unpacked already.
    opened: bool,
    /// Of the keys of this page and of the next, in turn.
    key_sums: [&'a mut [i32]; 2],
    value_sums: &'a mut [i32],
    scaled: Scaled<'a>,
    /// `[page][group][ROWS][high, low][64 tokens]`.
    weights: &'a mut [i8],
    /// `[group][ROWS]`.
    units: &'a mut [f32],
    /// Of all heads, as [`Running::lanes`].
    lanes: &'a mut [f32],
}

impl<'a, const CHANNELS: usize> Reader<'a, CHANNELS> {
    fn new(
        products: Products,
        shape: Shape,
        work: &Work<'_, u8>,
        keep: bool,
        buffers: &'a mut Buffers,
        tiles: &'a mut AlignedScratch,
    ) -> Self {
        let Buffers { queries, query_numbers, weights, weight_numbers, lanes, sums, scaled } = buffers;
        // SAFETY: the instruction set of this module is there.
        let queries = unsafe { tile_queries(&shape, work, queries, query_numbers) };
        let pages = if keep { PAGES } else { 1 };
        let key_len = pages * key_bytes(shape.padded);
        let value_len = pages * value_bytes(if keep { shape.padded } else { MOST_TILES * COLUMNS });
        let (keys, values) = tiles.at_least::<u8>(key_len + value_len).split_at_mut(key_len);
        if !shape.padded.is_multiple_of(PAGE_TOKENS) {
            // The last tile is not filled.
            keys.fill(0);
        }
        let group_sums = shape.groups * ROWS * 2 * PAGE_TOKENS;
        let (this, rest) =
            sums.at_least::<i32>(2 * group_sums + ROWS * 2 * shape.padded).split_at_mut(group_sums);
        let (next, value_sums) = rest.split_at_mut(group_sums);
        // Rows that no query has are multiplied too, whatever they hold: nobody reads their sums.
        let weights = weights.at_least::<i8>(PAGES * group_sums);
        let row_numbers = shape.groups * ROWS * PAGE_TOKENS;
        let (scaled, largest) = scaled
            .at_least::<f32>(PAGES * row_numbers + shape.groups * ROWS * LANES)
            .split_at_mut(PAGES * row_numbers);
        let lanes = lanes.at_least::<f32>(queries.rows * (1 + shape.groups) * LANES);
        lanes.fill(0.0);
        Reader {
            products,
            shape,
            queries,
            keep,
            keys,
            values,
            opened: false,
            key_sums: [this, next],
            value_sums,
            scaled: Scaled { page: 0, groups: shape.groups, rows: ROWS, numbers: scaled, largest },
            weights,
            units: weight_numbers.at_least(shape.groups * ROWS),
            lanes,
        }
    }

    /// The shape of pages, which the compiler knows if `CHANNELS` is not 0.
    #[inline(always)]
    fn shape(&self) -> Shape {
        if CHANNELS > 0 { Shape::plain(CHANNELS, self.shape.scale_type) } else { self.shape }
    }

    /// Some rows of a head and the pages of a batch; `fresh` for the first rows that read these pages, and ask for the next.
    ///
    /// # Safety
    /// The CPU has the instructions of [`attend`].
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,gfni")]
    unsafe fn read(
        &mut self,
        run: &Run<'_>,
        next: &Run<'_>,
        rows: Range<usize>,
        fresh: bool,
        state: &mut SoftmaxState,
    ) {
        let (count, d) = (run.len(), run.work.d);
        let unseen = |page: usize| {
            run.work.spans[rows.clone()].iter().all(|span| span.in_page(run.start(page)).is_empty())
        };
        // Codes are unpacked by the first rows, for all.
        if !fresh && (0..count).all(unseen) {
            return;
        }
        let page_bytes = self.shape().page_bytes();
        // What comes next is asked for page by page, a part at a time.
        let fetch = |page: usize, part: usize| {
            if fresh && page < count {
                next.fetch(page_bytes, page, part);
            }
        };
        if fresh {
            next.fetch_from(count);
        }
        self.scaled.largest.fill(0.0);
        if !self.opened {
            self.open_keys(run, 0, fresh);
        }
        let whole = run.is_seen_by(&rows);
        for page in 0..=count {
            fetch(page, 0);
            if page < count {
                self.multiply_keys(run, page, &rows);
                fetch(page, 1);
                if page + 1 < count {
                    self.open_keys(run, page + 1, fresh);
                }
            }
            fetch(page, 2);
            if page > 0 {
                self.weigh(run, page - 1, &rows, whole, state);
            }
            fetch(page, 3);
        }
        let fetch = |page: usize, part: usize| fetch(page, 4 + part);
        for group in 0..self.shape().groups {
            self.add_values(run, next, group, rows.len(), fresh, &fetch);
            let (padded, channels) = (self.shape().padded, self.shape().group(group));
            let values = &mut state.values[rows.start * d..rows.end * d];
            let units = &self.units[group * ROWS..][..ROWS];
            weigh::add_values(self.value_sums, units, padded, channels, rows.len(), d, values);
        }
    }

    /// Where the unpacked keys of a page are.
    fn key_range(&self, page: usize) -> Range<usize> {
        let len = key_bytes(self.shape().padded);
        let start = if self.keep { page * len } else { 0 };
        start..start + len
    }

    #[inline(always)]
    fn open_keys(&mut self, run: &Run<'_>, page: usize, fresh: bool) {
        if self.keep && !fresh {
            return;
        }
        let words = Words::of(&self.shape(), Side::Key, run.pages[page]);
        let range = self.key_range(page);
        // SAFETY: the instruction set of this module is there.
        unsafe {
            unpack(self.shape().bits, words, self.shape().padded, 0..PAGE_TOKENS, &mut self.keys[range])
        };
    }

    /// Unpacks the keys that are multiplied next, where there is one buffer: by then they have reached the cache.
    #[inline(always)]
    fn open_first_keys(&mut self, next: &Run<'_>) {
        self.opened = !self.keep && next.len() > 0;
        if self.opened {
            self.open_keys(next, 0, true);
        }
    }

    #[inline(always)]
    fn multiply_keys(&mut self, run: &Run<'_>, page: usize, rows: &Range<usize>) {
        let range = self.key_range(page);
        for group in 0..self.shape().groups {
            let left = self.queries.left(group, run.head, rows);
            let channels = self.shape().group(group);
            let sums = &mut self.key_sums[page % 2][group * ROWS * 2 * PAGE_TOKENS..];
            self.products.keys(&left, channels, &self.keys[range.clone()], sums);
        }
    }

    #[inline(always)]
    fn weigh(
        &mut self,
        run: &Run<'_>,
        page: usize,
        rows: &Range<usize>,
        whole: bool,
        state: &mut SoftmaxState,
    ) {
        let first = run.head * self.queries.head_rows + rows.start;
        let start = run.start(page);
        let spans = &run.work.spans[rows.clone()];
        let mut seen = [u64::MAX; ROWS];
        if !whole {
            for (seen, span) in seen.iter_mut().zip(spans) {
                *seen = span.page_mask(start);
            }
        }
        let stored = self.shape().stored_numbers(run.pages[page]);
        let shape = self.shape();
        let sums = Sums {
            shape: &shape,
            sums: self.key_sums[page % 2],
            steps: &self.queries.steps[first..first + rows.len()],
            totals: &self.queries.totals[first..],
            totals_stride: self.queries.rows,
            stored,
            spans,
            start,
            seen: &seen[..rows.len()],
        };
        let mut running = running(&self.shape(), rows.clone(), run.work.d, first, self.lanes, state);
        self.scaled.page = page;
        // SAFETY: as above.
        unsafe { weigh::weigh_into::<ROWS, _>(&sums, &mut running, &mut self.scaled) };
    }

    /// The values of a group, summed over the pages of a batch. Calls `fetch` with a page and a number below four, for the
    /// first group. With the last group the first page of the next run is opened.
    #[inline(always)]
    fn add_values(
        &mut self,
        run: &Run<'_>,
        next: &Run<'_>,
        group: usize,
        rows: usize,
        fresh: bool,
        fetch: &impl Fn(usize, usize),
    ) {
        let mut inverses = [0.0; ROWS];
        // SAFETY: the instruction set of this module is there.
        unsafe { self.scaled.units(group, rows, &mut self.units[group * ROWS..], &mut inverses) };
        let channels = self.shape().group(group);
        let end = channels.end.next_multiple_of(COLUMNS);
        let mut first = channels.start / COLUMNS * COLUMNS;
        let mut split = true;
        while first < end {
            let columns = first..(first + MOST_TILES * COLUMNS).min(end);
            let fetch = |page: usize, part: usize| {
                if split && group == 0 {
                    fetch(page, part);
                }
            };
            self.products.clear();
            self.open_values(run, 0, columns.clone(), fresh);
            if split {
                self.split(group, 0, rows, &inverses);
            }
            for page in 0..run.len() {
                fetch(page, 0);
                if split && page + 1 < run.len() {
                    self.split(group, page + 1, rows, &inverses);
                }
                fetch(page, 1);
                let weights = &self.weights[(page * self.shape().groups + group) * ROWS * 2 * PAGE_TOKENS..];
                self.products.add(weights, &self.values[self.value_range(page, &columns)]);
                fetch(page, 2);
                if page + 1 < run.len() {
                    self.open_values(run, page + 1, columns.clone(), fresh);
                } else if columns.end == end && group + 1 == self.shape().groups {
                    self.open_first_keys(next);
                }
                fetch(page, 3);
            }
            self.products.store(columns.len() / COLUMNS, self.shape().padded, &mut self.value_sums[first..]);
            first = columns.end;
            split = false;
        }
    }

    /// Where the unpacked values of some columns of a page are.
    fn value_range(&self, page: usize, columns: &Range<usize>) -> Range<usize> {
        let start = match self.keep {
            true => page * value_bytes(self.shape().padded) + value_bytes(columns.start),
            false => 0,
        };
        start..start + value_bytes(columns.len())
    }

    #[inline(always)]
    fn open_values(&mut self, run: &Run<'_>, page: usize, columns: Range<usize>, fresh: bool) {
        if self.keep && !fresh {
            return;
        }
        let words = Words::of(&self.shape(), Side::Value, run.pages[page]);
        let range = self.value_range(page, &columns);
        // SAFETY: the instruction set of this module is there.
        unsafe { unpack(self.shape().bits, words, PAGE_TOKENS, columns, &mut self.values[range]) };
    }

    /// The bytes of the weights of a page.
    #[inline(always)]
    fn split(&mut self, group: usize, page: usize, rows: usize, inverses: &[f32; ROWS]) {
        let at = (page * self.shape().groups + group) * ROWS;
        let numbers = &self.scaled.numbers[at * PAGE_TOKENS..][..rows * PAGE_TOKENS];
        let bytes = &mut self.weights[at * 2 * PAGE_TOKENS..][..rows * 2 * PAGE_TOKENS];
        for row in 0..rows {
            // SAFETY: the instruction set of this module is there; 64 numbers and two parts of 64 bytes for each row.
            unsafe {
                let numbers = numbers.as_ptr().add(row * PAGE_TOKENS);
                let high = bytes.as_mut_ptr().add(row * 2 * PAGE_TOKENS);
                let mut values = [_mm512_setzero_ps(); REGISTERS];
                for j in 0..REGISTERS {
                    values[j] = _mm512_loadu_ps(numbers.add(j * LANES));
                }
                split(values, _mm512_set1_ps(inverses[row]), high, high.add(PAGE_TOKENS));
            }
        }
    }
}

/// The queries of a call for products of tiles.
///
/// # Safety
/// The CPU has the instructions of [`attend`].
#[inline(always)]
pub(super) unsafe fn tile_queries<'a>(
    shape: &Shape,
    work: &Work<'_, u8>,
    bytes: &'a mut AlignedScratch,
    numbers: &'a mut AlignedScratch,
) -> Queries<'a> {
    // SAFETY: the caller's promise.
    let split_row =
        |row: &[f32], high: &mut [i8], low: &mut [i8]| unsafe { weigh::split_row(row, high, low) };
    // SAFETY: as above.
    let total = |row: &[f32]| unsafe { weigh::total(row) };
    Queries::new(shape, work, ROWS, (bytes, numbers), split_row, total)
}

/// Whether all rows see all of some pages.
pub(super) fn sees(spans: &[Span], pages: &Range<usize>) -> bool {
    let (from, to) = (pages.start * PAGE_TOKENS, pages.end * PAGE_TOKENS);
    spans.iter().all(|span| span.from <= from && to <= span.to)
}

/// The softmax of some rows of a head, whose lanes are those from row `first` of all heads on.
#[inline(always)]
pub(super) fn running<'s>(
    shape: &Shape,
    rows: Range<usize>,
    d: usize,
    first: usize,
    lanes: &'s mut [f32],
    state: &'s mut SoftmaxState,
) -> Running<'s> {
    let width = (1 + shape.groups) * LANES;
    Running {
        max: &mut state.max[rows.clone()],
        sum: &mut state.sum[rows.clone()],
        values: &mut state.values[rows.start * d..rows.end * d],
        d,
        lanes: &mut lanes[first * width..][..rows.len() * width],
    }
}
