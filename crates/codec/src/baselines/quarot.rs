//! `quarot-int2`: a Hadamard over the whole head, then two bits, min-max per row (QuaRot, arXiv 2404.00456).
//!
//! Choices: keys and values are both rotated after RoPE; QuaRot's clipping ratio is left out, so that the difference
//! to `naive-int2` is the rotation alone. Heads whose size is not a power of two use the block Hadamard.

use super::AffineRows;
use crate::error::CodecError;
use crate::hadamard;

/// Two bits per channel after a Hadamard.
pub fn quarot_int2(head_dim: usize) -> Result<AffineRows, CodecError> {
    super::check_head_dim(head_dim)?;
    AffineRows::new("quarot-int2", head_dim, 2, hadamard::block_size(head_dim))
}
