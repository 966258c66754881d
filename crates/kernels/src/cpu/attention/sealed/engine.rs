//! What an instruction set provides for pages of codes, and what it is given.

use std::ops::Range;

use oscar_codec::{BandLayout, CodeLayout, PAGE_TOKENS, ScaleType};

use crate::cpu::attention::work::Span;
use crate::cpu::simd::Simd;

/// Lanes in which an engine may keep a sum over tokens.
#[cfg(target_arch = "x86_64")]
pub(super) const LANES: usize = 16;

/// The shape of pages of codes: where the parts of a page lie, and which channels share a scale.
#[derive(Clone, Copy)]
pub(super) struct Shape {
    /// Bits of a value's code, and of a key's if there are no bands.
    pub(super) bits: u32,
    /// How scales and offsets of 16 bits are stored.
    pub(super) scale_type: ScaleType,
    /// Channels of a value as stored: those of the head, padded.
    pub(super) padded: usize,
    /// Number of groups that the channels of a value are in.
    pub(super) groups: usize,
    /// Number of channels in a group of a value.
    channels: usize,
    /// The bands of keys, in a format whose keys are in bands.
    bands: Option<BandLayout>,
}

impl Shape {
    pub(super) fn new(layout: &CodeLayout) -> Shape {
        Shape {
            bits: layout.bits(),
            scale_type: layout.scale_type(),
            padded: layout.padded_dim(),
            groups: layout.groups(),
            channels: layout.head_dim() / layout.groups(),
            bands: None,
        }
    }

    pub(super) fn banded(layout: &BandLayout) -> Shape {
        Shape {
            bits: layout.value_bits(),
            scale_type: layout.value_scale_type(),
            padded: layout.padded_dim(),
            groups: 1,
            channels: layout.head_dim(),
            bands: Some(*layout),
        }
    }

    /// The bands of keys, in a format whose keys are in bands.
    pub(super) fn bands(&self) -> Option<&BandLayout> {
        self.bands.as_ref()
    }

    /// Whether the keys of these pages are in bands.
    pub(super) fn has_bands(&self) -> bool {
        self.bands.is_some()
    }

    /// The channels of a group of a value.
    #[inline(always)]
    pub(super) fn group(&self, group: usize) -> Range<usize> {
        group * self.channels..(group + 1) * self.channels
    }

    /// Number of groups that the channels of a key are in: its bands, if it has any.
    #[inline(always)]
    pub(super) fn key_groups(&self) -> usize {
        self.bands.as_ref().map_or(self.groups, |layout| layout.bands().len())
    }

    /// Number of bytes that the codes of keys have in a page.
    fn key_bytes(&self) -> usize {
        self.bands.as_ref().map_or(self.value_bytes(), BandLayout::value_codes)
    }

    /// Number of bytes that the codes of values have in a page.
    fn value_bytes(&self) -> usize {
        PAGE_TOKENS * self.padded * self.bits as usize / 8
    }

    /// The words of all keys, in a format whose keys are not in bands.
    #[inline(always)]
    pub(super) fn key_words<'a>(&self, page: &'a [u8]) -> Words<'a> {
        Words { bytes: &page[..self.key_bytes()], width: PAGE_TOKENS }
    }

    /// The words of all values.
    #[inline(always)]
    pub(super) fn value_words<'a>(&self, page: &'a [u8]) -> Words<'a> {
        Words { bytes: &page[self.key_bytes()..][..self.value_bytes()], width: self.padded }
    }

    /// The stored scales of the keys of a page: `[group][scale, offset][64 tokens]` in 16 bits; none of bands, whose logits
    /// are scaled already.
    pub(super) fn key_scales<'a>(&self, page: &'a [u8]) -> &'a [u8] {
        let bytes = if self.has_bands() { 0 } else { 4 * self.groups * PAGE_TOKENS };
        &page[self.key_bytes() + self.value_bytes()..][..bytes]
    }

    /// The stored scales of the values of a page, `[group][scale, offset][64 tokens]` in 16 bits: what it ends with.
    pub(super) fn value_scales<'a>(&self, page: &'a [u8]) -> &'a [u8] {
        &page[page.len() - 4 * self.groups * PAGE_TOKENS..]
    }

    /// How many scales and offsets of 16 bits keys and values have in a page.
    pub(super) fn scale_counts(&self) -> [usize; 2] {
        let groups = 2 * PAGE_TOKENS * self.groups;
        [if self.has_bands() { 0 } else { groups }, groups]
    }
}

/// Codes as words `[blocks][width]`: keys are words of channels with tokens side by side, values words of tokens with
/// channels side by side.
#[derive(Clone, Copy)]
pub(super) struct Words<'a> {
    pub(super) bytes: &'a [u8],
    pub(super) width: usize,
}

/// The left side of a product: `[rows][high, low][stride]` bytes, with room for [`Engine::ROWS`] rows.
pub(super) struct Left<'a> {
    pub(super) bytes: &'a [i8],
    /// Distance in bytes from one row to the next, a multiple of 64.
    pub(super) stride: usize,
    pub(super) rows: usize,
}

/// The integer sums of the keys of a page for some rows, and what makes logits of them.
pub(super) struct KeySums<'a> {
    pub(super) shape: &'a Shape,
    /// `[group][ROWS][high, low][64 tokens]`; of keys in bands their logits, as the bits of numbers `[rows][64 tokens]`.
    pub(super) sums: &'a [i32],
    /// `[group]`, `stride` apart: what a unit of each row's query stands for.
    pub(super) units: &'a [f32],
    /// The sum of the channels of each row's query, in the same order.
    pub(super) totals: &'a [f32],
    pub(super) stride: usize,
    /// The stored scales of the keys, as [`Shape::key_scales`] gives them.
    pub(super) key_scales: &'a [u8],
    /// The stored scales of the values, as [`Shape::value_scales`] gives them.
    pub(super) value_scales: &'a [u8],
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
    /// What a unit of each row stands for and the sum of its offsets, `[group][ROWS][unit, Σ p·o]`; an engine that
    /// reads them itself may use another order.
    pub(super) units: &'a mut [f32],
}

/// The integer sums of the values of some rows over a page, for a group of channels.
pub(super) struct ValueSums<'a> {
    /// The sums, `[rows][high, low][width]`.
    pub(super) sums: &'a [i32],
    /// The units of the group's weights, as [`Weights::units`].
    pub(super) units: &'a [f32],
    pub(super) width: usize,
    /// The channels of the group in a row of values.
    pub(super) channels: Range<usize>,
    pub(super) rows: usize,
    /// Number of channels in a row of values.
    pub(super) d: usize,
}

/// The softmax state of some rows.
pub(super) struct RowStates<'a> {
    pub(super) max: &'a mut [f32],
    pub(super) sum: &'a mut [f32],
    /// The weighted sums of values, `[rows][d]`.
    pub(super) values: &'a mut [f32],
    pub(super) d: usize,
    /// `[rows][1 + groups][LANES]`: what an engine adds to the sum, and takes from the values of each group, only when
    /// all pages have been read. Zero before the first.
    #[cfg(target_arch = "x86_64")]
    pub(super) lanes: &'a mut [f32],
}

/// What happens around the integer products on one instruction set. A value exists only where the instruction set does.
pub(super) trait Engine {
    /// The largest number of rows of one product.
    const ROWS: usize;

    /// The instruction set that the products and the rest are compiled for.
    fn simd(&self) -> Simd;

    /// Splits a row into bytes (as many as a multiple of 64, zeros after the row) and returns what one unit stands for.
    fn split_row(&self, row: &[f32], high: &mut [i8], low: &mut [i8]) -> f32;

    /// The sum of the channels of a row.
    fn total(&self, row: &[f32]) -> f32;

    /// Makes logits of the sums, takes one step of the running softmax, and leaves the weights for the product with
    /// values.
    fn softmax(&mut self, sums: &KeySums<'_>, state: &mut RowStates<'_>, weights: &mut Weights<'_>);

    /// Adds what is left in the lanes of some rows, after all pages.
    #[cfg(target_arch = "x86_64")]
    fn finish(&self, _shape: &Shape, _state: RowStates<'_>) {}

    /// Adds `unit·(256·high + low) - Σ p·o` to the values (`[rows][d]`) of some channels.
    fn accumulate_values(&self, sums: ValueSums<'_>, values: &mut [f32]);
}
