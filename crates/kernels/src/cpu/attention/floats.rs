//! Products and softmax in `f32`: the kernels, and the loop over pages and groups of rows.
//!
//! Both products of attention have the same shape, `rows x pairs` times `pairs x width` with the right side in bf16 pairs,
//! so there is one kernel for products and one for a softmax step over a page.

use oscar_codec::PAGE_TOKENS;

use super::page::{split, written_values};
use super::scratch::AttentionScratch;
use super::state::SoftmaxState;
use super::work::{Span, Work};
use crate::cpu::simd::{Kernel, Simd, Vector, exp2, prefetch};

/// Most rows of a product: more would spill sums to the stack.
pub(super) const ROWS: usize = 4;

/// bf16 elements of a cache line.
const LINE: usize = 32;

/// Memory that a product prefetches, in four places side by side: the hardware prefetches ahead in each by itself, and
/// starts anew where a page of memory ends.
pub(super) type Ahead<'a> = [&'a [u16]; 4];

/// Nothing that will be read.
pub(super) const NOTHING: Ahead<'static> = [&[]; 4];

/// What each of the two products of a page prefetches of the next one: a half of every quarter of it.
fn halves(page: &[u16]) -> [Ahead<'_>; 2] {
    let quarter = page.len() / 4;
    [0, 1]
        .map(|half| std::array::from_fn(|place| &page[place * quarter + half * quarter / 2..][..quarter / 2]))
}

/// Attends all rows to all pages.
pub(super) fn attend(simd: Simd, work: &Work<'_>, scratch: &mut AttentionScratch, state: &mut SoftmaxState) {
    let Work { q, spans, d, .. } = *work;
    let rows = spans.len();
    // Equal groups: seven rows are four and three, not six and one.
    let group = rows.div_ceil(rows.div_ceil(ROWS));
    let mut pages = work.visible_pages().peekable();
    while let Some((page, start)) = pages.next() {
        let (keys, values) = split(page, d);
        let next = pages.peek().map_or([NOTHING; 2], |(page, _)| halves(page));
        let values = written_values(values, d, work.written(start), &mut scratch.values);
        for first in (0..rows).step_by(group) {
            let rows = group.min(rows - first);
            let spans = &spans[first..first + rows];
            let seen = spans.iter().map(|span| span.in_page(start)).filter(|seen| !seen.is_empty());
            let Some(seen) = seen.map(|seen| seen.end).max() else {
                continue;
            };
            // The first group prefetches the next page while it computes.
            let [next_keys, next_values] = if first == 0 { next } else { [NOTHING; 2] };
            let scores = scratch.scores.at_least::<f32>(rows * PAGE_TOKENS);
            scores.fill(0.0);
            let channels = first * d..(first + rows) * d;
            simd.run(Product {
                left: &q[channels.clone()],
                left_stride: d,
                rows,
                right: keys,
                pairs: d / 2,
                width: PAGE_TOKENS,
                out: scores,
                ahead: next_keys,
            });
            simd.run(SoftmaxRows {
                scores,
                spans,
                start,
                max: &mut state.max[first..first + rows],
                sum: &mut state.sum[first..first + rows],
                values: &mut state.values[channels.clone()],
                d,
            });
            simd.run(Product {
                left: scores,
                left_stride: PAGE_TOKENS,
                rows,
                right: values,
                pairs: seen.div_ceil(2),
                width: d,
                out: &mut state.values[channels],
                ahead: next_values,
            });
        }
    }
}

/// Adds `left · right` to `out`, for up to [`ROWS`] rows and widths that are multiples of 16.
pub(super) struct Product<'a> {
    /// `[rows][left_stride]`, of which `2 * pairs` count.
    pub(super) left: &'a [f32],
    pub(super) left_stride: usize,
    pub(super) rows: usize,
    /// `[pairs][width][2]` in bf16.
    pub(super) right: &'a [u16],
    pub(super) pairs: usize,
    pub(super) width: usize,
    /// `[rows][width]`.
    pub(super) out: &'a mut [f32],
    /// The memory that will be read next, to be prefetched.
    pub(super) ahead: Ahead<'a>,
}

impl Kernel for Product<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Vector>(mut self) {
        let Product { rows, pairs, width, left_stride, .. } = self;
        assert!(width.is_multiple_of(16) && (1..=ROWS).contains(&rows));
        assert!(self.right.len() >= pairs * width * 2 && self.out.len() >= rows * width);
        assert!(2 * pairs <= left_stride && self.left.len() >= rows * left_stride);
        let mut column = 0;
        while column < width {
            let registers = (width - column) / V::WIDTH;
            // SAFETY: the caller promises the instructions; so many registers of columns are left. Four of them for four
            // rows of sums leave registers for the operands if there are 32, else two do.
            column += V::WIDTH
                * unsafe {
                    match registers {
                        4.. if V::REGISTERS == 32 => self.columns::<V, 4>(column),
                        3 if V::REGISTERS == 32 => self.columns::<V, 3>(column),
                        2.. => self.columns::<V, 2>(column),
                        _ => self.columns::<V, 1>(column),
                    }
                };
        }
    }
}

impl Product<'_> {
    /// Columns from `column` on, `J` registers of them. Returns `J`.
    ///
    /// # Safety
    /// The CPU has the instructions of `V`, the columns exist, and lengths were checked.
    #[inline(always)]
    unsafe fn columns<V: Vector, const J: usize>(&mut self, column: usize) -> usize {
        // SAFETY: passed on.
        unsafe {
            match self.rows {
                1 => self.block::<V, 1, J>(column),
                2 => self.block::<V, 2, J>(column),
                3 => self.block::<V, 3, J>(column),
                _ => self.block::<V, 4, J>(column),
            }
        }
        J
    }

    /// # Safety
    /// The caller keeps the promises of [`Self::columns`], and there are `R` rows.
    #[inline(always)]
    unsafe fn block<V: Vector, const R: usize, const J: usize>(&mut self, column: usize) {
        let (width, stride) = (self.width, self.left_stride);
        // Each block of columns prefetches its share of what comes next, a part with every pair.
        let lines_per_pair = (J * V::WIDTH).div_ceil(LINE / 2);
        let first_line = column * self.pairs / (LINE / 2);
        let lines = self.ahead.len() * (self.ahead[0].len() / LINE);
        let prefetching = lines.saturating_sub(first_line) / lines_per_pair;
        let places = self.ahead.map(<[u16]>::as_ptr);
        // SAFETY: the caller's promise: columns `column..column + J · WIDTH` of `R` rows (left, out) or `pairs` rows (right).
        unsafe {
            let left = self.left.as_ptr();
            let right = self.right.as_ptr().add(2 * column);
            let out = self.out.as_mut_ptr().add(column);
            let mut sums = [[V::splat(0.0); J]; R];
            for r in 0..R {
                for j in 0..J {
                    sums[r][j] = V::load(out.add(r * width + j * V::WIDTH));
                }
            }
            for pair in 0..self.pairs {
                if pair < prefetching {
                    for n in 0..lines_per_pair {
                        let line = first_line + pair * lines_per_pair + n;
                        let place = places[line % places.len()];
                        prefetch(place.wrapping_add(line / places.len() * LINE).cast());
                    }
                }
                for j in 0..J {
                    let [even, odd] = V::load_bf16_pairs(right.add(2 * (pair * width + j * V::WIDTH)));
                    for r in 0..R {
                        let left = left.add(r * stride + 2 * pair);
                        sums[r][j] = V::splat(*left).multiply_add(even, sums[r][j]);
                        sums[r][j] = V::splat(*left.add(1)).multiply_add(odd, sums[r][j]);
                    }
                }
            }
            for r in 0..R {
                for j in 0..J {
                    sums[r][j].store(out.add(r * width + j * V::WIDTH));
                }
            }
        }
    }
}

/// One softmax step of some rows over a page: logits become weights relative to the new maximum of their row, and what was
/// summed before is rescaled to it.
pub(super) struct SoftmaxRows<'a> {
    /// `[rows][64]` logits; weights afterwards.
    pub(super) scores: &'a mut [f32],
    /// What the rows see, and the position of the page's first token.
    pub(super) spans: &'a [Span],
    pub(super) start: usize,
    pub(super) max: &'a mut [f32],
    pub(super) sum: &'a mut [f32],
    /// `[rows][d]`, the values that have been accumulated.
    pub(super) values: &'a mut [f32],
    pub(super) d: usize,
}

impl Kernel for SoftmaxRows<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Vector>(self) {
        let SoftmaxRows { scores, spans, start, max, sum, values, d } = self;
        for (row, span) in spans.iter().enumerate() {
            let scores: &mut [f32; PAGE_TOKENS] =
                scores[row * PAGE_TOKENS..].first_chunk_mut().expect("a row of scores per span");
            let seen = span.in_page(start);
            scores[..seen.start].fill(f32::NEG_INFINITY);
            scores[seen.end.max(seen.start)..].fill(f32::NEG_INFINITY);
            // SAFETY: the caller promises the instructions.
            unsafe { softmax_row::<V>(scores, &mut max[row], &mut sum[row], &mut values[row * d..][..d]) };
        }
    }
}

/// # Safety
/// The CPU has the instructions of `V`.
#[inline(always)]
unsafe fn softmax_row<V: Vector>(
    scores: &mut [f32; PAGE_TOKENS],
    max: &mut f32,
    sum: &mut f32,
    values: &mut [f32],
) {
    let at = scores.as_mut_ptr();
    // SAFETY: the caller promises the instructions; registers of `WIDTH` numbers cover the 64 scores.
    unsafe {
        let mut largest = V::load(at);
        for first in (V::WIDTH..PAGE_TOKENS).step_by(V::WIDTH) {
            largest = largest.maximum(V::load(at.add(first)));
        }
        let new = max.max(largest.largest());
        if new == f32::NEG_INFINITY {
            // Nothing seen, unless a logit is NaN: that must show.
            if scores.iter().any(|score| score.is_nan()) {
                *sum = f32::NAN;
            }
            return scores.fill(0.0);
        }
        let shift = V::splat(new);
        let mut total = V::splat(0.0);
        for first in (0..PAGE_TOKENS).step_by(V::WIDTH) {
            let weights = exp2(V::load(at.add(first)).subtract(shift));
            total = total.add(weights);
            weights.store(at.add(first));
        }
        let total = total.sum();
        if new == *max {
            *sum += total;
            return;
        }
        let rescale = (*max - new).exp2();
        *sum = *sum * rescale + total;
        *max = new;
        let whole = values.len() / V::WIDTH * V::WIDTH;
        for first in (0..whole).step_by(V::WIDTH) {
            let at = values.as_mut_ptr().add(first);
            V::load(at).multiply(V::splat(rescale)).store(at);
        }
        // Heads of 8-bit floats may have channels that fill no register.
        values[whole..].iter_mut().for_each(|value| *value *= rescale);
    }
}
