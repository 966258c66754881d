//! 2-bit and 4-bit pages: what happens around the integer products.
//!
//! Both products have the same shape: bytes of queries (or weights) times codes in words `[blocks][width]`, where a
//! word holds the codes of one token (or channel) for 8 or 16 channels (or tokens) in a row, and neighbouring words
//! are neighbouring tokens (or channels). An [`Engine`] multiplies, and turns sums into weights.
//!
//! Steps overlap: what one part of a step stores, the next part loads only after parts of other steps that do not depend
//! on it, and a page is prefetched some steps before it is read. See [`Reader::attend`] for the order. Many rows on AMX
//! take another way, `prefill`.
//!
//! Groups: queries are stored once per group with zeros outside it, and weights are split once per group with its
//! scales. A group may begin anywhere; what lies around it in the same word or register is multiplied and dropped.

use std::ops::Range;

use oscar_codec::{CodeLayout, PAGE_TOKENS, Side};

#[cfg(target_arch = "x86_64")]
use super::engine::LANES;
use super::engine::{Engine, Left, Running, Shape, Sums, Weights};
use super::{Step, scalar, schedule};
use crate::cpu::attention::{AttentionScratch, SoftmaxState, Work};
use crate::cpu::gemm::aligned::AlignedScratch;
use crate::cpu::isa::Isa;

/// Rows of query bytes are padded to this, a register of bytes.
const STRIDE_STEP: usize = 64;

/// Columns that engines multiply together: results of groups are cut out of such blocks.
const COLUMN_STEP: usize = 16;

/// Bytes of a cache line.
const LINE: usize = 64;

/// Steps between asking for a page and the softmax over it. Its keys are read one step before that.
const AHEAD: usize = 4;

/// No engine multiplies more rows at once.
#[cfg(target_arch = "x86_64")]
const MOST_ROWS: usize = 8;

/// Buffers of one thread.
#[derive(Default)]
pub(super) struct CodeScratch {
    buffers: Buffers,
    #[cfg(target_arch = "x86_64")]
    pub(super) prefill: super::prefill::PrefillScratch,
    /// Logits, and scales as numbers.
    logits: AlignedScratch,
}

#[derive(Default)]
struct Buffers {
    queries: AlignedScratch,
    query_numbers: AlignedScratch,
    weights: AlignedScratch,
    weight_numbers: AlignedScratch,
    #[cfg(target_arch = "x86_64")]
    lanes: AlignedScratch,
    sums: AlignedScratch,
}

/// Attends all rows of all heads to all pages. The instruction set must be available, which
/// [`super::attend_sealed_heads`] has checked; without one there is one head.
pub(super) fn attend(
    isa: Isa,
    layout: &CodeLayout,
    work: &Work<'_, u8>,
    scratch: &mut AttentionScratch,
    states: &mut [SoftmaxState],
) {
    let shape = Shape::new(layout);
    #[cfg(target_arch = "x86_64")]
    if isa == Isa::Amx && super::prefill::takes(&shape, work) {
        return super::prefill::attend(&shape, work, scratch, &mut states[0]);
    }
    let CodeScratch { buffers, logits, .. } = &mut scratch.sealed.codes;
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 | Isa::Amx => {
            // SAFETY: the instruction set is available.
            unsafe { with_avx512(Reader::new(super::vnni::Vpdpbusd, shape, work, buffers), work, states) };
        }
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => {
            let engine = super::maddubs::Maddubs::new(&shape, logits);
            Reader::new(engine, shape, work, buffers).attend(work, states);
        }
        #[cfg(target_arch = "aarch64")]
        Isa::Neon => {
            let engine = super::sdot::Sdot::new(&shape, logits);
            Reader::new(engine, shape, work, buffers).attend(work, states);
        }
        _ => {
            scalar::attend(
                work,
                |page, side, token, row| layout.decode_token(page, side, token, row),
                &mut states[0],
            );
        }
    }
}

/// [`Reader::attend`], compiled for an instruction set together with most of what it calls.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma")]
fn with_avx512<E: Engine>(mut reader: Reader<'_, E>, work: &Work<'_, u8>, states: &mut [SoftmaxState]) {
    reader.attend(work, states);
}

/// The queries of a call as bytes.
struct Queries<'a> {
    stride: usize,
    /// Of all heads, `[head][row]`.
    rows: usize,
    head_rows: usize,
    /// `[group][row][high, low][stride]`, zero outside the group; room for more rows at the end.
    bytes: &'a [i8],
    /// Unit of each row.
    steps: &'a [f32],
    /// `[group][row]`: sum of the channels of the group.
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
        let bytes = bytes.at_least::<i8>((shape.groups * rows + E::ROWS) * row_bytes);
        let (steps, totals) = numbers.at_least::<f32>((1 + shape.groups) * rows).split_at_mut(rows);
        bytes[rows * row_bytes..].fill(0);
        for (row, q) in work.q.chunks_exact(d).enumerate() {
            let (high, low) = bytes[row * row_bytes..][..row_bytes].split_at_mut(stride);
            steps[row] = engine.split_row(q, high, low);
            for group in 0..shape.groups {
                totals[group * rows + row] = engine.total(&q[shape.group(group)]);
            }
        }
        // Groups after the first get their channels of the first copy, which then loses them.
        let (first, others) = bytes.split_at_mut(rows * row_bytes);
        for (group, copy) in (1..shape.groups).zip(others.chunks_exact_mut(rows * row_bytes)) {
            let channels = shape.group(group);
            for (from, to) in first.chunks_exact_mut(stride).zip(copy.chunks_exact_mut(stride)) {
                to[channels.clone()].copy_from_slice(&from[channels.clone()]);
                from[channels.clone()].fill(0);
            }
        }
        Queries { stride, rows, head_rows, bytes, steps, totals }
    }

    /// Some rows of a head for the product with keys of a group.
    #[inline(always)]
    fn left(&self, group: usize, head: usize, rows: &Range<usize>) -> Left<'_> {
        let row = group * self.rows + head * self.head_rows + rows.start;
        Left { bytes: &self.bytes[row * 2 * self.stride..], stride: self.stride, rows: rows.len() }
    }
}

/// The queries, and buffers for a step.
struct Reader<'a, E> {
    engine: E,
    shape: Shape,
    queries: Queries<'a>,
    weights: Weights<'a>,
    /// Of the keys of this step and of the next, in turn.
    key_sums: [&'a mut [i32]; 2],
    value_sums: &'a mut [i32],
    /// Of all heads, as [`Running::lanes`].
    #[cfg(target_arch = "x86_64")]
    lanes: &'a mut [f32],
}

impl<'a, E: Engine> Reader<'a, E> {
    fn new(engine: E, shape: Shape, work: &Work<'_, u8>, buffers: &'a mut Buffers) -> Self {
        let Buffers { queries, query_numbers, weights, weight_numbers, sums, .. } = buffers;
        let queries = Queries::new(&engine, &shape, work, (queries, query_numbers));
        let weight_bytes = weights.at_least(shape.groups * E::ROWS * 2 * PAGE_TOKENS);
        // Rows that no query has are multiplied too.
        weight_bytes.fill(0);
        let key_sums = shape.groups * E::ROWS * 2 * PAGE_TOKENS;
        let sums = sums.at_least(2 * key_sums + shape.groups * E::ROWS * 2 * shape.padded);
        let (this, rest) = sums.split_at_mut(key_sums);
        let (next, value_sums) = rest.split_at_mut(key_sums);
        #[cfg(target_arch = "x86_64")]
        let lanes = buffers.lanes.at_least(queries.rows * (1 + shape.groups) * LANES);
        #[cfg(target_arch = "x86_64")]
        lanes.fill(0.0);
        Reader {
            engine,
            shape,
            queries,
            weights: Weights {
                bytes: weight_bytes,
                numbers: weight_numbers.at_least(shape.groups * E::ROWS * 2),
            },
            key_sums: [this, next],
            value_sums,
            #[cfg(target_arch = "x86_64")]
            lanes,
        }
    }

    /// Keys are multiplied one step before the weights of a step are known, values multiplied and added one step after.
    #[inline(always)]
    fn attend(&mut self, work: &Work<'_, u8>, states: &mut [SoftmaxState]) {
        let steps = schedule(work, states.len(), E::ROWS);
        if steps.is_empty() {
            return;
        }
        for step in steps.iter().take(AHEAD) {
            self.engine.fetch(step.page);
        }
        self.multiply(Side::Key, &steps, 0);
        for n in 0..=steps.len() {
            self.fetch(&steps, n, 0);
            if n + 1 < steps.len() {
                self.multiply(Side::Key, &steps, n + 1);
            }
            self.fetch(&steps, n, 1);
            if n > 0 {
                self.multiply(Side::Value, &steps, n - 1);
                self.fetch(&steps, n, 2);
                self.add_values(&steps[n - 1], work.d, &mut states[steps[n - 1].head]);
            }
            self.fetch(&steps, n, 3);
            if let Some(step) = steps.get(n) {
                self.weigh(n, step, work, &mut states[step.head]);
            }
        }
        #[cfg(target_arch = "x86_64")]
        for (head, state) in states.iter_mut().enumerate() {
            let (rows, d) = (self.queries.head_rows, work.d);
            let lanes = rows * (1 + self.shape.groups) * LANES;
            let running = Running {
                max: &mut state.max[..rows],
                sum: &mut state.sum[..rows],
                values: &mut state.values[..rows * d],
                d,
                lanes: &mut self.lanes[head * lanes..][..lanes],
            };
            self.engine.finish(&self.shape, running);
        }
    }

    /// Asks for a quarter of the page [`AHEAD`] steps after step `n`. All lines at once would fill the queue for them
    /// and stop everything else.
    #[inline(always)]
    fn fetch(&self, steps: &[Step<'_>], n: usize, quarter: usize) {
        if let Some([before, step]) = steps.get(n + AHEAD - 1..=n + AHEAD)
            && before.index != step.index
        {
            let lines = (step.page.len() / 4).next_multiple_of(LINE);
            let start = (quarter * lines).min(step.page.len());
            self.engine.fetch(&step.page[start..(start + lines).min(step.page.len())]);
        }
    }

    /// Multiplies one side of step `n`.
    #[inline(always)]
    fn multiply(&mut self, side: Side, steps: &[Step<'_>], n: usize) {
        let step = &steps[n];
        let group_sums = match side {
            Side::Key => E::ROWS * 2 * PAGE_TOKENS,
            Side::Value => E::ROWS * 2 * self.shape.padded,
        };
        for group in 0..self.shape.groups {
            let left = match side {
                Side::Key => self.queries.left(group, step.head, &step.rows),
                Side::Value => Left {
                    bytes: &self.weights.bytes[group * E::ROWS * 2 * PAGE_TOKENS..],
                    stride: PAGE_TOKENS,
                    rows: step.rows.len(),
                },
            };
            let sums = match side {
                Side::Key => &mut *self.key_sums[n % 2],
                Side::Value => &mut *self.value_sums,
            };
            let sums = &mut sums[group * group_sums..][..group_sums];
            let channels = self.shape.group(group);
            let (inner, columns) = match side {
                Side::Key => (channels, 0..PAGE_TOKENS),
                Side::Value => {
                    let first = channels.start / COLUMN_STEP * COLUMN_STEP;
                    (0..PAGE_TOKENS, first..channels.end.next_multiple_of(COLUMN_STEP))
                }
            };
            self.engine.product(&self.shape, side, step.page, &left, inner, columns, sums);
        }
    }

    #[inline(always)]
    fn weigh(&mut self, number: usize, step: &Step<'_>, work: &Work<'_, u8>, state: &mut SoftmaxState) {
        let (shape, d, rows) = (&self.shape, work.d, step.rows.clone());
        let first = step.head * self.queries.head_rows + rows.start;
        #[cfg(target_arch = "x86_64")]
        let lanes = (1 + shape.groups) * LANES;
        #[cfg(target_arch = "x86_64")]
        let mut seen = [0; MOST_ROWS];
        #[cfg(target_arch = "x86_64")]
        for (seen, span) in seen.iter_mut().zip(&work.spans[rows.clone()]) {
            *seen = span.page_mask(step.start);
        }
        let sums = Sums {
            shape,
            sums: self.key_sums[number % 2],
            steps: &self.queries.steps[first..first + rows.len()],
            totals: &self.queries.totals[first..],
            totals_stride: self.queries.rows,
            stored: shape.stored_numbers(step.page),
            spans: &work.spans[rows.clone()],
            start: step.start,
            #[cfg(target_arch = "x86_64")]
            seen: &seen[..rows.len()],
        };
        let mut running = Running {
            max: &mut state.max[rows.clone()],
            sum: &mut state.sum[rows.clone()],
            values: &mut state.values[rows.start * d..rows.end * d],
            d,
            #[cfg(target_arch = "x86_64")]
            lanes: &mut self.lanes[first * lanes..][..rows.len() * lanes],
        };
        self.engine.weigh(&sums, &mut running, &mut self.weights);
    }

    #[inline(always)]
    fn add_values(&mut self, step: &Step<'_>, d: usize, state: &mut SoftmaxState) {
        let group_sums = E::ROWS * 2 * self.shape.padded;
        let values = &mut state.values[step.rows.start * d..step.rows.end * d];
        for group in 0..self.shape.groups {
            let sums = &self.value_sums[group * group_sums..][..group_sums];
            let numbers = &self.weights.numbers[group * E::ROWS * 2..][..E::ROWS * 2];
            self.engine.add_values(
                sums,
                numbers,
                self.shape.padded,
                self.shape.group(group),
                step.rows.len(),
                d,
                values,
            );
        }
    }
}
