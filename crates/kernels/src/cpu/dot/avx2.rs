//! AVX2.
use super::{Product, scalar};
use crate::cpu::activation::QuantisedRows;
use crate::dtype::DType;
use crate::quant;

pub(super) unsafe fn quantised_rows(dtype: DType, product: Product<'_>) {
    scalar::quantised_rows(dtype, product);
}

/// # Safety
/// The CPU has AVX2, FMA and F16C. Lengths are checked by the caller.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn dequantise(dtype: DType, bytes: &[u8], out: &mut [f32]) {
    quant::dequantise_inline(dtype, bytes, out);
}

/// # Safety
/// The CPU has AVX2, FMA and F16C.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn quantise(x: &[f32], rows: usize, cols: usize, into: &mut QuantisedRows) {
    into.quantise(x, rows, cols);
}
