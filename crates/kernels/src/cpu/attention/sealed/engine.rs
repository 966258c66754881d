//! What an instruction set provides for 2-bit and 4-bit pages, and what it is given.

use std::ops::Range;

use oscar_codec::CodeLayout;
use oscar_codec::{PAGE_TOKENS, ScaleType, Side};

use crate::cpu::attention::work::Span;
use crate::cpu::simd::Simd;

/// Lanes in which an engine may keep a sum over tokens.
#[cfg(target_arch = "x86_64")]
pub(super) const LANES: usize = 16;

/// The shape of 2-bit or 4-bit pages.
#[derive(Clone, Copy)]
pub(super) struct Shape {
    /// Bits of a code.
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

    /// How many scales and offsets a page has, `[K, V][group][scale, offset][64 tokens]`.
    pub(super) fn scale_count(&self) -> usize {
        2 * self.groups * 2 * PAGE_TOKENS
    }

    /// The bytes of scales and offsets of a page.
    pub(super) fn stored_scales<'a>(&self, page: &'a [u8]) -> &'a [u8] {
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

/// The integer sums of the keys of a page for some rows, and what makes logits of them.
pub(super) struct KeySums<'a> {
    pub(super) shape: &'a Shape,
    /// `[group][ROWS][high, low][64 tokens]`.
    pub(super) sums: &'a [i32],
    /// What a unit of each row's query stands for.
    pub(super) units: &'a [f32],
    /// `[group]`, `totals_stride` apart: sum of the channels of each row's query.
    pub(super) totals: &'a [f32],
    pub(super) totals_stride: usize,
    /// Scales and offsets, as [`Shape::stored_scales`].
    pub(super) stored_scales: &'a [u8],
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
    pub(super) units: &'a mut [f32],
}

/// The integer sums of the values of some rows over a page, for a group of channels.
pub(super) struct ValueSums<'a> {
    /// `[rows][high, low][width]`.
    pub(super) sums: &'a [i32],
    /// The units of the group's weights, as [`Weights::units`].
    pub(super) units: &'a [f32],
    pub(super) width: usize,
    /// The channels of the group.
    pub(super) channels: Range<usize>,
    pub(super) rows: usize,
    /// Channels of a row of values.
    pub(super) d: usize,
}

/// The softmax state of some rows.
pub(super) struct RowStates<'a> {
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

/// What happens around the integer products on one instruction set. A value exists only where the instruction set does.
pub(super) trait Engine {
    /// Most rows of one product.
    const ROWS: usize;

    /// The instruction set.
    fn simd(&self) -> Simd;

    /// Splits a row into bytes (as many as a multiple of 64, zeros after the row) and returns what one unit stands for.
    fn split_row(&self, row: &[f32], high: &mut [i8], low: &mut [i8]) -> f32;

    /// The sum of a row.
    fn total(&self, row: &[f32]) -> f32;

    /// Logits, one softmax step, and the weights for the product with values.
    fn softmax(&mut self, sums: &KeySums<'_>, state: &mut RowStates<'_>, weights: &mut Weights<'_>);

    /// Adds what is left in the lanes of some rows, after all pages.
    #[cfg(target_arch = "x86_64")]
    fn finish(&self, _shape: &Shape, _state: RowStates<'_>) {}

    /// Adds `unit·(256·high + low) - Σ p·o` to the values (`[rows][d]`) of some channels.
    fn accumulate_values(&self, sums: ValueSums<'_>, values: &mut [f32]);
}
