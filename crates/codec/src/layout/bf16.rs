//! The order inside a page of bf16 elements. This file is the one place that knows it.
//!
//! | part | layout |
//! |---|---|
//! | K | u16 `[d/2 channel pairs][64 tokens][2]` |
//! | V | u16 `[32 token pairs][d][2]` |
//!
//! Both halves are the right operand of a matrix product with its summed index in pairs: channels for `q · k`, tokens
//! for `p · v`. There are no scales, and `d` is not padded, but it must be even.

use half::bf16;

use super::{PAGE_TOKENS, check_token};
use crate::cache_codec::Side;
use crate::error::{CodecError, check_length};

/// Shape of the bf16 pages of one model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bf16Layout {
    head_dim: usize,
}

impl Bf16Layout {
    /// The layout for rows of `head_dim` channels.
    pub fn new(head_dim: usize) -> Self {
        Bf16Layout { head_dim }
    }

    /// Channels of a row.
    pub fn head_dim(&self) -> usize {
        self.head_dim
    }

    /// Elements of a page, keys and values.
    pub fn elements(&self) -> usize {
        PAGE_TOKENS * 2 * self.head_dim
    }

    /// Bytes of a page.
    pub fn page_bytes(&self) -> usize {
        2 * self.elements()
    }

    /// Index of the element of (`token`, `channel`), counted from the start of the page.
    #[inline]
    pub fn index(&self, side: Side, token: usize, channel: usize) -> usize {
        match side {
            Side::Key => pair_index(side, self.head_dim, token, channel),
            Side::Value => PAGE_TOKENS * self.head_dim + pair_index(side, self.head_dim, token, channel),
        }
    }

    /// Writes one token's row, rounded to nearest even, leaving all other tokens as they are.
    pub fn write_token(
        &self,
        page: &mut [u8],
        side: Side,
        token: usize,
        row: &[f32],
    ) -> Result<(), CodecError> {
        self.check(page.len(), token, row.len())?;
        for (channel, &x) in row.iter().enumerate() {
            let at = 2 * self.index(side, token, channel);
            page[at..at + 2].copy_from_slice(&bf16::from_f32(x).to_le_bytes());
        }
        Ok(())
    }

    /// Reads one token's row.
    pub fn decode_token(
        &self,
        page: &[u8],
        side: Side,
        token: usize,
        row: &mut [f32],
    ) -> Result<(), CodecError> {
        self.check(page.len(), token, row.len())?;
        for (channel, x) in row.iter_mut().enumerate() {
            let at = 2 * self.index(side, token, channel);
            *x = bf16::from_le_bytes([page[at], page[at + 1]]).to_f32();
        }
        Ok(())
    }

    fn check(&self, page_bytes: usize, token: usize, channels: usize) -> Result<(), CodecError> {
        check_token("bytes of a bf16 page", self.page_bytes(), page_bytes, token)?;
        check_length("channels of a row", self.head_dim, channels)?;
        if !self.head_dim.is_multiple_of(2) {
            let reason = "bf16 pages hold channels in pairs";
            return Err(CodecError::HeadDim { head_dim: self.head_dim, reason });
        }
        Ok(())
    }
}

/// Index of an element in one half of a page whose elements lie in pairs; `width` is the number of stored channels.
#[inline]
pub(super) fn pair_index(side: Side, width: usize, token: usize, channel: usize) -> usize {
    match side {
        Side::Key => (channel / 2 * PAGE_TOKENS + token) * 2 + channel % 2,
        Side::Value => (token / 2 * width + channel) * 2 + token % 2,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_element_has_one_place_and_comes_back_rounded() {
        for d in [2, 32, 48, 128] {
            let layout = Bf16Layout::new(d);
            let mut taken = vec![false; layout.elements()];
            let mut page = vec![0; layout.page_bytes()];
            let row = |side: Side, token: usize| -> Vec<f32> {
                (0..d).map(|c| (token * d + c) as f32 * 0.37 - f32::from(side == Side::Key)).collect()
            };
            for (side, token) in
                [Side::Key, Side::Value].into_iter().flat_map(|s| (0..64).map(move |t| (s, t)))
            {
                for channel in 0..d {
                    let at = layout.index(side, token, channel);
                    assert!(!std::mem::replace(&mut taken[at], true), "d={d}: {at} twice");
                }
                layout.write_token(&mut page, side, token, &row(side, token)).unwrap();
            }
            let mut read = vec![0.0; d];
            for (side, token) in
                [Side::Key, Side::Value].into_iter().flat_map(|s| (0..64).map(move |t| (s, t)))
            {
                layout.decode_token(&page, side, token, &mut read).unwrap();
                let rounded: Vec<f32> =
                    row(side, token).iter().map(|&x| bf16::from_f32(x).to_f32()).collect();
                assert_eq!(read, rounded, "d={d} token {token}");
            }
        }
    }

    #[test]
    fn wrong_shapes_are_refused() {
        let layout = Bf16Layout::new(4);
        let mut page = vec![0; layout.page_bytes()];
        assert!(layout.write_token(&mut page, Side::Key, 64, &[0.0; 4]).is_err());
        assert!(layout.write_token(&mut page, Side::Key, 0, &[0.0; 3]).is_err());
        assert!(layout.write_token(&mut page[1..], Side::Key, 0, &[0.0; 4]).is_err());
        let odd = Bf16Layout::new(3);
        let mut page = vec![0; odd.page_bytes()];
        assert!(matches!(
            odd.write_token(&mut page, Side::Key, 0, &[0.0; 3]),
            Err(CodecError::HeadDim { .. })
        ));
    }
}
