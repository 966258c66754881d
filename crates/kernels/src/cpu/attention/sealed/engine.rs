//! What an instruction set provides for 2-bit and 4-bit pages, and what it is given.

use std::ops::Range;

use oscar_codec::CodeLayout;
use oscar_codec::{PAGE_TOKENS, ScaleType, Side};

use super::fixed_point;
use crate::cpu::attention::Span;

/// Lanes in which an engine may keep a sum over tokens.
#[cfg(target_arch = "x86_64")]
pub(super) const LANES: usize = 16;

/// The shape of pages.
#[derive(Clone, Copy)]
pub(super) struct Shape {
    pub(super) bits: u32,
    pub(super) scale_type: ScaleType,
    /// Channels as stored.
    pub(super) padded: usize,
    pub(super) groups: usize,
    /// Channels of a group.
    channels: usize,
}

impl Shape {
    pub(super) fn new(layout: &CodeLayout) -> Shape {
        Shape {
            bits: layout.bits(),
            scale_type: layout.scale_type(),
            padded: layout.padded_dim(),
            groups: layout.groups(),
            channels: layout.head_dim() / layout.groups(),
        }
    }

    /// The channels of a group.
    #[inline(always)]
    pub(super) fn group(&self, group: usize) -> Range<usize> {
        group * self.channels..(group + 1) * self.channels
    }

    /// Bytes of one side's codes.
    fn side_bytes(&self) -> usize {
        PAGE_TOKENS * self.padded * self.bits as usize / 8
    }

    /// Numbers of both sides' scales and offsets, `[K, V][group][scale, offset][64 tokens]`.
    pub(super) fn numbers(&self) -> usize {
        2 * self.groups * 2 * PAGE_TOKENS
    }

    /// The bytes of scales and offsets of a page.
    pub(super) fn stored_numbers<'a>(&self, page: &'a [u8]) -> &'a [u8] {
        &page[2 * self.side_bytes()..]
    }
}

/// One side of a page as words `[blocks][width]`.
#[derive(Clone, Copy)]
pub(super) struct Words<'a> {
    pub(super) bytes: &'a [u8],
    pub(super) width: usize,
}

impl<'a> Words<'a> {
    /// Keys are words of channels with tokens side by side, values words of tokens with channels side by side.
    #[inline(always)]
    pub(super) fn of(shape: &Shape, side: Side, page: &'a [u8]) -> Words<'a> {
        let (keys, rest) = page.split_at(shape.side_bytes());
        match side {
            Side::Key => Words { bytes: keys, width: PAGE_TOKENS },
            Side::Value => Words { bytes: &rest[..shape.side_bytes()], width: shape.padded },
        }
    }
}

/// The left side of a product: `[rows][high, low][stride]` bytes, with room for [`Engine::ROWS`] rows.
pub(super) struct Left<'a> {
    pub(super) bytes: &'a [i8],
    /// A multiple of 64.
    pub(super) stride: usize,
    pub(super) rows: usize,
}

/// What becomes weights: some rows and a page.
pub(super) struct Sums<'a> {
    pub(super) shape: &'a Shape,
    /// `[group][ROWS][high, low][64 tokens]`.
    pub(super) sums: &'a [i32],
    /// Unit of each row's query.
    pub(super) steps: &'a [f32],
    /// `[group]`, `totals_stride` apart: sum of the channels of each row's query.
    pub(super) totals: &'a [f32],
    pub(super) totals_stride: usize,
    /// Scales and offsets, as [`Shape::stored_numbers`].
    pub(super) stored: &'a [u8],
    pub(super) spans: &'a [Span],
    /// Position of the page's first token.
    pub(super) start: usize,
    /// The tokens of the page each row sees, one bit each.
    #[cfg(target_arch = "x86_64")]
    pub(super) seen: &'a [u64],
}

/// Weights times scales, split in bytes: `[group][ROWS][high, low][64 tokens]`.
pub(super) struct Weights<'a> {
    pub(super) bytes: &'a mut [i8],
    /// `[group][ROWS][unit, Σ p·o]`, or as an engine agrees with itself.
    pub(super) numbers: &'a mut [f32],
}

/// The softmax state of some rows.
pub(super) struct Running<'a> {
    pub(super) max: &'a mut [f32],
    pub(super) sum: &'a mut [f32],
    /// `[rows][d]`.
    pub(super) values: &'a mut [f32],
    pub(super) d: usize,
    /// `[rows][1 + groups][LANES]`: what an engine adds to the sum, and takes from the values of each group, only when
    /// all pages have been read. Zero before the first.
    #[cfg(target_arch = "x86_64")]
    pub(super) lanes: &'a mut [f32],
}

/// Integer products on one instruction set, and the steps around them. A value exists only where the instruction set
/// does.
pub(super) trait Engine {
    /// Most rows of one product.
    const ROWS: usize;

    /// Asks for memory that will be read later.
    fn fetch(&self, _ahead: &[u8]) {}

    /// `sums[row][part]` = bytes of a part of the row times codes, for the tokens or channels in `columns` (multiples
    /// of 16): `[rows][high, low][64 or padded channels]`, with room for [`Self::ROWS`] rows. Only the bytes in
    /// `inner` (channels of keys, tokens of values) are not zero.
    fn product(
        &mut self,
        shape: &Shape,
        side: Side,
        page: &[u8],
        left: &Left<'_>,
        inner: Range<usize>,
        columns: Range<usize>,
        sums: &mut [i32],
    );

    /// Splits a row into bytes (as many as a multiple of 64, zeros after the row) and returns what one unit stands for.
    fn split_row(&self, row: &[f32], high: &mut [i8], low: &mut [i8]) -> f32 {
        fixed_point::split_row(row, high, low)
    }

    /// The sum of a row.
    fn total(&self, row: &[f32]) -> f32 {
        fixed_point::total(row)
    }

    /// Logits, one softmax step, and the weights for the product with values.
    fn weigh(&mut self, sums: &Sums<'_>, running: &mut Running<'_>, weights: &mut Weights<'_>);

    /// Adds what is left in the lanes of some rows, after all pages.
    #[cfg(target_arch = "x86_64")]
    fn finish(&self, _shape: &Shape, _running: Running<'_>) {}

    /// Adds `unit·(256·high + low) - Σ p·o` to the values (`[rows][d]`) of some channels, from sums
    /// `[rows][high, low][width]` and the numbers of a group of weights.
    fn add_values(
        &self,
        sums: &[i32],
        numbers: &[f32],
        width: usize,
        channels: Range<usize>,
        rows: usize,
        d: usize,
        values: &mut [f32],
    );
}
