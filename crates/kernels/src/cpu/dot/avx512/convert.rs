//! Weights to floats and floats to fixed-point activations.

use std::arch::x86_64::*;

use super::superblock::{Q4K, Q5K, Superblock};
use crate::cpu::activation::{GROUP, LIMIT, QuantisedRows, SUM_GROUP};
use crate::dtype::DType;
use crate::quant;

/// # Safety
/// The CPU has AVX-512 F, BW, DQ and VL. Lengths are checked by the caller.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
pub(in super::super) unsafe fn dequantise(dtype: DType, bytes: &[u8], out: &mut [f32]) {
    // SAFETY: passed on.
    unsafe {
        match dtype {
            DType::F16 => widen_halves(bytes, out),
            DType::Q4K => superblocks::<Q4K>(bytes, out),
            DType::Q5K => superblocks::<Q5K>(bytes, out),
            // The compiler makes good vector code of the plain loops for these.
            _ => quant::dequantise_inline(dtype, bytes, out),
        }
    }
}

/// # Safety
/// The caller keeps the promises of [`dequantise`].
#[inline(always)]
unsafe fn widen_halves(bytes: &[u8], out: &mut [f32]) {
    assert_eq!(bytes.len(), 2 * out.len());
    for (bytes, out) in bytes.chunks(32).zip(out.chunks_mut(16)) {
        let lanes = ((1u32 << out.len()) - 1) as u16;
        // SAFETY: masked lanes are neither read nor written.
        unsafe {
            let halves = _mm256_maskz_loadu_epi16(lanes, bytes.as_ptr().cast());
            _mm512_mask_storeu_ps(out.as_mut_ptr(), lanes, _mm512_cvtph_ps(halves));
        }
    }
}

/// Q4_K and Q5_K.
///
/// # Safety
/// The caller keeps the promises of [`dequantise`].
#[inline(always)]
unsafe fn superblocks<B: Superblock>(bytes: &[u8], out: &mut [f32]) {
    for (block, out) in bytes.chunks_exact(B::BYTES).zip(out.chunks_exact_mut(256)) {
        // SAFETY: `block` is one block, and every store is to 16 values inside `out`.
        unsafe {
            let mut scales = [0.0f32; 16];
            _mm512_storeu_ps(scales.as_mut_ptr(), B::scales(block.as_ptr()));
            for half in 0..2 {
                for (i, codes) in B::codes(block.as_ptr(), half).into_iter().enumerate() {
                    let mut quarters = [_mm_setzero_si128(); 4];
                    _mm512_storeu_si512(quarters.as_mut_ptr().cast(), codes);
                    for (quarter, codes) in quarters.into_iter().enumerate() {
                        // Lane `4 * quarter` of a code vector says which group of 32 this quarter is a half of.
                        let group = B::SPREAD[2 * half + i][4 * quarter] as usize;
                        let values = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(codes));
                        let scaled = _mm512_mul_ps(values, _mm512_set1_ps(scales[group]));
                        let shifted = _mm512_sub_ps(scaled, _mm512_set1_ps(scales[8 + group]));
                        _mm512_storeu_ps(out[32 * group + 16 * (quarter % 2)..][..16].as_mut_ptr(), shifted);
                    }
                }
            }
        }
    }
}

/// Groups that are quantised side by side: what there is one of in each is computed in the lanes of a short vector.
const TOGETHER: usize = 4;

/// Equal to [`QuantisedRows::quantise`], bit for bit.
///
/// # Safety
/// The CPU has AVX-512 F, BW, DQ and VL.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
pub(in super::super) unsafe fn quantise(x: &[f32], rows: usize, cols: usize, into: &mut QuantisedRows) {
    assert_eq!(x.len(), rows * cols);
    into.reset(rows, cols);
    let (high, low, scales, sums) = into.parts_mut();
    let groups = rows * cols / GROUP;
    for first in (0..groups).step_by(TOGETHER) {
        let count = TOGETHER.min(groups - first);
        let x = &x[first * GROUP..][..count * GROUP];
        let (high, low) =
            (&mut high[first * GROUP..][..count * GROUP], &mut low[first * GROUP..][..count * GROUP]);
        // SAFETY: loads and stores are inside these slices and those of `count` scales and twice as many sums.
        unsafe {
            let (mut values, mut largest) =
                ([[_mm512_setzero_ps(); 2]; TOGETHER], [_mm512_setzero_si512(); TOGETHER]);
            for group in 0..count {
                for half in 0..2 {
                    let value = _mm512_loadu_ps(x.as_ptr().add(group * GROUP + half * SUM_GROUP));
                    values[group][half] = value;
                    // As integers, magnitudes are in the same order, and above them all come those that are no numbers.
                    let magnitude = _mm512_castps_si512(_mm512_abs_ps(value));
                    largest[group] = _mm512_max_epu32(largest[group], magnitude);
                }
            }
            let largest = _mm_castsi128_ps(largest_each(largest));
            let limit = _mm_set1_ps(LIMIT);
            let inverse = _mm_div_ps(limit, largest);
            let infinity = _mm_set1_ps(f32::INFINITY);
            let finite = _mm_cmp_ps_mask::<_CMP_LT_OQ>(largest, infinity);
            // A division by zero, or by next to nothing, is not less than infinity either.
            let usable = finite & _mm_cmp_ps_mask::<_CMP_LT_OQ>(inverse, infinity);
            let scale = _mm_maskz_div_ps(usable, largest, limit);
            let scale = _mm_mask_blend_ps(finite, _mm_set1_ps(f32::NAN), scale);
            let inverse = _mm512_castps128_ps512(_mm_maskz_mov_ps(usable, inverse));
            let mut fixed = [[_mm512_setzero_si512(); TOGETHER]; 2];
            for group in 0..count {
                let inverse = _mm512_permutexvar_ps(_mm512_set1_epi32(group as i32), inverse);
                let keep = if usable >> group & 1 == 1 { 0xffff } else { 0 };
                for half in 0..2 {
                    let scaled = _mm512_mul_ps(values[group][half], inverse);
                    // What is not finite stays out of the codes: its group has the scale to show it.
                    let value = _mm512_maskz_cvtps_epi32(keep, scaled);
                    fixed[half][group] = value;
                    let upper = _mm512_srai_epi32::<8>(_mm512_add_epi32(value, _mm512_set1_epi32(128)));
                    let at = group * GROUP + half * SUM_GROUP;
                    // Truncation to a byte is the subtraction of `upper * 256`.
                    _mm_storeu_si128(high.as_mut_ptr().add(at).cast(), _mm512_cvtepi32_epi8(upper));
                    _mm_storeu_si128(low.as_mut_ptr().add(at).cast(), _mm512_cvtepi32_epi8(value));
                }
            }
            let left = _mm_mul_ps(_mm_cvtepi32_ps(integer_sum_each(fixed[0])), scale);
            let right = _mm_mul_ps(_mm_cvtepi32_ps(integer_sum_each(fixed[1])), scale);
            let lanes = ((1u16 << count) - 1) as u8;
            _mm_mask_storeu_ps(scales[first..][..count].as_mut_ptr(), lanes, scale);
            let pairs = _mm256_set_m128(_mm_unpackhi_ps(left, right), _mm_unpacklo_ps(left, right));
            let lanes = ((1u16 << (2 * count)) - 1) as u8;
            _mm256_mask_storeu_ps(sums[2 * first..][..2 * count].as_mut_ptr(), lanes, pairs);
        }
    }
}

/// The sixteen lanes of each of four vectors combined, with an instruction on whole, half and quarter vectors.
macro_rules! combine_each {
    ($vectors:expr, $whole:ident, $half:ident, $quarter:ident) => {{
        let [a, b, c, d] = $vectors;
        let ab = $whole(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
        let cd = $whole(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
        let all = $whole(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
        let half = $half(_mm512_castsi512_si256(all), _mm512_extracti64x4_epi64::<1>(all));
        $quarter(_mm256_castsi256_si128(half), _mm256_extracti128_si256::<1>(half))
    }};
}

/// The largest of the sixteen unsigned lanes of each of four vectors.
///
/// # Safety
/// The CPU has AVX-512F and AVX2.
#[inline(always)]
unsafe fn largest_each(vectors: [__m512i; TOGETHER]) -> __m128i {
    // SAFETY: the caller promises the instructions.
    unsafe { combine_each!(vectors, _mm512_max_epu32, _mm256_max_epu32, _mm_max_epu32) }
}

/// The sum of the sixteen lanes of each of four vectors.
///
/// # Safety
/// The CPU has AVX-512F and AVX2.
#[inline(always)]
unsafe fn integer_sum_each(vectors: [__m512i; TOGETHER]) -> __m128i {
    // SAFETY: the caller promises the instructions.
    unsafe { combine_each!(vectors, _mm512_add_epi32, _mm256_add_epi32, _mm_add_epi32) }
}
