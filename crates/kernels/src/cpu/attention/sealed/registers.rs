//! AVX-512: a page's numbers in registers. Powers of two, bytes of numbers, and what is found across lanes.

use std::arch::x86_64::*;

use oscar_codec::PAGE_TOKENS;

use super::engine::LANES;
use super::fixed_point::{LARGEST, SMALLEST};

/// Selects the larger magnitude of two numbers, without its sign.
pub(super) const LARGER_MAGNITUDE: i32 = 0b10_11;

/// Registers of a page's tokens.
pub(super) const REGISTERS: usize = PAGE_TOKENS / LANES;

pub(super) type Page = [__m512; REGISTERS];

/// 2ˣ for 0 <= x <= 1 as a polynomial, lowest power first, exact at 0 and good to 3e-6: weights are rounded to 1.5e-5 of
/// the largest afterwards.
const EXP2: [f32; 5] = [1.0, 0.693_044_84, 0.241_280_2, 0.052_242_473, 0.013_426_684];

/// 2ˣ for `x <= 128`; 0 far below and for -∞, NaN stays NaN.
#[inline]
#[target_feature(enable = "avx512f,avx512dq")]
pub(super) fn exp2(x: __m512) -> __m512 {
    // `scalef` rounds its exponent down by itself, so what is left above the whole number is all that is needed.
    let rest = _mm512_reduce_ps::<{ _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC }>(x);
    let mut power = _mm512_set1_ps(EXP2[4]);
    for i in (0..4).rev() {
        power = _mm512_fmadd_ps(power, rest, _mm512_set1_ps(EXP2[i]));
    }
    _mm512_scalef_ps(power, x)
}

/// What integers are multiplied with to get numbers back, and numbers to get integers, for up to four rows.
#[inline]
#[target_feature(enable = "avx512f,avx512vl")]
pub(super) fn units(largest: __m128) -> (__m128, __m128) {
    let usable = _mm_cmp_ps_mask::<_CMP_NLT_UQ>(largest, _mm_set1_ps(SMALLEST));
    (
        _mm_maskz_mul_ps(usable, largest, _mm_set1_ps(1.0 / LARGEST)),
        _mm_maskz_div_ps(usable, _mm_set1_ps(LARGEST), largest),
    )
}

/// The lanes that have a number when `rest` are left.
#[inline]
pub(super) fn some(rest: usize) -> u16 {
    if rest >= LANES { u16::MAX } else { (1 << rest) - 1 }
}

/// 16 numbers of a row from `first` on; zeros past its end.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn load_some(row: &[f32], first: usize) -> __m512 {
    let mask = some(row.len().saturating_sub(first));
    // SAFETY: the mask has only numbers of the row, and the address is not used where it has none.
    unsafe { _mm512_maskz_loadu_ps(mask, row.as_ptr().wrapping_add(first)) }
}

/// 16 scales and the offsets 64 numbers after them, from 16 bits each: bf16 or f16.
///
/// # Safety
/// The pointer reaches 64 + 16 numbers.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn load_pair<const BF16: bool>(scale: *const u16) -> (__m512, __m512) {
    // SAFETY: the caller's promise.
    unsafe { (widen::<BF16>(scale), widen::<BF16>(scale.add(PAGE_TOKENS))) }
}

/// 16 numbers from 16 bits each: bf16 or f16.
///
/// # Safety
/// The pointer reaches 16 numbers.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn widen<const BF16: bool>(at: *const u16) -> __m512 {
    // SAFETY: the caller's promise.
    let bits = unsafe { _mm256_loadu_si256(at.cast()) };
    match BF16 {
        true => _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(bits))),
        false => _mm512_cvtph_ps(bits),
    }
}

/// `256·high + low` of 16 sums as numbers; `low` lies `distance` after `high`.
///
/// # Safety
/// The pointer reaches 16 integers, and so does the one `distance` after it.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn join(high: *const i32, distance: usize) -> __m512 {
    // SAFETY: the caller's promise.
    let (high, low) =
        unsafe { (_mm512_loadu_si512(high.cast()), _mm512_loadu_si512(high.add(distance).cast())) };
    _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32::<8>(high), low))
}

/// The high and the low bytes of 64 numbers times `inverse`.
///
/// # Safety
/// The pointers reach 64 bytes each.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) unsafe fn split(values: Page, inverse: __m512, high_bytes: *mut i8, low_bytes: *mut i8) {
    let mut integers = [_mm512_setzero_si512(); REGISTERS];
    for j in 0..REGISTERS {
        integers[j] = _mm512_cvtps_epi32(_mm512_mul_ps(values[j], inverse));
    }
    // Packing interleaves the quarters of its operands: dword 4·i + j of the bytes is dword 4·j + i of the tokens.
    let order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    let words = [_mm512_packs_epi32(integers[0], integers[1]), _mm512_packs_epi32(integers[2], integers[3])];
    // (128·word + 2¹⁴) >> 15: the high byte, rounded.
    let round = _mm512_set1_epi16(128);
    let high = _mm512_packs_epi16(_mm512_mulhrs_epi16(words[0], round), _mm512_mulhrs_epi16(words[1], round));
    let mask = _mm512_set1_epi16(0xff);
    let low = _mm512_packus_epi16(_mm512_and_si512(words[0], mask), _mm512_and_si512(words[1], mask));
    // SAFETY: the caller's promise.
    unsafe {
        _mm512_storeu_si512(high_bytes.cast(), _mm512_permutexvar_epi32(order, high));
        _mm512_storeu_si512(low_bytes.cast(), _mm512_permutexvar_epi32(order, low));
    }
}

/// Halves of two registers combined: eight lanes of `a`, then eight of `b`.
macro_rules! combine_halves {
    ($with:ident, $a:expr, $b:expr) => {
        $with(_mm512_shuffle_f32x4::<0b01_00_01_00>($a, $b), _mm512_shuffle_f32x4::<0b11_10_11_10>($a, $b))
    };
}

/// The lanes of each quarter of a register combined; all lanes of a quarter are equal.
macro_rules! combine_quarters {
    ($with:ident, $a:expr) => {{
        let pairs = $with($a, _mm512_permute_ps::<0b01_00_11_10>($a));
        $with(pairs, _mm512_permute_ps::<0b10_11_00_01>(pairs))
    }};
}

/// The largest lane of each of up to four registers.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn reduce_max<const R: usize>(registers: [__m512; R]) -> __m128 {
    let last = R - 1;
    let first = combine_halves!(_mm512_max_ps, registers[0], registers[1.min(last)]);
    let second = if R > 2 {
        combine_halves!(_mm512_max_ps, registers[2.min(last)], registers[3.min(last)])
    } else {
        first
    };
    // A quarter for each register.
    let quarters = _mm512_max_ps(
        _mm512_shuffle_f32x4::<0b10_00_10_00>(first, second),
        _mm512_shuffle_f32x4::<0b11_01_11_01>(first, second),
    );
    let lanes = combine_quarters!(_mm512_max_ps, quarters);
    let firsts = _mm512_setr_epi32(0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12);
    _mm512_castps512_ps128(_mm512_permutexvar_ps(firsts, lanes))
}
