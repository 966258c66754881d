//! AVX2, FMA and F16C: eight numbers in a register.
//!
//! The byte product of AVX2 saturates at 16 bits. Codes of weights can reach that, so these are widened to 16 bits and
//! multiplied with `vpmaddwd`; even and odd bytes are widened by shifts in place, so that no byte changes its lane. Codes of
//! a cache are small: `vpmaddubsw` multiplies them with bytes and adds in pairs.

use std::arch::x86_64::*;

use super::bytes::Bytes;
use super::codes::CodeWords;
use super::intrinsics;
use super::vector::{OCTAVE_BITS, Vector};

impl Vector for __m256 {
    const WIDTH: usize = 8;
    const REGISTERS: usize = 16;
    type Codes = __m256i;

    intrinsics! {
        add(other) = _mm256_add_ps;
        subtract(other) = _mm256_sub_ps;
        multiply(other) = _mm256_mul_ps;
        divide(other) = _mm256_div_ps;
        maximum(other) = _mm256_max_ps;
        minimum(other) = _mm256_min_ps;
        square_root() = _mm256_sqrt_ps;
        multiply_add(factor, addend) = _mm256_fmadd_ps;
    }

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
    unsafe fn load_f16(at: *const u8) -> Self {
        // SAFETY: the caller promises eight numbers.
        unsafe { _mm256_cvtph_ps(_mm_loadu_si128(at.cast())) }
    }

    #[inline(always)]
    unsafe fn load_bf16(at: *const u8) -> Self {
        // SAFETY: the caller promises eight numbers.
        unsafe {
            let words = _mm256_cvtepu16_epi32(_mm_loadu_si128(at.cast()));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(words))
        }
    }

    #[inline(always)]
    unsafe fn load_e4m3(at: *const u8) -> Self {
        // SAFETY: the caller promises eight numbers.
        unsafe {
            // As f16 with the exponent's bias of FP8: 2⁸ too small. All ones is NaN in both.
            let words = _mm_cvtepu8_epi16(_mm_loadl_epi64(at.cast()));
            let magnitude = _mm_and_si128(words, _mm_set1_epi16(0x7f));
            let nan = _mm_cmpeq_epi16(magnitude, _mm_set1_epi16(0x7f));
            let sign = _mm_slli_epi16::<8>(_mm_xor_si128(words, magnitude));
            let half = _mm_or_si128(_mm_or_si128(sign, _mm_slli_epi16::<7>(magnitude)), nan);
            _mm256_mul_ps(_mm256_cvtph_ps(half), _mm256_set1_ps(256.0))
        }
    }

    #[inline(always)]
    unsafe fn load_band_scales(at: *const u8) -> Self {
        // SAFETY: the caller promises eight bytes; the table has sixteen words.
        unsafe {
            let codes = _mm256_cvtepu8_epi32(_mm_loadl_epi64(at.cast()));
            let table = OCTAVE_BITS.as_ptr().cast::<__m256i>();
            // A permutation looks at the lowest three bits of an index, and a blend at the sign: bit 3 is moved there.
            let first = _mm256_permutevar8x32_epi32(_mm256_loadu_si256(table), codes);
            let second = _mm256_permutevar8x32_epi32(_mm256_loadu_si256(table.add(1)), codes);
            let step = _mm256_blendv_ps(
                _mm256_castsi256_ps(first),
                _mm256_castsi256_ps(second),
                _mm256_castsi256_ps(_mm256_slli_epi32::<28>(codes)),
            );
            let scales = _mm256_add_epi32(_mm256_castps_si256(step), _mm256_slli_epi32::<19>(codes));
            let zero = _mm256_cmpeq_epi32(codes, _mm256_setzero_si256());
            _mm256_castsi256_ps(_mm256_andnot_si256(zero, scales))
        }
    }

    #[inline(always)]
    unsafe fn load_bf16_pairs(at: *const u16) -> [Self; 2] {
        // SAFETY: the caller promises eight pairs.
        unsafe {
            let pairs = _mm256_loadu_si256(at.cast());
            let second = _mm256_and_si256(pairs, _mm256_set1_epi32(!0xffff));
            [_mm256_castsi256_ps(_mm256_slli_epi32::<16>(pairs)), _mm256_castsi256_ps(second)]
        }
    }

    #[inline(always)]
    unsafe fn round(self) -> Self {
        // SAFETY: the caller promises the instructions.
        unsafe { _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(self) }
    }

    #[inline(always)]
    unsafe fn scale_by_power_of_two(self, n: Self) -> Self {
        // SAFETY: the caller promises the instructions.
        unsafe {
            // The bits of 2ⁿ, and those of zero below the smallest exponent.
            let n = _mm256_max_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(-127));
            let power = _mm256_slli_epi32::<23>(_mm256_add_epi32(n, _mm256_set1_epi32(127)));
            _mm256_mul_ps(self, _mm256_castsi256_ps(power))
        }
    }

    #[inline(always)]
    unsafe fn sum(self) -> f32 {
        // SAFETY: the caller promises the instructions.
        unsafe {
            let four = _mm_add_ps(_mm256_castps256_ps128(self), _mm256_extractf128_ps::<1>(self));
            let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
        }
    }

    #[inline(always)]
    unsafe fn largest(self) -> f32 {
        // SAFETY: the caller promises the instructions.
        unsafe {
            let four = _mm_max_ps(_mm256_castps256_ps128(self), _mm256_extractf128_ps::<1>(self));
            let two = _mm_max_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)))
        }
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

impl Bytes for __m256i {
    /// The 16-bit numbers at even and at odd places.
    type Activations = [__m256i; 2];
    type Integers = __m256i;
    type Sums = __m256;

    #[inline(always)]
    unsafe fn load(at: *const u8) -> __m256i {
        // SAFETY: the caller promises 32 bytes.
        unsafe { _mm256_loadu_si256(at.cast()) }
    }

    #[inline(always)]
    unsafe fn nibbles(at: *const u8) -> __m256i {
        // SAFETY: the caller promises 16 bytes.
        unsafe {
            let bytes = _mm_loadu_si128(at.cast());
            let both =
                _mm256_inserti128_si256::<1>(_mm256_castsi128_si256(bytes), _mm_srli_epi16::<4>(bytes));
            _mm256_and_si256(both, _mm256_set1_epi8(15))
        }
    }

    #[inline(always)]
    unsafe fn splat(byte: u8) -> __m256i {
        // SAFETY: the caller promises the instructions.
        unsafe { _mm256_set1_epi8(byte as i8) }
    }

    #[inline(always)]
    unsafe fn and(self, other: __m256i) -> __m256i {
        // SAFETY: the caller promises the instructions.
        unsafe { _mm256_and_si256(self, other) }
    }

    #[inline(always)]
    unsafe fn or(self, other: __m256i) -> __m256i {
        // SAFETY: the caller promises the instructions.
        unsafe { _mm256_or_si256(self, other) }
    }

    #[inline(always)]
    unsafe fn subtract(self, other: __m256i) -> __m256i {
        // SAFETY: the caller promises the instructions.
        unsafe { _mm256_sub_epi8(self, other) }
    }

    #[inline(always)]
    unsafe fn shift_right(self, by: usize) -> __m256i {
        // SAFETY: the caller promises the instructions.
        unsafe { _mm256_srl_epi16(self, _mm_cvtsi32_si128(by as i32)) }
    }

    #[inline(always)]
    unsafe fn shift_left(self, by: usize) -> __m256i {
        // SAFETY: the caller promises the instructions.
        unsafe { _mm256_sll_epi16(self, _mm_cvtsi32_si128(by as i32)) }
    }

    #[inline(always)]
    unsafe fn where_set(self, mask: __m256i, value: u8) -> __m256i {
        // SAFETY: the caller promises the instructions.
        unsafe {
            let clear = _mm256_cmpeq_epi8(_mm256_and_si256(self, mask), _mm256_setzero_si256());
            _mm256_andnot_si256(clear, _mm256_set1_epi8(value as i8))
        }
    }

    #[inline(always)]
    unsafe fn look_up(self, table: &[i8; 16]) -> __m256i {
        // SAFETY: the caller promises the instructions; the table has sixteen bytes.
        unsafe {
            let table = _mm256_broadcastsi128_si256(_mm_loadu_si128(table.as_ptr().cast()));
            _mm256_shuffle_epi8(table, self)
        }
    }

    #[inline(always)]
    unsafe fn from_bits(bits: u32) -> __m256i {
        // SAFETY: the caller promises the instructions.
        unsafe {
            // Byte `i` gets byte `i / 8` of the bits and keeps bit `i % 8` of it.
            let byte =
                _mm256_setr_epi64x(0, 0x0101_0101_0101_0101, 0x0202_0202_0202_0202, 0x0303_0303_0303_0303);
            let spread = _mm256_shuffle_epi8(_mm256_set1_epi32(bits as i32), byte);
            let bit = _mm256_set1_epi64x(0x8040_2010_0804_0201u64 as i64);
            _mm256_cmpeq_epi8(_mm256_and_si256(spread, bit), bit)
        }
    }

    #[inline(always)]
    unsafe fn activations(high: *const i8, low: *const i8) -> [__m256i; 2] {
        // SAFETY: the caller promises 32 bytes each.
        unsafe {
            let (high, low) = (_mm256_loadu_si256(high.cast()), _mm256_loadu_si256(low.cast()));
            let low_even = _mm256_srai_epi16::<8>(_mm256_slli_epi16::<8>(low));
            let even = _mm256_add_epi16(_mm256_slli_epi16::<8>(high), low_even);
            let high_odd = _mm256_and_si256(high, _mm256_set1_epi16(0xff00u16 as i16));
            [even, _mm256_add_epi16(high_odd, _mm256_srai_epi16::<8>(low))]
        }
    }

    #[inline(always)]
    unsafe fn dot(self, x: [__m256i; 2]) -> __m256i {
        // SAFETY: the caller promises the instructions.
        unsafe {
            let even = _mm256_srai_epi16::<8>(_mm256_slli_epi16::<8>(self));
            let odd = _mm256_srai_epi16::<8>(self);
            _mm256_add_epi32(_mm256_madd_epi16(even, x[0]), _mm256_madd_epi16(odd, x[1]))
        }
    }

    #[inline(always)]
    unsafe fn zero() -> __m256 {
        // SAFETY: the caller promises the instructions.
        unsafe { _mm256_setzero_ps() }
    }

    #[inline(always)]
    unsafe fn accumulate(sums: __m256, integers: __m256i, scales: [f32; 2]) -> __m256 {
        // SAFETY: the caller promises the instructions.
        unsafe {
            let scales = _mm256_set_m128(_mm_set1_ps(scales[1]), _mm_set1_ps(scales[0]));
            _mm256_fmadd_ps(_mm256_cvtepi32_ps(integers), scales, sums)
        }
    }

    #[inline(always)]
    unsafe fn total(sums: __m256) -> f32 {
        // SAFETY: the caller promises the instructions.
        unsafe { sums.sum() }
    }

    #[inline(always)]
    unsafe fn widen_half(bits: u16) -> f32 {
        // SAFETY: the caller promises the instructions.
        unsafe { _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(i32::from(bits)))) }
    }
}

impl CodeWords for __m256i {
    const LANES: usize = 8;
    type Sums = __m256i;
    /// Two sums of 16 bits for each word.
    type Partial = __m256i;
    type Numbers = __m256;

    #[inline(always)]
    fn words_before_widening(bits: u32) -> usize {
        // A pair of products is at most 2·128 with 1-bit, 2·3·128 with 2-bit and 2·15·128 with 4-bit codes, and a word has
        // eight, four or two of them.
        if bits <= 2 { 8 } else { 4 }
    }

    #[inline(always)]
    unsafe fn load(at: *const u8) -> __m256i {
        // SAFETY: the caller promises eight words.
        unsafe { _mm256_loadu_si256(at.cast()) }
    }

    #[inline(always)]
    unsafe fn splat(bytes: i32) -> __m256i {
        // SAFETY: the caller promises the instructions.
        unsafe { _mm256_set1_epi32(bytes) }
    }

    #[inline(always)]
    unsafe fn low_codes<const BITS: u32>(self) -> __m256i {
        // SAFETY: the caller promises the instructions.
        unsafe { _mm256_and_si256(self, _mm256_set1_epi8((1 << BITS) - 1)) }
    }

    #[inline(always)]
    unsafe fn next_codes<const BITS: u32>(self) -> __m256i {
        // SAFETY: the caller promises the instructions.
        unsafe {
            match BITS {
                1 => _mm256_srli_epi32::<1>(self),
                2 => _mm256_srli_epi32::<2>(self),
                _ => _mm256_srli_epi32::<4>(self),
            }
        }
    }

    #[inline(always)]
    unsafe fn zero() -> __m256i {
        // SAFETY: the caller promises the instructions.
        unsafe { _mm256_setzero_si256() }
    }

    #[inline(always)]
    unsafe fn begin(_sums: __m256i) -> __m256i {
        // SAFETY: the caller promises the instructions.
        unsafe { _mm256_setzero_si256() }
    }

    #[inline(always)]
    unsafe fn add_products(partial: __m256i, codes: __m256i, bytes: __m256i) -> __m256i {
        // SAFETY: the caller promises the instructions.
        unsafe { _mm256_add_epi16(partial, _mm256_maddubs_epi16(codes, bytes)) }
    }

    #[inline(always)]
    unsafe fn widen(sums: __m256i, partial: __m256i) -> __m256i {
        // SAFETY: the caller promises the instructions.
        unsafe { _mm256_add_epi32(sums, _mm256_madd_epi16(partial, _mm256_set1_epi16(1))) }
    }

    #[inline(always)]
    unsafe fn join(high: __m256i, low: __m256i) -> __m256 {
        // SAFETY: the caller promises the instructions.
        unsafe { _mm256_cvtepi32_ps(_mm256_add_epi32(_mm256_slli_epi32::<8>(high), low)) }
    }

    #[inline(always)]
    unsafe fn store(sums: __m256i, at: *mut i32) {
        // SAFETY: the caller promises room for eight sums.
        unsafe { _mm256_storeu_si256(at.cast(), sums) }
    }
}
