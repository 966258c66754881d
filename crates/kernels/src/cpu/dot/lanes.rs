//! Dot products on vectors of 32 signed bytes, for AVX2 and NEON.
//!
//! A group of 32 weights becomes 32 signed codes in stored order, whatever the format. Four weight rows and up to four
//! activation rows go together.

use super::stripes::{PREFETCH_AHEAD, STRIPES, Stripes};
use super::{MAX_ROWS, Product};
use crate::cpu::activation::QuantisedRow;
use crate::cpu::simd::{Bytes, prefetch};
use crate::dtype::DType;
use crate::quant::block::six_bit_scales;
use crate::quant::mxfp4::{TWICE, half_power};

/// Scales and offsets of one block, as in [`crate::quant::block::Unpacked`] but offsets by 32.
struct Scales {
    scales: [f32; 16],
    offsets: [f32; 8],
}

/// A block format on vectors `B`.
///
/// # Safety of the methods
/// The CPU has the instructions of `B`; a block is readable at `block`.
#[allow(clippy::missing_safety_doc)]
trait Format<B: Bytes> {
    const DTYPE: DType;
    const HAS_OFFSET: bool = false;
    /// Whether scales differ within a group of 32.
    const SCALES_BY_16: bool = false;
    /// Signed codes of group `group` of 32.
    unsafe fn codes(block: *const u8, group: usize) -> B;
    unsafe fn scales(block: *const u8, into: &mut Scales);
}

/// All products of `product`.
///
/// # Safety
/// The CPU has the instructions of `B`; lengths are checked.
#[inline(always)]
pub(super) unsafe fn quantised_rows<B: Bytes>(dtype: DType, product: Product<'_>) {
    // SAFETY: passed on.
    unsafe {
        match dtype {
            DType::Q4_0 => passes::<B, Small<18, 2, 0, 8>>(product),
            DType::Q4_1 => passes::<B, Small<20, 4, 0, 0>>(product),
            DType::Q5_0 => passes::<B, Small<22, 6, 2, 16>>(product),
            DType::Q5_1 => passes::<B, Small<24, 8, 4, 0>>(product),
            DType::Q8_0 => passes::<B, Q8_0>(product),
            DType::Q4K => passes::<B, Q4K>(product),
            DType::Q5K => passes::<B, Q5K>(product),
            DType::Q6K => passes::<B, Q6K>(product),
            DType::Mxfp4 => passes::<B, Mxfp4>(product),
            DType::F32 | DType::F16 | DType::BF16 | DType::F8E4M3 => {
                unreachable!("float weights have no codes")
            }
        }
    }
}

/// # Safety
/// The caller keeps the promises of [`quantised_rows`].
#[inline(always)]
unsafe fn passes<B: Bytes, F: Format<B>>(product: Product<'_>) {
    let Product { mut stripes, x } = product;
    for first in (0..x.rows()).step_by(MAX_ROWS) {
        let (stripes, row) = (&mut stripes, |m: usize| x.row(first + m));
        // SAFETY: passed on.
        unsafe {
            match x.rows() - first {
                1 => pass::<B, F, 1>(stripes, [row(0)], first),
                2 => pass::<B, F, 2>(stripes, [row(0), row(1)], first),
                3 => pass::<B, F, 3>(stripes, [row(0), row(1), row(2)], first),
                _ => pass::<B, F, 4>(stripes, [row(0), row(1), row(2), row(3)], first),
            }
        }
    }
}

/// # Safety
/// The caller keeps the promises of [`quantised_rows`], and `x` has `M` rows from `first`.
#[inline(always)]
unsafe fn pass<B: Bytes, F: Format<B>, const M: usize>(
    stripes: &mut Stripes<'_>,
    x: [QuantisedRow<'_>; M],
    first: usize,
) {
    let (block_len, block_bytes) = (F::DTYPE.block_len(), F::DTYPE.block_bytes());
    let row_bytes = stripes.row_bytes();
    assert!(
        x.iter().all(|x| F::DTYPE.bytes_for(x.high.len()) == Some(row_bytes) && x.low.len() == x.high.len())
    );
    for pass in 0..stripes.passes() {
        let rows = stripes.rows(pass);
        // SAFETY: blocks and groups are those of the rows, whose lengths agree with those of the activations.
        unsafe {
            let mut sums = [[B::zero(); STRIPES]; M];
            let mut offsets = [[0.0f32; STRIPES]; M];
            let mut scales = [const { Scales { scales: [0.0; 16], offsets: [0.0; 8] } }; STRIPES];
            for block in 0..row_bytes / block_bytes {
                let mut at = rows.map(<[u8]>::as_ptr);
                for r in 0..STRIPES {
                    at[r] = at[r].add(block * block_bytes);
                    F::scales(at[r], &mut scales[r]);
                    for line in (0..block_bytes).step_by(64) {
                        prefetch(at[r].wrapping_add(PREFETCH_AHEAD + line));
                    }
                }
                for group in 0..block_len / 32 {
                    let mut codes = [B::splat(0); STRIPES];
                    for r in 0..STRIPES {
                        codes[r] = F::codes(at[r], group);
                    }
                    let index = block * (block_len / 32) + group;
                    for m in 0..M {
                        let values = B::activations(
                            x[m].high.as_ptr().add(32 * index),
                            x[m].low.as_ptr().add(32 * index),
                        );
                        let scale = *x[m].scales.get_unchecked(index);
                        let sum =
                            *x[m].sums.get_unchecked(2 * index) + *x[m].sums.get_unchecked(2 * index + 1);
                        for r in 0..STRIPES {
                            let first = scales[r].scales[2 * group] * scale;
                            let pair = if F::SCALES_BY_16 {
                                [first, scales[r].scales[2 * group + 1] * scale]
                            } else {
                                [first; 2]
                            };
                            sums[m][r] = B::accumulate(sums[m][r], codes[r].dot(values), pair);
                            if F::HAS_OFFSET {
                                offsets[m][r] += scales[r].offsets[group] * sum;
                            }
                        }
                    }
                }
            }
            for m in 0..M {
                let mut totals = [0.0; STRIPES];
                for r in 0..STRIPES {
                    totals[r] = B::total(sums[m][r]) + offsets[m][r];
                }
                stripes.write(first + m, pass, totals);
            }
        }
    }
}

/// Q4_0 to Q5_1: `BYTES` per block, nibbles at `CODES`, fifth bits at `FIFTH` (none if 0), `BIAS` off every code. A
/// bias stands in for an offset, so formats without a bias have an offset behind the scale.
struct Small<const BYTES: usize, const CODES: usize, const FIFTH: usize, const BIAS: u8>;

impl<B: Bytes, const BYTES: usize, const CODES: usize, const FIFTH: usize, const BIAS: u8> Format<B>
    for Small<BYTES, CODES, FIFTH, BIAS>
{
    const DTYPE: DType = match BYTES {
        18 => DType::Q4_0,
        20 => DType::Q4_1,
        22 => DType::Q5_0,
        _ => DType::Q5_1,
    };
    const HAS_OFFSET: bool = BIAS == 0;

    #[inline(always)]
    unsafe fn codes(block: *const u8, _group: usize) -> B {
        // SAFETY: all reads are inside the block.
        unsafe {
            let mut codes = B::nibbles(block.add(CODES));
            if FIFTH != 0 {
                let bits = u32::from_le(block.add(FIFTH).cast::<u32>().read_unaligned());
                codes = codes.or(B::from_bits(bits).and(B::splat(16)));
            }
            if BIAS != 0 { codes.subtract(B::splat(BIAS)) } else { codes }
        }
    }

    #[inline(always)]
    unsafe fn scales(block: *const u8, into: &mut Scales) {
        // SAFETY: all reads are inside the block.
        unsafe {
            let scale = half_at::<B>(block);
            (into.scales[0], into.scales[1]) = (scale, scale);
            if BIAS == 0 {
                into.offsets[0] = half_at::<B>(block.add(2));
            }
        }
    }
}

struct Q8_0;

impl<B: Bytes> Format<B> for Q8_0 {
    const DTYPE: DType = DType::Q8_0;

    #[inline(always)]
    unsafe fn codes(block: *const u8, _group: usize) -> B {
        // SAFETY: bytes 2 to 34 of the block.
        unsafe { B::load(block.add(2)) }
    }

    #[inline(always)]
    unsafe fn scales(block: *const u8, into: &mut Scales) {
        // SAFETY: the first bytes of the block.
        let scale = unsafe { half_at::<B>(block) };
        (into.scales[0], into.scales[1]) = (scale, scale);
    }
}

struct Mxfp4;

impl<B: Bytes> Format<B> for Mxfp4 {
    const DTYPE: DType = DType::Mxfp4;

    #[inline(always)]
    unsafe fn codes(block: *const u8, _group: usize) -> B {
        // SAFETY: bytes 1 to 17 of the block.
        unsafe { B::nibbles(block.add(1)).look_up(&TWICE) }
    }

    #[inline(always)]
    unsafe fn scales(block: *const u8, into: &mut Scales) {
        // SAFETY: the first byte of the block.
        let scale = half_power(unsafe { block.read() });
        (into.scales[0], into.scales[1]) = (scale, scale);
    }
}

struct Q4K;

impl<B: Bytes> Format<B> for Q4K {
    const DTYPE: DType = DType::Q4K;
    const HAS_OFFSET: bool = true;

    #[inline(always)]
    unsafe fn codes(block: *const u8, group: usize) -> B {
        // SAFETY: bytes 16 to 144 of the block.
        unsafe { nibble_of(B::load(block.add(16 + 32 * (group / 2))), group % 2) }
    }

    #[inline(always)]
    unsafe fn scales(block: *const u8, into: &mut Scales) {
        // SAFETY: passed on.
        unsafe { scales_and_minima::<B>(block, into) }
    }
}

struct Q5K;

impl<B: Bytes> Format<B> for Q5K {
    const DTYPE: DType = DType::Q5K;
    const HAS_OFFSET: bool = true;

    #[inline(always)]
    unsafe fn codes(block: *const u8, group: usize) -> B {
        // SAFETY: bytes 16 to 176 of the block.
        unsafe {
            let low = nibble_of(B::load(block.add(48 + 32 * (group / 2))), group % 2);
            low.or(B::load(block.add(16)).where_set(B::splat(1 << group), 16))
        }
    }

    #[inline(always)]
    unsafe fn scales(block: *const u8, into: &mut Scales) {
        // SAFETY: passed on.
        unsafe { scales_and_minima::<B>(block, into) }
    }
}

struct Q6K;

impl<B: Bytes> Format<B> for Q6K {
    const DTYPE: DType = DType::Q6K;
    const SCALES_BY_16: bool = true;

    #[inline(always)]
    unsafe fn codes(block: *const u8, group: usize) -> B {
        let (half, part) = (group / 4, group % 4);
        // SAFETY: bytes 0 to 192 of the block.
        unsafe {
            let low = nibble_of(B::load(block.add(64 * half + 32 * (part % 2))), part / 2);
            let pairs = B::load(block.add(128 + 32 * half));
            // The wanted pair of bits goes to bits 4 and 5.
            let high = match part {
                0 => pairs.shift_left(4),
                1 => pairs.shift_left(2),
                2 => pairs,
                _ => pairs.shift_right(2),
            };
            low.or(high.and(B::splat(0x30))).subtract(B::splat(32))
        }
    }

    #[inline(always)]
    unsafe fn scales(block: *const u8, into: &mut Scales) {
        // SAFETY: bytes 192 to 210 of the block.
        unsafe {
            let d = half_at::<B>(block.add(208));
            let codes = block.add(192).cast::<[i8; 16]>().read();
            for group in 0..16 {
                into.scales[group] = d * f32::from(codes[group]);
            }
        }
    }
}

/// # Safety
/// The CPU has the instructions of `B`.
#[inline(always)]
unsafe fn nibble_of<B: Bytes>(bytes: B, which: usize) -> B {
    // SAFETY: passed on.
    unsafe { (if which == 0 { bytes } else { bytes.shift_right(4) }).and(B::splat(15)) }
}

/// # Safety
/// The CPU has the instructions of `B`; 16 bytes of a Q4_K or Q5_K block are readable at `block`.
#[inline(always)]
unsafe fn scales_and_minima<B: Bytes>(block: *const u8, into: &mut Scales) {
    // SAFETY: the first 16 bytes of the block.
    unsafe {
        let (d, dmin) = (half_at::<B>(block), half_at::<B>(block.add(2)));
        let (scales, minima) = six_bit_scales(block.add(4).cast::<[u8; 12]>().read());
        let (scales, minima) = (scales.to_le_bytes(), minima.to_le_bytes());
        for group in 0..8 {
            let scale = d * f32::from(scales[group]);
            (into.scales[2 * group], into.scales[2 * group + 1]) = (scale, scale);
            into.offsets[group] = -(dmin * f32::from(minima[group]));
        }
    }
}

/// # Safety
/// The CPU has the instructions of `B`; two bytes are readable at `at`.
#[inline(always)]
unsafe fn half_at<B: Bytes>(at: *const u8) -> f32 {
    // SAFETY: the caller promises two bytes; the read is unaligned.
    unsafe { B::widen_half(u16::from_le(at.cast::<u16>().read_unaligned())) }
}
