//! AVX-512: product with bf16 pairs, power of two, softmax step.

use std::arch::x86_64::*;

use oscar_codec::PAGE_TOKENS;

use super::floats::{Places, SoftmaxRows};

/// Lanes of a register.
const LANES: usize = 16;

/// As [`super::floats::Product`], for up to 4 rows (more spill sums to the stack) and widths that are multiples of 16.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
pub(super) fn product(
    left: &[f32],
    left_stride: usize,
    rows: usize,
    right: &[u16],
    pairs: usize,
    width: usize,
    out: &mut [f32],
    next: &Places<'_>,
) {
    assert!(width.is_multiple_of(LANES) && right.len() >= pairs * width * 2 && out.len() >= rows * width);
    assert!(2 * pairs <= left_stride && left.len() >= rows * left_stride);
    let mut first = 0;
    while first < width {
        let registers = ((width - first) / LANES).min(4);
        let block = Block {
            left: left.as_ptr(),
            left_stride,
            // SAFETY: `first < width`, so the offset is inside the first row of pairs.
            right: unsafe { right.as_ptr().add(2 * first) }.cast(),
            pairs,
            width,
            // SAFETY: as above.
            out: unsafe { out.as_mut_ptr().add(first) },
            // Each block of columns asks for its share of what comes next, row by row.
            next,
            next_line: first / LANES * pairs,
        };
        // SAFETY: the block covers columns `first..first + 16 * registers` of `rows` rows, inside the lengths above.
        unsafe {
            match registers {
                4 => block.rows::<4>(rows),
                3 => block.rows::<3>(rows),
                2 => block.rows::<2>(rows),
                _ => block.rows::<1>(rows),
            }
        }
        first += registers * LANES;
    }
}

/// Some columns of a product.
struct Block<'a> {
    left: *const f32,
    left_stride: usize,
    right: *const i32,
    pairs: usize,
    width: usize,
    out: *mut f32,
    next: &'a Places<'a>,
    /// The first line it asks for, counted from place to place.
    next_line: usize,
}

impl Block<'_> {
    /// # Safety
    /// The pointers reach `rows` rows (left, out) or `pairs` rows (right) of `16 * J` columns.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
    unsafe fn rows<const J: usize>(&self, rows: usize) {
        // SAFETY: the caller's promise.
        unsafe {
            match rows {
                1 => self.run::<1, J>(),
                2 => self.run::<2, J>(),
                3 => self.run::<3, J>(),
                4 => self.run::<4, J>(),
                _ => unreachable!("groups have at most 4 rows"),
            }
        }
    }

    /// # Safety
    /// As [`Self::rows`] with `R` rows.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
    unsafe fn run<const R: usize, const J: usize>(&self) {
        let odd_mask = _mm512_set1_epi32(0xffff_0000u32 as i32);
        let mut sums = [[_mm512_setzero_ps(); J]; R];
        // SAFETY: the caller's promise; prefetching an address is harmless whatever it is.
        unsafe {
            for r in 0..R {
                for j in 0..J {
                    sums[r][j] = _mm512_loadu_ps(self.out.add(r * self.width + j * LANES));
                }
            }
            let places = self.next.map(<[u16]>::as_ptr);
            let lines = self.next.len() * (self.next[0].len() / (2 * LANES));
            let asking = lines.saturating_sub(self.next_line) / J;
            for pair in 0..self.pairs {
                if pair < asking {
                    for j in 0..J {
                        let line = self.next_line + pair * J + j;
                        let place = places[line % places.len()];
                        _mm_prefetch::<_MM_HINT_T0>(place.add(line / places.len() * 2 * LANES).cast());
                    }
                }
                for j in 0..J {
                    let words = _mm512_loadu_si512(self.right.add(pair * self.width + j * LANES).cast());
                    let even = _mm512_castsi512_ps(_mm512_slli_epi32::<16>(words));
                    let odd = _mm512_castsi512_ps(_mm512_and_si512(words, odd_mask));
                    for r in 0..R {
                        let left = self.left.add(r * self.left_stride + 2 * pair);
                        sums[r][j] = _mm512_fmadd_ps(_mm512_set1_ps(*left), even, sums[r][j]);
                        sums[r][j] = _mm512_fmadd_ps(_mm512_set1_ps(*left.add(1)), odd, sums[r][j]);
                    }
                }
            }
            for r in 0..R {
                for j in 0..J {
                    _mm512_storeu_ps(self.out.add(r * self.width + j * LANES), sums[r][j]);
                }
            }
        }
    }
}

/// 2ˣ for `x <= 128` to a relative error of about 1e-7; 0 far below, NaN stays NaN.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn exp2(x: __m512) -> __m512 {
    // The second operand is returned if either is NaN.
    let x = _mm512_max_ps(_mm512_set1_ps(-160.0), x);
    let whole = _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(x);
    let rest = _mm512_sub_ps(x, whole);
    let mut power = _mm512_set1_ps(super::EXP2[6]);
    for i in (0..6).rev() {
        power = _mm512_fmadd_ps(power, rest, _mm512_set1_ps(super::EXP2[i]));
    }
    _mm512_scalef_ps(power, whole)
}

/// One softmax step over a page: logits become weights relative to the new maximum, and what was summed before is
/// scaled to it.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
pub(super) fn softmax(rows: SoftmaxRows<'_>) {
    let SoftmaxRows { scores, spans, start, max, sum, values, d } = rows;
    for (row, span) in spans.iter().enumerate() {
        let scores: &mut [f32; PAGE_TOKENS] =
            scores[row * PAGE_TOKENS..].first_chunk_mut().expect("a row of scores per span");
        softmax_row(scores, span.page_mask(start), &mut max[row], &mut sum[row], &mut values[row * d..][..d]);
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
fn softmax_row(scores: &mut [f32; PAGE_TOKENS], seen: u64, max: &mut f32, sum: &mut f32, values: &mut [f32]) {
    let nothing = _mm512_set1_ps(f32::NEG_INFINITY);
    let mut logits = [nothing; 4];
    let mut largest = nothing;
    for (j, logits) in logits.iter_mut().enumerate() {
        let mask = (seen >> (j * LANES)) as u16;
        // SAFETY: four registers cover the 64 scores.
        *logits = unsafe { _mm512_mask_loadu_ps(nothing, mask, scores.as_ptr().add(j * LANES)) };
        largest = _mm512_max_ps(largest, *logits);
    }
    let new = max.max(_mm512_reduce_max_ps(largest));
    if new == f32::NEG_INFINITY {
        // Nothing seen, unless a logit is NaN: that must show.
        let nan = logits.iter().any(|&logits| _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(logits, logits) != 0);
        if nan {
            *sum = f32::NAN;
        }
        return scores.fill(0.0);
    }
    let shift = _mm512_set1_ps(new);
    let mut total = _mm512_setzero_ps();
    for (j, logits) in logits.iter().enumerate() {
        let weights = exp2(_mm512_sub_ps(*logits, shift));
        total = _mm512_add_ps(total, weights);
        // SAFETY: four registers cover the 64 scores.
        unsafe { _mm512_storeu_ps(scores.as_mut_ptr().add(j * LANES), weights) };
    }
    let total = _mm512_reduce_add_ps(total);
    if new == *max {
        *sum += total;
        return;
    }
    let shrink = (*max - new).exp2();
    *sum = *sum * shrink + total;
    *max = new;
    let factor = _mm512_set1_ps(shrink);
    let mut chunks = values.chunks_exact_mut(LANES);
    for chunk in &mut chunks {
        // SAFETY: the chunk has 16 elements.
        unsafe {
            let scaled = _mm512_mul_ps(_mm512_loadu_ps(chunk.as_ptr()), factor);
            _mm512_storeu_ps(chunk.as_mut_ptr(), scaled);
        }
    }
    // Heads of 8-bit floats may have channels that fill no register.
    chunks.into_remainder().iter_mut().for_each(|value| *value *= shrink);
}
