//! Plain Rust, for machines without a path of their own and as a reference.

use half::{bf16, f16};
use oscar_codec::ScaleType;

use super::codes::CodeWords;
use super::vector::{BAND_SCALES, Vector};
use crate::quant::fp8::E4M3;

/// Four numbers in plain Rust.
#[derive(Clone, Copy)]
pub(crate) struct Portable([f32; 4]);

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

impl Vector for Portable {
    const WIDTH: usize = 4;
    const REGISTERS: usize = 16;
    type Codes = [u32; 4];

    #[inline(always)]
    unsafe fn load(at: *const f32) -> Self {
        // SAFETY: the caller promises four numbers.
        Portable(unsafe { at.cast::<[f32; 4]>().read_unaligned() })
    }

    #[inline(always)]
    unsafe fn load_f16(at: *const u8) -> Self {
        // SAFETY: the caller promises four numbers.
        let bytes = unsafe { at.cast::<[[u8; 2]; 4]>().read() };
        Portable(bytes.map(|bytes| f16::from_le_bytes(bytes).to_f32()))
    }

    #[inline(always)]
    unsafe fn load_bf16(at: *const u8) -> Self {
        // SAFETY: the caller promises four numbers.
        let bytes = unsafe { at.cast::<[[u8; 2]; 4]>().read() };
        Portable(bytes.map(|bytes| bf16::from_le_bytes(bytes).to_f32()))
    }

    #[inline(always)]
    unsafe fn load_e4m3(at: *const u8) -> Self {
        // SAFETY: the caller promises four numbers.
        let bytes = unsafe { at.cast::<[u8; 4]>().read() };
        Portable(bytes.map(|byte| E4M3[usize::from(byte)]))
    }

    #[inline(always)]
    unsafe fn load_band_scales(at: *const u8) -> Self {
        // SAFETY: the caller promises four bytes.
        let codes = unsafe { at.cast::<[u8; 4]>().read() };
        Portable(codes.map(|code| BAND_SCALES[usize::from(code)]))
    }

    #[inline(always)]
    unsafe fn load_bf16_pairs(at: *const u16) -> [Self; 2] {
        // SAFETY: the caller promises four pairs.
        let pairs = unsafe { at.cast::<[[u16; 2]; 4]>().read_unaligned() };
        [0, 1].map(|part| Portable(pairs.map(|pair| bf16::from_bits(pair[part]).to_f32())))
    }

    #[inline(always)]
    unsafe fn store(self, at: *mut f32) {
        // SAFETY: the caller promises room for four numbers.
        unsafe { at.cast::<[f32; 4]>().write_unaligned(self.0) }
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
    unsafe fn round(self) -> Self {
        self.map(f32::round_ties_even)
    }

    #[inline(always)]
    unsafe fn scale_by_power_of_two(self, n: Self) -> Self {
        self.zip(n, |x, n| x * f32::from_bits(((n as i32).max(-127) + 127) as u32 * (1 << 23)))
    }

    #[inline(always)]
    unsafe fn sum(self) -> f32 {
        self.0.iter().sum()
    }

    #[inline(always)]
    unsafe fn largest(self) -> f32 {
        self.0.into_iter().fold(f32::NEG_INFINITY, f32::max)
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
        unsafe { at.cast::<[u16; 4]>().write_unaligned(self.0.map(|x| ScaleType::F16.to_bits(x))) }
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

impl CodeWords for [u32; 4] {
    const LANES: usize = 4;
    type Sums = [i32; 4];
    type Partial = [i32; 4];
    type Numbers = Portable;

    #[inline(always)]
    fn words_before_widening(_bits: u32) -> usize {
        usize::MAX
    }

    #[inline(always)]
    unsafe fn load(at: *const u8) -> Self {
        // SAFETY: the caller promises four words.
        unsafe { at.cast::<[[u8; 4]; 4]>().read() }.map(u32::from_le_bytes)
    }

    #[inline(always)]
    unsafe fn splat(bytes: i32) -> Self {
        [bytes as u32; 4]
    }

    #[inline(always)]
    unsafe fn low_codes<const BITS: u32>(self) -> Self {
        self.map(|word| word & (((1 << BITS) - 1) * 0x0101_0101))
    }

    #[inline(always)]
    unsafe fn next_codes<const BITS: u32>(self) -> Self {
        self.map(|word| word >> BITS)
    }

    #[inline(always)]
    unsafe fn zero() -> [i32; 4] {
        [0; 4]
    }

    #[inline(always)]
    unsafe fn begin(sums: [i32; 4]) -> [i32; 4] {
        sums
    }

    #[inline(always)]
    unsafe fn add_products(partial: [i32; 4], codes: Self, bytes: Self) -> [i32; 4] {
        std::array::from_fn(|lane| {
            let pairs = codes[lane].to_le_bytes().into_iter().zip(bytes[lane].to_le_bytes());
            partial[lane] + pairs.map(|(code, byte)| i32::from(code) * i32::from(byte as i8)).sum::<i32>()
        })
    }

    #[inline(always)]
    unsafe fn widen(_sums: [i32; 4], partial: [i32; 4]) -> [i32; 4] {
        partial
    }

    #[inline(always)]
    unsafe fn join(high: [i32; 4], low: [i32; 4]) -> Portable {
        Portable(std::array::from_fn(|lane| ((high[lane] << 8) + low[lane]) as f32))
    }

    #[inline(always)]
    unsafe fn store(sums: [i32; 4], at: *mut i32) {
        // SAFETY: the caller promises room for four sums.
        unsafe { at.cast::<[i32; 4]>().write_unaligned(sums) }
    }
}
