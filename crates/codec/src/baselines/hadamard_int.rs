//! `int3` and `int4`: `quarot-int2` with more levels. The safe tiers a failed certificate recommends.

use super::AffineRows;
use crate::error::CodecError;
use crate::hadamard;

/// Three bits per channel after a Hadamard, min-max per row.
pub fn int3(head_dim: usize) -> Result<AffineRows, CodecError> {
    super::check_head_dim(head_dim)?;
    AffineRows::new("int3", head_dim, 3, hadamard::block_size(head_dim))
}

/// Four bits per channel after a Hadamard, min-max per row.
pub fn int4(head_dim: usize) -> Result<AffineRows, CodecError> {
    super::check_head_dim(head_dim)?;
    AffineRows::new("int4", head_dim, 4, hadamard::block_size(head_dim))
}
