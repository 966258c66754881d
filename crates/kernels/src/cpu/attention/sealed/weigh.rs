//! AVX-512: from key sums to weights in bytes, and from value sums to values, for both engines that share it.
//!
//! A row's 64 logits stay in four registers from the integer sums through the softmax to the bytes of its weights.

use std::arch::x86_64::*;
use std::ops::Range;

use oscar_codec::{PAGE_TOKENS, ScaleType};

use super::codes::{Running, Sums, Weights};
use super::fixed_point::{LARGEST, SMALLEST};
use crate::cpu::attention::avx512::exp2;

/// Lanes of a register.
const LANES: usize = 16;

/// Registers of a page's tokens.
const REGISTERS: usize = PAGE_TOKENS / LANES;

type Page = [__m512; REGISTERS];

/// 16-bit numbers to `f32`.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(super) fn numbers(stored: &[u8], scale_type: ScaleType, numbers: &mut [f32]) {
    assert!(stored.len() == 2 * numbers.len() && numbers.len().is_multiple_of(LANES));
    // No iterators of the library here or below: they are not compiled for this instruction set.
    let mut at = 0;
    while at < numbers.len() {
        // SAFETY: 16 numbers, see the lengths above.
        unsafe {
            let bits = _mm256_loadu_si256(stored.as_ptr().add(2 * at).cast());
            let wide = match scale_type {
                ScaleType::F16 => _mm512_cvtph_ps(bits),
                ScaleType::Bf16 => _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(bits))),
            };
            _mm512_storeu_ps(numbers.as_mut_ptr().add(at), wide);
        }
        at += LANES;
    }
}

/// As `codes::Engine::weigh` for products of up to `ROWS` rows.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
pub(super) fn weigh<const ROWS: usize>(from: &Sums<'_>, running: Running<'_>, weights: &mut Weights<'_>) {
    let (rows, groups, d) = (from.spans.len(), from.shape.groups, running.d);
    assert!(rows <= ROWS && groups > 0 && from.steps.len() == rows && from.seen.len() == rows);
    assert!(from.sums.len() >= groups * ROWS * 2 * PAGE_TOKENS && from.numbers.len() == from.shape.numbers());
    assert!(from.totals.len() >= (groups - 1) * from.totals_stride + rows);
    assert!(weights.bytes.len() >= groups * ROWS * 2 * PAGE_TOKENS);
    assert!(weights.numbers.len() >= groups * ROWS * 2);
    assert!(running.max.len() == rows && running.sum.len() == rows && running.values.len() == rows * d);
    // SAFETY: `at` rows of 64 numbers, or pairs of them, are inside the lengths above in each of the loops below.
    let load = |from: *const f32, at: usize| unsafe { load_page(from.add(at * PAGE_TOKENS)) };
    let (sums, numbers) = (from.sums.as_ptr(), from.numbers.as_ptr());
    for row in 0..rows {
        let mut logits = [_mm512_setzero_ps(); REGISTERS];
        for group in 0..groups {
            let (scale, offset) = (load(numbers, 2 * group), load(numbers, 2 * group + 1));
            let step = _mm512_set1_ps(from.steps[row]);
            let total = _mm512_set1_ps(from.totals[group * from.totals_stride + row]);
            // SAFETY: a row of sums, see above.
            let integers = unsafe { join(sums.add((group * ROWS + row) * 2 * PAGE_TOKENS), PAGE_TOKENS) };
            for j in 0..REGISTERS {
                let offset = _mm512_mul_ps(offset[j], total);
                let logit = _mm512_fmsub_ps(integers[j], _mm512_mul_ps(scale[j], step), offset);
                logits[j] = if group == 0 { logit } else { _mm512_add_ps(logits[j], logit) };
            }
        }
        let seen = from.seen[row];
        if seen != u64::MAX {
            for j in 0..REGISTERS {
                let mask = (seen >> (j * LANES)) as u16;
                logits[j] = _mm512_mask_mov_ps(_mm512_set1_ps(f32::NEG_INFINITY), mask, logits[j]);
            }
        }
        let max = running.max[row];
        let largest = _mm512_max_ps(_mm512_max_ps(logits[0], logits[1]), _mm512_max_ps(logits[2], logits[3]));
        let new = max.max(_mm512_reduce_max_ps(largest));
        if new == f32::NEG_INFINITY {
            // Nothing seen, unless a logit is NaN: that must show.
            let nan = logits.iter().any(|&logits| _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(logits, logits) != 0);
            if nan {
                running.sum[row] = f32::NAN;
            }
            for group in 0..groups {
                let at = group * ROWS + row;
                weights.bytes[at * 2 * PAGE_TOKENS..][..2 * PAGE_TOKENS].fill(0);
                weights.numbers[2 * at..2 * at + 2].fill(0.0);
            }
            continue;
        }
        if new > max {
            let shrink = (max - new).exp2();
            running.max[row] = new;
            running.sum[row] *= shrink;
            running.values[row * d..][..d].iter_mut().for_each(|value| *value *= shrink);
        }
        let shift = _mm512_set1_ps(new);
        for logits in &mut logits {
            *logits = exp2(_mm512_sub_ps(*logits, shift));
        }
        let mut total =
            _mm512_add_ps(_mm512_add_ps(logits[0], logits[1]), _mm512_add_ps(logits[2], logits[3]));
        for group in 0..groups {
            let at = groups + group;
            let (scale, offset) = (load(numbers, 2 * at), load(numbers, 2 * at + 1));
            let mut offsets = _mm512_mul_ps(logits[0], offset[0]);
            for j in 1..REGISTERS {
                offsets = _mm512_fmadd_ps(logits[j], offset[j], offsets);
            }
            let mut scaled = [_mm512_setzero_ps(); REGISTERS];
            let mut largest = _mm512_setzero_ps();
            for j in 0..REGISTERS {
                scaled[j] = _mm512_mul_ps(logits[j], scale[j]);
                largest = _mm512_max_ps(largest, _mm512_abs_ps(scaled[j]));
            }
            let largest = _mm512_reduce_max_ps(largest);
            let (step, inverse) =
                if largest < SMALLEST { (0.0, 0.0) } else { (largest * (1.0 / LARGEST), LARGEST / largest) };
            let at = group * ROWS + row;
            // SAFETY: two parts of 64 bytes, inside the lengths above.
            unsafe { split(scaled, inverse, weights.bytes.as_mut_ptr().add(at * 2 * PAGE_TOKENS)) };
            let [sum, offset] = reduce_two(total, offsets);
            weights.numbers[2 * at] = step;
            weights.numbers[2 * at + 1] = offset;
            running.sum[row] += sum;
            total = _mm512_setzero_ps();
        }
    }
}

/// # Safety
/// The pointer reaches 64 numbers.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn load_page(from: *const f32) -> Page {
    let mut page = [_mm512_setzero_ps(); REGISTERS];
    for j in 0..REGISTERS {
        // SAFETY: the caller's promise.
        page[j] = unsafe { _mm512_loadu_ps(from.add(j * LANES)) };
    }
    page
}

/// `256·high + low` of 64 sums as numbers; `low` lies `distance` after `high`.
///
/// # Safety
/// The pointer reaches 64 integers, and so does the one `distance` after it.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn join(high: *const i32, distance: usize) -> Page {
    let mut page = [_mm512_setzero_ps(); REGISTERS];
    for j in 0..REGISTERS {
        // SAFETY: the caller's promise.
        page[j] = unsafe { join_register(high.add(j * LANES), distance) };
    }
    page
}

/// As [`join`], for 16 sums.
///
/// # Safety
/// The pointer reaches 16 integers, and so does the one `distance` after it.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn join_register(high: *const i32, distance: usize) -> __m512 {
    // SAFETY: the caller's promise.
    let (high, low) =
        unsafe { (_mm512_loadu_si512(high.cast()), _mm512_loadu_si512(high.add(distance).cast())) };
    _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32::<8>(high), low))
}

/// Writes the high bytes of 64 numbers times `inverse`, then their low bytes.
///
/// # Safety
/// The pointer reaches 128 bytes.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn split(values: Page, inverse: f32, bytes: *mut i8) {
    let inverse = _mm512_set1_ps(inverse);
    let mut integers = [_mm512_setzero_si512(); REGISTERS];
    for j in 0..REGISTERS {
        integers[j] = _mm512_cvtps_epi32(_mm512_mul_ps(values[j], inverse));
    }
    // Packing interleaves the quarters of its operands: dword 4·i + j of the bytes is dword 4·j + i of the tokens.
    let order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    let words = [_mm512_packs_epi32(integers[0], integers[1]), _mm512_packs_epi32(integers[2], integers[3])];
    let round = _mm512_set1_epi16(128);
    let high = _mm512_packs_epi16(
        _mm512_srai_epi16::<8>(_mm512_add_epi16(words[0], round)),
        _mm512_srai_epi16::<8>(_mm512_add_epi16(words[1], round)),
    );
    let mask = _mm512_set1_epi16(0xff);
    let low = _mm512_packus_epi16(_mm512_and_si512(words[0], mask), _mm512_and_si512(words[1], mask));
    // SAFETY: the caller's promise.
    unsafe {
        _mm512_storeu_si512(bytes.cast(), _mm512_permutexvar_epi32(order, high));
        _mm512_storeu_si512(bytes.add(PAGE_TOKENS).cast(), _mm512_permutexvar_epi32(order, low));
    }
}

/// The sums of the lanes of two registers.
#[inline]
#[target_feature(enable = "avx512f")]
fn reduce_two(a: __m512, b: __m512) -> [f32; 2] {
    // The lower half gets eight sums of `a`, the upper half eight of `b`.
    let sums = _mm512_add_ps(
        _mm512_shuffle_f32x4::<0b01_00_01_00>(a, b),
        _mm512_shuffle_f32x4::<0b11_10_11_10>(a, b),
    );
    let sums = _mm512_add_ps(sums, _mm512_shuffle_f32x4::<0b10_11_00_01>(sums, sums));
    let sums = _mm512_add_ps(sums, _mm512_permute_ps::<0b01_00_11_10>(sums));
    let sums = _mm512_add_ps(sums, _mm512_permute_ps::<0b10_11_00_01>(sums));
    [_mm512_cvtss_f32(sums), _mm_cvtss_f32(_mm512_extractf32x4_ps::<2>(sums))]
}

/// As `codes::Engine::add_values`.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
pub(super) fn add_values(
    sums: &[i32],
    numbers: &[f32],
    width: usize,
    channels: Range<usize>,
    d: usize,
    values: &mut [f32],
) {
    let rows = values.len() / d;
    let end = channels.end.next_multiple_of(LANES);
    assert!(channels.start < channels.end && channels.end <= d && end <= width);
    assert!(values.len() == rows * d && sums.len() >= rows * 2 * width && numbers.len() >= rows * 2);
    // Whole registers of channels, and what is left on either side.
    let whole = channels.start.next_multiple_of(LANES)..channels.end / LANES * LANES;
    for row in 0..rows {
        let (step, offset) = (_mm512_set1_ps(numbers[2 * row]), _mm512_set1_ps(numbers[2 * row + 1]));
        // SAFETY: a row of sums and one of values are inside the lengths above.
        let (sums, values) =
            unsafe { (sums.as_ptr().add(row * 2 * width), values.as_mut_ptr().add(row * d)) };
        let mut first = whole.start;
        while first < whole.end {
            // SAFETY: 16 channels of the row.
            unsafe {
                let target = values.add(first);
                let sum = _mm512_fmsub_ps(join_register(sums.add(first), width), step, offset);
                _mm512_storeu_ps(target, _mm512_add_ps(_mm512_loadu_ps(target), sum));
            }
            first += LANES;
        }
        if whole == channels {
            continue;
        }
        for first in (channels.start / LANES * LANES..end).step_by(LANES) {
            if whole.contains(&first) {
                continue;
            }
            let from = u16::MAX.checked_shl(channels.start.saturating_sub(first) as u32).unwrap_or(0);
            let past = u16::MAX.checked_shl((channels.end - first) as u32).unwrap_or(0);
            let mask = from & !past;
            // SAFETY: sums are padded to whole registers; the mask has only channels of the row.
            unsafe {
                let target = values.add(first);
                let sum = _mm512_fmsub_ps(join_register(sums.add(first), width), step, offset);
                let sum = _mm512_add_ps(_mm512_maskz_loadu_ps(mask, target), sum);
                _mm512_mask_storeu_ps(target, mask, sum);
            }
        }
    }
}

/// The steps of this module as functions of an engine for products of `ROWS` rows.
macro_rules! steps {
    () => {
        fn numbers(&self, stored: &[u8], scale_type: ScaleType, numbers: &mut [f32]) {
            // SAFETY: an engine exists only where its instruction set does.
            unsafe { weigh::numbers(stored, scale_type, numbers) }
        }

        fn add_values(
            &self,
            sums: &[i32],
            numbers: &[f32],
            width: usize,
            channels: Range<usize>,
            d: usize,
            values: &mut [f32],
        ) {
            // SAFETY: as above.
            unsafe { weigh::add_values(sums, numbers, width, channels, d, values) }
        }
    };
}
pub(super) use steps;
