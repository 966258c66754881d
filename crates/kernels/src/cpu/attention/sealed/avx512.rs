//! AVX-512: what happens around the integer products.
//!
//! A row's 64 logits stay in four registers from the integer sums through the softmax to the bytes of its weights. What is
//! summed over tokens stays in lanes until all pages have been read, and weights are relative to a reference that follows
//! the largest logit only when that has left it far behind: a page waits for one result across lanes, its unit.

use std::arch::x86_64::*;

use oscar_codec::{PAGE_TOKENS, ScaleType};

use super::engine::{Engine, KeySums, LANES, RowStates, Shape, ValueSums, Weights};
use super::product::most_rows;
use super::registers::{
    LARGER_MAGNITUDE, Page, REGISTERS, exp2, join, load_pair, load_some, reduce_max, some, split, units,
};
use crate::cpu::isa::Isa;
use crate::cpu::simd::Simd;

/// Logits may exceed the reference of their row by this much before the reference follows. Weights of up to 2¹⁶ are as
/// good as those of up to 1: each page has its own unit, and sums have 111 powers of two to go.
const SLACK: f32 = 16.0;

/// The engine that keeps logits in registers.
pub(super) struct Avx512(Simd);

impl Avx512 {
    /// The instruction set is AVX-512, or one that includes it.
    pub(super) fn new(simd: Simd) -> Avx512 {
        assert!(matches!(simd.isa(), Isa::Avx512 | Isa::Amx), "{} is not AVX-512", simd.isa());
        Avx512(simd)
    }
}

/// Most rows of one product.
const ROWS: usize = most_rows(LANES);

impl Engine for Avx512 {
    const ROWS: usize = ROWS;

    #[inline(always)]
    fn simd(&self) -> Simd {
        self.0
    }

    #[inline(always)]
    fn split_row(&self, row: &[f32], high: &mut [i8], low: &mut [i8]) -> f32 {
        // SAFETY: an engine exists only where its instruction set does.
        unsafe { split_row(row, high, low) }
    }

    #[inline(always)]
    fn total(&self, row: &[f32]) -> f32 {
        // SAFETY: as above.
        unsafe { total(row) }
    }

    #[inline(always)]
    fn softmax(&mut self, sums: &KeySums<'_>, state: &mut RowStates<'_>, weights: &mut Weights<'_>) {
        // SAFETY: as above.
        unsafe { softmax(sums, state, weights) }
    }

    #[inline(always)]
    fn finish(&self, shape: &Shape, state: RowStates<'_>) {
        // SAFETY: as above.
        unsafe { finish(shape, state) }
    }

    #[inline(always)]
    fn accumulate_values(&self, sums: ValueSums<'_>, values: &mut [f32]) {
        // SAFETY: as above.
        unsafe { accumulate_values(sums, values) }
    }
}

/// [`Engine::softmax`] on AVX-512.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
fn softmax(from: &KeySums<'_>, state: &mut RowStates<'_>, weights: &mut Weights<'_>) {
    let (rows, shape, d) = (from.spans.len(), from.shape, state.d);
    let groups = shape.groups;
    assert!(rows <= ROWS && groups > 0 && from.seen.len() == rows);
    if shape.has_bands() {
        assert!(from.sums.len() >= rows * PAGE_TOKENS);
    } else {
        assert!(from.sums.len() >= groups * ROWS * 2 * PAGE_TOKENS);
        assert!(from.key_scales.len() == groups * 4 * PAGE_TOKENS);
        let numbers = (groups - 1) * from.stride + rows;
        assert!(from.totals.len() >= numbers && from.units.len() >= numbers);
    }
    assert!(from.value_scales.len() == groups * 4 * PAGE_TOKENS);
    assert!(state.max.len() == rows && state.sum.len() == rows && state.values.len() == rows * d);
    assert!(state.lanes.len() == rows * (1 + groups) * LANES);
    assert!(weights.bytes.len() >= groups * ROWS * 2 * PAGE_TOKENS);
    assert!(weights.units.len() >= groups * ROWS * 2);
    // SAFETY: all lengths are as promised, see above.
    unsafe {
        match (shape.scale_type, shape.has_bands()) {
            (ScaleType::F16, false) => softmax_all::<false, false>(from, state, weights),
            (ScaleType::F16, true) => softmax_all::<false, true>(from, state, weights),
            (ScaleType::Bf16, false) => softmax_all::<true, false>(from, state, weights),
            (ScaleType::Bf16, true) => softmax_all::<true, true>(from, state, weights),
        }
    }
}

/// # Safety
/// The slices have the lengths that [`softmax`] checks.
#[inline(always)]
unsafe fn softmax_all<const BF16: bool, const BANDS: bool>(
    from: &KeySums<'_>,
    state: &mut RowStates<'_>,
    weights: &mut Weights<'_>,
) {
    let rows = from.spans.len();
    let mut row = 0;
    while row < rows {
        // SAFETY: the caller's promise.
        row += unsafe {
            match rows - row {
                1 => softmax_rows::<1, BF16, BANDS>(from, row, state, weights),
                2 | 4 => softmax_rows::<2, BF16, BANDS>(from, row, state, weights),
                _ => softmax_rows::<3, BF16, BANDS>(from, row, state, weights),
            }
        };
    }
}

/// [`softmax`] for `R` rows side by side, because one row is a chain of operations that wait for each other. Returns `R`.
///
/// # Safety
/// Rows `first..first + R` exist, and the slices have the lengths that [`softmax`] checks.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
unsafe fn softmax_rows<const R: usize, const BF16: bool, const BANDS: bool>(
    from: &KeySums<'_>,
    first: usize,
    state: &mut RowStates<'_>,
    weights: &mut Weights<'_>,
) -> usize {
    let groups = from.shape.groups;
    let (sums, key_scales) = (from.sums.as_ptr(), from.key_scales.as_ptr());
    // A row that has seen nothing must not subtract -∞ from -∞, and takes whatever it sees as its reference.
    let (mut reference, mut limit) = ([0.0; R], [SLACK; R]);
    for r in 0..R {
        let max = state.max[first + r];
        if max == f32::NEG_INFINITY {
            limit[r] = max;
        } else {
            reference[r] = max;
        }
    }
    // Logits relative to the reference.
    let mut logits = [[_mm512_setzero_ps(); REGISTERS]; R];
    // SAFETY: logits, or scales and offsets of the keys of a group and a row of sums, by the caller's promise.
    unsafe {
        if BANDS {
            for r in 0..R {
                for j in 0..REGISTERS {
                    let logit =
                        _mm512_loadu_ps(sums.cast::<f32>().add((first + r) * PAGE_TOKENS + j * LANES));
                    logits[r][j] = _mm512_sub_ps(logit, _mm512_set1_ps(reference[r]));
                }
            }
        }
        for group in 0..if BANDS { 0 } else { groups } {
            for j in 0..REGISTERS {
                let scale = key_scales.cast::<u16>().add(2 * group * PAGE_TOKENS);
                let (scale, offset) = load_pair::<BF16>(scale.add(j * LANES));
                for r in 0..R {
                    let row = first + r;
                    let number = group * from.stride + row;
                    let step = _mm512_set1_ps(*from.units.get_unchecked(number));
                    let total = _mm512_set1_ps(*from.totals.get_unchecked(number));
                    let at = (group * ROWS + row) * 2 * PAGE_TOKENS + j * LANES;
                    let integers = join(sums.add(at), PAGE_TOKENS);
                    let step = _mm512_mul_ps(scale, step);
                    logits[r][j] = if group == 0 {
                        let reference = _mm512_set1_ps(reference[r]);
                        _mm512_fmsub_ps(integers, step, _mm512_fmadd_ps(offset, total, reference))
                    } else {
                        let logit = _mm512_fmsub_ps(integers, step, _mm512_mul_ps(offset, total));
                        _mm512_add_ps(logits[r][j], logit)
                    };
                }
            }
        }
    }
    let mut above = 0;
    for r in 0..R {
        let seen = from.seen[first + r];
        if seen != u64::MAX {
            for j in 0..REGISTERS {
                let mask = (seen >> (j * LANES)) as u16;
                logits[r][j] = _mm512_mask_mov_ps(_mm512_set1_ps(f32::NEG_INFINITY), mask, logits[r][j]);
            }
        }
        above |= _mm512_cmp_ps_mask::<_CMP_GT_OQ>(largest(&logits[r]), _mm512_set1_ps(limit[r]));
    }
    if above != 0 {
        for r in 0..R {
            let largest = _mm512_reduce_max_ps(largest(&logits[r]));
            let rise = _mm512_set1_ps(raise(largest, limit[r], first + r, groups, state));
            for j in 0..REGISTERS {
                logits[r][j] = _mm512_sub_ps(logits[r][j], rise);
            }
        }
    }
    let lanes = state.lanes.as_mut_ptr();
    for r in 0..R {
        // SAFETY: 16 lanes of a row, by the caller's promise.
        unsafe {
            let lanes = lanes.add((first + r) * (1 + groups) * LANES);
            let mut total = _mm512_loadu_ps(lanes);
            for j in 0..REGISTERS {
                logits[r][j] = exp2(logits[r][j]);
                total = _mm512_add_ps(total, logits[r][j]);
            }
            _mm512_storeu_ps(lanes, total);
        }
    }
    for group in 0..groups {
        let mut scaled = [[_mm512_setzero_ps(); REGISTERS]; R];
        let mut largest = [_mm512_setzero_ps(); R];
        // SAFETY: scales and offsets of the values of a group, and 16 lanes of each row, by the caller's promise.
        unsafe {
            let lanes = lanes.add((first * (1 + groups) + 1 + group) * LANES);
            let mut offsets = [_mm512_setzero_ps(); R];
            for r in 0..R {
                offsets[r] = _mm512_loadu_ps(lanes.add(r * (1 + groups) * LANES));
            }
            let scale = from.value_scales.as_ptr().cast::<u16>().add(2 * group * PAGE_TOKENS);
            for j in 0..REGISTERS {
                let (scale, offset) = load_pair::<BF16>(scale.add(j * LANES));
                for r in 0..R {
                    offsets[r] = _mm512_fmadd_ps(logits[r][j], offset, offsets[r]);
                    scaled[r][j] = _mm512_mul_ps(logits[r][j], scale);
                    largest[r] = _mm512_range_ps::<LARGER_MAGNITUDE>(largest[r], scaled[r][j]);
                }
            }
            for r in 0..R {
                _mm512_storeu_ps(lanes.add(r * (1 + groups) * LANES), offsets[r]);
            }
        }
        let at = group * ROWS + first;
        // SAFETY: the rows exist, by the caller's promise; a number and two parts of 64 bytes for each row of a group.
        unsafe {
            let (steps, inverses) = units(reduce_max(largest));
            _mm_mask_storeu_ps(weights.units.as_mut_ptr().add(at + group * ROWS), (1 << R) - 1, steps);
            for r in 0..R {
                let index = _mm512_set1_epi32(r as i32);
                let inverse = _mm512_permutexvar_ps(index, _mm512_castps128_ps512(inverses));
                let high = weights.bytes.as_mut_ptr().add((at + r) * 2 * PAGE_TOKENS);
                split(scaled[r], inverse, high, high.add(PAGE_TOKENS));
            }
        }
    }
    R
}

/// The largest logits of a page, in lanes.
#[inline]
#[target_feature(enable = "avx512f")]
fn largest(logits: &Page) -> __m512 {
    _mm512_max_ps(_mm512_max_ps(logits[0], logits[1]), _mm512_max_ps(logits[2], logits[3]))
}

/// Makes the largest logit of a page the reference of its row if it is above the limit. Returns by how much it rises.
///
/// NaN is not above: the reference stays, and NaN shows in the sum.
#[cold]
#[inline(never)]
fn raise(largest: f32, limit: f32, row: usize, groups: usize, state: &mut RowStates<'_>) -> f32 {
    let above = largest > limit;
    if !above {
        return 0.0;
    }
    let old = state.max[row];
    if old == f32::NEG_INFINITY {
        // Nothing has been summed.
        state.max[row] = largest;
        return largest;
    }
    state.max[row] = old + largest;
    let rise = state.max[row] - old;
    let rescale = (-rise).exp2();
    let lanes = (1 + groups) * LANES;
    state.sum[row] *= rescale;
    state.lanes[row * lanes..][..lanes].iter_mut().for_each(|lane| *lane *= rescale);
    state.values[row * state.d..][..state.d].iter_mut().for_each(|value| *value *= rescale);
    rise
}

/// [`Engine::finish`] on AVX-512.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
fn finish(shape: &Shape, state: RowStates<'_>) {
    let RowStates { sum, values, lanes, d, .. } = state;
    let groups = shape.groups;
    assert!(lanes.len() == sum.len() * (1 + groups) * LANES && values.len() == sum.len() * d);
    for row in 0..sum.len() {
        let lanes = &lanes[row * (1 + groups) * LANES..];
        sum[row] += _mm512_reduce_add_ps(load_some(lanes, 0));
        for group in 0..groups {
            let offset = _mm512_set1_ps(_mm512_reduce_add_ps(load_some(lanes, (1 + group) * LANES)));
            let channels = shape.group(group);
            let values = &mut values[row * d..][channels.start..channels.end];
            let mut first = 0;
            while first < values.len() {
                let lower = _mm512_sub_ps(load_some(values, first), offset);
                // SAFETY: the mask has only numbers of the group.
                unsafe {
                    _mm512_mask_storeu_ps(values.as_mut_ptr().add(first), some(values.len() - first), lower)
                };
                first += LANES;
            }
        }
    }
}

/// [`Engine::split_row`] on AVX-512.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
fn split_row(row: &[f32], high: &mut [i8], low: &mut [i8]) -> f32 {
    assert!(high.len() == low.len() && high.len() >= row.len() && high.len().is_multiple_of(PAGE_TOKENS));
    let mut largest = _mm512_setzero_ps();
    for first in (0..row.len()).step_by(LANES) {
        largest = _mm512_range_ps::<LARGER_MAGNITUDE>(largest, load_some(row, first));
    }
    let (step, inverse) = units(reduce_max([largest]));
    let inverse = _mm512_broadcastss_ps(inverse);
    for first in (0..high.len()).step_by(PAGE_TOKENS) {
        let mut values = [_mm512_setzero_ps(); REGISTERS];
        for j in 0..REGISTERS {
            values[j] = load_some(row, first + j * LANES);
        }
        // SAFETY: 64 bytes each, see the lengths above.
        unsafe { split(values, inverse, high.as_mut_ptr().add(first), low.as_mut_ptr().add(first)) };
    }
    _mm_cvtss_f32(step)
}

/// [`Engine::total`] on AVX-512.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
pub(super) fn total(row: &[f32]) -> f32 {
    let mut sums = [_mm512_setzero_pd(); 2];
    for first in (0..row.len()).step_by(LANES) {
        let values = load_some(row, first);
        sums[0] = _mm512_add_pd(sums[0], _mm512_cvtps_pd(_mm512_castps512_ps256(values)));
        sums[1] = _mm512_add_pd(sums[1], _mm512_cvtps_pd(_mm512_extractf32x8_ps::<1>(values)));
    }
    _mm512_reduce_add_pd(_mm512_add_pd(sums[0], sums[1])) as f32
}

/// [`Engine::accumulate_values`] on AVX-512.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
fn accumulate_values(from: ValueSums<'_>, values: &mut [f32]) {
    let ValueSums { sums, units, width, channels, rows, d } = from;
    let end = channels.end.next_multiple_of(LANES);
    assert!(channels.start < channels.end && channels.end <= d && end <= width);
    assert!(values.len() == rows * d && sums.len() >= rows * 2 * width && units.len() >= rows);
    // Whole registers of channels, and what is left on either side.
    let whole = channels.start.next_multiple_of(LANES)..channels.end / LANES * LANES;
    for row in 0..rows {
        let step = _mm512_set1_ps(units[row]);
        // SAFETY: a row of sums and one of values are inside the lengths above.
        let (sums, values) =
            unsafe { (sums.as_ptr().add(row * 2 * width), values.as_mut_ptr().add(row * d)) };
        let mut first = whole.start;
        while first < whole.end {
            // SAFETY: 16 channels of the row.
            unsafe {
                let target = values.add(first);
                let sum = _mm512_fmadd_ps(join(sums.add(first), width), step, _mm512_loadu_ps(target));
                _mm512_storeu_ps(target, sum);
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
                let before = _mm512_maskz_loadu_ps(mask, target);
                let sum = _mm512_fmadd_ps(join(sums.add(first), width), step, before);
                _mm512_mask_storeu_ps(target, mask, sum);
            }
        }
    }
}
