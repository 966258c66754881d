//! AVX-512 F, BW, DQ, VL and VNNI: sixteen numbers in a register. `vpdpbusd` multiplies four codes of a word with four bytes.

use std::arch::x86_64::*;

use super::codes::CodeWords;
use super::intrinsics;
use super::vector::{OCTAVE_BITS, Vector};

impl Vector for __m512 {
    const WIDTH: usize = 16;
    const REGISTERS: usize = 32;
    type Codes = __m512i;

    intrinsics! {
        add(other) = _mm512_add_ps;
        subtract(other) = _mm512_sub_ps;
        multiply(other) = _mm512_mul_ps;
        divide(other) = _mm512_div_ps;
        maximum(other) = _mm512_max_ps;
        minimum(other) = _mm512_min_ps;
        square_root() = _mm512_sqrt_ps;
        multiply_add(factor, addend) = _mm512_fmadd_ps;
    }

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
    unsafe fn load_f16(at: *const u8) -> Self {
        // SAFETY: the caller promises sixteen numbers.
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(at.cast())) }
    }

    #[inline(always)]
    unsafe fn load_bf16(at: *const u8) -> Self {
        // SAFETY: the caller promises sixteen numbers.
        unsafe {
            let words = _mm512_cvtepu16_epi32(_mm256_loadu_si256(at.cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(words))
        }
    }

    #[inline(always)]
    unsafe fn load_e4m3(at: *const u8) -> Self {
        // SAFETY: the caller promises sixteen numbers.
        unsafe {
            // As f16 with the exponent's bias of FP8: 2⁸ too small. All ones is NaN in both.
            let words = _mm256_cvtepu8_epi16(_mm_loadu_si128(at.cast()));
            let magnitude = _mm256_and_si256(words, _mm256_set1_epi16(0x7f));
            let nan = _mm256_cmpeq_epi16(magnitude, _mm256_set1_epi16(0x7f));
            let sign = _mm256_slli_epi16::<8>(_mm256_xor_si256(words, magnitude));
            let half = _mm256_or_si256(_mm256_or_si256(sign, _mm256_slli_epi16::<7>(magnitude)), nan);
            _mm512_mul_ps(_mm512_cvtph_ps(half), _mm512_set1_ps(256.0))
        }
    }

    #[inline(always)]
    unsafe fn load_band_scales(at: *const u8) -> Self {
        // SAFETY: the caller promises sixteen bytes; the table has sixteen words.
        unsafe {
            let codes = _mm512_cvtepu8_epi32(_mm_loadu_si128(at.cast()));
            // A permutation looks at the lowest four bits of an index.
            let step = _mm512_permutexvar_epi32(codes, _mm512_loadu_si512(OCTAVE_BITS.as_ptr().cast()));
            let scales = _mm512_add_epi32(step, _mm512_slli_epi32::<19>(codes));
            _mm512_castsi512_ps(_mm512_maskz_mov_epi32(_mm512_test_epi32_mask(codes, codes), scales))
        }
    }

    #[inline(always)]
    unsafe fn load_bf16_pairs(at: *const u16) -> [Self; 2] {
        // SAFETY: the caller promises sixteen pairs.
        unsafe {
            let pairs = _mm512_loadu_si512(at.cast());
            let second = _mm512_and_si512(pairs, _mm512_set1_epi32(!0xffff));
            [_mm512_castsi512_ps(_mm512_slli_epi32::<16>(pairs)), _mm512_castsi512_ps(second)]
        }
    }

    #[inline(always)]
    unsafe fn round(self) -> Self {
        // SAFETY: the caller promises the instructions.
        unsafe { _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(self) }
    }

    #[inline(always)]
    unsafe fn scale_by_power_of_two(self, n: Self) -> Self {
        // SAFETY: the caller promises the instructions.
        unsafe { _mm512_scalef_ps(self, n) }
    }

    #[inline(always)]
    unsafe fn sum(self) -> f32 {
        // SAFETY: the caller promises the instructions.
        unsafe { _mm512_reduce_add_ps(self) }
    }

    #[inline(always)]
    unsafe fn largest(self) -> f32 {
        // SAFETY: the caller promises the instructions.
        unsafe { _mm512_reduce_max_ps(self) }
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

/// Transposes 16 rows of 16 words.
#[inline]
#[target_feature(enable = "avx512f")]
pub(crate) fn transpose(r: [__m512i; 16]) -> [__m512i; 16] {
    let mut a = r;
    for i in 0..8 {
        a[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
        a[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
    }
    let mut b = a;
    for i in 0..4 {
        for j in 0..2 {
            b[4 * i + 2 * j] = _mm512_unpacklo_epi64(a[4 * i + j], a[4 * i + 2 + j]);
            b[4 * i + 2 * j + 1] = _mm512_unpackhi_epi64(a[4 * i + j], a[4 * i + 2 + j]);
        }
    }
    // b[4i + j] now holds column j of each 128-bit lane for rows 4i..4i+4.
    let mut out = r;
    for j in 0..4 {
        let low = _mm512_shuffle_i32x4::<0x88>(b[j], b[4 + j]);
        let high = _mm512_shuffle_i32x4::<0xdd>(b[j], b[4 + j]);
        let low2 = _mm512_shuffle_i32x4::<0x88>(b[8 + j], b[12 + j]);
        let high2 = _mm512_shuffle_i32x4::<0xdd>(b[8 + j], b[12 + j]);
        out[j] = _mm512_shuffle_i32x4::<0x88>(low, low2);
        out[8 + j] = _mm512_shuffle_i32x4::<0xdd>(low, low2);
        out[4 + j] = _mm512_shuffle_i32x4::<0x88>(high, high2);
        out[12 + j] = _mm512_shuffle_i32x4::<0xdd>(high, high2);
    }
    out
}

impl CodeWords for __m512i {
    const LANES: usize = 16;
    type Sums = __m512i;
    type Partial = __m512i;
    type Numbers = __m512;

    #[inline(always)]
    fn words_before_widening(_bits: u32) -> usize {
        usize::MAX
    }

    #[inline(always)]
    unsafe fn load(at: *const u8) -> __m512i {
        // SAFETY: the caller promises sixteen words.
        unsafe { _mm512_loadu_si512(at.cast()) }
    }

    #[inline(always)]
    unsafe fn splat(bytes: i32) -> __m512i {
        // SAFETY: the caller promises the instructions.
        unsafe { _mm512_set1_epi32(bytes) }
    }

    #[inline(always)]
    unsafe fn low_codes<const BITS: u32>(self) -> __m512i {
        // SAFETY: the caller promises the instructions.
        unsafe { _mm512_and_si512(self, _mm512_set1_epi8((1 << BITS) - 1)) }
    }

    #[inline(always)]
    unsafe fn next_codes<const BITS: u32>(self) -> __m512i {
        // SAFETY: the caller promises the instructions.
        unsafe { _mm512_srli_epi32::<BITS>(self) }
    }

    #[inline(always)]
    unsafe fn zero() -> __m512i {
        // SAFETY: the caller promises the instructions.
        unsafe { _mm512_setzero_si512() }
    }

    #[inline(always)]
    unsafe fn begin(sums: __m512i) -> __m512i {
        sums
    }

    #[inline(always)]
    unsafe fn add_products(partial: __m512i, codes: __m512i, bytes: __m512i) -> __m512i {
        // SAFETY: the caller promises the instructions.
        unsafe { _mm512_dpbusd_epi32(partial, codes, bytes) }
    }

    #[inline(always)]
    unsafe fn widen(_sums: __m512i, partial: __m512i) -> __m512i {
        partial
    }

    #[inline(always)]
    unsafe fn join(high: __m512i, low: __m512i) -> __m512 {
        // SAFETY: the caller promises the instructions.
        unsafe { _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32::<8>(high), low)) }
    }

    #[inline(always)]
    unsafe fn store(sums: __m512i, at: *mut i32) {
        // SAFETY: the caller promises room for sixteen sums.
        unsafe { _mm512_storeu_si512(at.cast(), sums) }
    }
}
