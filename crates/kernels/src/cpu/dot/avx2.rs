//! AVX2, FMA and F16C: entry points.

use std::arch::x86_64::*;

use super::Product;
use super::lanes;
use crate::cpu::activation::QuantisedRows;
use crate::dtype::DType;
use crate::quant;

/// # Safety
/// The CPU has AVX2, FMA and F16C.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn quantised_rows(dtype: DType, product: Product<'_>) {
    // SAFETY: passed on.
    unsafe { lanes::quantised_rows::<__m256i>(dtype, product) }
}

/// # Safety
/// The CPU has AVX2, FMA and F16C. Lengths are checked by the caller.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn dequantise(dtype: DType, bytes: &[u8], out: &mut [f32]) {
    if dtype != DType::F16 {
        // The compiler makes good vector code of the plain loops.
        return quant::dequantise_inline(dtype, bytes, out);
    }
    let whole = out.len() / 8 * 8;
    for (bytes, out) in bytes.chunks_exact(16).zip(out.chunks_exact_mut(8)) {
        // SAFETY: sixteen bytes are readable and eight floats writable.
        unsafe {
            _mm256_storeu_ps(out.as_mut_ptr(), _mm256_cvtph_ps(_mm_loadu_si128(bytes.as_ptr().cast())))
        };
    }
    quant::dequantise_inline(dtype, &bytes[2 * whole..], &mut out[whole..]);
}

/// # Safety
/// The CPU has AVX2, FMA and F16C.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn quantise(x: &[f32], rows: usize, cols: usize, into: &mut QuantisedRows) {
    into.quantise(x, rows, cols);
}
