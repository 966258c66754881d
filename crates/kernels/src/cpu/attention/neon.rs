//! NEON: product with bf16 pairs, power of two, softmax step.

use std::arch::aarch64::*;

use oscar_codec::PAGE_TOKENS;

use super::floats::{Places, SoftmaxRows};

/// Lanes of a register.
const LANES: usize = 4;

/// Registers of a block; four rows of sums fit beside the operands.
const REGISTERS: usize = 4;

/// Columns of a block.
const COLUMNS: usize = REGISTERS * LANES;

/// As [`super::floats::Product`], for up to 4 rows and widths that are multiples of 16.
#[target_feature(enable = "neon")]
pub(super) fn product(
    left: &[f32],
    left_stride: usize,
    rows: usize,
    right: &[u16],
    pairs: usize,
    width: usize,
    out: &mut [f32],
    _next: &Places<'_>,
) {
    assert!(width.is_multiple_of(COLUMNS) && right.len() >= pairs * width * 2 && out.len() >= rows * width);
    assert!(2 * pairs <= left_stride && left.len() >= rows * left_stride);
    for first in (0..width).step_by(COLUMNS) {
        let left = left.as_ptr();
        // SAFETY: the block covers columns `first..first + 16` of `rows` rows, inside the lengths above.
        unsafe {
            let (right, out) = (right.as_ptr().add(2 * first), out.as_mut_ptr().add(first));
            match rows {
                1 => block::<1>(left, left_stride, right, pairs, width, out),
                2 => block::<2>(left, left_stride, right, pairs, width, out),
                3 => block::<3>(left, left_stride, right, pairs, width, out),
                4 => block::<4>(left, left_stride, right, pairs, width, out),
                _ => unreachable!("groups have at most 4 rows"),
            }
        }
    }
}

/// # Safety
/// The pointers reach `R` rows (left, out) or `pairs` rows (right) of 16 columns.
#[target_feature(enable = "neon")]
unsafe fn block<const R: usize>(
    left: *const f32,
    left_stride: usize,
    right: *const u16,
    pairs: usize,
    width: usize,
    out: *mut f32,
) {
    let odd_mask = vdupq_n_u32(0xffff_0000);
    let mut sums = [[vdupq_n_f32(0.0); REGISTERS]; R];
    // SAFETY: the caller's promise.
    unsafe {
        for r in 0..R {
            for j in 0..REGISTERS {
                sums[r][j] = vld1q_f32(out.add(r * width + j * LANES));
            }
        }
        for pair in 0..pairs {
            for j in 0..REGISTERS {
                let words = vreinterpretq_u32_u16(vld1q_u16(right.add((pair * width + j * LANES) * 2)));
                let even = vreinterpretq_f32_u32(vshlq_n_u32::<16>(words));
                let odd = vreinterpretq_f32_u32(vandq_u32(words, odd_mask));
                for r in 0..R {
                    let left = left.add(r * left_stride + 2 * pair);
                    sums[r][j] = vfmaq_n_f32(sums[r][j], even, *left);
                    sums[r][j] = vfmaq_n_f32(sums[r][j], odd, *left.add(1));
                }
            }
        }
        for r in 0..R {
            for j in 0..REGISTERS {
                vst1q_f32(out.add(r * width + j * LANES), sums[r][j]);
            }
        }
    }
}

/// 2ˣ for `x <= 127` to a relative error of about 1e-7; 0 below -126, NaN stays NaN.
#[inline]
#[target_feature(enable = "neon")]
pub(super) fn exp2(x: float32x4_t) -> float32x4_t {
    let tiny = vcltq_f32(x, vdupq_n_f32(-126.0));
    let x = vmaxq_f32(x, vdupq_n_f32(-126.0));
    let whole = vrndnq_f32(x);
    let rest = vsubq_f32(x, whole);
    let mut power = vdupq_n_f32(super::EXP2[6]);
    for &coefficient in super::EXP2[..6].iter().rev() {
        power = vfmaq_f32(vdupq_n_f32(coefficient), power, rest);
    }
    let exponent = vshlq_n_s32::<23>(vaddq_s32(vcvtq_s32_f32(whole), vdupq_n_s32(127)));
    let scaled = vmulq_f32(power, vreinterpretq_f32_s32(exponent));
    vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(scaled), tiny))
}

/// One softmax step over a page: logits become weights relative to the new maximum, and what was summed before is
/// scaled to it.
#[target_feature(enable = "neon")]
pub(super) fn softmax(rows: SoftmaxRows<'_>) {
    let SoftmaxRows { scores, spans, start, max, sum, values, d } = rows;
    for (row, span) in spans.iter().enumerate() {
        let scores = &mut scores[row * PAGE_TOKENS..][..PAGE_TOKENS];
        let values = &mut values[row * d..][..d];
        let seen = span.in_page(start);
        scores[..seen.start].fill(f32::NEG_INFINITY);
        scores[seen.end..].fill(f32::NEG_INFINITY);
        let new = scores.iter().copied().fold(max[row], f32::max);
        if new == f32::NEG_INFINITY {
            // Nothing seen, unless a logit is NaN: that must show.
            if scores.iter().any(|score| score.is_nan()) {
                sum[row] = f32::NAN;
            }
            scores.fill(0.0);
            continue;
        }
        let shift = vdupq_n_f32(new);
        let mut total = vdupq_n_f32(0.0);
        for chunk in scores.chunks_exact_mut(LANES) {
            // SAFETY: the chunk has 4 elements.
            unsafe {
                let weights = exp2(vsubq_f32(vld1q_f32(chunk.as_ptr()), shift));
                total = vaddq_f32(total, weights);
                vst1q_f32(chunk.as_mut_ptr(), weights);
            }
        }
        let total = vaddvq_f32(total);
        if new == max[row] {
            sum[row] += total;
            continue;
        }
        let shrink = (max[row] - new).exp2();
        sum[row] = sum[row] * shrink + total;
        max[row] = new;
        values.iter_mut().for_each(|value| *value *= shrink);
    }
}
