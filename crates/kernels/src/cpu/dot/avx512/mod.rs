//! AVX-512 with VNNI: 64 byte products per instruction, two instructions (high and low byte) per 64 weights.
//!
//! `vpdpbusd` multiplies unsigned with signed bytes. Codes go in as unsigned; formats with signed codes add a constant
//! to them and take it off again in the integer sum, once per activation vector and not once per weight row.

mod convert;
mod small;
mod superblock;

use std::arch::x86_64::*;

use super::stripes::{PREFETCH_AHEAD, Stripes};
use super::{MAX_ROWS, Product};
use crate::cpu::activation::{QuantisedRow, QuantisedRows};
use crate::dtype::DType;
pub(super) use convert::{dequantise, quantise};

/// One activation row as pointers, so that the loops carry no bounds checks.
#[derive(Clone, Copy)]
struct Activations {
    high: *const i8,
    low: *const i8,
    scales: *const f32,
    sums: *const f32,
}

impl Activations {
    fn new(row: QuantisedRow<'_>) -> Activations {
        let QuantisedRow { high, low, scales, sums } = row;
        Activations { high: high.as_ptr(), low: low.as_ptr(), scales: scales.as_ptr(), sums: sums.as_ptr() }
    }
}

/// The products of all weight rows with `M` activation rows.
trait Pass {
    /// # Safety
    /// The CPU has the instructions; the pointers in `x` are those of activation rows `first..`, which have as many values
    /// as a weight row.
    unsafe fn run<const M: usize>(stripes: &mut Stripes<'_>, x: [Activations; M], first: usize);
}

/// # Safety
/// The CPU has AVX-512 F, BW, DQ, VL and VNNI.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
pub(super) unsafe fn quantised_rows(dtype: DType, product: Product<'_>) {
    // SAFETY: passed on.
    unsafe {
        match dtype {
            DType::Q4_0 => passes::<small::Q4_0>(product),
            DType::Q4_1 => passes::<small::Q4_1>(product),
            DType::Q5_0 => passes::<small::Q5_0>(product),
            DType::Q5_1 => passes::<small::Q5_1>(product),
            DType::Q8_0 => passes::<small::Q8_0>(product),
            DType::Q4K => passes::<superblock::Q4K>(product),
            DType::Q5K => passes::<superblock::Q5K>(product),
            DType::Q6K => passes::<superblock::Q6K>(product),
            DType::Mxfp4 => passes::<small::Mxfp4>(product),
            DType::F32 | DType::F16 | DType::BF16 | DType::F8E4M3 => {
                unreachable!("float weights have no codes")
            }
        }
    }
}

/// Up to [`MAX_ROWS`] activation rows at a time.
///
/// # Safety
/// The caller keeps the promises of [`quantised_rows`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn passes<P: Pass>(product: Product<'_>) {
    let Product { mut stripes, x } = product;
    for first in (0..x.rows()).step_by(MAX_ROWS) {
        // SAFETY: passed on; so many rows are left.
        unsafe {
            match x.rows() - first {
                1 => pass::<P, 1>(&mut stripes, x, first),
                2 => pass::<P, 2>(&mut stripes, x, first),
                3 => pass::<P, 3>(&mut stripes, x, first),
                _ => pass::<P, 4>(&mut stripes, x, first),
            }
        }
    }
}

/// Kept out of line: each instance is a whole kernel.
///
/// # Safety
/// The caller keeps the promises of [`Pass::run`] for `M` rows of `x` from `first`.
#[inline(never)]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn pass<P: Pass, const M: usize>(stripes: &mut Stripes<'_>, x: &QuantisedRows, first: usize) {
    // SAFETY: passed on.
    unsafe { P::run::<M>(stripes, std::array::from_fn(|m| Activations::new(x.row(first + m))), first) }
}

/// Sum of the sixteen lanes.
///
/// # Safety
/// The CPU has AVX-512F.
#[inline(always)]
unsafe fn sum(lanes: __m512) -> f32 {
    // SAFETY: the caller promises the instructions.
    unsafe { _mm512_reduce_add_ps(lanes) }
}

/// The sum of the sixteen lanes of each of four vectors.
///
/// # Safety
/// The CPU has AVX-512F.
#[inline(always)]
unsafe fn sum_each(vectors: [__m512; 4]) -> __m128 {
    // SAFETY: the caller promises the instructions.
    unsafe {
        let [a, b, c, d] = vectors;
        let ab = _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)));
        let cd = _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d)));
        let low = _mm512_castpd_ps(_mm512_unpacklo_pd(ab, cd));
        let quarters = _mm512_add_ps(low, _mm512_castpd_ps(_mm512_unpackhi_pd(ab, cd)));
        let upper = _mm256_castpd_ps(_mm512_extractf64x4_pd::<1>(_mm512_castps_pd(quarters)));
        let halves = _mm256_add_ps(_mm512_castps512_ps256(quarters), upper);
        _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps::<1>(halves))
    }
}

/// `256 · Σ codes·high + Σ codes·low` over quadruples of bytes, for two vectors of codes that share lanes.
///
/// # Safety
/// The CPU has AVX-512F and VNNI.
#[inline(always)]
unsafe fn dot_pair(codes: [__m512i; 2], high: [__m512i; 2], low: [__m512i; 2]) -> __m512i {
    // SAFETY: the caller promises the instructions.
    unsafe {
        let sum = _mm512_dpbusd_epi32(_mm512_setzero_si512(), codes[0], high[0]);
        let sum = _mm512_slli_epi32::<8>(_mm512_dpbusd_epi32(sum, codes[1], high[1]));
        _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(sum, codes[0], low[0]), codes[1], low[1])
    }
}

/// The same for one vector of codes.
///
/// # Safety
/// The CPU has AVX-512F and VNNI.
#[inline(always)]
unsafe fn dot_one(codes: __m512i, high: __m512i, low: __m512i) -> __m512i {
    // SAFETY: the caller promises the instructions.
    unsafe {
        let sum = _mm512_slli_epi32::<8>(_mm512_dpbusd_epi32(_mm512_setzero_si512(), codes, high));
        _mm512_dpbusd_epi32(sum, codes, low)
    }
}

/// Prefetches `len` bytes of a stripe that are needed some time after those at `at`.
///
/// The address may lie past the end; prefetches never fault.
#[inline(always)]
fn prefetch(at: *const u8, len: usize) {
    for line in (0..len).step_by(64) {
        // SAFETY: a prefetch does not access memory in the sense of the language, whatever the address.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(at.wrapping_add(PREFETCH_AHEAD + line).cast()) }
    }
}
