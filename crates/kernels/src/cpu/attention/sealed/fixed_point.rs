//! Numbers as pairs of signed bytes, and integer sums back to logits and values.
//!
//! A row of numbers becomes integers of up to 32639 = 127·256 + 127 relative to its largest magnitude, each
//! `256·high + low` with both in -128..=127: what the byte multipliers of a CPU take. The error of a number is 1/65278
//! of the largest in its row.
//!
//! The functions are plain loops that the compiler turns into vectors; [`float_steps`] compiles them for an
//! instruction set. They round in the same way on all paths that share an instruction set, so that paths with
//! different integer products agree bit for bit.

use oscar_codec::PAGE_TOKENS;

/// The largest integer.
const LARGEST: f32 = 32639.0;

/// Rows with a smaller largest magnitude count as zeros: the reciprocal would not be finite.
const SMALLEST: f32 = 1e-30;

/// Adding and subtracting this rounds to the nearest integer, ties to even, and leaves it in the low bits.
const ROUND: f32 = 12_582_912.0;

/// A page's worth of numbers, one per token.
pub(super) type Tokens<T> = [T; PAGE_TOKENS];

/// Lanes the compiler may keep side by side in a reduction.
const LANES: usize = 16;

/// The larger of two numbers; the second if either is NaN. One instruction, unlike [`f32::max`].
#[inline(always)]
fn larger(a: f32, b: f32) -> f32 {
    if a > b { a } else { b }
}

/// What integers are multiplied with to get numbers back, and numbers to get integers.
#[inline(always)]
fn steps(largest: f32) -> (f32, f32) {
    if largest < SMALLEST { (0.0, 0.0) } else { (largest / LARGEST, LARGEST / largest) }
}

/// The two bytes of a number; those of NaN mean nothing.
#[inline(always)]
fn bytes(value: f32, inverse: f32) -> (i8, i8) {
    let integer = (value.mul_add(inverse, ROUND).to_bits() as i32).wrapping_sub(ROUND.to_bits() as i32);
    let high = integer.wrapping_add(128) >> 8;
    (high as i8, integer.wrapping_sub(high << 8) as i8)
}

/// Splits a row of any length and returns the number that one unit stands for.
#[inline(always)]
pub(super) fn split_row(row: &[f32], high: &mut [i8], low: &mut [i8]) -> f32 {
    let largest = row.iter().fold(0.0, |largest, value| larger(value.abs(), largest));
    let (step, inverse) = steps(largest);
    for ((value, high), low) in row.iter().zip(high).zip(low) {
        (*high, *low) = bytes(*value, inverse);
    }
    step
}

/// Scale and offset of each token, for one group of channels.
pub(super) struct Affine<'a> {
    pub(super) scale: &'a Tokens<f32>,
    pub(super) offset: &'a Tokens<f32>,
}

/// The logits of a row from its integer sums: `s·step·(256·high + low) - o·sum`, added to `logits` if asked.
#[inline(always)]
pub(super) fn finish_logits(
    [high, low]: [&Tokens<i32>; 2],
    step: f32,
    sum: f32,
    affine: &Affine<'_>,
    add: bool,
    logits: &mut Tokens<f32>,
) {
    for t in 0..PAGE_TOKENS {
        let integer = (high[t] << 8) + low[t];
        let offset = affine.offset[t] * sum;
        let logit = (integer as f32).mul_add(affine.scale[t] * step, -offset);
        logits[t] = if add { logits[t] + logit } else { logit };
    }
}

/// Splits the weights of a row times the scales of a group; returns the unit and `Σ p·o`.
#[inline(always)]
pub(super) fn split_weights(
    weights: &Tokens<f32>,
    affine: &Affine<'_>,
    high: &mut Tokens<i8>,
    low: &mut Tokens<i8>,
) -> (f32, f32) {
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
    let (step, inverse) = steps(largest[0]);
    for t in 0..PAGE_TOKENS {
        (high[t], low[t]) = bytes(scaled[t], inverse);
    }
    (step, offsets[0])
}

/// Adds `step·(256·high + low) - offset` to each value.
#[inline(always)]
pub(super) fn finish_values([high, low]: [&[i32]; 2], step: f32, offset: f32, values: &mut [f32]) {
    for ((value, high), low) in values.iter_mut().zip(high).zip(low) {
        *value += (((high << 8) + low) as f32).mul_add(step, -offset);
    }
}

/// Compiles the steps of this module for an instruction set, as associated functions of an engine.
macro_rules! float_steps {
    ($features:literal) => {
        fn split_row(row: &[f32], high: &mut [i8], low: &mut [i8]) -> f32 {
            #[target_feature(enable = $features)]
            fn compiled(row: &[f32], high: &mut [i8], low: &mut [i8]) -> f32 {
                fixed_point::split_row(row, high, low)
            }
            // SAFETY: an engine exists only where its instruction set does.
            unsafe { compiled(row, high, low) }
        }

        fn finish_logits(
            sums: [&Tokens<i32>; 2],
            step: f32,
            sum: f32,
            affine: &Affine<'_>,
            add: bool,
            logits: &mut Tokens<f32>,
        ) {
            #[target_feature(enable = $features)]
            fn compiled(
                sums: [&Tokens<i32>; 2],
                step: f32,
                sum: f32,
                affine: &Affine<'_>,
                add: bool,
                logits: &mut Tokens<f32>,
            ) {
                fixed_point::finish_logits(sums, step, sum, affine, add, logits)
            }
            // SAFETY: as above.
            unsafe { compiled(sums, step, sum, affine, add, logits) }
        }

        fn split_weights(
            weights: &Tokens<f32>,
            affine: &Affine<'_>,
            high: &mut Tokens<i8>,
            low: &mut Tokens<i8>,
        ) -> (f32, f32) {
            #[target_feature(enable = $features)]
            fn compiled(
                weights: &Tokens<f32>,
                affine: &Affine<'_>,
                high: &mut Tokens<i8>,
                low: &mut Tokens<i8>,
            ) -> (f32, f32) {
                fixed_point::split_weights(weights, affine, high, low)
            }
            // SAFETY: as above.
            unsafe { compiled(weights, affine, high, low) }
        }

        fn finish_values(sums: [&[i32]; 2], step: f32, offset: f32, values: &mut [f32]) {
            #[target_feature(enable = $features)]
            fn compiled(sums: [&[i32]; 2], step: f32, offset: f32, values: &mut [f32]) {
                fixed_point::finish_values(sums, step, offset, values)
            }
            // SAFETY: as above.
            unsafe { compiled(sums, step, offset, values) }
        }
    };
}
pub(super) use float_steps;
