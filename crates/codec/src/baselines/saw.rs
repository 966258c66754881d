//! `saw-int4`: block-diagonal Hadamard and four bits per token (SAW-INT4, arXiv 2604.19157).
//!
//! Choices: blocks of 16 channels (the order its serving code uses by default; less where 16 does not divide the
//! head), keys and values both rotated, one asymmetric scale per token and head in f16.

use super::AffineRows;
use crate::error::CodecError;
use crate::hadamard;

/// Four bits per channel after a Hadamard over blocks of 16.
pub fn saw_int4(head_dim: usize) -> Result<AffineRows, CodecError> {
    super::check_head_dim(head_dim)?;
    AffineRows::new("saw-int4", head_dim, 4, hadamard::block_size(head_dim).min(16))
}
