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
/// As [`dequantise`].
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
/// As [`dequantise`].
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

/// Equal to [`QuantisedRows::quantise`], bit for bit.
///
/// # Safety
/// The CPU has AVX-512 F, BW, DQ and VL.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
pub(in super::super) unsafe fn quantise(x: &[f32], rows: usize, cols: usize, into: &mut QuantisedRows) {
    assert_eq!(x.len(), rows * cols);
    into.reset(rows, cols);
    let (high, low, scales, sums) = into.parts_mut();
    for group in 0..rows * cols / GROUP {
        let values = &x[group * GROUP..][..GROUP];
        // SAFETY: 32 values are readable, and 32 bytes writable in both halves.
        unsafe {
            let values = [_mm512_loadu_ps(values.as_ptr()), _mm512_loadu_ps(values[SUM_GROUP..].as_ptr())];
            let magnitudes = [_mm512_abs_ps(values[0]), _mm512_abs_ps(values[1])];
            // The second operand of a maximum wins if either is not a number; the finite test catches that.
            let largest = _mm512_reduce_max_ps(_mm512_max_ps(magnitudes[0], magnitudes[1]));
            let infinity = _mm512_set1_ps(f32::INFINITY);
            let finite = _mm512_cmp_ps_mask::<_CMP_LT_OQ>(magnitudes[0], infinity)
                & _mm512_cmp_ps_mask::<_CMP_LT_OQ>(magnitudes[1], infinity)
                == 0xffff;
            let (scale, inverse) = if !finite {
                (f32::NAN, 0.0)
            } else if largest > 0.0 && (LIMIT / largest).is_finite() {
                (largest / LIMIT, LIMIT / largest)
            } else {
                (0.0, 0.0)
            };
            scales[group] = scale;
            for half in 0..2 {
                let at = group * GROUP + half * SUM_GROUP;
                let scaled = _mm512_mul_ps(values[half], _mm512_set1_ps(inverse));
                let keep = if finite { 0xffff } else { 0 };
                let fixed = _mm512_maskz_cvtps_epi32(keep, scaled);
                let upper = _mm512_srai_epi32::<8>(_mm512_add_epi32(fixed, _mm512_set1_epi32(128)));
                // Truncation to a byte is the subtraction of `upper * 256`.
                let (upper, lower) = (_mm512_cvtepi32_epi8(upper), _mm512_cvtepi32_epi8(fixed));
                _mm_storeu_si128(high[at..][..SUM_GROUP].as_mut_ptr().cast(), upper);
                _mm_storeu_si128(low[at..][..SUM_GROUP].as_mut_ptr().cast(), lower);
                sums[group * 2 + half] = scale * _mm512_reduce_add_epi32(fixed) as f32;
            }
        }
    }
}
