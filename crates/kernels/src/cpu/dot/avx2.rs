//! AVX2: codes and activations are widened to 16 bits and multiplied with `vpmaddwd`.
//!
//! The byte product of AVX2 saturates at 16 bits, which codes of eight bits can reach. Even and odd bytes are
//! widened by shifts in place, so no byte changes its lane, and the sums of the first and second 16 weights stay in
//! the lower and upper half of the register.

use std::arch::x86_64::*;

use super::Product;
use super::lanes::{self, Bytes};
use crate::cpu::activation::QuantisedRows;
use crate::dtype::DType;
use crate::quant;

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
        unsafe {
            let four = _mm_add_ps(_mm256_castps256_ps128(sums), _mm256_extractf128_ps::<1>(sums));
            let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
        }
    }

    #[inline(always)]
    unsafe fn widen_half(bits: u16) -> f32 {
        // SAFETY: the caller promises the instructions.
        unsafe { _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(i32::from(bits)))) }
    }

    #[inline(always)]
    fn prefetch(at: *const u8) {
        // SAFETY: a prefetch does not access memory in the sense of the language, whatever the address.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) }
    }
}

/// # Safety
/// The CPU has AVX2, FMA and F16C.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn quantised_rows(dtype: DType, product: Product<'_>) {
    // SAFETY: passed on.
    unsafe { lanes::quantised_rows::<__m256i>(dtype, product) }
}

/// # Safety
/// The CPU has AVX2, FMA and F16C. Lengths are checked by the caller.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn dequantise(dtype: DType, bytes: &[u8], out: &mut [f32]) {
    if dtype != DType::F16 {
        // The compiler makes good vector code of the plain loops.
        return quant::dequantise_inline(dtype, bytes, out);
    }
    let whole = out.len() / 8 * 8;
    for (bytes, out) in bytes.chunks_exact(16).zip(out.chunks_exact_mut(8)) {
        // SAFETY: sixteen bytes are readable and eight floats writable.
        unsafe {
            _mm256_storeu_ps(out.as_mut_ptr(), _mm256_cvtph_ps(_mm_loadu_si128(bytes.as_ptr().cast())))
        };
    }
    quant::dequantise_inline(dtype, &bytes[2 * whole..], &mut out[whole..]);
}

/// # Safety
/// The CPU has AVX2, FMA and F16C.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn quantise(x: &[f32], rows: usize, cols: usize, into: &mut QuantisedRows) {
    into.quantise(x, rows, cols);
}
