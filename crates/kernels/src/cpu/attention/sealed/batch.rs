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

use oscar_codec::{PAGE_TOKENS, Side};

use super::codes::{Buffers, Queries};
use super::engine::{LANES, Running, Shape, Sums, Words};
use super::equal_groups;
use super::registers::{LARGER_MAGNITUDE, Page, REGISTERS, reduce_max, split, units};
use super::tiles::{COLUMNS, MOST_TILES, Products, ROWS, key_bytes, unpack, value_bytes};
use super::weigh::{self, Sink};
use crate::cpu::attention::{SoftmaxState, Work};
use crate::cpu::gemm::aligned::AlignedScratch;

/// Pages of a batch.
const PAGES: usize = 4;

/// Attends all rows of all heads to all pages.
///
/// # Safety
/// The CPU has AMX with products of bytes ([`super::tiles::is_available`]) and AVX-512, and nothing else on this thread
/// uses tiles until the end of the call.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma")]
pub(super) unsafe fn attend(
    shape: Shape,
    work: &Work<'_, u8>,
    buffers: &mut Buffers,
    tiles: &mut AlignedScratch,
    states: &mut [SoftmaxState],
) {
    let heads = states.len();
    let (from, to) = (work.first_seen(), work.end());
    let start = |number: usize| (work.first_page + number) * PAGE_TOKENS;
    let seen: Vec<usize> = (0..work.pages.len() / heads)
        .filter(|&number| start(number) + PAGE_TOKENS > from && start(number) < to)
        .collect();
    if seen.is_empty() {
        return;
    }
    let page = |number: usize, head: usize| work.pages[number * heads + head];
    // Batches are cut where the sequence is, so that a row's result does not depend on what other rows see.
    let batch_of = |number: &usize| (work.first_page + number) / PAGES;
    let batches: Vec<&[usize]> = seen.chunk_by(|a, b| batch_of(a) == batch_of(b)).collect();
    // In the order in which they are read.
    let order: Vec<&[u8]> = batches
        .iter()
        .flat_map(|batch| {
            (0..heads).flat_map(move |head| batch.iter().map(move |&number| page(number, head)))
        })
        .collect();
    order.iter().take(PAGES).for_each(|page| weigh::prefetch(page));
    let rows = work.spans.len();
    let group = equal_groups(rows, ROWS);
    // SAFETY: the caller's promise.
    let products = unsafe { Products::new(group) };
    let mut reader = Reader::new(products, shape, work, rows > group, buffers, tiles);
    let seen_by_all = {
        let from = work.spans.iter().map(|span| span.from).max().unwrap_or(0);
        let to = work.spans.iter().map(|span| span.to).min().unwrap_or(0);
        move |number: usize| start(number) >= from && start(number) + PAGE_TOKENS <= to
    };
    let mut first = 0;
    for &batch in &batches {
        let whole = batch.iter().all(|&number| seen_by_all(number));
        for (head, state) in states.iter_mut().enumerate() {
            let next = order.get(first + batch.len()..).unwrap_or_default();
            let run = Run {
                head,
                pages: &order[first..first + batch.len()],
                numbers: batch,
                first_page: work.first_page,
                whole,
                next: &next[..PAGES.min(next.len())],
            };
            for (index, begin) in (0..rows).step_by(group).enumerate() {
                let rows = begin..(begin + group).min(rows);
                // SAFETY: the instructions are there.
                unsafe { reader.read(work, &run, rows, index == 0, state) };
            }
            first += batch.len();
        }
    }
    for (head, state) in states.iter_mut().enumerate() {
        let running = running(&shape, 0..rows, work.d, head * rows, reader.lanes, state);
        weigh::finish(&shape, running);
    }
}

/// The pages of a batch for one head.
struct Run<'a> {
    head: usize,
    pages: &'a [&'a [u8]],
    /// Counted from the first page of the call.
    numbers: &'a [usize],
    first_page: usize,
    /// Whether all rows see all of these pages.
    whole: bool,
    /// What is read after them.
    next: &'a [&'a [u8]],
}

impl Run<'_> {
    /// Position of the first token of a page.
    fn start(&self, page: usize) -> usize {
        (self.first_page + self.numbers[page]) * PAGE_TOKENS
    }

    /// Asks for one half of the page that is read as long after this one as a batch takes; after the last one, of all pages
    /// that are left of as many as a batch may have.
    #[inline(always)]
    fn fetch(&self, page: usize, side: Side) {
        let last = page + 1 == self.pages.len();
        let end = if last { self.next.len() } else { (page + 1).min(self.next.len()) };
        for page in &self.next[page.min(end)..end] {
            let (first, second) = page.split_at((page.len() / 2).next_multiple_of(64).min(page.len()));
            weigh::prefetch(match side {
                Side::Key => first,
                Side::Value => second,
            });
        }
    }
}

/// The queries of a call, and buffers for a batch.
struct Reader<'a> {
    products: Products,
    shape: Shape,
    queries: Queries<'a>,
    /// Whether several products serve the rows of a head: then a batch stays unpacked.
    keep: bool,
    /// Unpacked codes, of one page or of [`PAGES`].
    keys: &'a mut [u8],
    values: &'a mut [u8],
    /// Scales and offsets of a page.
    numbers: &'a mut [f32],
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

impl<'a> Reader<'a> {
    fn new(
        products: Products,
        shape: Shape,
        work: &Work<'_, u8>,
        keep: bool,
        buffers: &'a mut Buffers,
        tiles: &'a mut AlignedScratch,
    ) -> Reader<'a> {
        let Buffers { queries, query_numbers, numbers, weights, weight_numbers, lanes, sums, scaled } =
            buffers;
        // SAFETY: the instruction set of this module is there.
        let split_row =
            |row: &[f32], high: &mut [i8], low: &mut [i8]| unsafe { weigh::split_row(row, high, low) };
        // SAFETY: as above.
        let total = |row: &[f32]| unsafe { weigh::total(row) };
        let queries = Queries::new(&shape, work, ROWS, (queries, query_numbers), split_row, total);
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
        let weights = weights.at_least::<i8>(PAGES * group_sums);
        // Rows that no query has are multiplied too.
        weights.fill(0);
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
            numbers: numbers.at_least(shape.numbers()),
            key_sums: [this, next],
            value_sums,
            scaled: Scaled { page: 0, groups: shape.groups, numbers: scaled, largest },
            weights,
            units: weight_numbers.at_least(shape.groups * ROWS),
            lanes,
        }
    }

    /// Some rows of a head and the pages of a batch; `fresh` for the first rows that read these pages.
    ///
    /// # Safety
    /// The CPU has the instructions of [`attend`].
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma")]
    unsafe fn read(
        &mut self,
        work: &Work<'_, u8>,
        run: &Run<'_>,
        rows: Range<usize>,
        fresh: bool,
        state: &mut SoftmaxState,
    ) {
        let count = run.pages.len();
        let unseen = |page: usize| {
            work.spans[rows.clone()].iter().all(|span| span.in_page(run.start(page)).is_empty())
        };
        // Codes are unpacked by the first rows, for all.
        if !fresh && (0..count).all(unseen) {
            return;
        }
        self.scaled.largest.fill(0.0);
        self.open_keys(run, 0, fresh);
        for page in 0..=count {
            if page < count {
                self.multiply_keys(run, page, &rows);
                if page + 1 < count {
                    self.open_keys(run, page + 1, fresh);
                }
                run.fetch(page, Side::Key);
            }
            if page > 0 {
                self.weigh(work, run, page - 1, &rows, state);
            }
        }
        for group in 0..self.shape.groups {
            self.add_values(run, group, rows.len(), fresh);
            let channels = self.shape.group(group);
            let values = &mut state.values[rows.start * work.d..rows.end * work.d];
            let units = &self.units[group * ROWS..][..ROWS];
            weigh::add_values(
                self.value_sums,
                units,
                self.shape.padded,
                channels,
                rows.len(),
                work.d,
                values,
            );
        }
    }

    /// Where the unpacked keys of a page are.
    fn key_range(&self, page: usize) -> Range<usize> {
        let len = key_bytes(self.shape.padded);
        let start = if self.keep { page * len } else { 0 };
        start..start + len
    }

    #[inline(always)]
    fn open_keys(&mut self, run: &Run<'_>, page: usize, fresh: bool) {
        if self.keep && !fresh {
            return;
        }
        let words = Words::of(&self.shape, Side::Key, run.pages[page]);
        let range = self.key_range(page);
        // SAFETY: the instruction set of this module is there.
        unsafe { unpack(self.shape.bits, words, self.shape.padded, 0..PAGE_TOKENS, &mut self.keys[range]) };
    }

    #[inline(always)]
    fn multiply_keys(&mut self, run: &Run<'_>, page: usize, rows: &Range<usize>) {
        let range = self.key_range(page);
        for group in 0..self.shape.groups {
            let left = self.queries.left(group, run.head, rows);
            let sums = &mut self.key_sums[page % 2][group * ROWS * 2 * PAGE_TOKENS..];
            self.products.keys(&left, self.shape.group(group), &self.keys[range.clone()], sums);
        }
    }

    #[inline(always)]
    fn weigh(
        &mut self,
        work: &Work<'_, u8>,
        run: &Run<'_>,
        page: usize,
        rows: &Range<usize>,
        state: &mut SoftmaxState,
    ) {
        let first = run.head * self.queries.head_rows + rows.start;
        let start = run.start(page);
        let spans = &work.spans[rows.clone()];
        let mut seen = [u64::MAX; ROWS];
        if !run.whole {
            for (seen, span) in seen.iter_mut().zip(spans) {
                *seen = span.page_mask(start);
            }
        }
        let stored = self.shape.stored_numbers(run.pages[page]);
        // SAFETY: the instruction set of this module is there.
        unsafe { weigh::numbers(stored, self.shape.scale_type, self.numbers) };
        let sums = Sums {
            shape: &self.shape,
            sums: self.key_sums[page % 2],
            steps: &self.queries.steps[first..first + rows.len()],
            totals: &self.queries.totals[first..],
            totals_stride: self.queries.rows,
            numbers: self.numbers,
            spans,
            start,
            seen: &seen[..rows.len()],
        };
        let running = running(&self.shape, rows.clone(), work.d, first, self.lanes, state);
        self.scaled.page = page;
        // SAFETY: as above.
        unsafe { weigh::weigh_into::<ROWS, _>(&sums, running, &mut self.scaled) };
    }

    /// The values of a group, summed over the pages of a batch.
    #[inline(always)]
    fn add_values(&mut self, run: &Run<'_>, group: usize, rows: usize, fresh: bool) {
        let mut inverses = [0.0; ROWS];
        // SAFETY: the instruction set of this module is there.
        unsafe { self.scaled.units(group, rows, &mut self.units[group * ROWS..], &mut inverses) };
        let channels = self.shape.group(group);
        let end = channels.end.next_multiple_of(COLUMNS);
        let mut first = channels.start / COLUMNS * COLUMNS;
        let mut split = true;
        while first < end {
            let columns = first..(first + MOST_TILES * COLUMNS).min(end);
            self.products.clear();
            self.open_values(run, 0, columns.clone(), fresh);
            if split {
                self.split(group, 0, rows, &inverses);
            }
            for page in 0..run.pages.len() {
                if split && page + 1 < run.pages.len() {
                    self.split(group, page + 1, rows, &inverses);
                }
                let weights = &self.weights[(page * self.shape.groups + group) * ROWS * 2 * PAGE_TOKENS..];
                self.products.add(weights, &self.values[self.value_range(page, &columns)]);
                if page + 1 < run.pages.len() {
                    self.open_values(run, page + 1, columns.clone(), fresh);
                }
                if split && group == 0 {
                    run.fetch(page, Side::Value);
                }
            }
            self.products.store(columns.len() / COLUMNS, self.shape.padded, &mut self.value_sums[first..]);
            first = columns.end;
            split = false;
        }
    }

    /// Where the unpacked values of some columns of a page are.
    fn value_range(&self, page: usize, columns: &Range<usize>) -> Range<usize> {
        let start = match self.keep {
            true => page * value_bytes(self.shape.padded) + value_bytes(columns.start),
            false => 0,
        };
        start..start + value_bytes(columns.len())
    }

    #[inline(always)]
    fn open_values(&mut self, run: &Run<'_>, page: usize, columns: Range<usize>, fresh: bool) {
        if self.keep && !fresh {
            return;
        }
        let words = Words::of(&self.shape, Side::Value, run.pages[page]);
        let range = self.value_range(page, &columns);
        // SAFETY: the instruction set of this module is there.
        unsafe { unpack(self.shape.bits, words, PAGE_TOKENS, columns, &mut self.values[range]) };
    }

    /// The bytes of the weights of a page.
    #[inline(always)]
    fn split(&mut self, group: usize, page: usize, rows: usize, inverses: &[f32; ROWS]) {
        let at = (page * self.shape.groups + group) * ROWS;
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

/// The softmax of some rows of a head, whose lanes are those from row `first` of all heads on.
fn running<'s>(
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

/// Weights times scales of a batch.
struct Scaled<'a> {
    /// The page that is weighed.
    page: usize,
    groups: usize,
    /// `[page][group][ROWS][64 tokens]`.
    numbers: &'a mut [f32],
    /// `[group][ROWS][LANES]`: the largest magnitudes so far.
    largest: &'a mut [f32],
}

impl Scaled<'_> {
    /// The units of the rows of a group, and what their numbers are multiplied with to get integers.
    ///
    /// # Safety
    /// The CPU has AVX-512 F and VL.
    #[inline(always)]
    unsafe fn units(&self, group: usize, rows: usize, steps: &mut [f32], inverses: &mut [f32; ROWS]) {
        assert!(rows <= ROWS && steps.len() >= ROWS);
        let largest = &self.largest[group * ROWS * LANES..][..ROWS * LANES];
        for first in (0..rows).step_by(4) {
            // SAFETY: rows `first..first + 4` are among `ROWS`, a multiple of four.
            unsafe {
                let row = |r: usize| _mm512_loadu_ps(largest.as_ptr().add((first + r) * LANES));
                let (step, inverse) = units(reduce_max([row(0), row(1), row(2), row(3)]));
                _mm_storeu_ps(steps.as_mut_ptr().add(first), step);
                _mm_storeu_ps(inverses.as_mut_ptr().add(first), inverse);
            }
        }
    }
}

impl Sink for Scaled<'_> {
    #[inline(always)]
    unsafe fn take<const R: usize>(
        &mut self,
        group: usize,
        first: usize,
        scaled: [Page; R],
        largest: [__m512; R],
    ) {
        let at = (self.page * self.groups + group) * ROWS + first;
        let numbers = &mut self.numbers[at * PAGE_TOKENS..][..R * PAGE_TOKENS];
        let kept = &mut self.largest[(group * ROWS + first) * LANES..][..R * LANES];
        for r in 0..R {
            // SAFETY: the caller's promises, and the lengths above.
            unsafe {
                for j in 0..REGISTERS {
                    _mm512_storeu_ps(numbers.as_mut_ptr().add(r * PAGE_TOKENS + j * LANES), scaled[r][j]);
                }
                let kept = kept.as_mut_ptr().add(r * LANES);
                let larger = _mm512_range_ps::<LARGER_MAGNITUDE>(_mm512_loadu_ps(kept), largest[r]);
                _mm512_storeu_ps(kept, larger);
            }
        }
    }

    fn shrink(&mut self, row: usize, factor: f32) {
        for group in 0..self.groups {
            let largest = &mut self.largest[(group * ROWS + row) * LANES..][..LANES];
            largest.iter_mut().for_each(|number| *number *= factor);
            for page in 0..self.page {
                let at = ((page * self.groups + group) * ROWS + row) * PAGE_TOKENS;
                self.numbers[at..][..PAGE_TOKENS].iter_mut().for_each(|number| *number *= factor);
            }
        }
    }
}
