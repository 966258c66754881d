//! The softmax step of up to 16 rows over a page, from tiles of logits to tiles of weights.

use std::arch::x86_64::*;

use oscar_codec::PAGE_TOKENS;

use super::unit::{STEP, TILE_WORDS, WEIGHT_PARTS, peel, stay_awake};
use crate::cpu::attention::work::Span;
use crate::cpu::simd::amx::TILE_ROWS;
use crate::cpu::simd::avx512::transpose;
use crate::cpu::simd::exp2;

/// Combines the lanes of each of 16 registers; lane `i` of the result belongs to register `i`.
///
/// A macro, because a closure inside a generic function would not be compiled for the instruction set of its caller.
macro_rules! combine {
    ($registers:expr, $with:ident) => {{
        let mut words = [_mm512_setzero_si512(); 16];
        for i in 0..16 {
            words[i] = _mm512_castps_si512($registers[i]);
        }
        let words = transpose(words);
        let mut lanes = [_mm512_setzero_ps(); 16];
        for i in 0..16 {
            lanes[i] = _mm512_castsi512_ps(words[i]);
        }
        for half in [8, 4, 2, 1] {
            for i in 0..half {
                lanes[i] = $with(lanes[i], lanes[i + half]);
            }
        }
        lanes[0]
    }};
}

/// A number for the key and one for the value of each token of a page.
#[derive(Clone, Copy)]
pub(in crate::cpu::attention) struct TokenScales<'a> {
    pub(in crate::cpu::attention) keys: &'a [f32; PAGE_TOKENS],
    pub(in crate::cpu::attention) values: &'a [f32; PAGE_TOKENS],
}

/// No scales and no offsets.
pub(super) const ZEROS: TokenScales<'static> =
    TokenScales { keys: &[0.0; PAGE_TOKENS], values: &[0.0; PAGE_TOKENS] };

impl TokenScales<'_> {
    /// Those of the keys, followed by those of the values.
    pub(in crate::cpu::attention) fn of(scales: &[f32; 2 * PAGE_TOKENS]) -> TokenScales<'_> {
        let [keys, values] = [0, PAGE_TOKENS].map(|at| scales[at..].first_chunk().expect("64 of each"));
        TokenScales { keys, values }
    }
}

/// The rows of one group inside a softmax step.
pub(super) struct TileRows<'a> {
    /// `[16][64]` logits.
    pub(super) scores: &'a [f32],
    /// What up to 16 rows see, and the position of the page's first token.
    pub(super) spans: &'a [Span],
    pub(super) start: usize,
    pub(super) max: &'a mut [f32],
    pub(super) sum: &'a mut [f32],
}

impl TileRows<'_> {
    /// Turns logits into weights, packed as tiles, and scales what was summed before to the new maximum.
    ///
    /// As `floats::SoftmaxRows`, but what happens once per row happens for all 16 rows in one register. With
    /// `SCALED`, logits and weights are multiplied with the scales of keys and values. With `OFFSET`, the offsets of
    /// keys times the total of the row's query are subtracted from logits, and those of values summed with the weights.
    ///
    /// # Safety
    /// Tiles are configured, and the sums in `tmm0` are of no use any more.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma")]
    pub(super) unsafe fn softmax<const SCALED: bool, const OFFSET: bool>(
        self,
        scales: TokenScales<'_>,
        offsets: TokenScales<'_>,
        totals: &[f32],
        offset_sums: &mut [f32],
        values: &mut [f32],
        d: usize,
        tiles: &mut [u32],
    ) {
        let TileRows { scores, spans, start, max, sum } = self;
        assert!(scores.len() >= TILE_ROWS * PAGE_TOKENS && spans.len() <= TILE_ROWS);
        assert!(max.len() == TILE_ROWS && sum.len() == TILE_ROWS && values.len() == TILE_ROWS * d);
        assert!(tiles.len() >= 2 * WEIGHT_PARTS * TILE_WORDS);
        assert!(!OFFSET || SCALED && totals.len() == TILE_ROWS && offset_sums.len() == TILE_ROWS);
        let nothing = _mm512_set1_ps(f32::NEG_INFINITY);
        let mut masks = [0u64; TILE_ROWS];
        for (mask, span) in masks.iter_mut().zip(spans) {
            *mask = span.page_mask(start);
        }
        let load = |row: usize, register: usize| {
            let mask = (masks[row] >> (16 * register)) as u16;
            // SAFETY: 16 rows of four registers, see the lengths above; scales of 64 keys.
            unsafe {
                let logits = scores.as_ptr().add(row * PAGE_TOKENS + 16 * register);
                if SCALED {
                    let scale = _mm512_loadu_ps(scales.keys.as_ptr().add(16 * register));
                    if !OFFSET {
                        return _mm512_mask_mul_ps(nothing, mask, _mm512_loadu_ps(logits), scale);
                    }
                    let offset = _mm512_loadu_ps(offsets.keys.as_ptr().add(16 * register));
                    let offset = _mm512_mul_ps(offset, _mm512_set1_ps(totals[row]));
                    let logits = _mm512_fmsub_ps(_mm512_loadu_ps(logits), scale, offset);
                    _mm512_mask_mov_ps(nothing, mask, logits)
                } else {
                    _mm512_mask_loadu_ps(nothing, mask, logits)
                }
            }
        };

        let mut largest = [nothing; 16];
        for row in 0..spans.len() {
            let (low, high) =
                (_mm512_max_ps(load(row, 0), load(row, 1)), _mm512_max_ps(load(row, 2), load(row, 3)));
            largest[row] = _mm512_max_ps(low, high);
        }
        let largest = combine!(largest, _mm512_max_ps);
        // SAFETY: 16 elements each, see above.
        let (old, old_sum) = unsafe { (_mm512_loadu_ps(max.as_ptr()), _mm512_loadu_ps(sum.as_ptr())) };
        // If the new logits are NaN the old maximum stays, and NaN shows in the sum.
        let new = _mm512_max_ps(largest, old);
        // SAFETY: this function has the instructions.
        let rescale = unsafe { exp2(_mm512_sub_ps(old, new)) };
        // A row that has seen nothing yet must not subtract -∞ from -∞.
        let empty = _mm512_cmp_ps_mask::<_CMP_EQ_OQ>(new, nothing);
        let mut shift = [0.0; 16];
        // SAFETY: 16 elements.
        unsafe { _mm512_storeu_ps(shift.as_mut_ptr(), _mm512_mask_mov_ps(new, empty, _mm512_setzero_ps())) };

        let mut weight_sums = [_mm512_setzero_ps(); 16];
        let mut weighted_offsets = [_mm512_setzero_ps(); 16];
        for row in 0..spans.len() {
            if row % 4 == 0 {
                // SAFETY: the caller's promise.
                unsafe { stay_awake() };
            }
            let shift = _mm512_set1_ps(shift[row]);
            for step in 0..2 {
                // SAFETY: this function has the instructions.
                let mut first = unsafe { exp2(_mm512_sub_ps(load(row, 2 * step), shift)) };
                // SAFETY: as above.
                let mut second = unsafe { exp2(_mm512_sub_ps(load(row, 2 * step + 1), shift)) };
                weight_sums[row] = _mm512_add_ps(weight_sums[row], _mm512_add_ps(first, second));
                if OFFSET {
                    // SAFETY: offsets of 64 values.
                    let [low, high] = unsafe {
                        let offset = offsets.values.as_ptr().add(STEP * step);
                        [_mm512_loadu_ps(offset), _mm512_loadu_ps(offset.add(16))]
                    };
                    weighted_offsets[row] = _mm512_fmadd_ps(first, low, weighted_offsets[row]);
                    weighted_offsets[row] = _mm512_fmadd_ps(second, high, weighted_offsets[row]);
                }
                if SCALED {
                    // SAFETY: scales of 64 values.
                    let [low, high] = unsafe {
                        let scale = scales.values.as_ptr().add(STEP * step);
                        [_mm512_loadu_ps(scale), _mm512_loadu_ps(scale.add(16))]
                    };
                    (first, second) = (_mm512_mul_ps(first, low), _mm512_mul_ps(second, high));
                }
                for part in 0..WEIGHT_PARTS {
                    let high;
                    (high, first, second) = peel(first, second);
                    let at = (step * WEIGHT_PARTS + part) * TILE_WORDS + row * 16;
                    // SAFETY: inside the tile, see the lengths above.
                    unsafe { _mm512_storeu_si512(tiles.as_mut_ptr().add(at).cast(), high) };
                }
            }
        }
        let weight_sums = combine!(weight_sums, _mm512_add_ps);
        // Rows of an empty state have a rescale of NaN, and nothing to scale.
        let rescale = _mm512_mask_mov_ps(rescale, empty, _mm512_set1_ps(1.0));
        // SAFETY: 16 elements each.
        unsafe {
            _mm512_storeu_ps(sum.as_mut_ptr(), _mm512_fmadd_ps(old_sum, rescale, weight_sums));
            _mm512_storeu_ps(max.as_mut_ptr(), new);
        }
        if OFFSET {
            let added = combine!(weighted_offsets, _mm512_add_ps);
            // SAFETY: 16 elements, see the lengths above.
            unsafe {
                let before = _mm512_loadu_ps(offset_sums.as_ptr());
                _mm512_storeu_ps(offset_sums.as_mut_ptr(), _mm512_fmadd_ps(before, rescale, added));
            }
        }
        let changed = _mm512_cmp_ps_mask::<_CMP_NEQ_UQ>(rescale, _mm512_set1_ps(1.0));
        let mut factors = [0.0; 16];
        // SAFETY: 16 elements.
        unsafe { _mm512_storeu_ps(factors.as_mut_ptr(), rescale) };
        for row in (0..spans.len()).filter(|row| changed & (1 << row) != 0) {
            let factor = _mm512_set1_ps(factors[row]);
            for chunk in values[row * d..(row + 1) * d].chunks_exact_mut(16) {
                // SAFETY: the chunk has 16 elements.
                unsafe {
                    let scaled = _mm512_mul_ps(_mm512_loadu_ps(chunk.as_ptr()), factor);
                    _mm512_storeu_ps(chunk.as_mut_ptr(), scaled);
                }
            }
        }
    }
}
