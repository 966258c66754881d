//! Pages of 2-bit or 4-bit codes, and of keys in bands: what happens around the integer products.
//!
//! Items overlap: what one part of an item stores, the next part loads only after parts of other items that do not depend
//! on it, and a page is prefetched some items before it is read. See [`CodeAttention::attend`] for the order. Many rows on
//! AMX take another way, `prefill`.
//!
//! Groups: queries are split once per group with zeros outside it, and weights are split once per group with its
//! scales. A group may begin anywhere; what lies around it in the same word or register is multiplied and dropped.

use std::ops::Range;

use oscar_codec::band::half_range;
use oscar_codec::{CodecError, PAGE_TOKENS, Side};

#[cfg(target_arch = "x86_64")]
use super::avx512::Avx512;
use super::band_places::{BandPlaces, QUAD};
use super::bands::BandLogits;
#[cfg(target_arch = "x86_64")]
use super::engine::LANES;
use super::engine::{Engine, KeySums, Left, RowStates, Shape, ValueSums, Weights};
use super::fixed_point::FixedPoint;
use super::product::{COLUMN_STEP, Product};
use super::scalar;
use super::schedule::{WorkItem, schedule};
use crate::cpu::aligned::AlignedScratch;
use crate::cpu::attention::scratch::{AttentionScratch, CodeScratch};
use crate::cpu::attention::state::SoftmaxState;
use crate::cpu::attention::work::Work;
use crate::cpu::isa::Isa;
use crate::cpu::simd::{Simd, prefetch};

/// Rows of query bytes are padded to a multiple of this, a register of bytes.
const STRIDE_STEP: usize = 64;

/// The number of bytes in a cache line.
const LINE: usize = 64;

/// Items between the prefetch of a page and the softmax over it. Its keys are read one item before that.
const AHEAD: usize = 4;

/// The largest number of rows that any engine multiplies at once.
const MOST_ROWS: usize = 8;

/// Attends all rows of all heads to all pages; on a machine without vectors there is one head, and `decode` reads one token
/// of one side of a page.
pub(super) fn attend(
    simd: Simd,
    shape: Shape,
    decode: impl Fn(&[u8], Side, usize, &mut [f32]) -> Result<(), CodecError>,
    work: &Work<'_, u8>,
    scratch: &mut AttentionScratch,
    states: &mut [SoftmaxState],
) {
    #[cfg(target_arch = "x86_64")]
    if simd.isa() == Isa::Amx && super::prefill::takes(&shape, work) {
        return super::prefill::attend(simd, &shape, work, scratch, &mut states[0]);
    }
    let mut logits = std::mem::take(&mut scratch.codes.logits);
    match simd.isa() {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 | Isa::Amx => {
            let attention = CodeAttention::new(Avx512::new(simd), shape, work, &mut scratch.codes);
            // SAFETY: the instruction set is available.
            unsafe { with_avx512(attention, work, states) };
        }
        Isa::Avx2 | Isa::Neon => {
            let engine = FixedPoint::new(simd, &shape, &mut logits);
            CodeAttention::new(engine, shape, work, &mut scratch.codes).attend(work, states);
        }
        _ => scalar::attend(work, decode, &mut states[0]),
    }
    scratch.codes.logits = logits;
}

/// [`CodeAttention::attend`], compiled for an instruction set together with most of what it calls.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn with_avx512(mut attention: CodeAttention<'_, Avx512>, work: &Work<'_, u8>, states: &mut [SoftmaxState]) {
    attention.attend(work, states);
}

/// The queries of a call as bytes.
struct Queries<'a> {
    stride: usize,
    /// Number of rows of all heads; they lie in the order `[head][row]`.
    rows: usize,
    /// Number of rows of each head.
    head_rows: usize,
    /// `[group][row][high, low][stride]`, zero outside the group; room for more rows at the end. For keys in bands,
    /// `[quad of channels][row][high, low][4 channels]`.
    bytes: &'a [i8],
    /// `[group][row]`: what a unit stands for. Channels of a group are of like strength, those of two bands need not be.
    units: &'a [f32],
    /// `[group][row]`: sum of the channels of the group; for keys in bands, times minus half the largest code.
    totals: &'a [f32],
}

impl<'a> Queries<'a> {
    fn new<E: Engine>(
        engine: &E,
        shape: &Shape,
        work: &Work<'_, u8>,
        (bytes, numbers): (&'a mut AlignedScratch, &'a mut AlignedScratch),
    ) -> Self {
        let (d, rows, head_rows) = (work.d, work.q.len() / work.d, work.spans.len());
        let stride = shape.padded.next_multiple_of(STRIDE_STEP);
        let row_bytes = 2 * stride;
        // The last rows are read as part of a full product.
        let groups = shape.key_groups();
        let bytes = bytes.at_least::<i8>((groups * rows + E::ROWS) * row_bytes);
        let (masked, numbers) = numbers.at_least::<f32>(d + 2 * groups * rows).split_at_mut(d);
        let (units, totals) = numbers.split_at_mut(groups * rows);
        if let Some(layout) = shape.bands() {
            let (quads, split) = bytes.split_at_mut(groups * rows * row_bytes);
            let (high, low) = split[..row_bytes].split_at_mut(stride);
            for (row, q) in work.q.chunks_exact(d).enumerate() {
                for (index, band) in layout.bands().iter().enumerate() {
                    let channels = band.range();
                    let (at, padded) = (index * rows + row, channels.len().next_multiple_of(STRIDE_STEP));
                    units[at] =
                        engine.split_row(&q[channels.clone()], &mut high[..padded], &mut low[..padded]);
                    totals[at] = -half_range(band.bits) * engine.total(&q[channels.clone()]);
                    for (index, channel) in channels.step_by(QUAD).enumerate() {
                        let quad = &mut quads[(channel / QUAD * rows + row) * 2 * QUAD..][..2 * QUAD];
                        quad[..QUAD].copy_from_slice(&high[index * QUAD..][..QUAD]);
                        quad[QUAD..].copy_from_slice(&low[index * QUAD..][..QUAD]);
                    }
                }
            }
            return Queries { stride, rows, head_rows, bytes, units, totals };
        }
        bytes[groups * rows * row_bytes..].fill(0);
        for group in 0..groups {
            let channels = shape.group(group);
            masked.fill(0.0);
            for (row, q) in work.q.chunks_exact(d).enumerate() {
                masked[channels.clone()].copy_from_slice(&q[channels.clone()]);
                let at = group * rows + row;
                let (high, low) = bytes[at * row_bytes..][..row_bytes].split_at_mut(stride);
                units[at] = engine.split_row(masked, high, low);
                totals[at] = engine.total(&q[channels.clone()]);
            }
        }
        Queries { stride, rows, head_rows, bytes, units, totals }
    }

    /// The left side of the product of some rows of a head with keys of a group.
    #[inline(always)]
    fn left(&self, group: usize, head: usize, rows: &Range<usize>) -> Left<'_> {
        let row = group * self.rows + head * self.head_rows + rows.start;
        Left { bytes: &self.bytes[row * 2 * self.stride..], stride: self.stride, rows: rows.len() }
    }
}

/// The queries of a call, and buffers for the items that are under way.
struct CodeAttention<'a, E> {
    engine: E,
    shape: Shape,
    queries: Queries<'a>,
    /// Where in a page the bands of keys are; empty in formats without bands.
    bands: BandPlaces,
    weights: Weights<'a>,
    /// The integer sums of the keys of this item and of the next; the two buffers change places at every item.
    key_sums: [&'a mut [i32]; 2],
    value_sums: &'a mut [i32],
    /// The lanes of the rows of all heads, as [`RowStates::lanes`] describes them.
    #[cfg(target_arch = "x86_64")]
    lanes: &'a mut [f32],
}

impl<'a, E: Engine> CodeAttention<'a, E> {
    fn new(engine: E, shape: Shape, work: &Work<'_, u8>, scratch: &'a mut CodeScratch) -> Self {
        let CodeScratch { queries, query_units, weights, weight_units, sums, .. } = scratch;
        let queries = Queries::new(&engine, &shape, work, (queries, query_units));
        let weight_bytes = weights.at_least(shape.groups * E::ROWS * 2 * PAGE_TOKENS);
        // Rows that no query has are multiplied too.
        weight_bytes.fill(0);
        let parts = if shape.has_bands() { 1 } else { 2 * shape.groups };
        let key_sums = parts * E::ROWS * PAGE_TOKENS;
        let sums = sums.at_least(2 * key_sums + shape.groups * E::ROWS * 2 * shape.padded);
        let (this, rest) = sums.split_at_mut(key_sums);
        let (next, value_sums) = rest.split_at_mut(key_sums);
        #[cfg(target_arch = "x86_64")]
        let lanes = scratch.lanes.at_least(queries.rows * (1 + shape.groups) * LANES);
        #[cfg(target_arch = "x86_64")]
        lanes.fill(0.0);
        CodeAttention {
            bands: shape.bands().map(BandPlaces::new).unwrap_or_default(),
            engine,
            shape,
            queries,
            weights: Weights {
                bytes: weight_bytes,
                units: weight_units.at_least(shape.groups * E::ROWS * 2),
            },
            key_sums: [this, next],
            value_sums,
            #[cfg(target_arch = "x86_64")]
            lanes,
        }
    }

    /// Keys are multiplied one item before the weights of an item are known, values multiplied and added one item after.
    #[inline(always)]
    fn attend(&mut self, work: &Work<'_, u8>, states: &mut [SoftmaxState]) {
        let items = schedule(work, states.len(), E::ROWS);
        if items.is_empty() {
            return;
        }
        for item in items.iter().take(AHEAD) {
            prefetch_all(item.page);
        }
        self.multiply_keys(&items[0], 0, work);
        for n in 0..=items.len() {
            self.prefetch(&items, n, 0);
            if n + 1 < items.len() {
                self.multiply_keys(&items[n + 1], n + 1, work);
            }
            self.prefetch(&items, n, 1);
            if n > 0 {
                self.multiply_values(&items[n - 1]);
                self.prefetch(&items, n, 2);
                self.accumulate_values(&items[n - 1], work.d, &mut states[items[n - 1].head]);
            }
            self.prefetch(&items, n, 3);
            if let Some(item) = items.get(n) {
                self.softmax(n, item, work, &mut states[item.head]);
            }
        }
        #[cfg(target_arch = "x86_64")]
        for (head, state) in states.iter_mut().enumerate() {
            let (rows, d) = (self.queries.head_rows, work.d);
            let lanes = rows * (1 + self.shape.groups) * LANES;
            let state = RowStates {
                max: &mut state.max[..rows],
                sum: &mut state.sum[..rows],
                values: &mut state.values[..rows * d],
                d,
                lanes: &mut self.lanes[head * lanes..][..lanes],
            };
            self.engine.finish(&self.shape, state);
        }
    }

    /// Prefetches a quarter of the page [`AHEAD`] items after item `n`. All lines at once would fill the queue for them
    /// and stop everything else.
    #[inline(always)]
    fn prefetch(&self, items: &[WorkItem<'_>], n: usize, quarter: usize) {
        if let Some([before, item]) = items.get(n + AHEAD - 1..=n + AHEAD)
            && before.index != item.index
        {
            let lines = (item.page.len() / 4).next_multiple_of(LINE);
            let start = (quarter * lines).min(item.page.len());
            prefetch_all(&item.page[start..(start + lines).min(item.page.len())]);
        }
    }

    /// Multiplies the keys of item `n`.
    #[inline(always)]
    fn multiply_keys(&mut self, item: &WorkItem<'_>, n: usize, work: &Work<'_, u8>) {
        if self.shape.has_bands() {
            let first = item.head * self.queries.head_rows + item.rows.start;
            let mut starts = [0.0; MOST_ROWS];
            for (row, start) in starts.iter_mut().enumerate().take(item.rows.len()) {
                *start = work.page_logit(first + row, item.index);
            }
            return self.engine.simd().run(BandLogits {
                bands: &self.bands,
                page: item.page,
                rows: item.rows.len(),
                left: &self.queries.bytes[first * 2 * QUAD..],
                units: &self.queries.units[first..],
                offsets: &self.queries.totals[first..],
                stride: self.queries.rows,
                starts: &starts,
                logits: bytemuck::cast_slice_mut(self.key_sums[n % 2]),
            });
        }
        let group_sums = E::ROWS * 2 * PAGE_TOKENS;
        for group in 0..self.shape.groups {
            self.engine.simd().run(Product {
                bits: self.shape.bits,
                left: self.queries.left(group, item.head, &item.rows),
                words: self.shape.key_words(item.page),
                inner: self.shape.group(group),
                columns: 0..PAGE_TOKENS,
                sums: &mut self.key_sums[n % 2][group * group_sums..][..group_sums],
            });
        }
    }

    /// Multiplies the values of an item with its weights.
    #[inline(always)]
    fn multiply_values(&mut self, item: &WorkItem<'_>) {
        let group_sums = E::ROWS * 2 * self.shape.padded;
        for group in 0..self.shape.groups {
            let channels = self.shape.group(group);
            let first = channels.start / COLUMN_STEP * COLUMN_STEP;
            self.engine.simd().run(Product {
                bits: self.shape.bits,
                left: Left {
                    bytes: &self.weights.bytes[group * E::ROWS * 2 * PAGE_TOKENS..],
                    stride: PAGE_TOKENS,
                    rows: item.rows.len(),
                },
                words: self.shape.value_words(item.page),
                inner: 0..PAGE_TOKENS,
                columns: first..channels.end.next_multiple_of(COLUMN_STEP),
                sums: &mut self.value_sums[group * group_sums..][..group_sums],
            });
        }
    }

    #[inline(always)]
    fn softmax(&mut self, number: usize, item: &WorkItem<'_>, work: &Work<'_, u8>, state: &mut SoftmaxState) {
        let (shape, d, rows) = (&self.shape, work.d, item.rows.clone());
        let first = item.head * self.queries.head_rows + rows.start;
        #[cfg(target_arch = "x86_64")]
        let lanes = (1 + shape.groups) * LANES;
        #[cfg(target_arch = "x86_64")]
        let mut seen = [0; MOST_ROWS];
        #[cfg(target_arch = "x86_64")]
        for (seen, span) in seen.iter_mut().zip(&work.spans[rows.clone()]) {
            *seen = span.page_mask(item.start);
        }
        let sums = KeySums {
            shape,
            sums: self.key_sums[number % 2],
            units: &self.queries.units[first..],
            totals: &self.queries.totals[first..],
            stride: self.queries.rows,
            key_scales: shape.key_scales(item.page),
            value_scales: shape.value_scales(item.page),
            spans: &work.spans[rows.clone()],
            start: item.start,
            #[cfg(target_arch = "x86_64")]
            seen: &seen[..rows.len()],
        };
        let mut state = RowStates {
            max: &mut state.max[rows.clone()],
            sum: &mut state.sum[rows.clone()],
            values: &mut state.values[rows.start * d..rows.end * d],
            d,
            #[cfg(target_arch = "x86_64")]
            lanes: &mut self.lanes[first * lanes..][..rows.len() * lanes],
        };
        self.engine.softmax(&sums, &mut state, &mut self.weights);
    }

    #[inline(always)]
    fn accumulate_values(&mut self, item: &WorkItem<'_>, d: usize, state: &mut SoftmaxState) {
        let group_sums = E::ROWS * 2 * self.shape.padded;
        let values = &mut state.values[item.rows.start * d..item.rows.end * d];
        for group in 0..self.shape.groups {
            let sums = &self.value_sums[group * group_sums..][..group_sums];
            let units = &self.weights.units[group * E::ROWS * 2..][..E::ROWS * 2];
            let (width, channels, rows) = (self.shape.padded, self.shape.group(group), item.rows.len());
            self.engine.accumulate_values(ValueSums { sums, units, width, channels, rows, d }, values);
        }
    }
}

/// Prefetches all lines of some memory.
#[inline(always)]
fn prefetch_all(bytes: &[u8]) {
    for line in (0..bytes.len()).step_by(LINE) {
        prefetch(bytes.as_ptr().wrapping_add(line));
    }
}
