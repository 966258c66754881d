//! Attention of a step over the worker pool.
//!
//! The rows of a sequence are cut into blocks of tokens, and the pages a block reads into ranges, until there is
//! enough work for all threads: prefill gets its parallelism from blocks, a decode step from page ranges. Partial
//! results of a block are merged exactly. A row reads its sink and its recent pages in bf16 and what lies between
//! sealed, all into one softmax.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use oscar_codec::{HeadIndex, PAGE_TOKENS};

use super::CpuBackend;
use super::attention::sealed::attend_sealed;
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

/// Work items per thread, so that uneven ones balance out.
const ITEMS_PER_THREAD: usize = 8;

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

/// Tokens of one sequence that share a KV head.
struct Block<'a> {
    sequence: &'a StepSequence,
    head: usize,
    /// Tokens inside the sequence's rows.
    tokens: Range<usize>,
    /// Items of this block.
    items: Range<usize>,
}

impl Block<'_> {
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
    /// Softmax of a block that is one item.
    state: SoftmaxState,
}

/// Softmax of each item of blocks that are several; kept between steps.
pub(super) type PartialStates = Vec<Mutex<SoftmaxState>>;

/// What the rows of a step read.
pub(super) struct Tiers<'a> {
    /// The pools of the step.
    pub(super) cache: &'a Cache,
    /// Layer of `cache`.
    pub(super) layer: usize,
    /// What is read instead for early positions, if anything: a measurement's stand-in for sealed pages.
    pub(super) history: Option<History<'a>>,
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
    let (blocks, items) = match numerics.fixed {
        false => plan(step, heads, Split::Items(pool.threads() * ITEMS_PER_THREAD)),
        true => plan(step, heads, Split::Pages(FIXED_PAGES)),
    };
    partial.resize_with(partial.len().max(items.len()), Mutex::default);
    let partial = &*partial;
    let unfinished: Vec<AtomicUsize> =
        blocks.iter().map(|block| AtomicUsize::new(block.items.len())).collect();
    let target = DisjointSlice::new(out);
    let isa = numerics.attention_isa();
    pool.for_each_worker(items.len(), |worker, index| {
        let item = &items[index];
        let block = &blocks[item.block];
        let scratch = &mut *lock(&workers[worker]);
        gather_queries(block, heads, qkv, scratch);
        if block.items.len() == 1 {
            let mut state = std::mem::take(&mut scratch.state);
            read_item(isa, block, item, heads, tiers, scratch, &mut state);
            write_block(block, heads, tiers, &state, &mut scratch.transform, &target);
            scratch.state = state;
            return;
        }
        read_item(isa, block, item, heads, tiers, scratch, &mut lock(&partial[index]));
        // Whoever comes last puts the parts together, in order.
        if unfinished[item.block].fetch_sub(1, Ordering::AcqRel) == 1 {
            let mut merged = lock(&partial[block.items.start]);
            for item in block.items.clone().skip(1) {
                merged.merge(&lock(&partial[item]));
            }
            write_block(block, heads, tiers, &merged, &mut scratch.transform, &target);
        }
    });
}

/// Buffers hold nothing that matters between steps, so a panic in an earlier one does not either.
fn lock<T>(buffer: &Mutex<T>) -> MutexGuard<'_, T> {
    buffer.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The softmax of a block's rows over the pages of an item: sink, sealed history, and the rest.
fn read_item(
    isa: Isa,
    block: &Block<'_>,
    item: &Item,
    heads: Heads,
    tiers: &Tiers<'_>,
    scratch: &mut AttendScratch,
    state: &mut SoftmaxState,
) {
    let AttendScratch { queries, spans, kernel, .. } = scratch;
    state.reset(spans.len(), heads.head_dim);
    let mut reader = Reader { isa, block, heads, queries, kernel, state };
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
    state: &'a mut SoftmaxState,
}

impl Reader<'_> {
    /// Reads bf16 pages.
    fn exact(&mut self, cache: &Cache, layer: usize, spans: &[Span], pages: Range<usize>) {
        let (first, Heads { head_dim, scale, .. }) = (pages.start, self.heads);
        let slots = &self.block.sequence.pages[pages];
        if !slots.is_empty() {
            let pages: Vec<&[u16]> =
                slots.iter().map(|&slot| cache.page(layer, slot, self.block.head)).collect();
            let Reader { isa, queries, kernel, state, .. } = self;
            attention::attend(*isa, queries, scale, spans, first, &pages, head_dim, kernel, state);
        }
    }

    /// Reads sealed pages.
    fn sealed(&mut self, cache: &Cache, layer: usize, spans: &[Span], pages: Range<usize>) {
        let first = pages.start;
        let Some(sealed) = cache.sealed().filter(|_| !pages.is_empty()) else { return };
        let head = HeadIndex { layer, head: self.block.head };
        let pages: Vec<&[u8]> =
            pages.map(|page| sealed.page(head, self.block.sequence.sealed_slot(page))).collect();
        let Reader { isa, heads, queries, kernel, state, .. } = self;
        attend_sealed(
            *isa,
            &sealed.formats[layer],
            queries,
            heads.scale,
            spans,
            first,
            &pages,
            kernel,
            state,
        );
    }
}

/// How the pages of a block are cut.
enum Split {
    /// At least this many items in all, where there is that much work.
    Items(usize),
    /// This many pages to an item, whatever else there is.
    Pages(usize),
}

/// Cuts a step into blocks and their page ranges.
fn plan(step: &Step, heads: Heads, split: Split) -> (Vec<Block<'_>>, Vec<Item>) {
    let block_tokens = (BLOCK_ROWS / heads.group()).max(1);
    let block_count: usize = step.sequences.iter().map(|sequence| sequence.len.div_ceil(block_tokens)).sum();
    let mut blocks = Vec::new();
    let mut items = Vec::new();
    for sequence in &step.sequences {
        for head in 0..heads.kv_heads {
            for first in (0..sequence.len).step_by(block_tokens) {
                let tokens = first..(first + block_tokens).min(sequence.len);
                let mut block = Block { sequence, head, tokens, items: 0..0 };
                let pages = block.pages();
                let range = match split {
                    Split::Items(wanted) => {
                        pages.div_ceil(wanted.div_ceil((block_count * heads.kv_heads).max(1))).max(1)
                    }
                    Split::Pages(pages) => pages,
                };
                let first_item = items.len();
                for start in (0..pages).step_by(range) {
                    items.push(Item { block: blocks.len(), pages: start..(start + range).min(pages) });
                }
                block.items = first_item..items.len();
                blocks.push(block);
            }
        }
    }
    (blocks, items)
}

/// Collects the query rows of a block, token by token, and what each may see.
fn gather_queries(block: &Block<'_>, heads: Heads, qkv: &[f32], scratch: &mut AttendScratch) {
    let AttendScratch { queries, spans, .. } = scratch;
    queries.clear();
    spans.clear();
    let width = heads.group() * heads.head_dim;
    for token in block.tokens.clone() {
        let row = &qkv[(block.sequence.first_row + token) * heads.qkv_cols()..];
        queries.extend_from_slice(&row[block.head * width..(block.head + 1) * width]);
        spans.extend(std::iter::repeat_n(Span::up_to(block.sequence.start + token + 1), heads.group()));
    }
}

/// Writes the output of a block, back in the model's basis.
fn write_block(
    block: &Block<'_>,
    heads: Heads,
    tiers: &Tiers<'_>,
    state: &SoftmaxState,
    scratch: &mut SealScratch,
    target: &DisjointSlice<'_, f32>,
) {
    let (group, d) = (heads.group(), heads.head_dim);
    let head = HeadIndex { layer: tiers.layer, head: block.head };
    for (index, token) in block.tokens.clone().enumerate() {
        let row = block.sequence.first_row + token;
        let start = (row * heads.q_heads + block.head * group) * d;
        // SAFETY: every (row, KV head) belongs to one block, and a block is written by one thread.
        let target = unsafe { target.part(start..start + group * d) };
        for (member, target) in target.chunks_exact_mut(d).enumerate() {
            state.finish(index * group + member, target);
        }
        if let Some(sealed) = tiers.cache.sealed() {
            sealed.sealer.undo_values(head, target, scratch);
        }
    }
}
