//! The order inside a sealed page of 2-bit or 4-bit codes. This file is the one place that knows it.
//!
//! A page holds 64 tokens of one layer and one KV head, `d` channels (padded to a multiple of 32), little-endian. A
//! word of 32 bits holds `n = 32 / bits` codes, 16 or 8 of them:
//!
//! | part | layout |
//! |---|---|
//! | K codes | u32 words `[d/n][64 tokens]`; byte `b`, bits `bits·p..` of a word: channel `n·block + 4·p + b` |
//! | V codes | u32 words `[64/n][d]`; byte `b`, bits `bits·p..`: token `n·block + 4·p + b` |
//! | K scales | u16 `[group][scale, offset][64 tokens]` |
//! | V scales | the same |
//!
//! `w & 0x03030303` (4 bits: `0x0f0f0f0f`) of a K word is four neighbouring channels as bytes, of a V word four
//! neighbouring tokens: what an 8-bit multiply-accumulate reads along its inner dimension. A code `c` stands for
//! `c·scale - offset`. Codes of padded channels are zero and belong to no group.

use super::{HEAD_DIM_STEP, PAGE_TOKENS, check_token};
use crate::cache_codec::Side;
use crate::error::{CodecError, check_length};
use crate::quantise::{RowFormat, ScalePair, dequantise_row, quantise_row};
use crate::rule::{Rule, ScaleType};

/// Shape of the pages of one model: everything needed to find a code or a scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CodeLayout {
    bits: u32,
    head_dim: usize,
    groups: usize,
    scale_type: ScaleType,
}

impl CodeLayout {
    /// The layout for rows of `head_dim` channels in `groups` groups, with codes of 2 or 4 bits and f16 scales.
    pub fn new(bits: u32, head_dim: usize, groups: usize) -> Result<Self, CodecError> {
        if !matches!(bits, 2 | 4) {
            return Err(CodecError::Shape {
                what: "bits of a code (2 or 4)",
                expected: 2,
                got: bits as usize,
            });
        }
        // Kernels sum products of 16-bit numbers and codes in 32 bits, which holds 4369 of the largest.
        if head_dim == 0 || head_dim > 4096 {
            return Err(CodecError::HeadDim { head_dim, reason: "pages of codes need 1 to 4096 channels" });
        }
        if groups == 0 || !head_dim.is_multiple_of(groups) {
            return Err(CodecError::Groups { head_dim, groups });
        }
        Ok(CodeLayout { bits, head_dim, groups, scale_type: ScaleType::F16 })
    }

    /// The same layout with another type of scales.
    pub fn with_scales(self, scale_type: ScaleType) -> Self {
        CodeLayout { scale_type, ..self }
    }

    /// How scales and offsets are stored.
    pub fn scale_type(&self) -> ScaleType {
        self.scale_type
    }

    /// Bits of a code, 2 or 4.
    pub fn bits(&self) -> u32 {
        self.bits
    }

    /// Codes in a word: channels of a K word, tokens of a V word.
    pub fn codes_per_word(&self) -> usize {
        32 / self.bits as usize
    }

    /// The largest number that a code can hold.
    pub fn largest_code(&self) -> u8 {
        (1 << self.bits) - 1
    }

    /// Channels of a row, without padding.
    pub fn head_dim(&self) -> usize {
        self.head_dim
    }

    /// Channels of a row as stored.
    pub fn padded_dim(&self) -> usize {
        self.head_dim.next_multiple_of(HEAD_DIM_STEP)
    }

    /// The number of groups of channels in a row, each with a scale and an offset.
    pub fn groups(&self) -> usize {
        self.groups
    }

    /// Bytes of a page: codes of all padded channels, and a 16-bit scale and offset per row and group.
    pub fn page_bytes(&self) -> usize {
        2 * (4 * self.side_words() + PAGE_TOKENS * self.groups * 4)
    }

    /// Byte and bit shift of the code of (`token`, `channel`).
    pub fn code_position(&self, side: Side, token: usize, channel: usize) -> (usize, u32) {
        assert!(token < PAGE_TOKENS && channel < self.padded_dim(), "({token}, {channel}) is outside a page");
        match side {
            Side::Key => key_code(self.bits, token, channel),
            Side::Value => {
                let (byte, shift) = value_code(self.bits, self.padded_dim(), token, channel);
                (4 * self.side_words() + byte, shift)
            }
        }
    }

    /// Byte of the little-endian u16 that holds a scale; the offset lies 128 bytes (64 tokens) after it.
    pub fn scale_position(&self, side: Side, token: usize, group: usize) -> usize {
        assert!(token < PAGE_TOKENS && group < self.groups, "token {token}, group {group} is outside a page");
        let side_scales = self.groups * 2 * PAGE_TOKENS;
        let first = match side {
            Side::Key => 0,
            Side::Value => side_scales,
        };
        2 * self.side_words() * 4 + 2 * (first + group * 2 * PAGE_TOKENS + token)
    }

    /// Words of one side's codes.
    fn side_words(&self) -> usize {
        PAGE_TOKENS * self.padded_dim() / self.codes_per_word()
    }

    /// Writes one token's codes (one per channel) and scales, leaving all other tokens as they are.
    pub fn write_token(
        &self,
        page: &mut [u8],
        side: Side,
        token: usize,
        codes: &[u8],
        scales: &[ScalePair],
    ) -> Result<(), CodecError> {
        check_token("bytes of a page of codes", self.page_bytes(), page.len(), token)?;
        check_length("codes of a row", self.head_dim, codes.len())?;
        check_length("scales of a row", self.groups, scales.len())?;
        let mask = self.largest_code();
        for channel in 0..self.padded_dim() {
            let code = codes.get(channel).map_or(0, |code| code & mask);
            let (byte, shift) = self.code_position(side, token, channel);
            page[byte] = page[byte] & !(mask << shift) | code << shift;
        }
        for (group, &(scale, offset)) in scales.iter().enumerate() {
            let at = self.scale_position(side, token, group);
            page[at..at + 2].copy_from_slice(&scale.to_le_bytes());
            page[at + 2 * PAGE_TOKENS..at + 2 * PAGE_TOKENS + 2].copy_from_slice(&offset.to_le_bytes());
        }
        Ok(())
    }

    /// Reads one token's codes and scales.
    pub fn read_token(
        &self,
        page: &[u8],
        side: Side,
        token: usize,
        codes: &mut [u8],
        scales: &mut [ScalePair],
    ) -> Result<(), CodecError> {
        check_token("bytes of a page of codes", self.page_bytes(), page.len(), token)?;
        check_length("codes of a row", self.head_dim, codes.len())?;
        check_length("scales of a row", self.groups, scales.len())?;
        let mask = self.largest_code();
        for (channel, code) in codes.iter_mut().enumerate() {
            let (byte, shift) = self.code_position(side, token, channel);
            *code = page[byte] >> shift & mask;
        }
        for (group, pair) in scales.iter_mut().enumerate() {
            let at = self.scale_position(side, token, group);
            let word = |at: usize| u16::from_le_bytes([page[at], page[at + 1]]);
            *pair = (word(at), word(at + 2 * PAGE_TOKENS));
        }
        Ok(())
    }

    /// What a reader makes of one token: `code·scale - offset` per channel, still rotated.
    pub fn decode_token(
        &self,
        page: &[u8],
        side: Side,
        token: usize,
        row: &mut [f32],
    ) -> Result<(), CodecError> {
        let mut codes = vec![0; self.head_dim];
        let mut scales = vec![(0, 0); self.groups];
        self.read_token(page, side, token, &mut codes, &mut scales)?;
        dequantise_row(&codes, &scales, self.scale_type, row)
    }
}

/// Byte and bit shift of a key's code among words `[word of a token][64 tokens]` of `bits`-bit codes.
pub(super) fn key_code(bits: u32, token: usize, channel: usize) -> (usize, u32) {
    let codes = 32 / bits as usize;
    place(channel / codes * PAGE_TOKENS + token, channel % codes, bits)
}

/// Byte and bit shift of a value's code among words `[block of tokens][width channels]` of `bits`-bit codes.
pub(super) fn value_code(bits: u32, width: usize, token: usize, channel: usize) -> (usize, u32) {
    let codes = 32 / bits as usize;
    place(token / codes * width + channel, token % codes, bits)
}

/// Code `inner` of a word: byte `inner % 4`, so that one mask takes four neighbours out of it.
fn place(word: usize, inner: usize, bits: u32) -> (usize, u32) {
    (word * 4 + inner % 4, bits * (inner / 4) as u32)
}

/// How rows become codes of a layout.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CodeRows {
    /// The layout of the pages that the codes are written to.
    pub layout: CodeLayout,
    /// How the grid of a row is chosen.
    pub rule: Rule,
    /// Codes are chosen against the unrounded scale, as in the paper; see [`crate::quantise`].
    pub published: bool,
}

impl CodeRows {
    /// The arithmetic of one row.
    pub fn row_format(&self) -> RowFormat {
        RowFormat {
            groups: self.layout.groups,
            rule: self.rule,
            scale_type: self.layout.scale_type,
            published: self.published,
            levels: 1 << self.layout.bits,
        }
    }

    /// Quantises one row and writes its codes and scales.
    pub fn write_token(
        &self,
        page: &mut [u8],
        side: Side,
        token: usize,
        row: &[f32],
    ) -> Result<(), CodecError> {
        let (mut codes, mut scales) = (vec![0; row.len()], vec![(0, 0); self.layout.groups]);
        check_length("channels of a row", self.layout.head_dim, row.len())?;
        quantise_row(row, &self.row_format(), &mut codes, &mut scales)?;
        self.layout.write_token(page, side, token, &codes, &scales)
    }
}
