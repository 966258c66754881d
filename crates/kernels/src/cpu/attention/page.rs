//! How tokens are written to bf16 pages and read back.
//!
//! The order is that of [`Bf16Layout`]: both halves of a page are the right operand of a matrix product with its summed
//! index in pairs.
//! That is the tile order of AMX, so pages are multiplied where they lie; and a vector register of pairs splits into
//! even and odd elements with a shift and a mask, with tokens (or channels) side by side in the lanes, so no path
//! ever sums across lanes.

use half::bf16;
use oscar_codec::{Bf16Layout, PAGE_TOKENS, Side};

use crate::cpu::aligned::AlignedScratch;

/// Elements of a page of head dimension `d`.
pub fn page_elements(d: usize) -> usize {
    Bf16Layout::new(d).elements()
}

/// The keys and the values of a page.
pub(super) fn split(page: &[u16], d: usize) -> (&[u16], &[u16]) {
    page.split_at(PAGE_TOKENS * d)
}

/// Writes the key and value of one token, rounded to nearest even; NaN stays NaN.
///
/// `d` is the head dimension, a multiple of 2, and `token_in_page` the position modulo 64.
pub fn write_token(page: &mut [u16], d: usize, token_in_page: usize, key: &[f32], value: &[f32]) {
    assert!(d.is_multiple_of(2) && page.len() == page_elements(d) && token_in_page < PAGE_TOKENS);
    assert!(
        key.len() == d && value.len() == d,
        "a key of {} and a value of {} channels",
        key.len(),
        value.len()
    );
    let (keys, values) = page.split_at_mut(PAGE_TOKENS * d);
    write_side(keys, Side::Key, token_in_page, key);
    write_side(values, Side::Value, token_in_page, value);
}

/// Writes the key or the value of one token to the keys or the values of a page, which are one half of it each.
pub fn write_side(half: &mut [u16], side: Side, token_in_page: usize, row: &[f32]) {
    let d = row.len();
    assert!(half.len() == PAGE_TOKENS * d && token_in_page < PAGE_TOKENS);
    match side {
        // Token by token a page is written in pairs that lie a row of all tokens apart.
        Side::Key => {
            for (line, pair) in half.chunks_exact_mut(2 * PAGE_TOKENS).zip(row.as_chunks::<2>().0) {
                line[2 * token_in_page..][..2].copy_from_slice(&pair.map(round_to_bf16));
            }
        }
        Side::Value => {
            let line = &mut half[token_in_page / 2 * 2 * d..][..2 * d];
            for (pair, &value) in line.as_chunks_mut::<2>().0.iter_mut().zip(row) {
                pair[token_in_page % 2] = round_to_bf16(value);
            }
        }
    }
}

/// Bits of the nearest bf16, ties to even; NaN stays NaN. As `bf16::from_f32`, without a branch.
fn round_to_bf16(x: f32) -> u16 {
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
    (if x.is_nan() { bits >> 16 | 0x40 } else { rounded }) as u16
}

/// Prefetches the memory of what [`write_side`] writes: in a page that is not in a cache, each pair of channels of a key is on
/// a line of its own.
#[cfg_attr(not(target_arch = "x86_64"), allow(unused_variables))]
pub fn prefetch_side(half: &[u16], side: Side, token_in_page: usize) {
    let d = half.len() / PAGE_TOKENS;
    assert!(half.len() == PAGE_TOKENS * d && token_in_page < PAGE_TOKENS);
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_ET0, _mm_prefetch};
        let step = if side == Side::Key { 2 } else { 16 };
        for channel in (0..d).step_by(step) {
            let before = if side == Side::Key { 0 } else { PAGE_TOKENS * d };
            let index = Bf16Layout::new(d).index(side, token_in_page, channel) - before;
            // SAFETY: a prefetch does not access memory in the sense of the language, whatever the address.
            unsafe { _mm_prefetch::<_MM_HINT_ET0>(half.as_ptr().wrapping_add(index).cast()) };
        }
    }
}

/// Reads the key and value of one token back.
pub fn read_token(page: &[u16], d: usize, token_in_page: usize, key: &mut [f32], value: &mut [f32]) {
    assert!(d.is_multiple_of(2) && page.len() == page_elements(d) && token_in_page < PAGE_TOKENS);
    assert!(
        key.len() == d && value.len() == d,
        "a key of {} and a value of {} channels",
        key.len(),
        value.len()
    );
    let layout = Bf16Layout::new(d);
    for (side, row) in [(Side::Key, key), (Side::Value, value)] {
        for (channel, x) in row.iter_mut().enumerate() {
            *x = bf16::from_bits(page[layout.index(side, token_in_page, channel)]).to_f32();
        }
    }
}

/// The values of a page with zeros for tokens from `visible` on.
///
/// What was never written may be NaN, and a weight of zero does not hide that.
pub(super) fn written_values<'a>(
    values: &'a [u16],
    d: usize,
    visible: usize,
    scratch: &'a mut AlignedScratch,
) -> &'a [u16] {
    if visible == PAGE_TOKENS {
        return values;
    }
    let copy = scratch.at_least::<u16>(PAGE_TOKENS * d);
    let pairs = visible.div_ceil(2) * 2 * d;
    copy[..pairs].copy_from_slice(&values[..pairs]);
    if !visible.is_multiple_of(2) {
        copy[pairs - 2 * d..pairs].iter_mut().skip(1).step_by(2).for_each(|value| *value = 0);
    }
    copy[pairs..].fill(0);
    copy
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_come_back_rounded_and_nothing_else_moves() {
        for d in [2, 32, 48, 128] {
            let mut page = vec![0u16; page_elements(d)];
            let key =
                |token: usize| -> Vec<f32> { (0..d).map(|c| (token * d + c) as f32 * 0.37 - 9.0).collect() };
            let value =
                |token: usize| -> Vec<f32> { (0..d).map(|c| (token * 7 + c * 3) as f32 * -0.11).collect() };
            for token in 0..PAGE_TOKENS {
                write_token(&mut page, d, token, &key(token), &value(token));
            }
            for token in 0..PAGE_TOKENS {
                let (mut got_key, mut got_value) = (vec![0.0; d], vec![0.0; d]);
                read_token(&page, d, token, &mut got_key, &mut got_value);
                let rounded =
                    |x: Vec<f32>| -> Vec<f32> { x.iter().map(|&x| bf16::from_f32(x).to_f32()).collect() };
                assert_eq!(got_key, rounded(key(token)), "d={d} token {token}");
                assert_eq!(got_value, rounded(value(token)), "d={d} token {token}");
            }
        }
    }

    #[test]
    fn rounding_is_that_of_the_library() {
        for high in 0..=u16::MAX {
            for low in [0, 1, 0x7fff, 0x8000, 0x8001, 0xffff] {
                let x = f32::from_bits(u32::from(high) << 16 | low);
                assert_eq!(round_to_bf16(x), bf16::from_f32(x).to_bits(), "{:x}", x.to_bits());
            }
        }
    }

    #[test]
    fn rounding_is_to_even_and_keeps_what_is_not_finite() {
        let mut page = vec![0u16; page_elements(2)];
        // Halfway between 1.0 and the next bf16, halfway above an odd one, and values without a neighbour.
        let key = [f32::from_bits(0x3f80_8000), f32::from_bits(0x3f81_8000)];
        let value = [f32::NAN, f32::NEG_INFINITY];
        write_token(&mut page, 2, 63, &key, &value);
        let (mut got_key, mut got_value) = ([0.0; 2], [0.0; 2]);
        read_token(&page, 2, 63, &mut got_key, &mut got_value);
        assert_eq!(got_key.map(f32::to_bits), [0x3f80_0000, 0x3f82_0000]);
        assert!(got_value[0].is_nan() && got_value[1] == f32::NEG_INFINITY);
    }
}
