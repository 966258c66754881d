//! The tile unit: left operands of split bf16, and products of tiles.

use std::arch::asm;
use std::arch::x86_64::*;

use oscar_codec::PAGE_TOKENS;

use crate::cpu::simd::amx::{TILE_BYTES, TILE_ROWS, Tiles};

/// Summed elements of one tile: channels for logits, tokens for values.
pub(super) const STEP: usize = 32;

/// Words (pairs of bf16) of one tile.
pub(super) const TILE_WORDS: usize = TILE_BYTES / 4;

/// bf16 parts of a query and of a weight.
pub(super) const QUERY_PARTS: usize = 3;
pub(super) const WEIGHT_PARTS: usize = 2;

/// Multiplies for nothing: a tile unit that has had nothing to do for some 400 ns goes to sleep, and takes almost as
/// long to wake up.
///
/// # Safety
/// Tiles are configured, and the sums in `tmm0` are of no use any more.
#[inline]
pub(super) unsafe fn stay_awake() {
    // SAFETY: only a tile register is touched, and the caller does not need it.
    unsafe { asm!("tdpbf16ps tmm0, tmm4, tmm5", out("tmm0") _, options(nostack, nomem, preserves_flags)) };
}

/// Rounds 32 values to bf16 and returns them with what rounding left.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
pub(super) fn peel(first: __m512, second: __m512) -> (__m512i, __m512, __m512) {
    // SAFETY: same size, all bit patterns valid.
    let high: __m512i = unsafe { std::mem::transmute(_mm512_cvtne2ps_pbh(second, first)) };
    let rest = |value: __m512, half: __m256i| {
        let high = _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(half)));
        let rest = _mm512_sub_ps(value, high);
        // An infinite value would leave NaN; the high part alone says all there is to say.
        _mm512_maskz_mov_ps(_mm512_cmp_ps_mask::<_CMP_ORD_Q>(rest, rest), rest)
    };
    (high, rest(first, _mm512_castsi512_si256(high)), rest(second, _mm512_extracti64x4_epi64::<1>(high)))
}

/// Packs up to 16 rows of `width` values as left operands, `[step][part][row]`; columns past the end are zero.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
pub(super) fn pack<const PARTS: usize>(rows: &[f32], width: usize, tiles: &mut [u32]) {
    assert!(width.is_multiple_of(16) && tiles.len() >= width.div_ceil(STEP) * PARTS * TILE_WORDS);
    for (row, values) in rows.chunks_exact(width).enumerate() {
        for (step, values) in values.chunks(STEP).enumerate() {
            // SAFETY: chunks hold 16 or 32 values.
            let (mut first, mut second) = unsafe {
                let first = _mm512_loadu_ps(values.as_ptr());
                if values.len() == STEP {
                    (first, _mm512_loadu_ps(values.as_ptr().add(16)))
                } else {
                    (first, _mm512_setzero_ps())
                }
            };
            for part in 0..PARTS {
                let high;
                (high, first, second) = peel(first, second);
                let target = &mut tiles[(step * PARTS + part) * TILE_WORDS + row * 16..][..16];
                // SAFETY: the slice has 16 words.
                unsafe { _mm512_storeu_si512(target.as_mut_ptr().cast(), high) };
            }
        }
    }
}

/// The AMX unit, ready for left operands of some rows.
pub(super) struct Unit {
    _tiles: Tiles,
}

impl Unit {
    /// # Safety
    /// The caller keeps the promises of [`Tiles::configure`].
    pub(super) unsafe fn new(rows: usize) -> Unit {
        // SAFETY: the caller's promise.
        Unit { _tiles: unsafe { Tiles::configure(rows, [rows, 16, 16, 16]) } }
    }

    /// Logits of up to 16 rows with the 64 keys of a page; `next` will be the keys of the next page.
    pub(super) fn logits(
        &self,
        queries: &[u32],
        keys: &[u16],
        tail: &[u16],
        d: usize,
        next: &[u16],
        scores: &mut [f32],
    ) {
        let whole = d / STEP;
        assert!(
            queries.len() >= d.div_ceil(STEP) * QUERY_PARTS * TILE_WORDS && keys.len() >= d * PAGE_TOKENS
        );
        assert!(scores.len() >= TILE_ROWS * PAGE_TOKENS && whole > 0);
        assert!(d.is_multiple_of(STEP) || tail.len() >= STEP * PAGE_TOKENS);
        let (queries, next, scores) = (queries.as_ptr(), next.as_ptr(), scores.as_mut_ptr());
        // SAFETY: tiles are configured while `self` lives, and the lengths above cover `whole` steps of the keys and
        // one of the tail.
        unsafe {
            query_keys(queries, keys.as_ptr(), PAGE_TOKENS, whole, next, whole * STEP * PAGE_TOKENS, scores);
            if !d.is_multiple_of(STEP) {
                let rest = queries.add(whole * QUERY_PARTS * TILE_WORDS);
                let next = next.wrapping_add(whole * STEP * PAGE_TOKENS);
                query_more_keys(rest, tail.as_ptr(), PAGE_TOKENS, 1, next, STEP * PAGE_TOKENS / 2, scores);
            }
        }
    }

    /// Adds the values of the first `32 * steps` tokens of a page, weighted, to `sums` (`[16][d]`); `next` will be
    /// the values of the next page.
    pub(super) fn values(
        &self,
        weights: &[u32],
        values: &[u16],
        steps: usize,
        d: usize,
        next: &[u16],
        sums: &mut [f32],
    ) {
        assert!(weights.len() >= steps * WEIGHT_PARTS * TILE_WORDS && values.len() >= steps * STEP * d);
        assert!(sums.len() >= TILE_ROWS * d && d.is_multiple_of(16) && steps > 0);
        let mut first = 0;
        while first < d {
            let tiles = ((d - first) / 16).min(4);
            // SAFETY: tiles are configured while `self` lives; the lengths above cover columns
            // `first..first + 16 * tiles` of both.
            unsafe {
                let (weights, values) = (weights.as_ptr(), values.as_ptr().add(2 * first));
                let next = next.as_ptr().wrapping_add(first * PAGE_TOKENS);
                let sums = sums.as_mut_ptr().add(first);
                let half = tiles * 16 * PAGE_TOKENS;
                match tiles {
                    4 => weight_values_4(weights, values, d, steps, next, half, sums),
                    3 => weight_values_3(weights, values, d, steps, next, half, sums),
                    2 => weight_values_2(weights, values, d, steps, next, half, sums),
                    _ => weight_values_1(weights, values, d, steps, next, half, sums),
                }
            }
            first += 16 * tiles;
        }
    }
}

/// Products of one part of the left operand (at byte `$part`) with all tiles of the right one.
macro_rules! part {
    ($part:literal, [$(($sum:literal, $right:literal, $column:literal)),*]) => {
        concat!(
            "tileloadd tmm4, [{a} + {line} + ", $part, "]\n",
            $("tileloadd tmm", $right, ", [{b} + {stride} + ", $column, "]\n",
              "tdpbf16ps tmm", $sum, ", tmm4, tmm", $right, "\n",
              "prefetcht0 [{next}]\n",
              "prefetcht0 [{next} + {half}]\n",
              "prefetcht0 [{next} + 64]\n",
              "prefetcht0 [{next} + {half} + 64]\n",
              "prefetcht0 [{next} + 128]\n",
              "prefetcht0 [{next} + {half} + 128]\n",
              "add {next}, 192\n",)*
        )
    };
}

/// Where the sums start: from zero, or from what is stored.
macro_rules! from_zero {
    ($sum:literal, $column:literal) => {
        concat!("tilezero tmm", $sum)
    };
}
macro_rules! from_sums {
    ($sum:literal, $column:literal) => {
        concat!("tileloadd tmm", $sum, ", [{c} + {stride} + ", $column, "]")
    };
}

/// Defines a product that adds to up to four tiles of sums side by side.
///
/// `left` is `[step][part]` tiles; `right` is rows of `width` pairs, 16 rows per step; `sums` has rows of `width`
/// floats. Every part of the left operand visits all tiles of sums before the next one, so that consecutive
/// products do not wait for each other; what this reloads comes from the first-level cache. What comes
/// next is prefetched along the way, from there on and from `half` bytes after it in turn: the hardware fetches ahead in each
/// place, and starts anew where a page of memory ends.
macro_rules! product {
    ($name:ident, $start:ident, [$($part:literal),*] of $bytes:literal, $tiles:tt,
     sums: [$(($sum:literal, $column:literal)),*]) => {
        /// # Safety
        /// Tiles are configured; the operands cover `steps` steps and the sums all rows of a tile.
        unsafe fn $name(
            left: *const u32,
            right: *const u16,
            width: usize,
            steps: usize,
            next: *const u16,
            half: usize,
            sums: *mut f32,
        ) {
            // SAFETY: reads and writes exactly what the caller promised.
            unsafe {
                asm!(
                    $($start!($sum, $column),)*
                    "2:",
                    $(part!($part, $tiles),)*
                    concat!("add {a}, ", $bytes),
                    "add {b}, {advance}",
                    "dec {steps}",
                    "jnz 2b",
                    $(concat!("tilestored [{c} + {stride} + ", $column, "], tmm", $sum),)*
                    a = inout(reg) left => _,
                    b = inout(reg) right => _,
                    steps = inout(reg) steps => _,
                    next = inout(reg) next => _,
                    c = in(reg) sums,
                    half = in(reg) half,
                    line = in(reg) 64usize,
                    stride = in(reg) 4 * width,
                    advance = in(reg) 64 * width,
                    out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                    out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                    options(nostack),
                );
            }
        }
    };
}

product!(query_keys, from_zero, [0, 1024, 2048] of 3072, [(0, 5, 0), (1, 6, 64), (2, 7, 128), (3, 5, 192)],
    sums: [(0, 0), (1, 64), (2, 128), (3, 192)]);
product!(query_more_keys, from_sums, [0, 1024, 2048] of 3072,
    [(0, 5, 0), (1, 6, 64), (2, 7, 128), (3, 5, 192)], sums: [(0, 0), (1, 64), (2, 128), (3, 192)]);
product!(weight_values_4, from_sums, [0, 1024] of 2048, [(0, 5, 0), (1, 6, 64), (2, 7, 128), (3, 5, 192)],
    sums: [(0, 0), (1, 64), (2, 128), (3, 192)]);
product!(weight_values_3, from_sums, [0, 1024] of 2048, [(0, 5, 0), (1, 6, 64), (2, 7, 128)],
    sums: [(0, 0), (1, 64), (2, 128)]);
product!(weight_values_2, from_sums, [0, 1024] of 2048, [(0, 5, 0), (1, 6, 64)], sums: [(0, 0), (1, 64)]);
product!(weight_values_1, from_sums, [0, 1024] of 2048, [(0, 5, 0)], sums: [(0, 0)]);
