//! AVX2: eight rows in a register.

use std::arch::x86_64::*;

use super::lanes::Lanes;

impl Lanes for __m256 {
    const WIDTH: usize = 8;

    #[inline(always)]
    unsafe fn load(at: *const f32) -> Self {
        // SAFETY: the caller promises eight numbers.
        unsafe { _mm256_loadu_ps(at) }
    }

    #[inline(always)]
    unsafe fn store(self, at: *mut f32) {
        // SAFETY: the caller promises room for eight numbers.
        unsafe { _mm256_storeu_ps(at, self) }
    }

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self {
        // SAFETY: the caller promises the instructions.
        unsafe { _mm256_set1_ps(value) }
    }

    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        // SAFETY: the caller promises the instructions.
        unsafe { _mm256_add_ps(self, other) }
    }

    #[inline(always)]
    unsafe fn subtract(self, other: Self) -> Self {
        // SAFETY: the caller promises the instructions.
        unsafe { _mm256_sub_ps(self, other) }
    }

    #[inline(always)]
    unsafe fn multiply(self, other: Self) -> Self {
        // SAFETY: the caller promises the instructions.
        unsafe { _mm256_mul_ps(self, other) }
    }

    #[inline(always)]
    unsafe fn divide(self, other: Self) -> Self {
        // SAFETY: the caller promises the instructions.
        unsafe { _mm256_div_ps(self, other) }
    }

    #[inline(always)]
    unsafe fn square_root(self) -> Self {
        // SAFETY: the caller promises the instructions.
        unsafe { _mm256_sqrt_ps(self) }
    }

    #[inline(always)]
    unsafe fn multiply_add(self, factor: Self, addend: Self) -> Self {
        // SAFETY: the caller promises the instructions.
        unsafe { _mm256_fmadd_ps(self, factor, addend) }
    }

    #[inline(always)]
    unsafe fn maximum(self, other: Self) -> Self {
        // SAFETY: the caller promises the instructions.
        unsafe { _mm256_max_ps(self, other) }
    }

    #[inline(always)]
    unsafe fn minimum(self, other: Self) -> Self {
        // SAFETY: the caller promises the instructions.
        unsafe { _mm256_min_ps(self, other) }
    }

    #[inline(always)]
    unsafe fn magnitude(self) -> Self {
        // SAFETY: the caller promises the instructions.
        unsafe { _mm256_andnot_ps(_mm256_set1_ps(-0.0), self) }
    }

    #[inline(always)]
    unsafe fn truncate(self) -> Self {
        // SAFETY: the caller promises the instructions.
        unsafe { _mm256_round_ps::<{ _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC }>(self) }
    }

    #[inline(always)]
    unsafe fn where_less(self, limit: Self, then: Self, otherwise: Self) -> Self {
        // SAFETY: the caller promises the instructions.
        unsafe { _mm256_blendv_ps(otherwise, then, _mm256_cmp_ps::<_CMP_LT_OQ>(self, limit)) }
    }

    #[inline(always)]
    unsafe fn round_to_bf16(self) -> Self {
        // SAFETY: the caller promises the instructions.
        unsafe {
            let bits = _mm256_castps_si256(self);
            let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
            let bits = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
            _mm256_castsi256_ps(_mm256_and_si256(bits, _mm256_set1_epi32(!0xffff)))
        }
    }

    #[inline(always)]
    unsafe fn round_to_f16(self) -> Self {
        // SAFETY: the caller promises the instructions.
        unsafe { _mm256_cvtph_ps(_mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self)) }
    }

    #[inline(always)]
    unsafe fn store_f16(self, at: *mut u16) {
        // SAFETY: the caller promises room for eight numbers.
        unsafe { _mm_storeu_si128(at.cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self)) }
    }

    #[inline(always)]
    unsafe fn store_bytes(self, at: *mut u8) {
        // SAFETY: the caller promises room for eight bytes.
        unsafe {
            let words = _mm256_cvttps_epi32(self);
            let words = _mm_packs_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256::<1>(words));
            _mm_storel_epi64(at.cast(), _mm_packus_epi16(words, words));
        }
    }

    #[inline(always)]
    unsafe fn transpose(from: *const f32, from_stride: usize, to: *mut f32, to_stride: usize) {
        // SAFETY: the caller promises both squares.
        unsafe {
            let mut rows = [_mm256_setzero_ps(); 8];
            for (index, row) in rows.iter_mut().enumerate() {
                *row = _mm256_loadu_ps(from.add(index * from_stride));
            }
            store_transposed(rows, to, to_stride);
        }
    }
}

/// Writes the columns of eight rows.
///
/// # Safety
/// The CPU has AVX2 and there is room for eight numbers at each of eight strides from `to`.
#[inline(always)]
unsafe fn store_transposed(rows: [__m256; 8], to: *mut f32, to_stride: usize) {
    // SAFETY: the caller promises the instructions and the room.
    unsafe {
        // Pairs of rows, then fours, inside 128-bit halves; last, halves.
        let mut pairs = rows;
        for i in 0..4 {
            pairs[2 * i] = _mm256_unpacklo_ps(rows[2 * i], rows[2 * i + 1]);
            pairs[2 * i + 1] = _mm256_unpackhi_ps(rows[2 * i], rows[2 * i + 1]);
        }
        let mut fours = pairs;
        for i in 0..2 {
            for j in 0..2 {
                let (a, b) = (pairs[4 * i + j], pairs[4 * i + 2 + j]);
                fours[4 * i + 2 * j] = _mm256_shuffle_ps::<0x44>(a, b);
                fours[4 * i + 2 * j + 1] = _mm256_shuffle_ps::<0xee>(a, b);
            }
        }
        for j in 0..4 {
            let low = _mm256_permute2f128_ps::<0x20>(fours[j], fours[4 + j]);
            let high = _mm256_permute2f128_ps::<0x31>(fours[j], fours[4 + j]);
            _mm256_storeu_ps(to.add(j * to_stride), low);
            _mm256_storeu_ps(to.add((4 + j) * to_stride), high);
        }
    }
}
