//! AMX: both products in bf16 tiles, 16 rows at a time.
//!
//! Pages are bf16 already and lie in tile order, so only the left operands are converted. Queries are split into
//! three bf16 parts, which keeps all 24 bits: some models have keys with large constant parts, and a logit of a few
//! hundred must still be right to a few parts in a million of one. Weights lie in `[0, 1]` and enter linearly; two
//! parts are enough for them.

use std::arch::asm;
use std::arch::x86_64::*;

use oscar_codec::PAGE_TOKENS;

use super::avx512::exp2;
use super::page::split;
use super::state::SoftmaxState;
use super::{AttentionScratch, Span, Work, written_values};
use crate::cpu::gemm::aligned::AlignedScratch;
use crate::cpu::gemm::avx512::transpose;
use crate::cpu::gemm::tiles::{TILE_BYTES, TILE_ROWS, Tiles};

/// Summed elements of one tile: channels for logits, tokens for values.
const STEP: usize = 32;

/// Words (pairs of bf16) of one tile.
const TILE_WORDS: usize = TILE_BYTES / 4;

/// bf16 parts of a query and of a weight.
const QUERY_PARTS: usize = 3;
const WEIGHT_PARTS: usize = 2;

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

/// Attends all rows to all pages. AMX must be available, which [`super::attend`] has checked.
pub(super) fn attend(work: &Work<'_>, scratch: &mut AttentionScratch, state: &mut SoftmaxState) {
    let d = work.d;
    let AttentionScratch { query_tiles, score_tiles, scores, keys: tail, values: filled, .. } = scratch;
    let mut tiled = Tiled::new(work.q, work.spans, d, query_tiles, score_tiles, scores);
    let mut pages = work.visible_pages().peekable();
    while let Some((page, start)) = pages.next() {
        let (keys, values) = split(page, d);
        // A page is in the cache after its first group, which fetches the next one as it goes.
        let (next_keys, next_values) = pages.peek().map_or((keys, values), |(page, _)| split(page, d));
        let values = written_values(values, d, work.written(start), filled);
        let page = Page { keys, values, next_keys, next_values, start, scales: None, offsets: None };
        tiled.attend(&page, tail, state);
    }
}

/// A page in bf16.
pub(super) struct Page<'a> {
    pub(super) keys: &'a [u16],
    /// Numbers for all tokens, seen or not.
    pub(super) values: &'a [u16],
    /// Will be read after this page.
    pub(super) next_keys: &'a [u16],
    pub(super) next_values: &'a [u16],
    /// Position of the first token.
    pub(super) start: usize,
    /// What stored keys and values are to be multiplied with.
    pub(super) scales: Option<TokenScales<'a>>,
    /// What is to be subtracted from every channel after that, if the rows have [`RowOffsets`].
    pub(super) offsets: Option<TokenScales<'a>>,
}

/// A number for the key and one for the value of each token of a page.
#[derive(Clone, Copy)]
pub(super) struct TokenScales<'a> {
    pub(super) keys: &'a [f32; PAGE_TOKENS],
    pub(super) values: &'a [f32; PAGE_TOKENS],
}

/// No scales and no offsets.
const ZEROS: TokenScales<'static> = TokenScales { keys: &[0.0; PAGE_TOKENS], values: &[0.0; PAGE_TOKENS] };

impl TokenScales<'_> {
    /// Those of the keys, followed by those of the values.
    pub(super) fn of(scales: &[f32; 2 * PAGE_TOKENS]) -> TokenScales<'_> {
        let [keys, values] = [0, PAGE_TOKENS].map(|at| scales[at..].first_chunk().expect("64 of each"));
        TokenScales { keys, values }
    }
}

/// What offsets of keys and values need of each row; rows are padded to whole tiles.
pub(super) struct RowOffsets<'a> {
    /// Sum of the channels of the query, scaled.
    pub(super) totals: &'a [f32],
    /// Sum of the offsets of values with the weights of the row; zero before the first page.
    pub(super) sums: &'a mut [f32],
}

/// The queries of a call as tiles, and the unit that multiplies them.
pub(super) struct Tiled<'a> {
    unit: Unit,
    spans: &'a [Span],
    d: usize,
    query_tiles: &'a [u32],
    weight_tiles: &'a mut [u32],
    scores: &'a mut [f32],
    offsets: Option<RowOffsets<'a>>,
}

impl<'a> Tiled<'a> {
    /// `q` is scaled. AMX must be available.
    pub(super) fn new(
        q: &[f32],
        spans: &'a [Span],
        d: usize,
        query_tiles: &'a mut AlignedScratch,
        weight_tiles: &'a mut AlignedScratch,
        scores: &'a mut AlignedScratch,
    ) -> Tiled<'a> {
        let rows = spans.len();
        let group_words = d.div_ceil(STEP) * QUERY_PARTS * TILE_WORDS;
        let query_tiles = query_tiles.at_least::<u32>(rows.div_ceil(TILE_ROWS) * group_words);
        for (group, tiles) in query_tiles.chunks_exact_mut(group_words).enumerate() {
            let first = group * TILE_ROWS;
            let count = TILE_ROWS.min(rows - first);
            // SAFETY: AMX implies the instruction sets of the function.
            unsafe { pack::<QUERY_PARTS>(&q[first * d..(first + count) * d], d, tiles) };
        }
        let weight_tiles = weight_tiles.at_least::<u32>(2 * WEIGHT_PARTS * TILE_WORDS);
        weight_tiles.fill(0);
        let scores = scores.at_least::<f32>(TILE_ROWS * PAGE_TOKENS);
        scores.fill(0.0);
        // Products take as long as their tiles have rows, so a few rows of a decode step are not padded to 16.
        // SAFETY: AMX is available; nothing else uses tiles while the value lives.
        let unit = unsafe { Unit::new(rows.min(TILE_ROWS)) };
        Tiled { unit, spans, d, query_tiles, weight_tiles, scores, offsets: None }
    }

    /// The same for pages with offsets. [`Self::subtract_offsets`] must follow the last page.
    pub(super) fn with_offsets(self, offsets: RowOffsets<'a>) -> Tiled<'a> {
        Tiled { offsets: Some(offsets), ..self }
    }

    /// Subtracts the summed offsets of values from the weighted values of each row.
    pub(super) fn subtract_offsets(self, state: &mut SoftmaxState) {
        let sums = self.offsets.iter().flat_map(|offsets| offsets.sums.iter());
        for (values, sum) in state.values.chunks_exact_mut(self.d).zip(sums) {
            values.iter_mut().for_each(|value| *value -= sum);
        }
    }

    /// Attends all rows to a page; `tail` is scratch.
    pub(super) fn attend(&mut self, page: &Page<'_>, tail: &mut AlignedScratch, state: &mut SoftmaxState) {
        let Page { keys, values, start, .. } = *page;
        let (d, rows) = (self.d, self.spans.len());
        let group_words = d.div_ceil(STEP) * QUERY_PARTS * TILE_WORDS;
        let tail = padded_tail(keys, d, tail);
        for (group, queries) in self.query_tiles.chunks_exact(group_words).enumerate() {
            let first = group * TILE_ROWS;
            let spans = &self.spans[first..rows.min(first + TILE_ROWS)];
            let seen = spans.iter().map(|span| span.in_page(start)).filter(|seen| !seen.is_empty());
            let Some(seen) = seen.map(|seen| seen.end).max() else {
                continue;
            };
            let (next_keys, next_values) =
                if group == 0 { (page.next_keys, page.next_values) } else { (keys, values) };
            self.unit.logits(queries, keys, tail, d, next_keys, self.scores);
            let padded = first..first + TILE_ROWS;
            let sums = &mut state.values[padded.start * d..padded.end * d];
            let rows = Rows {
                scores: self.scores,
                spans,
                start,
                max: &mut state.max[padded.clone()],
                sum: &mut state.sum[padded.clone()],
            };
            let tiles = &mut *self.weight_tiles;
            // SAFETY: AMX implies the instruction sets of the function.
            unsafe {
                match (page.scales, page.offsets, &mut self.offsets) {
                    (Some(scales), Some(offsets), Some(rows_offsets)) => {
                        let (totals, sums_of) =
                            (&rows_offsets.totals[padded.clone()], &mut rows_offsets.sums[padded]);
                        rows.softmax::<true, true>(scales, offsets, totals, sums_of, sums, d, tiles)
                    }
                    (Some(scales), ..) => {
                        rows.softmax::<true, false>(scales, ZEROS, &[], &mut [], sums, d, tiles)
                    }
                    _ => rows.softmax::<false, false>(ZEROS, ZEROS, &[], &mut [], sums, d, tiles),
                }
            }
            self.unit.values(self.weight_tiles, values, seen.div_ceil(STEP), d, next_values, sums);
        }
    }
}

/// Multiplies for nothing: a tile unit that has had nothing to do for some 400 ns goes to sleep, and takes almost as
/// long to wake up.
///
/// # Safety
/// Tiles are configured, and the sums in `tmm0` are of no use any more.
#[inline]
unsafe fn stay_awake() {
    // SAFETY: only a tile register is touched, and the caller does not need it.
    unsafe { asm!("tdpbf16ps tmm0, tmm4, tmm5", out("tmm0") _, options(nostack, nomem, preserves_flags)) };
}

/// The rows of one group inside a softmax step.
struct Rows<'a> {
    /// `[16][64]` logits.
    scores: &'a [f32],
    /// What up to 16 rows see, and the position of the page's first token.
    spans: &'a [Span],
    start: usize,
    max: &'a mut [f32],
    sum: &'a mut [f32],
}

impl Rows<'_> {
    /// Turns logits into weights, packed as tiles, and scales what was summed before to the new maximum.
    ///
    /// As [`super::avx512::softmax`], but what happens once per row happens for all 16 rows in one register. With
    /// `SCALED`, logits and weights are multiplied with the scales of keys and values. With `OFFSET`, the offsets of
    /// keys times the total of the row's query are subtracted from logits, and those of values summed with the weights.
    ///
    /// # Safety
    /// Tiles are configured, and the sums in `tmm0` are of no use any more.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma")]
    unsafe fn softmax<const SCALED: bool, const OFFSET: bool>(
        self,
        scales: TokenScales<'_>,
        offsets: TokenScales<'_>,
        totals: &[f32],
        offset_sums: &mut [f32],
        values: &mut [f32],
        d: usize,
        tiles: &mut [u32],
    ) {
        let Rows { scores, spans, start, max, sum } = self;
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
        let shrink = exp2(_mm512_sub_ps(old, new));
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
                let mut first = exp2(_mm512_sub_ps(load(row, 2 * step), shift));
                let mut second = exp2(_mm512_sub_ps(load(row, 2 * step + 1), shift));
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
        // Rows of an empty state have a shrink of NaN, and nothing to scale.
        let shrink = _mm512_mask_mov_ps(shrink, empty, _mm512_set1_ps(1.0));
        // SAFETY: 16 elements each.
        unsafe {
            _mm512_storeu_ps(sum.as_mut_ptr(), _mm512_fmadd_ps(old_sum, shrink, weight_sums));
            _mm512_storeu_ps(max.as_mut_ptr(), new);
        }
        if OFFSET {
            let added = combine!(weighted_offsets, _mm512_add_ps);
            // SAFETY: 16 elements, see the lengths above.
            unsafe {
                let before = _mm512_loadu_ps(offset_sums.as_ptr());
                _mm512_storeu_ps(offset_sums.as_mut_ptr(), _mm512_fmadd_ps(before, shrink, added));
            }
        }
        let changed = _mm512_cmp_ps_mask::<_CMP_NEQ_UQ>(shrink, _mm512_set1_ps(1.0));
        let mut factors = [0.0; 16];
        // SAFETY: 16 elements.
        unsafe { _mm512_storeu_ps(factors.as_mut_ptr(), shrink) };
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

/// Keys of the channels past the last whole tile, followed by zeros; empty if there are none.
fn padded_tail<'a>(keys: &[u16], d: usize, scratch: &'a mut AlignedScratch) -> &'a [u16] {
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

    /// Logits of up to 16 rows with the 64 keys of a page; `next` will be the keys of the next page.
    fn logits(
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
    fn values(
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
/// next is fetched along the way, from there on and from `half` bytes after it in turn: the hardware fetches ahead in each
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
