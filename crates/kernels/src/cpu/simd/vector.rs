//! Registers of `f32`, and what is computed with them on every instruction set alike.

use oscar_codec::band::scale;
#[cfg(target_arch = "x86_64")]
use oscar_codec::band::{OCTAVE, OCTAVES_BELOW};

use super::codes::CodeWords;

/// A register of `f32`. Methods are inlined into functions that enable the instructions.
///
/// # Safety of the methods
/// The CPU has the instructions, and pointers lead to as many elements as a method says, on any address.
#[allow(clippy::missing_safety_doc)]
pub(crate) trait Vector: Copy {
    /// Lanes of a register; divides 16.
    const WIDTH: usize;
    /// The number of registers that the instruction set has.
    const REGISTERS: usize;
    /// Registers of packed codes on the same instruction set, with as many lanes.
    type Codes: CodeWords<Numbers = Self>;

    /// Reads [`Vector::WIDTH`] numbers.
    unsafe fn load(at: *const f32) -> Self;
    /// Reads [`Vector::WIDTH`] f16 numbers.
    unsafe fn load_f16(at: *const u8) -> Self;
    /// Reads [`Vector::WIDTH`] bf16 numbers.
    unsafe fn load_bf16(at: *const u8) -> Self;
    /// Reads [`Vector::WIDTH`] FP8 numbers (E4M3).
    unsafe fn load_e4m3(at: *const u8) -> Self;
    /// Reads [`Vector::WIDTH`] scales of bands, as [`oscar_codec::band::scale`] widens them.
    unsafe fn load_band_scales(at: *const u8) -> Self;
    /// Reads [`Vector::WIDTH`] pairs of bf16 numbers: the first of each pair, and the second.
    unsafe fn load_bf16_pairs(at: *const u16) -> [Self; 2];
    /// Writes [`Vector::WIDTH`] numbers.
    unsafe fn store(self, at: *mut f32);
    /// Writes the bits of numbers that are f16 already.
    unsafe fn store_f16(self, at: *mut u16);
    /// Writes whole numbers of 0 to 255 as bytes.
    unsafe fn store_bytes(self, at: *mut u8);

    unsafe fn splat(value: f32) -> Self;
    unsafe fn add(self, other: Self) -> Self;
    unsafe fn subtract(self, other: Self) -> Self;
    unsafe fn multiply(self, other: Self) -> Self;
    unsafe fn divide(self, other: Self) -> Self;
    unsafe fn square_root(self) -> Self;
    /// `self * factor + addend`, rounded once.
    unsafe fn multiply_add(self, factor: Self, addend: Self) -> Self;
    /// The larger number; `other` where one is NaN.
    unsafe fn maximum(self, other: Self) -> Self;
    /// The smaller number; `other` where one is NaN.
    unsafe fn minimum(self, other: Self) -> Self;
    unsafe fn magnitude(self) -> Self;
    unsafe fn truncate(self) -> Self;
    /// The nearest whole number, ties to even.
    unsafe fn round(self) -> Self;
    /// `then` where `self < limit`, else (and for NaN) `otherwise`.
    unsafe fn where_less(self, limit: Self, then: Self, otherwise: Self) -> Self;
    /// Nearest bf16, ties to even; anything may come of NaN.
    unsafe fn round_to_bf16(self) -> Self;
    /// Nearest f16, ties to even, of numbers within its range.
    unsafe fn round_to_f16(self) -> Self;
    /// `self · 2ⁿ` for whole numbers `n` of -160 to 127; may be 0 below -126.
    unsafe fn scale_by_power_of_two(self, n: Self) -> Self;

    /// The sum of all lanes.
    unsafe fn sum(self) -> f32;
    /// The largest of all lanes; if some are NaN, NaN or the largest of others.
    unsafe fn largest(self) -> f32;

    /// `to[j·to_stride + i] = from[i·from_stride + j]` for a square of [`Vector::WIDTH`].
    unsafe fn transpose(from: *const f32, from_stride: usize, to: *mut f32, to_stride: usize);
}

/// The bits of the scales of one octave less those of their codes, shifted to where the exponent is. A scale's code, shifted
/// by 19, has its octave where the exponent is, and below it the step inside the octave, which these are chosen by.
#[cfg(target_arch = "x86_64")]
pub(super) const OCTAVE_BITS: [u32; 16] = {
    let mut bits = [0; 16];
    let mut step = 0;
    while step < 16 {
        bits[step] = OCTAVE[step].to_bits() - (OCTAVES_BELOW << 23) - ((step as u32) << 19);
        step += 1;
    }
    bits
};

/// The scale of every code.
pub(super) static BAND_SCALES: [f32; 256] = {
    let mut scales = [0.0; 256];
    let mut code = 0;
    while code < 256 {
        scales[code] = scale(code as u8);
        code += 1;
    }
    scales
};

/// 2ˣ for |x| <= 1/2 as a polynomial, lowest power first: the Chebyshev fit of relative error, good to 2e-8 in `f32`.
const EXP2: [f32; 7] =
    [1.0, std::f32::consts::LN_2, 0.240_226_46, 0.055_503_29, 0.009_618_52, 0.001_339_986, 0.000_153_375_77];

/// 2ˣ for `x <= 127` to a relative error of about 1e-7; 0 far below -126, NaN stays NaN.
///
/// # Safety
/// The CPU has the instructions of `V`.
#[inline(always)]
pub(crate) unsafe fn exp2<V: Vector>(x: V) -> V {
    // SAFETY: the caller promises the instructions.
    unsafe {
        let x = V::splat(-160.0).maximum(x);
        let whole = x.round();
        let rest = x.subtract(whole);
        let mut power = V::splat(EXP2[6]);
        for i in (0..6).rev() {
            power = power.multiply_add(rest, V::splat(EXP2[i]));
        }
        power.scale_by_power_of_two(whole)
    }
}
