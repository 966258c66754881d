//! Weight rows as `f32`, whatever their stored type.

use crate::cpu::isa::Isa;
use crate::dtype::DType;

/// Dequantises a run of whole blocks.
pub(super) fn dequantise(_isa: Isa, dtype: DType, bytes: &[u8], out: &mut [f32]) {
    assert_eq!(dtype.bytes_for(out.len()), Some(bytes.len()), "{dtype} run of {}", out.len());
    match dtype {
        DType::F32 => {
            for (out, bytes) in out.iter_mut().zip(bytes.as_chunks::<4>().0) {
                *out = f32::from_le_bytes(*bytes);
            }
        }
        DType::BF16 => {
            for (out, bytes) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
                *out = half::bf16::from_le_bytes(*bytes).to_f32();
            }
        }
        DType::F16 => {
            for (out, bytes) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
                *out = half::f16::from_le_bytes(*bytes).to_f32();
            }
        }
        _ => panic!("{dtype}"),
    }
}
