//! Weight rows as `f32`, whatever their stored type.

use crate::cpu::dot::Dot;
use crate::cpu::isa::Isa;
use crate::dtype::DType;

/// Dequantises a run of whole blocks.
pub(super) fn dequantise(isa: Isa, dtype: DType, bytes: &[u8], out: &mut [f32]) {
    Dot::new(isa).dequantise(dtype, bytes, out);
}
