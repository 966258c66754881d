//! `naive-int2`: no rotation; each row is rounded to four levels between its minimum and maximum.
//!
//! The floor of every comparison: what two bits give without an idea.

use super::AffineRows;
use crate::error::CodecError;

/// Two bits per channel, min-max per row, nothing else.
pub fn naive_int2(head_dim: usize) -> Result<AffineRows, CodecError> {
    AffineRows::new("naive-int2", head_dim, 2, 1)
}
