//! One quantised block taken apart into codes, scales and offsets.
//!
//! | type | elements | code | scale | offset | layout |
//! |---|---|---|---|---|---|
//! | Q4_0 | 32 | nibble - 8 | `d` | - | `d`, 16 bytes: element `i` low, `i + 16` high nibble |
//! | Q4_1 | 32 | nibble | `d` | `m` | `d`, `m`, nibbles |
//! | Q5_0 | 32 | 5 bits - 16 | `d` | - | `d`, 32 fifth bits, nibbles |
//! | Q5_1 | 32 | 5 bits | `d` | `m` | `d`, `m`, 32 fifth bits, nibbles |
//! | Q8_0 | 32 | byte | `d` | - | `d`, 32 bytes |
//! | Q4_K | 256 | nibble | `d·s` per 32 | `-dmin·t` per 32 | `d`, `dmin`, 12 bytes of 6-bit `s` and `t`, nibbles by 64 |
//! | Q5_K | 256 | 5 bits | as Q4_K | as Q4_K | as Q4_K with 32 bytes of fifth bits before the nibbles |
//! | Q6_K | 256 | 6 bits - 32 | `d·s` per 16 | - | low nibbles by 128, upper bit pairs by 128, 16 signed `s`, `d` |
//! | MXFP4 | 32 | twice an E2M1 number | a power of two | - | its exponent plus 127, nibbles as Q4_0 |
//!
//! `d`, `m` and `dmin` are half-precision floats; everything is little-endian.

use half::f16;

use super::GROUP;
use super::mxfp4::{half_power, twice};
use crate::dtype::DType;

/// A block taken apart: element `i` is `scales[i / 16] * codes[i] + offsets[i / 16]`.
///
/// Types with 32 elements per block fill the front of the arrays only.
#[derive(Clone, Debug)]
pub struct Unpacked {
    /// One small integer per element.
    pub codes: [i8; 256],
    /// One factor per [`GROUP`] elements.
    pub scales: [f32; 256 / GROUP],
    /// One summand per [`GROUP`] elements; zero for types without offsets.
    pub offsets: [f32; 256 / GROUP],
}

impl Default for Unpacked {
    fn default() -> Unpacked {
        Unpacked { codes: [0; 256], scales: [0.0; 256 / GROUP], offsets: [0.0; 256 / GROUP] }
    }
}

/// A quantised block format.
pub trait Block {
    /// The stored type that has these blocks.
    const DTYPE: DType;
    /// Whether elements have an offset beside their scale.
    const HAS_OFFSET: bool;
    /// Takes apart the block in `bytes` (`DTYPE.block_bytes()` of them).
    fn unpack(bytes: &[u8], into: &mut Unpacked);
}

/// Takes apart a block of a quantised type. Panics if `dtype` is a float type or `bytes` is not one block.
pub fn unpack(dtype: DType, bytes: &[u8], into: &mut Unpacked) {
    assert!(!dtype.is_float() && bytes.len() == dtype.block_bytes(), "not one {dtype} block");
    match dtype {
        DType::F32 | DType::F16 | DType::BF16 | DType::F8E4M3 => unreachable!("float types have no blocks"),
        DType::Q4_0 => Q4_0::unpack(bytes, into),
        DType::Q4_1 => Q4_1::unpack(bytes, into),
        DType::Q5_0 => Q5_0::unpack(bytes, into),
        DType::Q5_1 => Q5_1::unpack(bytes, into),
        DType::Q8_0 => Q8_0::unpack(bytes, into),
        DType::Q4K => Q4K::unpack(bytes, into),
        DType::Q5K => Q5K::unpack(bytes, into),
        DType::Q6K => Q6K::unpack(bytes, into),
        DType::Mxfp4 => Mxfp4::unpack(bytes, into),
    }
}

#[inline(always)]
fn half_at(bytes: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f32()
}

/// 32 elements from 16 bytes: low nibbles first, then high nibbles.
#[inline(always)]
fn nibbles(packed: &[u8], subtract: i8, codes: &mut [i8; 256]) {
    for i in 0..16 {
        codes[i] = (packed[i] & 15) as i8 - subtract;
        codes[i + 16] = (packed[i] >> 4) as i8 - subtract;
    }
}

#[inline(always)]
fn add_fifth_bits(bits: &[u8], codes: &mut [i8; 256]) {
    for i in 0..32 {
        codes[i] += (((bits[i / 8] >> (i % 8)) & 1) << 4) as i8;
    }
}

/// Blocks of the GGUF type Q4_0.
pub struct Q4_0;

impl Block for Q4_0 {
    const DTYPE: DType = DType::Q4_0;
    const HAS_OFFSET: bool = false;

    #[inline(always)]
    fn unpack(bytes: &[u8], into: &mut Unpacked) {
        nibbles(&bytes[2..18], 8, &mut into.codes);
        into.scales[..2].fill(half_at(bytes, 0));
    }
}

/// Blocks of the GGUF type Q4_1.
pub struct Q4_1;

impl Block for Q4_1 {
    const DTYPE: DType = DType::Q4_1;
    const HAS_OFFSET: bool = true;

    #[inline(always)]
    fn unpack(bytes: &[u8], into: &mut Unpacked) {
        nibbles(&bytes[4..20], 0, &mut into.codes);
        into.scales[..2].fill(half_at(bytes, 0));
        into.offsets[..2].fill(half_at(bytes, 2));
    }
}

/// Blocks of the GGUF type Q5_0.
pub struct Q5_0;

impl Block for Q5_0 {
    const DTYPE: DType = DType::Q5_0;
    const HAS_OFFSET: bool = false;

    #[inline(always)]
    fn unpack(bytes: &[u8], into: &mut Unpacked) {
        nibbles(&bytes[6..22], 16, &mut into.codes);
        add_fifth_bits(&bytes[2..6], &mut into.codes);
        into.scales[..2].fill(half_at(bytes, 0));
    }
}

/// Blocks of the GGUF type Q5_1.
pub struct Q5_1;

impl Block for Q5_1 {
    const DTYPE: DType = DType::Q5_1;
    const HAS_OFFSET: bool = true;

    #[inline(always)]
    fn unpack(bytes: &[u8], into: &mut Unpacked) {
        nibbles(&bytes[8..24], 0, &mut into.codes);
        add_fifth_bits(&bytes[4..8], &mut into.codes);
        into.scales[..2].fill(half_at(bytes, 0));
        into.offsets[..2].fill(half_at(bytes, 2));
    }
}

/// Blocks of the GGUF type Q8_0.
pub struct Q8_0;

impl Block for Q8_0 {
    const DTYPE: DType = DType::Q8_0;
    const HAS_OFFSET: bool = false;

    #[inline(always)]
    fn unpack(bytes: &[u8], into: &mut Unpacked) {
        for i in 0..32 {
            into.codes[i] = bytes[2 + i] as i8;
        }
        into.scales[..2].fill(half_at(bytes, 0));
    }
}

/// The eight 6-bit scales and eight 6-bit minima of a Q4_K or Q5_K block, one per byte, the first in the lowest.
///
/// Bytes 0-3 hold scales 0-3 and bytes 4-7 minima 0-3 in their low six bits; the low nibbles of bytes 8-11 are the
/// low bits of scales 4-7, their high nibbles those of minima 4-7, and the two missing bits of each sit at the top
/// of bytes 0-7.
#[inline(always)]
pub(crate) fn six_bit_scales(packed: [u8; 12]) -> (u64, u64) {
    let word = |at: usize| u32::from_le_bytes([packed[at], packed[at + 1], packed[at + 2], packed[at + 3]]);
    let (first, second, third) = (word(0), word(4), word(8));
    let low_scales = first & 0x3f3f_3f3f;
    let low_minima = second & 0x3f3f_3f3f;
    let high_scales = (third & 0x0f0f_0f0f) | ((first >> 2) & 0x3030_3030);
    let high_minima = ((third >> 4) & 0x0f0f_0f0f) | ((second >> 2) & 0x3030_3030);
    let join = |low: u32, high: u32| u64::from(low) | (u64::from(high) << 32);
    (join(low_scales, high_scales), join(low_minima, high_minima))
}

/// Scales and offsets of Q4_K and Q5_K from the first 16 bytes of the block.
#[inline(always)]
fn scales_and_minima(bytes: &[u8], into: &mut Unpacked) {
    let (d, dmin) = (half_at(bytes, 0), half_at(bytes, 2));
    let mut packed = [0; 12];
    packed.copy_from_slice(&bytes[4..16]);
    let (scales, minima) = six_bit_scales(packed);
    for (group, (scale, minimum)) in scales.to_le_bytes().into_iter().zip(minima.to_le_bytes()).enumerate() {
        into.scales[2 * group..2 * group + 2].fill(d * f32::from(scale));
        into.offsets[2 * group..2 * group + 2].fill(-(dmin * f32::from(minimum)));
    }
}

/// 256 nibbles: of every 32 bytes, first all low nibbles, then all high ones.
#[inline(always)]
fn nibbles_by_64(packed: &[u8], codes: &mut [i8; 256]) {
    for chunk in 0..4 {
        for i in 0..32 {
            let byte = packed[32 * chunk + i];
            codes[64 * chunk + i] = (byte & 15) as i8;
            codes[64 * chunk + 32 + i] = (byte >> 4) as i8;
        }
    }
}

/// Blocks of the GGUF type Q4_K.
pub struct Q4K;

impl Block for Q4K {
    const DTYPE: DType = DType::Q4K;
    const HAS_OFFSET: bool = true;

    #[inline(always)]
    fn unpack(bytes: &[u8], into: &mut Unpacked) {
        scales_and_minima(bytes, into);
        nibbles_by_64(&bytes[16..144], &mut into.codes);
    }
}

/// Blocks of the GGUF type Q5_K.
pub struct Q5K;

impl Block for Q5K {
    const DTYPE: DType = DType::Q5K;
    const HAS_OFFSET: bool = true;

    #[inline(always)]
    fn unpack(bytes: &[u8], into: &mut Unpacked) {
        scales_and_minima(bytes, into);
        nibbles_by_64(&bytes[48..176], &mut into.codes);
        let fifth = &bytes[16..48];
        for group in 0..8 {
            for i in 0..32 {
                into.codes[32 * group + i] += (((fifth[i] >> group) & 1) << 4) as i8;
            }
        }
    }
}

/// Blocks of the GGUF type Q6_K.
pub struct Q6K;

impl Block for Q6K {
    const DTYPE: DType = DType::Q6K;
    const HAS_OFFSET: bool = false;

    #[inline(always)]
    fn unpack(bytes: &[u8], into: &mut Unpacked) {
        let d = half_at(bytes, 208);
        for group in 0..16 {
            into.scales[group] = d * f32::from(bytes[192 + group] as i8);
        }
        for half in 0..2 {
            let low = &bytes[64 * half..][..64];
            let high = &bytes[128 + 32 * half..][..32];
            let codes = &mut into.codes[128 * half..][..128];
            for i in 0..32 {
                codes[i] = ((low[i] & 15) | ((high[i] & 3) << 4)) as i8 - 32;
                codes[i + 32] = ((low[i + 32] & 15) | (((high[i] >> 2) & 3) << 4)) as i8 - 32;
                codes[i + 64] = ((low[i] >> 4) | (((high[i] >> 4) & 3) << 4)) as i8 - 32;
                codes[i + 96] = ((low[i + 32] >> 4) | ((high[i] >> 6) << 4)) as i8 - 32;
            }
        }
    }
}

/// Blocks of MXFP4: 32 floats of four bits with a power of two for a scale.
pub struct Mxfp4;

impl Block for Mxfp4 {
    const DTYPE: DType = DType::Mxfp4;
    const HAS_OFFSET: bool = false;

    #[inline(always)]
    fn unpack(bytes: &[u8], into: &mut Unpacked) {
        nibbles(&bytes[1..17], 0, &mut into.codes);
        into.codes[..32].iter_mut().for_each(|code| *code = twice(*code as u8));
        into.scales[..2].fill(half_power(bytes[0]));
    }
}
