//! From a bf16 page to what the encoders read, and 8-bit pages, which keep its order.

use half::bf16;
use oscar_codec::fp8::f32_to_e4m3;
use oscar_codec::layout::fp8::scale_of_largest;
use oscar_codec::{Fp8Layout, PAGE_TOKENS, ScaleType, Side};

use crate::cpu::simd::{Kernel, Vector};

/// Rows that are laid out side by side, `[channel][BLOCK]`. A V word holds the codes of as many tokens.
pub(super) const BLOCK: usize = 16;

/// Whether all numbers of a bf16 page are finite.
pub(super) struct AllFinite<'a>(pub(super) &'a [u16]);

impl Kernel for AllFinite<'_> {
    type Output = bool;

    #[inline(always)]
    unsafe fn run<V: Vector>(self) -> bool {
        // As integers, because a `max` over floats would lose NaN.
        self.0.iter().fold(0, |largest: u16, bits| largest.max(bits & 0x7fff)) < bf16::INFINITY.to_bits()
    }
}

/// A page of rotated rows, `[d/2][64][2]` keys and `[32][d][2]` values, as blocks `[block][channel][16]`.
pub(super) struct Unpack<'a> {
    pub(super) dim: usize,
    pub(super) page: &'a [u16],
    pub(super) keys: &'a mut [f32],
    pub(super) values: &'a mut [f32],
    /// Scratch of the size of `values`.
    pub(super) rows: &'a mut [f32],
}

impl Kernel for Unpack<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Vector>(self) {
        let Unpack { dim, page, keys, values, rows } = self;
        let (page_keys, page_values) = page.split_at(PAGE_TOKENS * dim);
        // Keys of sixteen tokens lie together, two channels of each: a block is only taken apart.
        for (pair, tokens) in page_keys.chunks_exact(2 * PAGE_TOKENS).enumerate() {
            for (block, tokens) in tokens.chunks_exact(2 * BLOCK).enumerate() {
                let at = (block * dim + 2 * pair) * BLOCK;
                let (even, odd) = keys[at..at + 2 * BLOCK].split_at_mut(BLOCK);
                split_pairs(tokens, even, odd);
            }
        }
        // Values become rows and are transposed.
        for (pairs, rows) in page_values.chunks_exact(2 * dim).zip(rows.chunks_exact_mut(2 * dim)) {
            let (even, odd) = rows.split_at_mut(dim);
            split_pairs(pairs, even, odd);
        }
        // SAFETY: the caller promises the instructions.
        unsafe { rows_to_blocks::<V>(rows, dim, values) };
    }
}

/// Rows as blocks `[block][channel][16]`.
pub(super) struct Arrange<'a> {
    pub(super) dim: usize,
    pub(super) rows: &'a [f32],
    pub(super) blocks: &'a mut [f32],
}

impl Kernel for Arrange<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Vector>(self) {
        // SAFETY: the caller promises the instructions.
        unsafe { rows_to_blocks::<V>(self.rows, self.dim, self.blocks) };
    }
}

/// Lays `rows` out in blocks `[block][channel][16]`; rows that fill up the last block are zero.
///
/// # Safety
/// The CPU has the instructions of `V`.
#[inline(always)]
unsafe fn rows_to_blocks<V: Vector>(rows: &[f32], dim: usize, blocks: &mut [f32]) {
    let count = rows.len() / dim;
    assert_eq!(blocks.len(), count.div_ceil(BLOCK) * dim * BLOCK);
    // Whole squares go through registers, edges one by one.
    let (square_rows, square_channels) = (count / V::WIDTH * V::WIDTH, dim / V::WIDTH * V::WIDTH);
    for row in (0..square_rows).step_by(V::WIDTH) {
        let to = row / BLOCK * dim * BLOCK + row % BLOCK;
        for channel in (0..square_channels).step_by(V::WIDTH) {
            // SAFETY: `row + WIDTH <= count` and `channel + WIDTH <= dim`; a block has 16 lanes for each of `dim`
            // channels and `row % 16 + WIDTH <= 16`.
            unsafe {
                let from = rows.as_ptr().add(row * dim + channel);
                V::transpose(from, dim, blocks.as_mut_ptr().add(to + channel * BLOCK), BLOCK);
            }
        }
    }
    let at = |row: usize, channel: usize| (row / BLOCK * dim + channel) * BLOCK + row % BLOCK;
    for row in 0..count {
        let edge = if row < square_rows { square_channels } else { 0 };
        for channel in edge..dim {
            blocks[at(row, channel)] = rows[row * dim + channel];
        }
    }
    for row in count..count.next_multiple_of(BLOCK) {
        for channel in 0..dim {
            blocks[at(row, channel)] = 0.0;
        }
    }
}

#[inline(always)]
fn split_pairs(pairs: &[u16], even: &mut [f32], odd: &mut [f32]) {
    for ((pair, even), odd) in pairs.chunks_exact(2).zip(even).zip(odd) {
        *even = f32::from_bits(u32::from(pair[0]) << 16);
        *odd = f32::from_bits(u32::from(pair[1]) << 16);
    }
}

/// A bf16 page of finite numbers as a page of 8-bit floats.
pub(super) struct ToFp8<'a> {
    pub(super) layout: Fp8Layout,
    pub(super) page: &'a [u16],
    pub(super) out: &'a mut [u8],
}

impl Kernel for ToFp8<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Vector>(self) {
        let ToFp8 { layout, page, out } = self;
        let (dim, padded) = (layout.head_dim(), layout.padded_dim());
        assert!(page.len() == 2 * PAGE_TOKENS * dim && out.len() == layout.page_bytes());
        let (keys, values) = page.split_at(PAGE_TOKENS * dim);
        let (out_keys, rest) = out.split_at_mut(PAGE_TOKENS * padded);
        let (out_values, _) = rest.split_at_mut(PAGE_TOKENS * padded);

        // Magnitudes of bf16 numbers are ordered as their bits are.
        let mut largest = [0_u16; 2 * PAGE_TOKENS];
        for tokens in keys.chunks_exact(2 * PAGE_TOKENS) {
            for (largest, bits) in largest.iter_mut().zip(tokens) {
                *largest = (*largest).max(bits & 0x7fff);
            }
        }
        let mut key_scales = [0; PAGE_TOKENS];
        let mut divisors = [0.0; 2 * PAGE_TOKENS];
        for (token, bits) in key_scales.iter_mut().enumerate() {
            *bits = scale_bits(largest[2 * token].max(largest[2 * token + 1]));
            divisors[2 * token..2 * token + 2].fill(ScaleType::F16.to_f32(*bits));
        }
        let (real, padding) = out_keys.split_at_mut(PAGE_TOKENS * dim);
        for (tokens, out) in keys.chunks_exact(2 * PAGE_TOKENS).zip(real.chunks_exact_mut(2 * PAGE_TOKENS)) {
            to_bytes(tokens, &divisors, out);
        }
        padding.fill(0);

        let mut value_scales = [0; PAGE_TOKENS];
        for (pair, (source, out)) in
            values.chunks_exact(2 * dim).zip(out_values.chunks_exact_mut(2 * padded)).enumerate()
        {
            let mut largest = [0_u16; 32];
            for part in source.chunks(32) {
                for (largest, bits) in largest.iter_mut().zip(part) {
                    *largest = (*largest).max(bits & 0x7fff);
                }
            }
            let mut divisors = [0.0; 32];
            for token in 0..2 {
                let bits = scale_bits(largest.iter().skip(token).step_by(2).fold(0, |a, &b| a.max(b)));
                value_scales[2 * pair + token] = bits;
                divisors.iter_mut().skip(token).step_by(2).for_each(|x| *x = ScaleType::F16.to_f32(bits));
            }
            let (real, padding) = out.split_at_mut(2 * dim);
            for (part, out) in source.chunks(32).zip(real.chunks_mut(32)) {
                to_bytes(part, &divisors, out);
            }
            padding.fill(0);
        }

        for (side, scales) in [(Side::Key, key_scales), (Side::Value, value_scales)] {
            let start = layout.scale_position(side, 0);
            for (bits, out) in scales.iter().zip(out[start..].chunks_exact_mut(2)) {
                out.copy_from_slice(&bits.to_le_bytes());
            }
        }
    }
}

#[inline(always)]
fn scale_bits(largest: u16) -> u16 {
    scale_of_largest(bf16::from_bits(largest).to_f32())
}

#[inline(always)]
fn to_bytes(source: &[u16], divisors: &[f32], out: &mut [u8]) {
    for ((bits, divisor), out) in source.iter().zip(divisors).zip(out) {
        *out = f32_to_e4m3(f32::from_bits(u32::from(*bits) << 16) / divisor);
    }
}
