//! `bf16`: the reference all others are measured against.

use half::bf16;

use super::{check_head_dim, count_rows};
use crate::cache_codec::{CacheCodec, HeadIndex, Side};
use crate::error::{CodecError, check_finite};

/// Rows rounded to bf16, which is what an unquantised cache holds.
#[derive(Clone, Debug)]
pub struct Bf16Rows {
    head_dim: usize,
}

impl Bf16Rows {
    /// Makes the codec for heads of `head_dim` channels.
    pub fn new(head_dim: usize) -> Result<Self, CodecError> {
        check_head_dim(head_dim)?;
        Ok(Bf16Rows { head_dim })
    }
}

impl CacheCodec for Bf16Rows {
    fn name(&self) -> &str {
        "bf16"
    }

    fn round_trip(&self, _: HeadIndex, _: Side, _: usize, rows: &mut [f32]) -> Result<(), CodecError> {
        count_rows(rows, self.head_dim)?;
        for (index, row) in rows.chunks_exact(self.head_dim).enumerate() {
            check_finite(row, index)?;
        }
        for x in rows {
            // A value next to the largest bf16 would round to infinity.
            let largest = bf16::MAX.to_f32();
            *x = bf16::from_f32(x.clamp(-largest, largest)).to_f32();
        }
        Ok(())
    }

    fn token_bytes(&self, head_dim: usize) -> f64 {
        (2 * 2 * head_dim) as f64
    }
}
