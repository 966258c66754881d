//! Weight rows as `f32`, whatever their stored type.

use crate::cpu::dot::Dot;
use crate::cpu::isa::Isa;
use crate::dtype::DType;

/// Dequantises a run of whole blocks.
pub(super) fn dequantise(isa: Isa, dtype: DType, bytes: &[u8], out: &mut [f32]) {
    let isa = match (isa, dtype) {
        // The compiler's AVX-512 code for these is several times slower than its AVX2 code; values are the same.
        (Isa::Avx512 | Isa::Amx, DType::Q4K | DType::Q5K) => Isa::Avx2,
        _ => isa,
    };
    Dot::new(isa).dequantise(dtype, bytes, out);
}
