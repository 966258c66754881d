//! Weight rows as `f32`, whatever their stored type.

use crate::cpu::isa::Isa;
use crate::dtype::DType;
use crate::quant;

/// Dequantises a run of whole blocks.
pub(super) fn dequantise(_isa: Isa, dtype: DType, bytes: &[u8], out: &mut [f32]) {
    quant::dequantise(dtype, bytes, out);
}
