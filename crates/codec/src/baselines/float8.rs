//! `fp8`: E4M3 with one f16 scale per row, so that the largest magnitude of the row becomes 448.
//!
//! Serving engines mostly use one scale per tensor, often 1.0; per row is what vLLM calls per token and head, and is
//! the fairer rival. The scale is stored before the codes are chosen, so they answer to what a reader multiplies by.

use super::{check_head_dim, count_rows};
use crate::cache_codec::{CacheCodec, HeadIndex, Side};
use crate::error::{CodecError, check_finite};
use crate::fp8::{e4m3_to_f32, f32_to_e4m3};
use crate::layout::fp8::row_scale;
use crate::rule::ScaleType;

/// Rows of E4M3 bytes.
#[derive(Clone, Debug)]
pub struct Fp8Rows {
    head_dim: usize,
}

impl Fp8Rows {
    /// Makes the codec for heads of `head_dim` channels.
    pub fn new(head_dim: usize) -> Result<Self, CodecError> {
        check_head_dim(head_dim)?;
        Ok(Fp8Rows { head_dim })
    }
}

impl CacheCodec for Fp8Rows {
    fn name(&self) -> &str {
        "fp8"
    }

    fn round_trip(&self, _: HeadIndex, _: Side, _: usize, rows: &mut [f32]) -> Result<(), CodecError> {
        count_rows(rows, self.head_dim)?;
        let mut bytes = Vec::with_capacity(rows.len() / self.head_dim * (self.head_dim + 2));
        for (index, row) in rows.chunks_exact(self.head_dim).enumerate() {
            check_finite(row, index)?;
            let scale_bits = row_scale(row);
            let scale = ScaleType::F16.to_f32(scale_bits);
            bytes.extend(row.iter().map(|x| f32_to_e4m3(x / scale)));
            bytes.extend(scale_bits.to_le_bytes());
        }
        for (row, bytes) in rows.chunks_exact_mut(self.head_dim).zip(bytes.chunks_exact(self.head_dim + 2)) {
            let (codes, scale) = bytes.split_at(self.head_dim);
            let scale = ScaleType::F16.to_f32(u16::from_le_bytes([scale[0], scale[1]]));
            row.iter_mut().zip(codes).for_each(|(x, &code)| *x = e4m3_to_f32(code) * scale);
        }
        Ok(())
    }

    fn token_bytes(&self, head_dim: usize) -> f64 {
        (2 * (head_dim + 2)) as f64
    }
}
