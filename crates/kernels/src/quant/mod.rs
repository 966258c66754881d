//! Every stored weight type decoded by plain loops, which all fast paths are compared with.
//!
//! A quantised element is `scale · code + offset`: `code` a small integer, `scale` and `offset` shared by a group of
//! at least [`GROUP`] elements. [`block`] takes one block apart into these; [`dequantise`] multiplies them out.
//! FP8 elements are [`fp8`]'s; their scales are no part of the bytes.
//! Products and sums round separately (no fused multiply-add), so the values are those of any other plain reader
//! of the same bytes.

pub mod block;
pub mod fp8;
pub mod mxfp4;

use half::{bf16, f16};

use crate::dtype::DType;
use block::{Block, Unpacked};

/// Elements per entry of [`Unpacked::scales`]: the smallest group of any format.
pub const GROUP: usize = 16;

/// Decodes `out.len()` elements of type `dtype`.
///
/// Panics if `bytes` is not exactly the stored form of `out.len()` elements. `bytes` need not be aligned.
pub fn dequantise(dtype: DType, bytes: &[u8], out: &mut [f32]) {
    assert_eq!(dtype.bytes_for(out.len()), Some(bytes.len()), "{} {dtype} elements", out.len());
    dequantise_inline(dtype, bytes, out);
}

/// The body of [`dequantise`], to be compiled again for better instruction sets. Lengths are already checked.
#[inline(always)]
pub(crate) fn dequantise_inline(dtype: DType, bytes: &[u8], out: &mut [f32]) {
    match dtype {
        DType::F32 => {
            for (value, raw) in out.iter_mut().zip(bytes.as_chunks::<4>().0) {
                *value = f32::from_le_bytes(*raw);
            }
        }
        DType::F16 => {
            for (value, raw) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
                *value = f16::from_le_bytes(*raw).to_f32();
            }
        }
        DType::BF16 => {
            for (value, raw) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
                *value = bf16::from_le_bytes(*raw).to_f32();
            }
        }
        DType::Q4_0 => blocks::<block::Q4_0>(bytes, out),
        DType::Q4_1 => blocks::<block::Q4_1>(bytes, out),
        DType::Q5_0 => blocks::<block::Q5_0>(bytes, out),
        DType::Q5_1 => blocks::<block::Q5_1>(bytes, out),
        DType::Q8_0 => blocks::<block::Q8_0>(bytes, out),
        DType::Q4K => blocks::<block::Q4K>(bytes, out),
        DType::Q5K => blocks::<block::Q5K>(bytes, out),
        DType::Q6K => blocks::<block::Q6K>(bytes, out),
        DType::Mxfp4 => blocks::<block::Mxfp4>(bytes, out),
        DType::F8E4M3 => {
            out.iter_mut().zip(bytes).for_each(|(value, byte)| *value = fp8::E4M3[usize::from(*byte)]);
        }
    }
}

#[inline(always)]
fn blocks<B: Block>(bytes: &[u8], out: &mut [f32]) {
    let mut unpacked = Unpacked::default();
    for (bytes, out) in
        bytes.chunks_exact(B::DTYPE.block_bytes()).zip(out.chunks_exact_mut(B::DTYPE.block_len()))
    {
        B::unpack(bytes, &mut unpacked);
        for (group, out) in out.as_chunks_mut::<GROUP>().0.iter_mut().enumerate() {
            let (scale, offset) = (unpacked.scales[group], unpacked.offsets[group]);
            let codes = &unpacked.codes[group * GROUP..][..GROUP];
            for i in 0..GROUP {
                out[i] = scale * f32::from(codes[i]);
                // Adding zero would turn a negative zero into a positive one.
                if B::HAS_OFFSET {
                    out[i] += offset;
                }
            }
        }
    }
}
