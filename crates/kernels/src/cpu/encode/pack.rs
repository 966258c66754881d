//! Blocks of codes into pages, in the order that [`CodeLayout`] defines.
//!
//! Sixteen tokens of a page are one lane block. A K word belongs to one token and sixteen channels (4 bits: eight), a
//! V word to one channel and the sixteen tokens of a block (4 bits: half of them); both are built from whole registers
//! of bytes by shifts, without ever moving a single code.

use oscar_codec::{CodeLayout, PAGE_TOKENS, Side};

use super::quantise::BlockCodes;
use super::unpack::BLOCK;

/// Writes the first `tokens` rows of a block to tokens `first..first + tokens` of `page`; `first` is a multiple of 16.
/// Other tokens stay as they are.
#[inline(always)]
pub(super) fn write_block(
    layout: &CodeLayout,
    side: Side,
    page: &mut [u8],
    first: usize,
    tokens: usize,
    block: &BlockCodes,
) {
    assert!(first.is_multiple_of(BLOCK) && tokens <= BLOCK && first + tokens <= PAGE_TOKENS);
    assert!(block.codes.len() == layout.padded_dim() && block.scales.len() == layout.groups());
    match layout.bits() {
        2 => write_codes::<2>(layout, side, page, first, tokens, &block.codes),
        _ => write_codes::<4>(layout, side, page, first, tokens, &block.codes),
    }
    for (group, pair) in block.scales.iter().enumerate() {
        let start = layout.scale_position(side, first, group);
        for (part, values) in pair.iter().enumerate() {
            let target = &mut page[start + part * 2 * PAGE_TOKENS..][..2 * tokens];
            for (value, target) in values.iter().zip(target.chunks_exact_mut(2)) {
                target.copy_from_slice(&value.to_le_bytes());
            }
        }
    }
}

/// The codes of [`write_block`], of `BITS` bits.
#[inline(always)]
fn write_codes<const BITS: usize>(
    layout: &CodeLayout,
    side: Side,
    page: &mut [u8],
    first: usize,
    tokens: usize,
    codes: &[[u8; BLOCK]],
) {
    let per_word = 32 / BITS;
    match side {
        Side::Key => {
            for (index, codes) in codes.chunks_exact(per_word).enumerate() {
                let start = layout.code_position(side, first, per_word * index).0;
                let words = key_words::<BITS>(codes);
                for (word, target) in words.iter().zip(page[start..][..4 * tokens].chunks_exact_mut(4)) {
                    target.copy_from_slice(&word.to_le_bytes());
                }
            }
        }
        Side::Value => {
            for part in 0..BLOCK / per_word {
                let start = layout.code_position(side, first + part * per_word, 0).0;
                let targets = page[start..][..4 * codes.len()].chunks_exact_mut(4);
                let word = |codes: &[u8; BLOCK]| (value_words::<BITS>(codes) >> (32 * part)) as u32;
                if tokens == BLOCK {
                    for (codes, target) in codes.iter().zip(targets) {
                        target.copy_from_slice(&word(codes).to_le_bytes());
                    }
                } else {
                    let largest = layout.largest_code();
                    let mask = word(&std::array::from_fn(|lane| if lane < tokens { largest } else { 0 }));
                    for (codes, target) in codes.iter().zip(targets) {
                        let old = u32::from_le_bytes([target[0], target[1], target[2], target[3]]);
                        target.copy_from_slice(&(old & !mask | word(codes) & mask).to_le_bytes());
                    }
                }
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
