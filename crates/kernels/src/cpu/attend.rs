//! Attention of a step over the worker pool.
//!
//! The rows of a sequence are cut into blocks of tokens, and the pages a block reads into ranges, until there is
//! enough work for all threads: prefill gets its parallelism from blocks, a decode step from page ranges. Partial
//! results of a block are merged exactly.

use std::ops::Range;
use std::sync::Mutex;

use oscar_codec::PAGE_TOKENS;

use super::attention::{self, AttentionScratch, SoftmaxState, Span};
use super::isa::Isa;
use super::memory::DisjointSlice;
use super::pool::Pool;
use super::tensors::{Cache, Step, StepSequence};

/// Query rows (tokens times heads of a group) a block aims for.
const BLOCK_ROWS: usize = 64;

/// Work items per thread, so that uneven ones balance out.
const ITEMS_PER_THREAD: usize = 8;

/// Heads of an attention layer, without the weights.
#[derive(Clone, Copy)]
pub(super) struct Heads {
    pub(super) q_heads: usize,
    pub(super) kv_heads: usize,
    pub(super) head_dim: usize,
    pub(super) scale: f32,
}

impl Heads {
    fn group(&self) -> usize {
        self.q_heads / self.kv_heads
    }

    fn qkv_cols(&self) -> usize {
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
}

/// What the rows of a step read.
pub(super) struct Tiers<'a> {
    /// Holds every position.
    pub(super) exact: &'a Cache,
    /// Layer of `exact`.
    pub(super) layer: usize,
    /// What is read instead for early positions, if anything.
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
    isa: Isa,
    pool: &Pool,
    workers: &[Mutex<AttendScratch>],
    step: &Step,
    heads: Heads,
    tiers: &Tiers<'_>,
    qkv: &[f32],
    out: &mut [f32],
) {
    let (blocks, items) = plan(step, heads, pool.threads() * ITEMS_PER_THREAD);
    let states: Vec<Mutex<SoftmaxState>> = items.iter().map(|_| Mutex::default()).collect();
    let target = DisjointSlice::new(out);
    let whole = items.len() == blocks.len();
    pool.for_each_worker(items.len(), |worker, index| {
        let item = &items[index];
        let block = &blocks[item.block];
        let mut scratch = workers[worker].lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let AttendScratch { queries, spans, kernel } = &mut *scratch;
        gather_queries(block, heads, qkv, queries, spans);
        let mut state = states[index].lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        state.reset(spans.len(), heads.head_dim);
        let (first, d) = (item.pages.start, heads.head_dim);
        let mut read = |cache: &Cache, layer: usize, spans: &[Span]| {
            let pages: Vec<&[u16]> = item
                .pages
                .clone()
                .map(|page| cache.page(layer, block.sequence.pages[page], block.head))
                .collect();
            attention::attend(isa, queries, heads.scale, spans, first, &pages, d, kernel, &mut state);
        };
        if let Some(history) = &tiers.history {
            let early: Vec<Span> = spans
                .iter_mut()
                .map(|span| {
                    span.from = (history.ends)(span.to - 1).min(span.to);
                    Span::up_to(span.from)
                })
                .collect();
            read(history.cache, history.layer, &early);
        }
        read(tiers.exact, tiers.layer, spans);
        if whole {
            write_block(block, heads, &state, &target);
        }
    });
    if whole {
        return;
    }
    for block in &blocks {
        let mut merged = states[block.items.start].lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        for item in block.items.clone().skip(1) {
            merged.merge(&states[item].lock().unwrap_or_else(|poisoned| poisoned.into_inner()));
        }
        write_block(block, heads, &merged, &target);
    }
}

/// Cuts a step into blocks and their page ranges, at least `wanted` items where there is that much work.
fn plan(step: &Step, heads: Heads, wanted: usize) -> (Vec<Block<'_>>, Vec<Item>) {
    let block_tokens = (BLOCK_ROWS / heads.group()).max(1);
    let block_count: usize = step.sequences.iter().map(|sequence| sequence.len.div_ceil(block_tokens)).sum();
    let splits = wanted.div_ceil((block_count * heads.kv_heads).max(1));
    let mut blocks = Vec::new();
    let mut items = Vec::new();
    for sequence in &step.sequences {
        for head in 0..heads.kv_heads {
            for first in (0..sequence.len).step_by(block_tokens) {
                let tokens = first..(first + block_tokens).min(sequence.len);
                let mut block = Block { sequence, head, tokens, items: 0..0 };
                let pages = block.pages();
                let range = pages.div_ceil(splits).max(1);
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
fn gather_queries(
    block: &Block<'_>,
    heads: Heads,
    qkv: &[f32],
    queries: &mut Vec<f32>,
    spans: &mut Vec<Span>,
) {
    queries.clear();
    spans.clear();
    let width = heads.group() * heads.head_dim;
    for token in block.tokens.clone() {
        let row = &qkv[(block.sequence.first_row + token) * heads.qkv_cols()..];
        queries.extend_from_slice(&row[block.head * width..(block.head + 1) * width]);
        spans.extend(std::iter::repeat_n(Span::up_to(block.sequence.start + token + 1), heads.group()));
    }
}

fn write_block(block: &Block<'_>, heads: Heads, state: &SoftmaxState, target: &DisjointSlice<'_, f32>) {
    let group = heads.group();
    for (index, token) in block.tokens.clone().enumerate() {
        for member in 0..group {
            let row = block.sequence.first_row + token;
            let start = (row * heads.q_heads + block.head * group + member) * heads.head_dim;
            // SAFETY: every (row, query head) belongs to one block, and a block is written by one thread.
            let target = unsafe { target.part(start..start + heads.head_dim) };
            state.finish(index * group + member, target);
        }
    }
}
