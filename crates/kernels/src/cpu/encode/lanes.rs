//! Vectors whose lanes are rows: what the encoder asks of an instruction set.
//!
//! Every lane does what the scalar definition in `oscar_codec::quantise` does to one row, in the same order and with
//! the same rounding, so all widths write the same bytes. [`Portable`] is plain Rust and serves machines without a
//! path of their own.

use half::bf16;
use oscar_codec::ScaleType;

/// Rows that are laid out side by side, `[channel][BLOCK]`. A V word holds the codes of as many tokens.
pub(super) const BLOCK: usize = 16;

/// A register of `f32`, one row per lane. Methods are inlined into functions that enable the instructions.
///
/// # Safety of the methods
/// The CPU has the instructions, and pointers lead to as many elements as a method says.
#[allow(clippy::missing_safety_doc)]
pub(super) trait Lanes: Copy {
    /// Lanes; divides [`BLOCK`].
    const WIDTH: usize;

    /// Reads [`Lanes::WIDTH`] numbers.
    unsafe fn load(at: *const f32) -> Self;
    /// Writes [`Lanes::WIDTH`] numbers.
    unsafe fn store(self, at: *mut f32);
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
    /// `then` where `self < limit`, else (and for NaN) `otherwise`.
    unsafe fn where_less(self, limit: Self, then: Self, otherwise: Self) -> Self;
    /// Nearest bf16, ties to even; anything may come of NaN.
    unsafe fn round_to_bf16(self) -> Self;
    /// Nearest f16, ties to even, of numbers within its range.
    unsafe fn round_to_f16(self) -> Self;
    /// Writes the bits of numbers that are f16 already.
    unsafe fn store_f16(self, at: *mut u16);
    /// Writes whole numbers of 0 to 255 as bytes.
    unsafe fn store_bytes(self, at: *mut u8);

    /// `to[j·to_stride + i] = from[i·from_stride + j]` for a square of [`Lanes::WIDTH`].
    unsafe fn transpose(from: *const f32, from_stride: usize, to: *mut f32, to_stride: usize);
}

/// Nearest number of the scale type, saturating; NaN becomes the most negative one, as in [`ScaleType::to_bits`].
///
/// # Safety
/// The CPU has the instructions of `V`.
#[inline(always)]
pub(super) unsafe fn round_to_scale<V: Lanes>(value: V, scale_type: ScaleType) -> V {
    // SAFETY: the caller promises the instructions.
    unsafe {
        let limit = scale_type.largest();
        let value = value.maximum(V::splat(-limit)).minimum(V::splat(limit));
        match scale_type {
            ScaleType::F16 => value.round_to_f16(),
            ScaleType::Bf16 => value.round_to_bf16(),
        }
    }
}

/// Four rows in plain Rust.
#[derive(Clone, Copy)]
pub(super) struct Portable([f32; 4]);

impl Portable {
    #[inline(always)]
    fn map(self, f: impl Fn(f32) -> f32) -> Self {
        Portable(self.0.map(f))
    }

    #[inline(always)]
    fn zip(self, other: Self, f: impl Fn(f32, f32) -> f32) -> Self {
        Portable(std::array::from_fn(|lane| f(self.0[lane], other.0[lane])))
    }
}

impl Lanes for Portable {
    const WIDTH: usize = 4;

    #[inline(always)]
    unsafe fn load(at: *const f32) -> Self {
        // SAFETY: the caller promises four numbers.
        Portable(unsafe { at.cast::<[f32; 4]>().read() })
    }

    #[inline(always)]
    unsafe fn store(self, at: *mut f32) {
        // SAFETY: the caller promises room for four numbers.
        unsafe { at.cast::<[f32; 4]>().write(self.0) }
    }

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self {
        Portable([value; 4])
    }

    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        self.zip(other, |a, b| a + b)
    }

    #[inline(always)]
    unsafe fn subtract(self, other: Self) -> Self {
        self.zip(other, |a, b| a - b)
    }

    #[inline(always)]
    unsafe fn multiply(self, other: Self) -> Self {
        self.zip(other, |a, b| a * b)
    }

    #[inline(always)]
    unsafe fn divide(self, other: Self) -> Self {
        self.zip(other, |a, b| a / b)
    }

    #[inline(always)]
    unsafe fn square_root(self) -> Self {
        self.map(f32::sqrt)
    }

    #[inline(always)]
    unsafe fn multiply_add(self, factor: Self, addend: Self) -> Self {
        Portable(std::array::from_fn(|lane| self.0[lane].mul_add(factor.0[lane], addend.0[lane])))
    }

    #[inline(always)]
    unsafe fn maximum(self, other: Self) -> Self {
        self.zip(other, |a, b| if a > b { a } else { b })
    }

    #[inline(always)]
    unsafe fn minimum(self, other: Self) -> Self {
        self.zip(other, |a, b| if a < b { a } else { b })
    }

    #[inline(always)]
    unsafe fn magnitude(self) -> Self {
        self.map(f32::abs)
    }

    #[inline(always)]
    unsafe fn truncate(self) -> Self {
        self.map(f32::trunc)
    }

    #[inline(always)]
    unsafe fn where_less(self, limit: Self, then: Self, otherwise: Self) -> Self {
        Portable(std::array::from_fn(|lane| {
            if self.0[lane] < limit.0[lane] { then.0[lane] } else { otherwise.0[lane] }
        }))
    }

    #[inline(always)]
    unsafe fn round_to_bf16(self) -> Self {
        self.map(|x| bf16::from_f32(x).to_f32())
    }

    #[inline(always)]
    unsafe fn round_to_f16(self) -> Self {
        self.map(|x| ScaleType::F16.to_f32(ScaleType::F16.to_bits(x)))
    }

    #[inline(always)]
    unsafe fn store_f16(self, at: *mut u16) {
        // SAFETY: the caller promises room for four numbers.
        unsafe { at.cast::<[u16; 4]>().write(self.0.map(|x| ScaleType::F16.to_bits(x))) }
    }

    #[inline(always)]
    unsafe fn store_bytes(self, at: *mut u8) {
        // SAFETY: the caller promises room for four bytes.
        unsafe { at.cast::<[u8; 4]>().write(self.0.map(|x| x as u8)) }
    }

    #[inline(always)]
    unsafe fn transpose(from: *const f32, from_stride: usize, to: *mut f32, to_stride: usize) {
        for i in 0..4 {
            for j in 0..4 {
                // SAFETY: the caller promises both squares.
                unsafe { *to.add(j * to_stride + i) = *from.add(i * from_stride + j) };
            }
        }
    }
}
