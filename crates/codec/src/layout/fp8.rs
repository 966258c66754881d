//! The order inside a sealed page of 8-bit floats. This file is the one place that knows it.
//!
//! A page holds 64 tokens of one layer and one KV head, `d` channels (padded to a multiple of 32), little-endian:
//!
//! | part | layout |
//! |---|---|
//! | K | E4M3 bytes `[d/2 channel pairs][64 tokens][2]` |
//! | V | E4M3 bytes `[32 token pairs][d][2]` |
//! | K scales | f16 `[64 tokens]` |
//! | V scales | f16 `[64 tokens]` |
//!
//! Elements lie in the order of bf16 pages, so a reader widens a register of bytes to a register of bf16
//! and goes on as there. A byte stands for `value·scale`. Padded channels are zero.

use super::bf16::pair_index;
use super::{HEAD_DIM_STEP, PAGE_TOKENS, check_token};
use crate::cache_codec::Side;
use crate::error::{CodecError, check_finite, check_length};
use crate::fp8::{E4M3_LARGEST, e4m3_to_f32, f32_to_e4m3};
use crate::rule::ScaleType;

/// Shape of the 8-bit pages of one model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fp8Layout {
    head_dim: usize,
}

impl Fp8Layout {
    /// The layout for rows of `head_dim` channels.
    pub fn new(head_dim: usize) -> Result<Self, CodecError> {
        if head_dim == 0 || head_dim > 1 << 16 {
            return Err(CodecError::HeadDim { head_dim, reason: "pages need 1 to 65536 channels" });
        }
        Ok(Fp8Layout { head_dim })
    }

    /// Channels of a row, without padding.
    pub fn head_dim(&self) -> usize {
        self.head_dim
    }

    /// Channels of a row as stored.
    pub fn padded_dim(&self) -> usize {
        self.head_dim.next_multiple_of(HEAD_DIM_STEP)
    }

    /// Bytes of a page.
    pub fn page_bytes(&self) -> usize {
        2 * (self.side_bytes() + PAGE_TOKENS * 2)
    }

    /// Byte of the element of (`token`, `channel`).
    pub fn position(&self, side: Side, token: usize, channel: usize) -> usize {
        assert!(token < PAGE_TOKENS && channel < self.padded_dim(), "({token}, {channel}) is outside a page");
        let first = if side == Side::Key { 0 } else { self.side_bytes() };
        first + pair_index(side, self.padded_dim(), token, channel)
    }

    /// Byte of the little-endian f16 scale of a token.
    pub fn scale_position(&self, side: Side, token: usize) -> usize {
        assert!(token < PAGE_TOKENS, "token {token} is outside a page");
        let first = match side {
            Side::Key => 0,
            Side::Value => PAGE_TOKENS,
        };
        2 * self.side_bytes() + 2 * (first + token)
    }

    /// Bytes of one side's elements.
    fn side_bytes(&self) -> usize {
        PAGE_TOKENS * self.padded_dim()
    }

    /// Writes one token's row, leaving all other tokens as they are: the largest magnitude becomes 448 and elements
    /// answer to the scale as it is stored. On an error the page is as it was.
    pub fn write_token(
        &self,
        page: &mut [u8],
        side: Side,
        token: usize,
        row: &[f32],
    ) -> Result<(), CodecError> {
        check_token("bytes of an 8-bit page", self.page_bytes(), page.len(), token)?;
        check_length("channels of a row", self.head_dim, row.len())?;
        check_finite(row, 0)?;
        let scale_bits = row_scale(row);
        let scale = ScaleType::F16.to_f32(scale_bits);
        for channel in 0..self.padded_dim() {
            page[self.position(side, token, channel)] =
                row.get(channel).map_or(0, |value| f32_to_e4m3(value / scale));
        }
        let at = self.scale_position(side, token);
        page[at..at + 2].copy_from_slice(&scale_bits.to_le_bytes());
        Ok(())
    }

    /// What a reader makes of one token: `value·scale` per channel.
    pub fn decode_token(
        &self,
        page: &[u8],
        side: Side,
        token: usize,
        row: &mut [f32],
    ) -> Result<(), CodecError> {
        check_token("bytes of an 8-bit page", self.page_bytes(), page.len(), token)?;
        check_length("channels of a row", self.head_dim, row.len())?;
        let at = self.scale_position(side, token);
        let scale = ScaleType::F16.to_f32(u16::from_le_bytes([page[at], page[at + 1]]));
        for (channel, value) in row.iter_mut().enumerate() {
            *value = e4m3_to_f32(page[self.position(side, token, channel)]) * scale;
        }
        Ok(())
    }
}

/// The f16 scale of a row of finite numbers.
pub fn row_scale(row: &[f32]) -> u16 {
    scale_of_largest(row.iter().fold(0.0_f32, |largest, x| largest.max(x.abs())))
}

/// The f16 scale of a row by its largest magnitude, which becomes 448. Beyond the range of f16 it saturates and the
/// elements do too.
pub fn scale_of_largest(largest: f32) -> u16 {
    ScaleType::F16.to_bits((largest / E4M3_LARGEST).max(ScaleType::F16.smallest_scale()))
}
