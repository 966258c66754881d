//! Attention of a step over the worker pool.
//!
//! The rows of a sequence are cut into blocks of tokens, and the pages a block reads into ranges, until there is
//! enough work for all threads: prefill gets its parallelism from blocks, a decode step from page ranges. Partial
//! results of a block are merged exactly. A row reads its sink and its recent pages in bf16 and what lies between
//! sealed, all into one softmax.

use std::ops::Range;
use std::sync::{Mutex, PoisonError, RwLock};

use oscar_codec::{HeadIndex, PAGE_TOKENS};

use super::CpuBackend;
use super::attention::sealed::{SealedFormat, attend_sealed_heads};
use super::attention::{self, AttentionScratch, SoftmaxState, Span};
use super::cache::Cache;
use super::encode::SealScratch;
use super::isa::Isa;
use super::memory::DisjointSlice;
use super::pool::Pool;
use super::step::{Step, StepSequence};
use crate::backend::AttentionSpec;

/// Query rows (tokens times heads of a group) a block aims for.
const BLOCK_ROWS: usize = 64;

/// Work items per thread where there are several blocks, so that uneven ones balance out.
const ITEMS_PER_THREAD: usize = 6;

/// Shares of a thread's part of a lone block, one item each. An item costs some microseconds before its first page, so
/// there are few; the last one is small, and is what a thread that is done early takes over.
const SHARES: [usize; 2] = [4, 1];

/// Heads are read together where an item gets at least this many pages of each.
const PAGES_TOGETHER: usize = 4;

/// Pages of an item when results must not depend on what else is computed.
const FIXED_PAGES: usize = 16;

/// How a step is computed.
#[derive(Clone, Copy)]
pub(super) struct Numerics {
    pub(super) isa: Isa,
    /// One path and one way to split for every batch, so that a row's result depends on the row alone.
    pub(super) fixed: bool,
}

impl Numerics {
    /// The path for attention. Tiles are chosen by the number of rows, so a fixed path does without.
    fn attention_isa(self) -> Isa {
        if self.fixed { self.isa.without_tiles() } else { self.isa }
    }
}

/// Heads of an attention layer, without the weights.
#[derive(Clone, Copy)]
pub(super) struct Heads {
    pub(super) q_heads: usize,
    pub(super) kv_heads: usize,
    pub(super) head_dim: usize,
    pub(super) scale: f32,
}

impl Heads {
    pub(super) fn of(spec: &AttentionSpec<CpuBackend>) -> Heads {
        let AttentionSpec { q_heads, kv_heads, head_dim, scale, .. } = *spec;
        Heads { q_heads, kv_heads, head_dim, scale }
    }

    pub(super) fn group(&self) -> usize {
        self.q_heads / self.kv_heads
    }

    pub(super) fn qkv_cols(&self) -> usize {
        (self.q_heads + 2 * self.kv_heads) * self.head_dim
    }
}

/// Tokens of one sequence, and KV heads they read.
struct Block<'a> {
    sequence: &'a StepSequence,
    /// One when there are many rows. Of few rows all heads are read together: their pages are neighbours in memory.
    heads: Range<usize>,
    /// Tokens inside the sequence's rows.
    tokens: Range<usize>,
    /// Items of this block.
    items: Range<usize>,
}

impl Block<'_> {
    /// Pages up to its last token.
    fn pages(&self) -> usize {
        (self.sequence.start + self.tokens.end).div_ceil(PAGE_TOKENS)
    }
}

/// One range of pages of a block.
struct Item {
    block: usize,
    pages: Range<usize>,
}

/// Buffers of one thread.
#[derive(Default)]
pub(super) struct AttendScratch {
    queries: Vec<f32>,
    spans: Vec<Span>,
    kernel: AttentionScratch,
    transform: SealScratch,
    /// Output rows of a head.
    rows: Vec<f32>,
    /// Softmax of a block that is one item.
    states: HeadStates,
}

/// Softmax of the rows of each head of a block.
type HeadStates = Vec<SoftmaxState>;

/// Softmax of each item of blocks that are several; kept between steps.
pub(super) type PartialStates = Vec<RwLock<HeadStates>>;

/// What the rows of a step read.
pub(super) struct Tiers<'a> {
    /// The pools of the step.
    pub(super) cache: &'a Cache,
    /// Layer of `cache`.
    pub(super) layer: usize,
    /// What is read instead for early positions, if anything: a measurement's stand-in for sealed pages.
    pub(super) history: Option<History<'a>>,
}

impl Tiers<'_> {
    /// About how many sealed pages take as long as one in bf16. Codes are bound by arithmetic, not by their bytes.
    fn exact_cost(&self) -> usize {
        match self.cache.sealed().map(|sealed| sealed.formats[self.layer]) {
            Some(SealedFormat::Codes(layout, _)) => 8 / layout.bits() as usize,
            _ => 1,
        }
    }
}

/// Stand-ins for the early positions of a sequence; see [`super::CpuBackend::attend_with_history`].
pub(super) struct History<'a> {
    pub(super) cache: &'a Cache,
    pub(super) layer: usize,
    /// Positions below `ends(position of the query)` are read from the history.
    pub(super) ends: &'a (dyn Fn(usize) -> usize + Sync),
}

/// Attends all rows of a step; `out` has `q_heads * head_dim` columns.
pub(super) fn attend(
    numerics: Numerics,
    pool: &Pool,
    workers: &[Mutex<AttendScratch>],
    partial: &mut PartialStates,
    step: &Step,
    heads: Heads,
    tiers: &Tiers<'_>,
    qkv: &[f32],
    out: &mut [f32],
) {
    let split = match numerics.fixed {
        false => Split::Threads(pool.threads(), tiers.exact_cost()),
        true => Split::Pages(FIXED_PAGES),
    };
    let (blocks, items) = plan(step, heads, split);
    partial.resize_with(partial.len().max(items.len()), RwLock::default);
    let partial = &*partial;
    let target = DisjointSlice::new(out);
    let isa = numerics.attention_isa();
    pool.for_each_worker(items.len(), |worker, index| {
        let item = &items[index];
        let block = &blocks[item.block];
        let mut scratch = workers[worker].lock().unwrap_or_else(PoisonError::into_inner);
        gather_queries(block, heads, qkv, &mut scratch);
        if block.items.len() == 1 {
            let mut states = std::mem::take(&mut scratch.states);
            read_item(isa, block, item, heads, tiers, &mut scratch, &mut states);
            for (head, state) in block.heads.clone().zip(&states) {
                write_head(block, head, heads, tiers, &[state], &mut scratch, &target);
            }
            scratch.states = states;
            return;
        }
        let mut states = partial[index].write().unwrap_or_else(PoisonError::into_inner);
        read_item(isa, block, item, heads, tiers, &mut scratch, &mut states);
    });
    // The parts of every head are put together by the thread that has just used its matrices, where tasks do not move.
    let several = blocks.iter().filter(|block| block.items.len() > 1);
    let outputs: Vec<(&Block<'_>, usize)> =
        several.flat_map(|block| (0..block.heads.len()).map(move |head| (block, head))).collect();
    pool.for_each_worker(outputs.len(), |worker, index| {
        let (block, head) = outputs[index];
        let scratch = &mut *workers[worker].lock().unwrap_or_else(PoisonError::into_inner);
        let parts: Vec<_> = partial[block.items.clone()]
            .iter()
            .map(|part| part.read().unwrap_or_else(PoisonError::into_inner))
            .collect();
        let parts: Vec<&SoftmaxState> = parts.iter().map(|states| &states[head]).collect();
        write_head(block, block.heads.start + head, heads, tiers, &parts, scratch, &target);
    });
}

/// The softmax of a block's rows over the pages of an item: sink, sealed history, and the rest.
fn read_item(
    isa: Isa,
    block: &Block<'_>,
    item: &Item,
    heads: Heads,
    tiers: &Tiers<'_>,
    scratch: &mut AttendScratch,
    states: &mut HeadStates,
) {
    let AttendScratch { queries, spans, kernel, .. } = scratch;
    states.resize_with(block.heads.len(), SoftmaxState::default);
    states.iter_mut().for_each(|state| state.reset(spans.len(), heads.head_dim));
    let mut reader = Reader { isa, block, heads, queries, kernel, states };
    let (cache, layer) = (tiers.cache, tiers.layer);
    if let Some(history) = &tiers.history {
        let early: Vec<Span> = spans
            .iter_mut()
            .map(|span| {
                span.from = (history.ends)(span.to - 1).min(span.to);
                Span::up_to(span.from)
            })
            .collect();
        reader.exact(history.cache, history.layer, &early, item.pages.clone());
        return reader.exact(cache, layer, spans, item.pages.clone());
    }
    let within = |pages: Range<usize>| {
        let start = pages.start.max(item.pages.start);
        start..pages.end.min(item.pages.end).max(start)
    };
    let positions =
        |pages: Range<usize>| Span { from: pages.start * PAGE_TOKENS, to: pages.end * PAGE_TOKENS };
    let history = |span: &Span| block.sequence.history(span.to - 1);
    // Rows of one block are neighbours: the first has the shortest history, the last the longest.
    let shortest = spans.first().map_or(0..0, history);
    let longest = spans.last().map_or(0..0, history);
    if !longest.is_empty() {
        // A row without a history sees its sink together with the rest.
        let sink = 0..longest.start;
        let early = |span: &Span| positions(if history(span).is_empty() { 0..0 } else { sink.clone() });
        reader.exact(cache, layer, &spans.iter().map(early).collect::<Vec<_>>(), within(sink.clone()));
        let middle: Vec<Span> = spans.iter().map(|span| positions(history(span))).collect();
        reader.sealed(cache, layer, &middle, within(longest));
        for span in spans.iter_mut() {
            span.from = history(span).end * PAGE_TOKENS;
        }
    }
    reader.exact(cache, layer, spans, within(shortest.end..block.pages()));
}

/// The rows of an item while they read pages.
struct Reader<'a> {
    isa: Isa,
    block: &'a Block<'a>,
    heads: Heads,
    queries: &'a [f32],
    kernel: &'a mut AttentionScratch,
    states: &'a mut [SoftmaxState],
}

impl Reader<'_> {
    /// Reads bf16 pages.
    fn exact(&mut self, cache: &Cache, layer: usize, spans: &[Span], pages: Range<usize>) {
        let (first, Heads { head_dim, scale, .. }) = (pages.start, self.heads);
        let slots = &self.block.sequence.pages[pages];
        if slots.is_empty() {
            return;
        }
        let Reader { isa, block, queries, kernel, states, .. } = self;
        let rows = queries.chunks_exact(spans.len() * head_dim);
        for ((head, queries), state) in block.heads.clone().zip(rows).zip(states.iter_mut()) {
            let pages: Vec<&[u16]> = slots.iter().map(|&slot| cache.page(layer, slot, head)).collect();
            attention::attend(*isa, queries, scale, spans, first, &pages, head_dim, kernel, state);
        }
    }

    /// Reads sealed pages.
    fn sealed(&mut self, cache: &Cache, layer: usize, spans: &[Span], pages: Range<usize>) {
        let first = pages.start;
        let Some(sealed) = cache.sealed().filter(|_| !pages.is_empty()) else { return };
        let Reader { isa, block, heads, queries, kernel, states } = self;
        let mut found: Vec<&[u8]> = Vec::with_capacity(pages.len() * block.heads.len());
        for page in pages {
            let slot = block.sequence.sealed_slot(page);
            found.extend(block.heads.clone().map(|head| sealed.page(HeadIndex { layer, head }, slot)));
        }
        let format = &sealed.formats[layer];
        attend_sealed_heads(*isa, format, queries, heads.scale, spans, first, &found, kernel, states);
    }
}

/// How the pages of a block are cut.
enum Split {
    /// For so many threads, where a bf16 page takes as long as so many sealed ones.
    Threads(usize, usize),
    /// This many pages to an item, whatever else there is.
    Pages(usize),
}

/// Cuts a step into blocks and their page ranges. A range comes after those of later pages: the last pages are bf16 and
/// take longest, and long items go first.
fn plan(step: &Step, heads: Heads, split: Split) -> (Vec<Block<'_>>, Vec<Item>) {
    let block_tokens = (BLOCK_ROWS / heads.group()).max(1);
    let block_count: usize = step.sequences.iter().map(|sequence| sequence.len.div_ceil(block_tokens)).sum();
    let ranges = match split {
        Split::Threads(1, _) | Split::Pages(_) => 1,
        Split::Threads(threads, _) if block_count == 1 => threads * SHARES.len(),
        Split::Threads(threads, _) => (threads * ITEMS_PER_THREAD).div_ceil(block_count.max(1)),
    };
    let mut blocks = Vec::new();
    let mut items = Vec::new();
    for sequence in &step.sequences {
        for first in (0..sequence.len).step_by(block_tokens) {
            let tokens = first..(first + block_tokens).min(sequence.len);
            let pages = (sequence.start + tokens.end).div_ceil(PAGE_TOKENS);
            let together = tokens.len() == 1 && pages >= ranges * PAGES_TOGETHER;
            let block_heads = if together { heads.kv_heads } else { 1 };
            let cut: Vec<Range<usize>> = match split {
                Split::Threads(_, exact_cost) => {
                    let history = sequence.history(sequence.start + tokens.end - 1);
                    let cost = |page: usize| if history.contains(&page) { 1 } else { exact_cost };
                    let shares: Vec<usize> = match (together, block_count) {
                        (true, 1) => SHARES.into_iter().cycle().take(ranges).collect(),
                        (true, _) => vec![1; ranges],
                        (false, _) => vec![1; ranges.div_ceil(heads.kv_heads)],
                    };
                    cut(pages, cost, &shares)
                }
                Split::Pages(count) => (0..pages.div_ceil(count))
                    .rev()
                    .map(|n| n * count..((n + 1) * count).min(pages))
                    .collect(),
            };
            for head in (0..heads.kv_heads).step_by(block_heads) {
                let first_item = items.len();
                items.extend(cut.iter().map(|pages| Item { block: blocks.len(), pages: pages.clone() }));
                let heads = head..head + block_heads;
                let items = first_item..items.len();
                blocks.push(Block { sequence, heads, tokens: tokens.clone(), items });
            }
        }
    }
    (blocks, items)
}

/// Cuts pages into ranges whose costs are about as the shares, from the last page to the first. Ranges are not empty,
/// so there may be fewer.
fn cut(pages: usize, cost: impl Fn(usize) -> usize, shares: &[usize]) -> Vec<Range<usize>> {
    let total: usize = (0..pages).map(&cost).sum();
    let whole: usize = shares.iter().sum();
    let mut ranges = Vec::new();
    let (mut start, mut passed, mut due) = (pages, 0, 0);
    for share in shares {
        due += share;
        let end = start;
        // A page belongs where its middle lies.
        while start > 0 && (2 * passed + cost(start - 1)) * whole <= 2 * due * total {
            start -= 1;
            passed += cost(start);
        }
        if start < end {
            ranges.push(start..end);
        }
    }
    ranges
}

/// Collects the query rows of a block, head by head and token by token, and what each row of a head may see.
fn gather_queries(block: &Block<'_>, heads: Heads, qkv: &[f32], scratch: &mut AttendScratch) {
    let AttendScratch { queries, spans, .. } = scratch;
    queries.clear();
    spans.clear();
    let width = heads.group() * heads.head_dim;
    for head in block.heads.clone() {
        for token in block.tokens.clone() {
            let row = &qkv[(block.sequence.first_row + token) * heads.qkv_cols()..];
            queries.extend_from_slice(&row[head * width..(head + 1) * width]);
        }
    }
    for token in block.tokens.clone() {
        spans.extend(std::iter::repeat_n(Span::up_to(block.sequence.start + token + 1), heads.group()));
    }
}

/// Writes the output of one KV head of a block, back in the model's basis.
fn write_head(
    block: &Block<'_>,
    head: usize,
    heads: Heads,
    tiers: &Tiers<'_>,
    parts: &[&SoftmaxState],
    scratch: &mut AttendScratch,
    target: &DisjointSlice<'_, f32>,
) {
    let (group, d) = (heads.group(), heads.head_dim);
    let AttendScratch { rows, transform, .. } = scratch;
    rows.resize(block.tokens.len() * group * d, 0.0);
    for (row, out) in rows.chunks_exact_mut(d).enumerate() {
        SoftmaxState::finish_parts(parts, row, out);
    }
    if let Some(sealed) = tiers.cache.sealed() {
        sealed.sealer.undo_values(HeadIndex { layer: tiers.layer, head }, rows, transform);
    }
    for (rows, token) in rows.chunks_exact(group * d).zip(block.tokens.clone()) {
        let row = block.sequence.first_row + token;
        let start = (row * heads.q_heads + head * group) * d;
        // SAFETY: every (row, KV head) belongs to one block, and each of its heads is one task.
        unsafe { target.part(start..start + group * d) }.copy_from_slice(rows);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_cut_by_what_they_cost() {
        // A sink of one page, a history of 100 and four recent pages that cost as much as four each.
        let cost = |page: usize| if (1..101).contains(&page) { 1 } else { 4 };
        assert_eq!(cut(105, cost, &[4, 1, 4, 1]), [69..105, 57..69, 9..57, 0..9]);
        assert_eq!(cut(105, cost, &[1, 1]), [57..105, 0..57]);
        assert_eq!(cut(0, cost, &[4, 1]), []);
    }

    #[test]
    fn every_page_is_in_one_range() {
        for pages in 0..40 {
            for shares in [&[1][..], &[4, 1, 4, 1], &[1; 12], &[1; 50]] {
                for exact in [1, 2, 4] {
                    let cost = |page: usize| if (1..20).contains(&page) { 1 } else { exact };
                    let ranges = cut(pages, cost, shares);
                    assert!(ranges.len() <= shares.len());
                    assert!(ranges.iter().all(|range| !range.is_empty()));
                    assert!(ranges.into_iter().rev().flatten().eq(0..pages), "{pages} {shares:?} {exact}");
                }
            }
        }
    }
}
