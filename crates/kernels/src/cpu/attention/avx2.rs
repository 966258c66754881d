//! AVX2 and FMA: product with bf16 pairs, power of two, softmax step.

use std::arch::x86_64::*;

use oscar_codec::PAGE_TOKENS;

use super::floats::{Places, SoftmaxRows};

/// Lanes of a register.
const LANES: usize = 8;

/// Columns of a block: two registers, which leaves room for four rows of sums.
const COLUMNS: usize = 2 * LANES;

/// As [`super::floats::Product`], for up to 4 rows and widths that are multiples of 16.
#[target_feature(enable = "avx2,fma")]
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
            let (right, out) = (right.as_ptr().add(2 * first).cast(), out.as_mut_ptr().add(first));
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
#[target_feature(enable = "avx2,fma")]
unsafe fn block<const R: usize>(
    left: *const f32,
    left_stride: usize,
    right: *const i32,
    pairs: usize,
    width: usize,
    out: *mut f32,
) {
    let odd_mask = _mm256_set1_epi32(0xffff_0000u32 as i32);
    let mut sums = [[_mm256_setzero_ps(); 2]; R];
    // SAFETY: the caller's promise.
    unsafe {
        for r in 0..R {
            for j in 0..2 {
                sums[r][j] = _mm256_loadu_ps(out.add(r * width + j * LANES));
            }
        }
        for pair in 0..pairs {
            for j in 0..2 {
                let words = _mm256_loadu_si256(right.add(pair * width + j * LANES).cast());
                let even = _mm256_castsi256_ps(_mm256_slli_epi32::<16>(words));
                let odd = _mm256_castsi256_ps(_mm256_and_si256(words, odd_mask));
                for r in 0..R {
                    let left = left.add(r * left_stride + 2 * pair);
                    sums[r][j] = _mm256_fmadd_ps(_mm256_set1_ps(*left), even, sums[r][j]);
                    sums[r][j] = _mm256_fmadd_ps(_mm256_set1_ps(*left.add(1)), odd, sums[r][j]);
                }
            }
        }
        for r in 0..R {
            for j in 0..2 {
                _mm256_storeu_ps(out.add(r * width + j * LANES), sums[r][j]);
            }
        }
    }
}

/// 2ˣ for `x <= 127` to a relative error of about 1e-7; 0 below -126, NaN stays NaN.
#[inline]
#[target_feature(enable = "avx2,fma")]
pub(super) fn exp2(x: __m256) -> __m256 {
    let tiny = _mm256_cmp_ps::<_CMP_LT_OQ>(x, _mm256_set1_ps(-126.0));
    // The second operand is returned if either is NaN.
    let x = _mm256_max_ps(_mm256_set1_ps(-126.0), x);
    let whole = _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(x);
    let rest = _mm256_sub_ps(x, whole);
    let mut power = _mm256_set1_ps(super::EXP2[6]);
    for i in (0..6).rev() {
        power = _mm256_fmadd_ps(power, rest, _mm256_set1_ps(super::EXP2[i]));
    }
    let exponent =
        _mm256_slli_epi32::<23>(_mm256_add_epi32(_mm256_cvtps_epi32(whole), _mm256_set1_epi32(127)));
    _mm256_andnot_ps(tiny, _mm256_mul_ps(power, _mm256_castsi256_ps(exponent)))
}

#[inline]
#[target_feature(enable = "avx2")]
fn reduce(register: __m256, combine: impl Fn(f32, f32) -> f32) -> f32 {
    let mut lanes = [0.0; LANES];
    // SAFETY: the array holds one register.
    unsafe { _mm256_storeu_ps(lanes.as_mut_ptr(), register) };
    lanes.into_iter().reduce(combine).expect("a register has lanes")
}

/// As [`super::avx512::softmax`].
#[target_feature(enable = "avx2,fma")]
pub(super) fn softmax(rows: SoftmaxRows<'_>) {
    let SoftmaxRows { scores, spans, start, max, sum, values, d } = rows;
    for (row, span) in spans.iter().enumerate() {
        let scores = &mut scores[row * PAGE_TOKENS..][..PAGE_TOKENS];
        let values = &mut values[row * d..][..d];
        let seen = span.in_page(start);
        scores[..seen.start].fill(f32::NEG_INFINITY);
        scores[seen.end..].fill(f32::NEG_INFINITY);
        let mut largest = _mm256_set1_ps(f32::NEG_INFINITY);
        for chunk in scores.chunks_exact(LANES) {
            // SAFETY: the chunk has 8 elements.
            largest = _mm256_max_ps(largest, unsafe { _mm256_loadu_ps(chunk.as_ptr()) });
        }
        let new = max[row].max(reduce(largest, f32::max));
        if new == f32::NEG_INFINITY {
            // Nothing seen, unless a logit is NaN: that must show.
            if scores.iter().any(|score| score.is_nan()) {
                sum[row] = f32::NAN;
            }
            scores.fill(0.0);
            continue;
        }
        let shift = _mm256_set1_ps(new);
        let mut total = _mm256_setzero_ps();
        for chunk in scores.chunks_exact_mut(LANES) {
            // SAFETY: the chunk has 8 elements.
            unsafe {
                let weights = exp2(_mm256_sub_ps(_mm256_loadu_ps(chunk.as_ptr()), shift));
                total = _mm256_add_ps(total, weights);
                _mm256_storeu_ps(chunk.as_mut_ptr(), weights);
            }
        }
        let total = reduce(total, |a, b| a + b);
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
