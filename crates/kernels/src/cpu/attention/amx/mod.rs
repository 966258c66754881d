//! AMX: both products in bf16 tiles, 16 rows at a time.
//!
//! Pages are bf16 already and lie in tile order, so only the left operands are converted. Queries are split into
//! three bf16 parts, which keeps all 24 bits: some models have keys with large constant parts, and a logit of a few
//! hundred must still be right to a few parts in a million of one. Weights lie in `[0, 1]` and enter linearly; two
//! parts are enough for them.

mod softmax;
mod unit;

use oscar_codec::PAGE_TOKENS;

pub(super) use self::softmax::TokenScales;
use self::softmax::{TileRows, ZEROS};
use self::unit::{QUERY_PARTS, STEP, TILE_WORDS, Unit, WEIGHT_PARTS, pack};
use super::page::{split, written_values};
use super::scratch::{AttentionScratch, TileScratch};
use super::state::SoftmaxState;
use super::work::{Span, Work};
use crate::cpu::aligned::AlignedScratch;
use crate::cpu::simd::amx::TILE_ROWS;

/// Attends all rows to all pages. AMX must be available, which [`super::attend`] has checked.
pub(super) fn attend(work: &Work<'_>, scratch: &mut AttentionScratch, state: &mut SoftmaxState) {
    let d = work.d;
    let AttentionScratch { tiles, scores, values: filled, .. } = scratch;
    let mut tiled = Tiled::new(work.q, work.spans, d, tiles, scores);
    let mut pages = work.visible_pages().peekable();
    while let Some((page, start)) = pages.next() {
        let (keys, values) = split(page, d);
        // A page is in the cache after its first group, which prefetches the next one as it goes.
        let (next_keys, next_values) = pages.peek().map_or((keys, values), |(page, _)| split(page, d));
        let values = written_values(values, d, work.written(start), filled);
        let page = Page { keys, values, next_keys, next_values, start, scales: None, offsets: None };
        tiled.attend(&page, state);
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
    tail: &'a mut AlignedScratch,
    scores: &'a mut [f32],
    offsets: Option<RowOffsets<'a>>,
}

impl<'a> Tiled<'a> {
    /// `q` is scaled. AMX must be available.
    pub(super) fn new(
        q: &[f32],
        spans: &'a [Span],
        d: usize,
        scratch: &'a mut TileScratch,
        scores: &'a mut AlignedScratch,
    ) -> Tiled<'a> {
        let rows = spans.len();
        let TileScratch { queries: query_tiles, weights: weight_tiles, tail } = scratch;
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
        Tiled { unit, spans, d, query_tiles, weight_tiles, tail, scores, offsets: None }
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

    /// Attends all rows to a page.
    pub(super) fn attend(&mut self, page: &Page<'_>, state: &mut SoftmaxState) {
        let Page { keys, values, start, .. } = *page;
        let (d, rows) = (self.d, self.spans.len());
        let group_words = d.div_ceil(STEP) * QUERY_PARTS * TILE_WORDS;
        let tail = padded_tail(keys, d, self.tail);
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
            let rows = TileRows {
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
