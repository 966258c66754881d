//! AMX: both products in bf16 tiles, 16 rows at a time.
//!
//! Pages are bf16 already and lie in tile order, so only the left operands are converted. Queries are split into
//! three bf16 parts, which keeps all 24 bits: some models have keys with large constant parts, and a logit of a few
//! hundred must still be right to a few parts in a million of one. Weights lie in `[0, 1]` and enter linearly; two
//! parts are enough for them.

use std::arch::asm;
use std::arch::x86_64::*;

use oscar_codec::PAGE_TOKENS;

use super::avx512;
use super::floats::SoftmaxRows;
use super::page::split;
use super::state::SoftmaxState;
use super::{AttentionScratch, Work, visible, written_values};
use crate::cpu::gemm::tiles::{TILE_BYTES, TILE_ROWS, Tiles};

/// Summed elements of one tile: channels for logits, tokens for values.
const STEP: usize = 32;

/// Words (pairs of bf16) of one tile.
const TILE_WORDS: usize = TILE_BYTES / 4;

/// bf16 parts of a query and of a weight.
const QUERY_PARTS: usize = 3;
const WEIGHT_PARTS: usize = 2;

/// Attends all rows to all pages. AMX must be available, which [`super::attend`] has checked.
pub(super) fn attend(work: &Work<'_>, scratch: &mut AttentionScratch, state: &mut SoftmaxState) {
    let Work { q, limits, d, .. } = *work;
    let rows = limits.len();
    let groups = rows.div_ceil(TILE_ROWS);
    let steps = d.div_ceil(STEP);
    let group_words = steps * QUERY_PARTS * TILE_WORDS;

    let query_tiles = scratch.query_tiles.at_least::<u32>(groups * group_words);
    for (group, tiles) in query_tiles.chunks_exact_mut(group_words).enumerate() {
        let first = group * TILE_ROWS;
        let count = TILE_ROWS.min(rows - first);
        // SAFETY: AMX implies the instruction sets of the function.
        unsafe { pack::<QUERY_PARTS>(&q[first * d..(first + count) * d], d, tiles) };
    }
    let weight_tiles = scratch.score_tiles.at_least::<u32>(2 * WEIGHT_PARTS * TILE_WORDS);
    weight_tiles.fill(0);
    let scores = scratch.scores.at_least::<f32>(TILE_ROWS * PAGE_TOKENS);

    // Products take as long as their tiles have rows, so a few rows of a decode step are not padded to 16.
    let tile_rows = rows.min(TILE_ROWS);
    // SAFETY: AMX is available; nothing else uses tiles until the end of this function.
    let unit = unsafe { Unit::new(tile_rows) };
    let most = limits.iter().copied().max().unwrap_or(0);
    for (page, start) in work.visible_pages() {
        let (keys, values) = split(page, d);
        let tail = padded_tail(keys, d, &mut scratch.keys);
        let values = written_values(values, d, visible(most, start), &mut scratch.values);
        for group in 0..groups {
            let first = group * TILE_ROWS;
            let count = TILE_ROWS.min(rows - first);
            let limits = &limits[first..first + count];
            let seen = limits.iter().map(|&limit| visible(limit, start)).max().unwrap_or(0);
            if seen == 0 {
                continue;
            }
            unit.logits(&query_tiles[group * group_words..][..group_words], keys, tail, d, scores);
            let channels = first * d..(first + TILE_ROWS) * d;
            // SAFETY: AMX implies the instruction sets of both functions.
            unsafe {
                avx512::softmax(SoftmaxRows {
                    scores: &mut *scores,
                    limits,
                    start,
                    max: &mut state.max[first..first + count],
                    sum: &mut state.sum[first..first + count],
                    values: &mut state.values[channels.clone()],
                    d,
                });
                pack::<WEIGHT_PARTS>(&scores[..count * PAGE_TOKENS], PAGE_TOKENS, weight_tiles);
            }
            let token_steps = seen.div_ceil(STEP);
            unit.values(weight_tiles, values, token_steps, d, &mut state.values[channels]);
        }
    }
}

/// Keys of the channels past the last whole tile, followed by zeros; empty if there are none.
fn padded_tail<'a>(
    keys: &[u16],
    d: usize,
    scratch: &'a mut crate::cpu::gemm::aligned::AlignedScratch,
) -> &'a [u16] {
    let whole = d / STEP * STEP;
    if whole == d {
        return &[];
    }
    let tail = scratch.at_least::<u16>(STEP * PAGE_TOKENS);
    let used = (d - whole) * PAGE_TOKENS;
    tail[..used].copy_from_slice(&keys[whole * PAGE_TOKENS..]);
    tail[used..].fill(0);
    tail
}

/// Rounds 32 values to bf16 and returns them with what rounding left.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
fn peel(first: __m512, second: __m512) -> (__m512i, __m512, __m512) {
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
fn pack<const PARTS: usize>(rows: &[f32], width: usize, tiles: &mut [u32]) {
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
struct Unit {
    _tiles: Tiles,
}

impl Unit {
    /// # Safety
    /// As [`Tiles::configure`].
    unsafe fn new(rows: usize) -> Unit {
        // SAFETY: the caller's promise.
        Unit { _tiles: unsafe { Tiles::configure(rows, [rows, 16, 16, 16]) } }
    }

    /// Logits of up to 16 rows with the 64 keys of a page.
    fn logits(&self, queries: &[u32], keys: &[u16], tail: &[u16], d: usize, scores: &mut [f32]) {
        let whole = d / STEP;
        assert!(
            queries.len() >= d.div_ceil(STEP) * QUERY_PARTS * TILE_WORDS && keys.len() >= d * PAGE_TOKENS
        );
        assert!(scores.len() >= TILE_ROWS * PAGE_TOKENS);
        assert!(d.is_multiple_of(STEP) || tail.len() >= STEP * PAGE_TOKENS);
        scores.fill(0.0);
        let (queries, scores) = (queries.as_ptr(), scores.as_mut_ptr());
        // SAFETY: tiles are configured while `self` lives, and the lengths above cover `whole` steps of the keys and
        // one of the tail.
        unsafe {
            query_keys(queries, keys.as_ptr(), PAGE_TOKENS, whole, scores);
            if !d.is_multiple_of(STEP) {
                let rest = queries.add(whole * QUERY_PARTS * TILE_WORDS);
                query_keys(rest, tail.as_ptr(), PAGE_TOKENS, 1, scores);
            }
        }
    }

    /// Adds the values of the first `32 * steps` tokens of a page, weighted, to `sums` (`[16][d]`).
    fn values(&self, weights: &[u32], values: &[u16], steps: usize, d: usize, sums: &mut [f32]) {
        assert!(weights.len() >= steps * WEIGHT_PARTS * TILE_WORDS && values.len() >= steps * STEP * d);
        assert!(sums.len() >= TILE_ROWS * d && d.is_multiple_of(16));
        let mut first = 0;
        while first < d {
            let tiles = ((d - first) / 16).min(4);
            // SAFETY: tiles are configured while `self` lives; the lengths above cover columns
            // `first..first + 16 * tiles` of both.
            unsafe {
                let (weights, values) = (weights.as_ptr(), values.as_ptr().add(2 * first));
                let sums = sums.as_mut_ptr().add(first);
                match tiles {
                    4 => weight_values_4(weights, values, d, steps, sums),
                    3 => weight_values_3(weights, values, d, steps, sums),
                    2 => weight_values_2(weights, values, d, steps, sums),
                    _ => weight_values_1(weights, values, d, steps, sums),
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
              "tdpbf16ps tmm", $sum, ", tmm4, tmm", $right, "\n",)*
        )
    };
}

/// Defines a product that adds to up to four tiles of sums side by side.
///
/// `left` is `[step][part]` tiles; `right` is rows of `width` pairs, 16 rows per step; `sums` has rows of `width`
/// floats. Every part of the left operand visits all tiles of sums before the next one, so that consecutive
/// products do not wait for each other; what this reloads comes from the first-level cache.
macro_rules! product {
    ($name:ident, [$($part:literal),*] of $bytes:literal, $tiles:tt, sums: [$(($sum:literal, $column:literal)),*]) => {
        /// # Safety
        /// Tiles are configured; the operands cover `steps` steps and the sums all rows of a tile.
        unsafe fn $name(left: *const u32, right: *const u16, width: usize, steps: usize, sums: *mut f32) {
            // SAFETY: reads and writes exactly what the caller promised.
            unsafe {
                asm!(
                    $(concat!("tileloadd tmm", $sum, ", [{c} + {stride} + ", $column, "]"),)*
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
                    c = in(reg) sums,
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

product!(query_keys, [0, 1024, 2048] of 3072, [(0, 5, 0), (1, 6, 64), (2, 7, 128), (3, 5, 192)],
    sums: [(0, 0), (1, 64), (2, 128), (3, 192)]);
product!(weight_values_4, [0, 1024] of 2048, [(0, 5, 0), (1, 6, 64), (2, 7, 128), (3, 5, 192)],
    sums: [(0, 0), (1, 64), (2, 128), (3, 192)]);
product!(weight_values_3, [0, 1024] of 2048, [(0, 5, 0), (1, 6, 64), (2, 7, 128)],
    sums: [(0, 0), (1, 64), (2, 128)]);
product!(weight_values_2, [0, 1024] of 2048, [(0, 5, 0), (1, 6, 64)], sums: [(0, 0), (1, 64)]);
product!(weight_values_1, [0, 1024] of 2048, [(0, 5, 0)], sums: [(0, 0)]);
