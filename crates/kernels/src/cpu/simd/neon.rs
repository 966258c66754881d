//! NEON with the dot-product extension: four numbers in a register, and `sdot`, which multiplies 16 signed bytes and adds by
//! fours.
//!
//! The intrinsics of the extension and of half floats are not stable yet, so these instructions are written as assembly.
//! Their features are enabled by directive, because the compiler's baseline for AArch64 does not have them;
//! [`crate::cpu::isa::Isa::is_available`] checks that the CPU does.

use std::arch::aarch64::*;
use std::arch::asm;

use super::bytes::Bytes;
use super::codes::CodeWords;
use super::intrinsics;
use super::vector::{BAND_SCALES, Vector};

impl Vector for float32x4_t {
    const WIDTH: usize = 4;
    const REGISTERS: usize = 32;
    type Codes = uint8x16_t;

    intrinsics! {
        add(other) = vaddq_f32;
        subtract(other) = vsubq_f32;
        multiply(other) = vmulq_f32;
        divide(other) = vdivq_f32;
        square_root() = vsqrtq_f32;
        magnitude() = vabsq_f32;
        truncate() = vrndq_f32;
        round() = vrndnq_f32;
    }

    #[inline(always)]
    unsafe fn load(at: *const f32) -> Self {
        // SAFETY: the caller promises four numbers.
        unsafe { vld1q_f32(at) }
    }

    #[inline(always)]
    unsafe fn load_f16(at: *const u8) -> Self {
        let wide: float32x4_t;
        // SAFETY: the caller promises four numbers; the widening is part of the AArch64 baseline.
        unsafe {
            let half = vld1_u8(at);
            asm!("fcvtl {wide:v}.4s, {half:v}.4h", wide = lateout(vreg) wide, half = in(vreg) half,
                 options(pure, nomem, nostack, preserves_flags));
        }
        wide
    }

    #[inline(always)]
    unsafe fn load_bf16(at: *const u8) -> Self {
        // SAFETY: the caller promises four numbers.
        unsafe { vreinterpretq_f32_u32(vshll_n_u16::<16>(vreinterpret_u16_u8(vld1_u8(at)))) }
    }

    #[inline(always)]
    unsafe fn load_e4m3(at: *const u8) -> Self {
        let wide: float32x4_t;
        // SAFETY: the caller promises four numbers; the widening is part of the AArch64 baseline.
        unsafe {
            // As f16 with the exponent's bias of FP8: 2⁸ too small. All ones is NaN in both.
            let bytes = vcreate_u8(u64::from(at.cast::<u32>().read_unaligned()));
            let words = vget_low_u16(vmovl_u8(bytes));
            let magnitude = vand_u16(words, vdup_n_u16(0x7f));
            let nan = vceq_u16(magnitude, vdup_n_u16(0x7f));
            let sign = vshl_n_u16::<8>(veor_u16(words, magnitude));
            let half = vorr_u16(vorr_u16(sign, vshl_n_u16::<7>(magnitude)), nan);
            asm!("fcvtl {wide:v}.4s, {half:v}.4h", wide = lateout(vreg) wide, half = in(vreg) half,
                 options(pure, nomem, nostack, preserves_flags));
            vmulq_n_f32(wide, 256.0)
        }
    }

    #[inline(always)]
    unsafe fn load_band_scales(at: *const u8) -> Self {
        // SAFETY: the caller promises four bytes.
        unsafe {
            let codes = at.cast::<[u8; 4]>().read();
            vld1q_f32(codes.map(|code| BAND_SCALES[usize::from(code)]).as_ptr())
        }
    }

    #[inline(always)]
    unsafe fn load_bf16_pairs(at: *const u16) -> [Self; 2] {
        // SAFETY: the caller promises four pairs.
        unsafe {
            let pairs = vreinterpretq_u32_u16(vld1q_u16(at));
            let second = vandq_u32(pairs, vdupq_n_u32(!0xffff));
            [vreinterpretq_f32_u32(vshlq_n_u32::<16>(pairs)), vreinterpretq_f32_u32(second)]
        }
    }

    #[inline(always)]
    unsafe fn store(self, at: *mut f32) {
        // SAFETY: the caller promises room for four numbers.
        unsafe { vst1q_f32(at, self) }
    }

    #[inline(always)]
    unsafe fn store_f16(self, at: *mut u16) {
        // SAFETY: the caller promises room for four numbers.
        unsafe { vst1_u16(at, to_f16(self)) }
    }

    #[inline(always)]
    unsafe fn store_bytes(self, at: *mut u8) {
        // SAFETY: the caller promises room for four bytes.
        unsafe {
            let words = vmovn_u32(vcvtq_u32_f32(self));
            let bytes = vmovn_u16(vcombine_u16(words, words));
            at.cast::<u32>().write_unaligned(vget_lane_u32::<0>(vreinterpret_u32_u8(bytes)));
        }
    }

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self {
        // SAFETY: NEON is part of the AArch64 baseline.
        unsafe { vdupq_n_f32(value) }
    }

    #[inline(always)]
    unsafe fn multiply_add(self, factor: Self, addend: Self) -> Self {
        // SAFETY: NEON is part of the AArch64 baseline.
        unsafe { vfmaq_f32(addend, self, factor) }
    }

    #[inline(always)]
    unsafe fn maximum(self, other: Self) -> Self {
        // SAFETY: NEON is part of the AArch64 baseline.
        unsafe { vbslq_f32(vcgtq_f32(self, other), self, other) }
    }

    #[inline(always)]
    unsafe fn minimum(self, other: Self) -> Self {
        // SAFETY: NEON is part of the AArch64 baseline.
        unsafe { vbslq_f32(vcltq_f32(self, other), self, other) }
    }

    #[inline(always)]
    unsafe fn where_less(self, limit: Self, then: Self, otherwise: Self) -> Self {
        // SAFETY: NEON is part of the AArch64 baseline.
        unsafe { vbslq_f32(vcltq_f32(self, limit), then, otherwise) }
    }

    #[inline(always)]
    unsafe fn round_to_bf16(self) -> Self {
        // SAFETY: NEON is part of the AArch64 baseline.
        unsafe {
            let bits = vreinterpretq_u32_f32(self);
            let odd = vandq_u32(vshrq_n_u32::<16>(bits), vdupq_n_u32(1));
            let bits = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
            vreinterpretq_f32_u32(vandq_u32(bits, vdupq_n_u32(!0xffff)))
        }
    }

    #[inline(always)]
    unsafe fn round_to_f16(self) -> Self {
        let wide: float32x4_t;
        // SAFETY: only registers are touched; the conversion is part of the AArch64 baseline.
        unsafe {
            asm!("fcvtl {wide:v}.4s, {half:v}.4h", wide = lateout(vreg) wide, half = in(vreg) to_f16(self),
                 options(pure, nomem, nostack, preserves_flags));
        }
        wide
    }

    #[inline(always)]
    unsafe fn scale_by_power_of_two(self, n: Self) -> Self {
        // SAFETY: NEON is part of the AArch64 baseline.
        unsafe {
            // The bits of 2ⁿ, and those of zero below the smallest exponent.
            let n = vmaxq_s32(vcvtq_s32_f32(n), vdupq_n_s32(-127));
            let power = vshlq_n_s32::<23>(vaddq_s32(n, vdupq_n_s32(127)));
            vmulq_f32(self, vreinterpretq_f32_s32(power))
        }
    }

    #[inline(always)]
    unsafe fn sum(self) -> f32 {
        // SAFETY: NEON is part of the AArch64 baseline.
        unsafe { vaddvq_f32(self) }
    }

    #[inline(always)]
    unsafe fn largest(self) -> f32 {
        // SAFETY: NEON is part of the AArch64 baseline.
        unsafe { vmaxvq_f32(self) }
    }

    #[inline(always)]
    unsafe fn transpose(from: *const f32, from_stride: usize, to: *mut f32, to_stride: usize) {
        // SAFETY: the caller promises both squares.
        unsafe {
            let row = |i: usize| vld1q_f32(from.add(i * from_stride));
            store_transposed([row(0), row(1), row(2), row(3)], to, to_stride);
        }
    }
}

/// The nearest f16 numbers, ties to even.
#[inline(always)]
fn to_f16(value: float32x4_t) -> uint16x4_t {
    let half: uint16x4_t;
    // SAFETY: only registers are touched; the conversion is part of the AArch64 baseline.
    unsafe {
        asm!("fcvtn {half:v}.4h, {value:v}.4s", half = lateout(vreg) half, value = in(vreg) value,
             options(pure, nomem, nostack, preserves_flags));
    }
    half
}

/// Writes the columns of four rows.
///
/// # Safety
/// There is room for four numbers at each of four strides from `to`.
#[inline(always)]
unsafe fn store_transposed(rows: [float32x4_t; 4], to: *mut f32, to_stride: usize) {
    // SAFETY: the caller promises the room; NEON is part of the AArch64 baseline.
    unsafe {
        let [a, b, c, d] = rows;
        let (ab, cd) = (vtrnq_f32(a, b), vtrnq_f32(c, d));
        let low = |x: float32x4_t, y: float32x4_t| vcombine_f32(vget_low_f32(x), vget_low_f32(y));
        let high = |x: float32x4_t, y: float32x4_t| vcombine_f32(vget_high_f32(x), vget_high_f32(y));
        vst1q_f32(to, low(ab.0, cd.0));
        vst1q_f32(to.add(to_stride), low(ab.1, cd.1));
        vst1q_f32(to.add(2 * to_stride), high(ab.0, cd.0));
        vst1q_f32(to.add(3 * to_stride), high(ab.1, cd.1));
    }
}

/// `sum + a · b` by fours.
///
/// # Safety
/// The CPU has the dot-product extension.
#[inline(always)]
unsafe fn sdot(mut sum: int32x4_t, a: int8x16_t, b: int8x16_t) -> int32x4_t {
    // SAFETY: the caller promises the instruction; only registers are touched.
    unsafe {
        asm!(
            ".arch_extension dotprod",
            "sdot {sum:v}.4s, {a:v}.16b, {b:v}.16b",
            sum = inout(vreg) sum, a = in(vreg) a, b = in(vreg) b,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    sum
}

/// 32 bytes in two registers.
#[derive(Clone, Copy)]
pub(crate) struct BytePair(uint8x16_t, uint8x16_t);

impl Bytes for BytePair {
    /// High bytes and low bytes of both halves.
    type Activations = [[int8x16_t; 2]; 2];
    type Integers = [int32x4_t; 2];
    type Sums = float32x4_t;

    #[inline(always)]
    unsafe fn load(at: *const u8) -> BytePair {
        // SAFETY: the caller promises 32 bytes.
        unsafe { BytePair(vld1q_u8(at), vld1q_u8(at.add(16))) }
    }

    #[inline(always)]
    unsafe fn nibbles(at: *const u8) -> BytePair {
        // SAFETY: the caller promises 16 bytes.
        unsafe {
            let bytes = vld1q_u8(at);
            BytePair(vandq_u8(bytes, vdupq_n_u8(15)), vshrq_n_u8::<4>(bytes))
        }
    }

    #[inline(always)]
    unsafe fn splat(byte: u8) -> BytePair {
        // SAFETY: NEON is part of the AArch64 baseline.
        unsafe { BytePair(vdupq_n_u8(byte), vdupq_n_u8(byte)) }
    }

    #[inline(always)]
    unsafe fn and(self, other: BytePair) -> BytePair {
        // SAFETY: NEON is part of the AArch64 baseline.
        unsafe { BytePair(vandq_u8(self.0, other.0), vandq_u8(self.1, other.1)) }
    }

    #[inline(always)]
    unsafe fn or(self, other: BytePair) -> BytePair {
        // SAFETY: NEON is part of the AArch64 baseline.
        unsafe { BytePair(vorrq_u8(self.0, other.0), vorrq_u8(self.1, other.1)) }
    }

    #[inline(always)]
    unsafe fn subtract(self, other: BytePair) -> BytePair {
        // SAFETY: NEON is part of the AArch64 baseline.
        unsafe { BytePair(vsubq_u8(self.0, other.0), vsubq_u8(self.1, other.1)) }
    }

    #[inline(always)]
    unsafe fn shift_right(self, by: usize) -> BytePair {
        // SAFETY: NEON is part of the AArch64 baseline.
        unsafe {
            // A negative count shifts right.
            let by = vdupq_n_s8(-(by as i8));
            BytePair(vshlq_u8(self.0, by), vshlq_u8(self.1, by))
        }
    }

    #[inline(always)]
    unsafe fn shift_left(self, by: usize) -> BytePair {
        // SAFETY: NEON is part of the AArch64 baseline.
        unsafe {
            let by = vdupq_n_s8(by as i8);
            BytePair(vshlq_u8(self.0, by), vshlq_u8(self.1, by))
        }
    }

    #[inline(always)]
    unsafe fn where_set(self, mask: BytePair, value: u8) -> BytePair {
        // SAFETY: NEON is part of the AArch64 baseline.
        unsafe {
            let value = vdupq_n_u8(value);
            BytePair(vandq_u8(vtstq_u8(self.0, mask.0), value), vandq_u8(vtstq_u8(self.1, mask.1), value))
        }
    }

    #[inline(always)]
    unsafe fn look_up(self, table: &[i8; 16]) -> BytePair {
        // SAFETY: NEON is part of the AArch64 baseline; the table has sixteen bytes.
        unsafe {
            let table = vld1q_u8(table.as_ptr().cast());
            BytePair(vqtbl1q_u8(table, self.0), vqtbl1q_u8(table, self.1))
        }
    }

    #[inline(always)]
    unsafe fn from_bits(bits: u32) -> BytePair {
        // SAFETY: NEON is part of the AArch64 baseline.
        unsafe {
            let [first, second, third, fourth] = bits.to_le_bytes();
            let bit = vcreate_u8(0x8040_2010_0804_0201);
            let bit = vcombine_u8(bit, bit);
            BytePair(
                vtstq_u8(vcombine_u8(vdup_n_u8(first), vdup_n_u8(second)), bit),
                vtstq_u8(vcombine_u8(vdup_n_u8(third), vdup_n_u8(fourth)), bit),
            )
        }
    }

    #[inline(always)]
    unsafe fn activations(high: *const i8, low: *const i8) -> [[int8x16_t; 2]; 2] {
        // SAFETY: the caller promises 32 bytes each.
        unsafe { [[vld1q_s8(high), vld1q_s8(high.add(16))], [vld1q_s8(low), vld1q_s8(low.add(16))]] }
    }

    #[inline(always)]
    unsafe fn dot(self, x: [[int8x16_t; 2]; 2]) -> [int32x4_t; 2] {
        // SAFETY: the caller promises the instructions.
        unsafe {
            let [first, second] = [vreinterpretq_s8_u8(self.0), vreinterpretq_s8_u8(self.1)];
            let high = [sdot(vdupq_n_s32(0), first, x[0][0]), sdot(vdupq_n_s32(0), second, x[0][1])];
            [
                sdot(vshlq_n_s32::<8>(high[0]), first, x[1][0]),
                sdot(vshlq_n_s32::<8>(high[1]), second, x[1][1]),
            ]
        }
    }

    #[inline(always)]
    unsafe fn zero() -> float32x4_t {
        // SAFETY: NEON is part of the AArch64 baseline.
        unsafe { vdupq_n_f32(0.0) }
    }

    #[inline(always)]
    unsafe fn accumulate(sums: float32x4_t, integers: [int32x4_t; 2], scales: [f32; 2]) -> float32x4_t {
        // SAFETY: NEON is part of the AArch64 baseline.
        unsafe {
            let sums = vfmaq_n_f32(sums, vcvtq_f32_s32(integers[0]), scales[0]);
            vfmaq_n_f32(sums, vcvtq_f32_s32(integers[1]), scales[1])
        }
    }

    #[inline(always)]
    unsafe fn total(sums: float32x4_t) -> f32 {
        // SAFETY: NEON is part of the AArch64 baseline.
        unsafe { vaddvq_f32(sums) }
    }

    #[inline(always)]
    unsafe fn widen_half(bits: u16) -> f32 {
        let wide: f32;
        // SAFETY: only registers are touched; the conversion is part of the AArch64 baseline.
        unsafe {
            asm!(
                "fmov {wide:s}, {bits:w}",
                "fcvt {wide:s}, {wide:h}",
                wide = lateout(vreg) wide, bits = in(reg) u32::from(bits),
                options(pure, nomem, nostack, preserves_flags)
            );
        }
        wide
    }
}

impl CodeWords for uint8x16_t {
    const LANES: usize = 4;
    type Sums = int32x4_t;
    type Partial = int32x4_t;
    type Numbers = float32x4_t;

    #[inline(always)]
    fn words_before_widening(_bits: u32) -> usize {
        usize::MAX
    }

    #[inline(always)]
    unsafe fn load(at: *const u8) -> uint8x16_t {
        // SAFETY: the caller promises four words.
        unsafe { vld1q_u8(at) }
    }

    #[inline(always)]
    unsafe fn splat(bytes: i32) -> uint8x16_t {
        // SAFETY: NEON is part of the AArch64 baseline.
        unsafe { vreinterpretq_u8_s32(vdupq_n_s32(bytes)) }
    }

    #[inline(always)]
    unsafe fn low_codes<const BITS: u32>(self) -> uint8x16_t {
        // SAFETY: NEON is part of the AArch64 baseline.
        unsafe { vandq_u8(self, vdupq_n_u8((1 << BITS) - 1)) }
    }

    #[inline(always)]
    unsafe fn next_codes<const BITS: u32>(self) -> uint8x16_t {
        // SAFETY: NEON is part of the AArch64 baseline.
        unsafe {
            match BITS {
                1 => vshrq_n_u8::<1>(self),
                2 => vshrq_n_u8::<2>(self),
                _ => vshrq_n_u8::<4>(self),
            }
        }
    }

    #[inline(always)]
    unsafe fn zero() -> int32x4_t {
        // SAFETY: NEON is part of the AArch64 baseline.
        unsafe { vdupq_n_s32(0) }
    }

    #[inline(always)]
    unsafe fn begin(sums: int32x4_t) -> int32x4_t {
        sums
    }

    #[inline(always)]
    unsafe fn add_products(partial: int32x4_t, codes: uint8x16_t, bytes: uint8x16_t) -> int32x4_t {
        // SAFETY: the caller promises the instructions. Codes are small, so they are signed bytes as well.
        unsafe { sdot(partial, vreinterpretq_s8_u8(codes), vreinterpretq_s8_u8(bytes)) }
    }

    #[inline(always)]
    unsafe fn widen(_sums: int32x4_t, partial: int32x4_t) -> int32x4_t {
        partial
    }

    #[inline(always)]
    unsafe fn join(high: int32x4_t, low: int32x4_t) -> float32x4_t {
        // SAFETY: NEON is part of the AArch64 baseline.
        unsafe { vcvtq_f32_s32(vaddq_s32(vshlq_n_s32::<8>(high), low)) }
    }

    #[inline(always)]
    unsafe fn store(sums: int32x4_t, at: *mut i32) {
        // SAFETY: the caller promises room for four sums.
        unsafe { vst1q_s32(at, sums) }
    }
}
