//! Attention of a step over the worker pool.
//!
//! The rows of a sequence are cut into blocks of tokens, and the pages a block reads into ranges, until there is
//! enough work for all threads: prefill gets its parallelism from blocks, a decode step from page ranges. Partial
//! results of a block are merged exactly. A row reads its sink and its recent pages in bf16 and what lies between
//! sealed, all into one softmax.

mod plan;

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
use super::step::Step;
use crate::backend::AttentionSpec;
use plan::{Block, FIXED_PAGES, Item, Split, plan};

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

/// Softmax of the rows of each head of an item.
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
            Some(SealedFormat::Codes(layout, _)) => 10 / layout.bits() as usize,
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
    let plan = plan(step, heads, split);
    let (blocks, items) = (&plan.blocks, &plan.items);
    partial.resize_with(partial.len().max(items.len()), RwLock::default);
    let partial = &*partial;
    let target = DisjointSlice::new(out);
    let isa = numerics.attention_isa();
    let end = |thread: usize| plan.end(thread, pool.threads());
    pool.for_each_in_runs(items.len(), end, |worker, index| {
        let item = &items[index];
        let block = &blocks[item.block];
        let mut scratch = workers[worker].lock().unwrap_or_else(PoisonError::into_inner);
        gather_queries(block, &item.heads, heads, qkv, &mut scratch);
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
    // The parts of a head are put together by the thread that rotated its value, if no other has helped: it has the matrix.
    let several = blocks.iter().filter(|block| block.items.len() > 1);
    let outputs: Vec<(&Block<'_>, usize)> =
        several.flat_map(|block| block.heads.clone().map(move |head| (block, head))).collect();
    pool.for_each_worker(outputs.len(), |worker, index| {
        let (block, head) = outputs[index];
        let scratch = &mut *workers[worker].lock().unwrap_or_else(PoisonError::into_inner);
        let parts = items[block.items.clone()].iter().zip(&partial[block.items.clone()]);
        let parts: Vec<_> = parts
            .filter(|(item, _)| item.heads.contains(&head))
            .map(|(item, part)| {
                (head - item.heads.start, part.read().unwrap_or_else(PoisonError::into_inner))
            })
            .collect();
        let parts: Vec<&SoftmaxState> = parts.iter().map(|(index, states)| &states[*index]).collect();
        write_head(block, head, heads, tiers, &parts, scratch, &target);
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
    states.resize_with(item.heads.len(), SoftmaxState::default);
    states.iter_mut().for_each(|state| state.reset(spans.len(), heads.head_dim));
    let mut reader = Reader { isa, block, kv_heads: &item.heads, heads, queries, kernel, states };
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
    kv_heads: &'a Range<usize>,
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
        let Reader { isa, kv_heads, queries, kernel, states, .. } = self;
        let rows = queries.chunks_exact(spans.len() * head_dim);
        for ((head, queries), state) in kv_heads.clone().zip(rows).zip(states.iter_mut()) {
            let pages: Vec<&[u16]> = slots.iter().map(|&slot| cache.page(layer, slot, head)).collect();
            attention::attend(*isa, queries, scale, spans, first, &pages, head_dim, kernel, state);
        }
    }

    /// Reads sealed pages.
    fn sealed(&mut self, cache: &Cache, layer: usize, spans: &[Span], pages: Range<usize>) {
        let first = pages.start;
        let Some(sealed) = cache.sealed().filter(|_| !pages.is_empty()) else { return };
        let Reader { isa, block, kv_heads, heads, queries, kernel, states } = self;
        let mut found: Vec<&[u8]> = Vec::with_capacity(pages.len() * kv_heads.len());
        for page in pages {
            let slot = block.sequence.sealed_slot(page);
            found.extend(kv_heads.clone().map(|head| sealed.page(HeadIndex { layer, head }, slot)));
        }
        let format = &sealed.formats[layer];
        attend_sealed_heads(*isa, format, queries, heads.scale, spans, first, &found, kernel, states);
    }
}

/// Collects the query rows of a block, head by head and token by token, and what each row of a head may see.
fn gather_queries(
    block: &Block<'_>,
    kv_heads: &Range<usize>,
    heads: Heads,
    qkv: &[f32],
    scratch: &mut AttendScratch,
) {
    let AttendScratch { queries, spans, .. } = scratch;
    queries.clear();
    spans.clear();
    let width = heads.group() * heads.head_dim;
    for head in kv_heads.clone() {
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
