//! `kivi2`: keys per channel, values per token, two bits (KIVI, arXiv 2402.02750).
//!
//! A key channel keeps its own scale over 32 tokens, because key outliers sit in fixed channels; values are quantised
//! per token in groups of 32 channels. Choices: group 32 on both sides and asymmetric min-max as in its code, scale
//! and minimum in f16, keys after RoPE. KIVI's full-precision residual of 128 tokens is the lab's recent window; the
//! lab's sink, which KIVI does not have, is the same for all codecs. A head that 32 does not divide uses the largest
//! divisor below.

use super::line::LineFormat;
use super::{check_head_dim, count_rows, group_channels};
use crate::cache_codec::{CacheCodec, HeadIndex, Side};
use crate::error::{CodecError, check_finite, check_length};

const GROUP: usize = 32;

/// Two bits, per-channel keys and per-token values.
#[derive(Clone, Debug)]
pub struct Kivi {
    head_dim: usize,
    key_line: LineFormat,
    value_line: LineFormat,
}

impl Kivi {
    /// Makes the codec for heads of `head_dim` channels.
    pub fn new(head_dim: usize) -> Result<Self, CodecError> {
        check_head_dim(head_dim)?;
        Ok(Kivi {
            head_dim,
            key_line: LineFormat::new(GROUP, 2, 1)?,
            value_line: LineFormat::new(head_dim, 2, head_dim / group_channels(head_dim, GROUP))?,
        })
    }
}

/// Replaces each row by what its stored line gives back.
pub(super) fn round_trip_rows(
    line: &LineFormat,
    head_dim: usize,
    rows: &mut [f32],
) -> Result<(), CodecError> {
    count_rows(rows, head_dim)?;
    let mut bytes = Vec::with_capacity(rows.len() / head_dim * line.bytes());
    for (index, row) in rows.chunks_exact(head_dim).enumerate() {
        line.store(row, &mut bytes).map_err(|error| error.in_row(index))?;
    }
    for (row, bytes) in rows.chunks_exact_mut(head_dim).zip(bytes.chunks_exact(line.bytes())) {
        line.load(bytes, row)?;
    }
    Ok(())
}

/// Checks that keys come in whole groups of tokens and are finite.
pub(super) fn check_key_groups(rows: &[f32], head_dim: usize, group: usize) -> Result<(), CodecError> {
    let tokens = count_rows(rows, head_dim)?;
    check_length("key rows (whole token groups)", tokens.next_multiple_of(group), tokens)?;
    for (index, row) in rows.chunks_exact(head_dim).enumerate() {
        check_finite(row, index)?;
    }
    Ok(())
}

impl CacheCodec for Kivi {
    fn name(&self) -> &str {
        "kivi2"
    }

    fn token_group(&self) -> usize {
        GROUP
    }

    fn round_trip(&self, _: HeadIndex, side: Side, _: usize, rows: &mut [f32]) -> Result<(), CodecError> {
        if side == Side::Value {
            return round_trip_rows(&self.value_line, self.head_dim, rows);
        }
        check_key_groups(rows, self.head_dim, GROUP)?;
        let mut column = [0.0; GROUP];
        for group in rows.chunks_exact_mut(GROUP * self.head_dim) {
            let mut bytes = Vec::with_capacity(self.head_dim * self.key_line.bytes());
            for channel in 0..self.head_dim {
                for (token, x) in column.iter_mut().enumerate() {
                    *x = group[token * self.head_dim + channel];
                }
                self.key_line.store(&column, &mut bytes)?;
            }
            for (channel, bytes) in bytes.chunks_exact(self.key_line.bytes()).enumerate() {
                self.key_line.load(bytes, &mut column)?;
                for (token, x) in column.iter().enumerate() {
                    group[token * self.head_dim + channel] = *x;
                }
            }
        }
        Ok(())
    }

    fn token_bytes(&self, head_dim: usize) -> f64 {
        Kivi::new(head_dim).map_or(f64::NAN, |codec| {
            let key = (head_dim * codec.key_line.bytes()) as f64 / GROUP as f64;
            key + codec.value_line.bytes() as f64
        })
    }
}
