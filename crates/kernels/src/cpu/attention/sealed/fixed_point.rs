//! Numbers as pairs of signed bytes, and integer sums back to logits and values.
//!
//! A row of numbers becomes integers of up to 32639 = 127·256 + 127 relative to its largest magnitude, each
//! `256·high + low` with both in -128..=127: what the byte multipliers of a CPU take. The error of a number is 1/65278
//! of the largest in its row.
//!
//! The kernels are plain loops that the compiler turns into vectors.

use oscar_codec::PAGE_TOKENS;

use super::engine::{Engine, KeySums, RowStates, Shape, ValueSums, Weights};
use super::scales::Widen;
use crate::cpu::aligned::AlignedScratch;
use crate::cpu::attention::floats::SoftmaxRows;
use crate::cpu::simd::{Kernel, Simd, Vector};

/// The largest magnitude that the two signed bytes of a number can hold: `256·127 + 127`.
pub(super) const LARGEST: f32 = 32639.0;

/// Rows with a smaller largest magnitude count as zeros: the reciprocal would not be finite.
pub(super) const SMALLEST: f32 = 1e-30;

/// Adding this rounds to the nearest integer, ties to even, and leaves it in the low bits.
const ROUND: f32 = 12_582_912.0;

/// A page's worth of numbers, one per token.
type Tokens<T> = [T; PAGE_TOKENS];

/// Lanes the compiler may keep side by side in a reduction.
const LANES: usize = 16;

/// The larger of two numbers; the second if either is NaN. One instruction, unlike [`f32::max`].
#[inline(always)]
fn larger(a: f32, b: f32) -> f32 {
    if a > b { a } else { b }
}

/// What integers are multiplied with to get numbers back, and numbers to get integers.
#[inline(always)]
fn units(largest: f32) -> (f32, f32) {
    if largest < SMALLEST { (0.0, 0.0) } else { (largest / LARGEST, LARGEST / largest) }
}

/// The two bytes of a number; those of NaN mean nothing.
#[inline(always)]
fn bytes(value: f32, inverse: f32) -> (i8, i8) {
    let integer = ((value * inverse + ROUND).to_bits() as i32).wrapping_sub(ROUND.to_bits() as i32);
    let high = integer.wrapping_add(128) >> 8;
    (high as i8, integer.wrapping_sub(high << 8) as i8)
}

/// [`Engine::split_row`] in plain Rust.
fn split_row(row: &[f32], high: &mut [i8], low: &mut [i8]) -> f32 {
    high[row.len()..].fill(0);
    low[row.len()..].fill(0);
    let (blocks, rest) = row.as_chunks::<LANES>();
    let mut lanes = [0.0; LANES];
    for block in blocks {
        for lane in 0..LANES {
            lanes[lane] = larger(block[lane].abs(), lanes[lane]);
        }
    }
    let largest = rest.iter().chain(&lanes).fold(0.0, |largest, value| larger(value.abs(), largest));
    let (unit, inverse) = units(largest);
    for ((value, high), low) in row.iter().zip(high).zip(low) {
        (*high, *low) = bytes(*value, inverse);
    }
    unit
}

/// [`Engine::total`] in plain Rust.
fn total(row: &[f32]) -> f32 {
    let (blocks, rest) = row.as_chunks::<LANES>();
    let mut lanes = [0.0; LANES];
    for block in blocks {
        for lane in 0..LANES {
            lanes[lane] += f64::from(block[lane]);
        }
    }
    (lanes.iter().sum::<f64>() + rest.iter().copied().map(f64::from).sum::<f64>()) as f32
}

/// The scale and the offset of each token of a page, for one group of channels.
struct Affine<'a> {
    scale: &'a Tokens<f32>,
    offset: &'a Tokens<f32>,
}

impl Affine<'_> {
    /// The scales and offsets of the group that `scales` begins with.
    #[inline(always)]
    fn of(scales: &[f32]) -> Affine<'_> {
        Affine { scale: tokens(scales), offset: tokens(&scales[PAGE_TOKENS..]) }
    }
}

/// The first number of each token: the first 64 of a slice.
#[inline(always)]
fn tokens<T>(slice: &[T]) -> &Tokens<T> {
    slice.first_chunk().expect("a number per token")
}

/// Makes the logits of a row from its integer sums: `s·unit·(256·high + low) - o·total`. With `add` they are added to
/// `logits`, else they replace what is there.
#[inline(always)]
fn finish_logits(
    [high, low]: [&Tokens<i32>; 2],
    unit: f32,
    total: f32,
    affine: &Affine<'_>,
    add: bool,
    logits: &mut Tokens<f32>,
) {
    for t in 0..PAGE_TOKENS {
        let integer = (high[t] << 8) + low[t];
        let offset = affine.offset[t] * total;
        let logit = (integer as f32).mul_add(affine.scale[t] * unit, -offset);
        logits[t] = if add { logits[t] + logit } else { logit };
    }
}

/// Splits the weights of a row times the scales of a group; returns the unit and `Σ p·o`.
#[inline(always)]
fn split_weights(
    weights: &Tokens<f32>,
    affine: &Affine<'_>,
    high: &mut Tokens<i8>,
    low: &mut Tokens<i8>,
) -> [f32; 2] {
    let mut scaled = [0.0; PAGE_TOKENS];
    let (mut largest, mut offsets) = ([0.0; LANES], [0.0; LANES]);
    for t in (0..PAGE_TOKENS).step_by(LANES) {
        for lane in 0..LANES {
            let weight = weights[t + lane];
            let product = weight * affine.scale[t + lane];
            scaled[t + lane] = product;
            largest[lane] = larger(product.abs(), largest[lane]);
            offsets[lane] = weight.mul_add(affine.offset[t + lane], offsets[lane]);
        }
    }
    let mut half = LANES / 2;
    while half > 0 {
        for lane in 0..half {
            largest[lane] = larger(largest[lane], largest[lane + half]);
            offsets[lane] += offsets[lane + half];
        }
        half /= 2;
    }
    let (unit, inverse) = units(largest[0]);
    for t in 0..PAGE_TOKENS {
        (high[t], low[t]) = bytes(scaled[t], inverse);
    }
    [unit, offsets[0]]
}

/// The engine of paths whose registers do not hold the logits of a row.
pub(super) struct FixedPoint<'a> {
    simd: Simd,
    /// Logits, and then softmax weights, of some rows over a page: `[ROWS][64]`.
    logits: &'a mut [f32],
    /// The scales and offsets of a page, widened to 32 bits.
    scales: &'a mut [f32],
}

impl<'a> FixedPoint<'a> {
    pub(super) fn new(simd: Simd, shape: &Shape, scratch: &'a mut AlignedScratch) -> Self {
        let logits = Self::ROWS * PAGE_TOKENS;
        let scales = shape.scale_counts().iter().sum::<usize>();
        let (logits, scales) = scratch.at_least(logits + scales).split_at_mut(logits);
        FixedPoint { simd, logits, scales }
    }
}

impl Engine for FixedPoint<'_> {
    // More than a product multiplies at once, so that a page is read and its scales are widened once for so many rows.
    const ROWS: usize = 8;

    fn simd(&self) -> Simd {
        self.simd
    }

    fn split_row(&self, row: &[f32], high: &mut [i8], low: &mut [i8]) -> f32 {
        split_row(row, high, low)
    }

    fn total(&self, row: &[f32]) -> f32 {
        total(row)
    }

    fn softmax(&mut self, sums: &KeySums<'_>, state: &mut RowStates<'_>, weights: &mut Weights<'_>) {
        let FixedPoint { simd, logits, scales } = self;
        simd.run(Softmax { sums, state, weights, logits, scales });
    }

    fn accumulate_values(&self, sums: ValueSums<'_>, values: &mut [f32]) {
        self.simd.run(AccumulateValues { sums, values });
    }
}

/// [`Engine::softmax`] as a kernel that is compiled for each instruction set.
struct Softmax<'a, 'sums, 'state, 'weights> {
    sums: &'a KeySums<'sums>,
    state: &'a mut RowStates<'state>,
    weights: &'a mut Weights<'weights>,
    logits: &'a mut [f32],
    scales: &'a mut [f32],
}

impl Kernel for Softmax<'_, '_, '_, '_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Vector>(self) {
        const ROWS: usize = FixedPoint::ROWS;
        let Softmax { sums: from, state, weights, logits, scales } = self;
        let (rows, shape) = (from.spans.len(), from.shape);
        let scale_type = shape.scale_type;
        let (key_scales, value_scales) = scales.split_at_mut(shape.scale_counts()[0]);
        // SAFETY: the caller promises the instructions.
        unsafe { Widen { stored: from.value_scales, scale_type, out: value_scales }.run::<V>() };
        // SAFETY: as above.
        unsafe { Widen { stored: from.key_scales, scale_type, out: key_scales }.run::<V>() };
        if shape.has_bands() {
            let made = bytemuck::cast_slice(&from.sums[..rows * PAGE_TOKENS]);
            logits[..rows * PAGE_TOKENS].copy_from_slice(made);
        }
        for (group, scales) in key_scales.chunks_exact(2 * PAGE_TOKENS).enumerate() {
            let affine = Affine::of(scales);
            for row in 0..rows {
                let sums = &from.sums[(group * ROWS + row) * 2 * PAGE_TOKENS..];
                let at = group * from.stride + row;
                let logits = logits[row * PAGE_TOKENS..].first_chunk_mut().expect("a logit per token");
                let sums = [tokens(sums), tokens(&sums[PAGE_TOKENS..])];
                finish_logits(sums, from.units[at], from.totals[at], &affine, group > 0, logits);
            }
        }
        let softmax = SoftmaxRows {
            scores: &mut logits[..rows * PAGE_TOKENS],
            spans: from.spans,
            start: from.start,
            max: state.max,
            sum: state.sum,
            values: state.values,
            d: state.d,
        };
        // SAFETY: as above.
        unsafe { softmax.run::<V>() };
        for group in 0..shape.groups {
            let affine = Affine::of(&value_scales[group * 2 * PAGE_TOKENS..]);
            for row in 0..rows {
                let at = group * ROWS + row;
                let (high, low) = weights.bytes[at * 2 * PAGE_TOKENS..].split_at_mut(PAGE_TOKENS);
                let high = high.first_chunk_mut().expect("a byte per token");
                let low = low.first_chunk_mut().expect("a byte per token");
                let units = split_weights(tokens(&logits[row * PAGE_TOKENS..]), &affine, high, low);
                weights.units[2 * at..2 * at + 2].copy_from_slice(&units);
            }
        }
    }
}

/// [`Engine::accumulate_values`] as a kernel that is compiled for each instruction set.
struct AccumulateValues<'a> {
    sums: ValueSums<'a>,
    values: &'a mut [f32],
}

impl Kernel for AccumulateValues<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Vector>(self) {
        let AccumulateValues { sums: ValueSums { sums, units, width, channels, rows, d }, values } = self;
        for row in 0..rows {
            let values = &mut values[row * d..][channels.start..channels.end];
            let high = &sums[row * 2 * width..][channels.start..channels.end];
            let low = &sums[(row * 2 + 1) * width..][channels.start..channels.end];
            let (unit, offset) = (units[2 * row], units[2 * row + 1]);
            for c in 0..values.len() {
                values[c] += (((high[c] << 8) + low[c]) as f32).mul_add(unit, -offset);
            }
        }
    }
}
