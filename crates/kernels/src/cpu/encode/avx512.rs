//! AVX-512: sixteen rows in a register.

use std::arch::x86_64::*;

use super::lanes::Lanes;
use crate::cpu::gemm::avx512::transpose;

impl Lanes for __m512 {
    const WIDTH: usize = 16;

    #[inline(always)]
    unsafe fn load(at: *const f32) -> Self {
        // SAFETY: the caller promises sixteen numbers.
        unsafe { _mm512_loadu_ps(at) }
    }

    #[inline(always)]
    unsafe fn store(self, at: *mut f32) {
        // SAFETY: the caller promises room for sixteen numbers.
        unsafe { _mm512_storeu_ps(at, self) }
    }

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self {
        // SAFETY: the caller promises the instructions.
        unsafe { _mm512_set1_ps(value) }
    }

    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        // SAFETY: the caller promises the instructions.
        unsafe { _mm512_add_ps(self, other) }
    }

    #[inline(always)]
    unsafe fn subtract(self, other: Self) -> Self {
        // SAFETY: the caller promises the instructions.
        unsafe { _mm512_sub_ps(self, other) }
    }

    #[inline(always)]
    unsafe fn multiply(self, other: Self) -> Self {
        // SAFETY: the caller promises the instructions.
        unsafe { _mm512_mul_ps(self, other) }
    }

    #[inline(always)]
    unsafe fn divide(self, other: Self) -> Self {
        // SAFETY: the caller promises the instructions.
        unsafe { _mm512_div_ps(self, other) }
    }

    #[inline(always)]
    unsafe fn square_root(self) -> Self {
        // SAFETY: the caller promises the instructions.
        unsafe { _mm512_sqrt_ps(self) }
    }

    #[inline(always)]
    unsafe fn multiply_add(self, factor: Self, addend: Self) -> Self {
        // SAFETY: the caller promises the instructions.
        unsafe { _mm512_fmadd_ps(self, factor, addend) }
    }

    #[inline(always)]
    unsafe fn maximum(self, other: Self) -> Self {
        // SAFETY: the caller promises the instructions.
        unsafe { _mm512_max_ps(self, other) }
    }

    #[inline(always)]
    unsafe fn minimum(self, other: Self) -> Self {
        // SAFETY: the caller promises the instructions.
        unsafe { _mm512_min_ps(self, other) }
    }

    #[inline(always)]
    unsafe fn magnitude(self) -> Self {
        // SAFETY: the caller promises the instructions.
        unsafe { _mm512_abs_ps(self) }
    }

    #[inline(always)]
    unsafe fn truncate(self) -> Self {
        // SAFETY: the caller promises the instructions.
        unsafe { _mm512_roundscale_ps::<{ _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC }>(self) }
    }

    #[inline(always)]
    unsafe fn where_less(self, limit: Self, then: Self, otherwise: Self) -> Self {
        // SAFETY: the caller promises the instructions.
        unsafe { _mm512_mask_blend_ps(_mm512_cmp_ps_mask::<_CMP_LT_OQ>(self, limit), otherwise, then) }
    }

    #[inline(always)]
    unsafe fn round_to_bf16(self) -> Self {
        // SAFETY: the caller promises the instructions.
        unsafe {
            let bits = _mm512_castps_si512(self);
            let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
            let bits = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
            _mm512_castsi512_ps(_mm512_and_si512(bits, _mm512_set1_epi32(!0xffff)))
        }
    }

    #[inline(always)]
    unsafe fn round_to_f16(self) -> Self {
        // SAFETY: the caller promises the instructions.
        unsafe { _mm512_cvtph_ps(_mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self)) }
    }

    #[inline(always)]
    unsafe fn store_f16(self, at: *mut u16) {
        // SAFETY: the caller promises room for sixteen numbers.
        unsafe { _mm256_storeu_si256(at.cast(), _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self)) }
    }

    #[inline(always)]
    unsafe fn store_bytes(self, at: *mut u8) {
        // SAFETY: the caller promises room for sixteen bytes.
        unsafe { _mm_storeu_si128(at.cast(), _mm512_cvtepi32_epi8(_mm512_cvttps_epi32(self))) }
    }

    #[inline(always)]
    unsafe fn transpose(from: *const f32, from_stride: usize, to: *mut f32, to_stride: usize) {
        // SAFETY: the caller promises both squares.
        unsafe {
            let mut rows = [_mm512_setzero_si512(); 16];
            for (index, row) in rows.iter_mut().enumerate() {
                *row = _mm512_loadu_si512(from.add(index * from_stride).cast());
            }
            store_rows(transpose(rows), to, to_stride);
        }
    }
}

/// Writes sixteen registers of sixteen words.
///
/// # Safety
/// The CPU has AVX-512 and there is room for sixteen numbers at each of sixteen strides from `to`.
#[inline(always)]
unsafe fn store_rows(rows: [__m512i; 16], to: *mut f32, to_stride: usize) {
    for (index, row) in rows.into_iter().enumerate() {
        // SAFETY: the caller promises the instructions and the room.
        unsafe { _mm512_storeu_si512(to.add(index * to_stride).cast(), row) };
    }
}
