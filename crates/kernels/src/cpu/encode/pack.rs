//! Blocks of codes into pages, in the order that [`CodeLayout`] and [`BandLayout`] define.
//!
//! Sixteen tokens of a page are one lane block. A K word belongs to one token and sixteen channels (4 bits: eight), a
//! V word to one channel and the sixteen tokens of a block (4 bits: half of them); both are built from whole registers
//! of bytes by shifts, without ever moving a single code.

use oscar_codec::{BandLayout, CodeLayout, PAGE_TOKENS, Side};

use super::quantise::BlockCodes;
use super::unpack::BLOCK;

/// Where codes of one width, and their scales and offsets of 16 bits, lie in a page.
#[derive(Clone, Copy)]
pub(super) struct Placement {
    side: Side,
    bits: u32,
    /// The number of channels as stored, those of the head and padding.
    pub(super) channels: usize,
    /// First byte of the codes.
    codes: usize,
    /// First byte of the scales.
    scales: usize,
}

impl Placement {
    /// One side of a page of codes.
    pub(super) fn of(layout: &CodeLayout, side: Side) -> Placement {
        Placement {
            side,
            bits: layout.bits(),
            channels: layout.padded_dim(),
            codes: layout.code_position(side, 0, 0).0,
            scales: layout.scale_position(side, 0, 0),
        }
    }

    /// The values of a page whose keys are in bands.
    pub(super) fn of_banded_values(layout: &BandLayout) -> Placement {
        Placement {
            side: Side::Value,
            bits: layout.value_bits(),
            channels: layout.padded_dim(),
            codes: layout.value_codes(),
            scales: layout.value_scales(),
        }
    }
}

/// Writes the first `tokens` rows of a block to tokens `first..first + tokens` of `page`; `first` is a multiple of 16.
/// Other tokens stay as they are.
#[inline(always)]
pub(super) fn write_block(
    place: &Placement,
    page: &mut [u8],
    first: usize,
    tokens: usize,
    block: &BlockCodes,
) {
    assert!(first.is_multiple_of(BLOCK) && tokens <= BLOCK && first + tokens <= PAGE_TOKENS);
    assert!(block.codes.len() == place.channels);
    let words = &mut page[place.codes..];
    match (place.side, place.bits) {
        (Side::Key, 2) => write_keys::<2>(words, first, tokens, &block.codes),
        (Side::Key, _) => write_keys::<4>(words, first, tokens, &block.codes),
        (Side::Value, 2) => write_values::<2>(words, first, tokens, &block.codes),
        (Side::Value, _) => write_values::<4>(words, first, tokens, &block.codes),
    }
    for (group, pair) in block.scales.iter().enumerate() {
        for (part, values) in pair.iter().enumerate() {
            let start = place.scales + 2 * ((2 * group + part) * PAGE_TOKENS + first);
            let target = &mut page[start..][..2 * tokens];
            for (value, target) in values.iter().zip(target.chunks_exact_mut(2)) {
                target.copy_from_slice(&value.to_le_bytes());
            }
        }
    }
}

/// Codes of `BITS` bits of some keys into words `[word of a token][64 tokens]`.
#[inline(always)]
pub(super) fn write_keys<const BITS: usize>(
    words: &mut [u8],
    first: usize,
    tokens: usize,
    codes: &[[u8; BLOCK]],
) {
    for (index, codes) in codes.chunks_exact(32 / BITS).enumerate() {
        let target = &mut words[4 * (index * PAGE_TOKENS + first)..][..4 * tokens];
        for (word, target) in key_words::<BITS>(codes).iter().zip(target.chunks_exact_mut(4)) {
            target.copy_from_slice(&word.to_le_bytes());
        }
    }
}

/// Codes of `BITS` bits of some values into words `[block of tokens][channels]`.
#[inline(always)]
fn write_values<const BITS: usize>(words: &mut [u8], first: usize, tokens: usize, codes: &[[u8; BLOCK]]) {
    let per_word = 32 / BITS;
    for part in 0..BLOCK / per_word {
        let start = 4 * (first / per_word + part) * codes.len();
        let targets = words[start..][..4 * codes.len()].chunks_exact_mut(4);
        let word = |codes: &[u8; BLOCK]| (value_words::<BITS>(codes) >> (32 * part)) as u32;
        if tokens == BLOCK {
            for (codes, target) in codes.iter().zip(targets) {
                target.copy_from_slice(&word(codes).to_le_bytes());
            }
        } else {
            let largest = ((1_u32 << BITS) - 1) as u8;
            let mask = word(&std::array::from_fn(|lane| if lane < tokens { largest } else { 0 }));
            for (codes, target) in codes.iter().zip(targets) {
                let old = u32::from_le_bytes([target[0], target[1], target[2], target[3]]);
                target.copy_from_slice(&(old & !mask | word(codes) & mask).to_le_bytes());
            }
        }
    }
}

/// The words of sixteen tokens from the codes of `32 / BITS` channels: channel `4p + b` is byte `b`, bits `BITS·p..`.
#[inline(always)]
fn key_words<const BITS: usize>(codes: &[[u8; BLOCK]]) -> [u32; BLOCK] {
    let mut words = [0; BLOCK];
    for b in 0..4 {
        // Sixteen bytes at once: a code fits its bits, so no shift reaches the next byte.
        let mut byte = 0_u128;
        for p in 0..8 / BITS {
            byte |= u128::from_le_bytes(codes[4 * p + b]) << (BITS * p);
        }
        for (word, byte) in words.iter_mut().zip(byte.to_le_bytes()) {
            *word |= u32::from(byte) << (8 * b);
        }
    }
    words
}

/// The words of one channel from the codes of sixteen tokens, the first in the lowest bits: token `4p + b` of a word is
/// byte `b`, bits `BITS·p..`.
#[inline(always)]
fn value_words<const BITS: usize>(codes: &[u8; BLOCK]) -> u64 {
    let codes = u128::from_le_bytes(*codes);
    if BITS == 2 {
        // Four dwords of four tokens each, the later ones two bits further up.
        u64::from((codes | codes >> 30 | codes >> 60 | codes >> 90) as u32)
    } else {
        // Two dwords make a word, the second four bits further up.
        let word = |codes: u64| (codes | codes >> 28) as u32;
        u64::from(word(codes as u64)) | u64::from(word((codes >> 64) as u64)) << 32
    }
}
