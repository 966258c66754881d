//! NEON with the dot-product extension: `sdot` multiplies 16 signed bytes and adds by fours.
//!
//! The intrinsic is not stable yet, so the instruction is written as assembly. Its feature is enabled by directive,
//! because the compiler's baseline for AArch64 does not have it; [`super::Dot::new`] checks that the CPU does.

use std::arch::aarch64::*;
use std::arch::asm;

use super::Product;
use super::lanes::{self, Bytes};
use crate::dtype::DType;

/// 32 bytes in two registers.
#[derive(Clone, Copy)]
struct Pair(uint8x16_t, uint8x16_t);

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

impl Bytes for Pair {
    /// High bytes and low bytes of both halves.
    type Activations = [[int8x16_t; 2]; 2];
    type Integers = [int32x4_t; 2];
    type Sums = float32x4_t;

    #[inline(always)]
    unsafe fn load(at: *const u8) -> Pair {
        // SAFETY: the caller promises 32 bytes.
        unsafe { Pair(vld1q_u8(at), vld1q_u8(at.add(16))) }
    }

    #[inline(always)]
    unsafe fn nibbles(at: *const u8) -> Pair {
        // SAFETY: the caller promises 16 bytes.
        unsafe {
            let bytes = vld1q_u8(at);
            Pair(vandq_u8(bytes, vdupq_n_u8(15)), vshrq_n_u8::<4>(bytes))
        }
    }

    #[inline(always)]
    unsafe fn splat(byte: u8) -> Pair {
        // SAFETY: NEON is part of the AArch64 baseline.
        unsafe { Pair(vdupq_n_u8(byte), vdupq_n_u8(byte)) }
    }

    #[inline(always)]
    unsafe fn and(self, other: Pair) -> Pair {
        // SAFETY: NEON is part of the AArch64 baseline.
        unsafe { Pair(vandq_u8(self.0, other.0), vandq_u8(self.1, other.1)) }
    }

    #[inline(always)]
    unsafe fn or(self, other: Pair) -> Pair {
        // SAFETY: NEON is part of the AArch64 baseline.
        unsafe { Pair(vorrq_u8(self.0, other.0), vorrq_u8(self.1, other.1)) }
    }

    #[inline(always)]
    unsafe fn subtract(self, other: Pair) -> Pair {
        // SAFETY: NEON is part of the AArch64 baseline.
        unsafe { Pair(vsubq_u8(self.0, other.0), vsubq_u8(self.1, other.1)) }
    }

    #[inline(always)]
    unsafe fn shift_right(self, by: usize) -> Pair {
        // SAFETY: NEON is part of the AArch64 baseline.
        unsafe {
            // A negative count shifts right.
            let by = vdupq_n_s8(-(by as i8));
            Pair(vshlq_u8(self.0, by), vshlq_u8(self.1, by))
        }
    }

    #[inline(always)]
    unsafe fn shift_left(self, by: usize) -> Pair {
        // SAFETY: NEON is part of the AArch64 baseline.
        unsafe {
            let by = vdupq_n_s8(by as i8);
            Pair(vshlq_u8(self.0, by), vshlq_u8(self.1, by))
        }
    }

    #[inline(always)]
    unsafe fn where_set(self, mask: Pair, value: u8) -> Pair {
        // SAFETY: NEON is part of the AArch64 baseline.
        unsafe {
            let value = vdupq_n_u8(value);
            Pair(vandq_u8(vtstq_u8(self.0, mask.0), value), vandq_u8(vtstq_u8(self.1, mask.1), value))
        }
    }

    #[inline(always)]
    unsafe fn from_bits(bits: u32) -> Pair {
        // SAFETY: NEON is part of the AArch64 baseline.
        unsafe {
            let [first, second, third, fourth] = bits.to_le_bytes();
            let bit = vcreate_u8(0x8040_2010_0804_0201);
            let bit = vcombine_u8(bit, bit);
            Pair(
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

    #[inline(always)]
    fn prefetch(at: *const u8) {
        // SAFETY: a prefetch does not access memory in the sense of the language, whatever the address.
        unsafe {
            asm!("prfm pldl1keep, [{at}]", at = in(reg) at, options(readonly, nostack, preserves_flags));
        }
    }
}

/// # Safety
/// The CPU has the dot-product extension.
pub(super) unsafe fn quantised_rows(dtype: DType, product: Product<'_>) {
    // SAFETY: passed on.
    unsafe { lanes::quantised_rows::<Pair>(dtype, product) }
}
