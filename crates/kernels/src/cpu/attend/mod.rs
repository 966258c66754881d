//! Attention of a step over the worker pool.
//!
//! The rows of a sequence are cut into blocks of tokens, and the pages a block reads into ranges, until there is
//! enough work for all threads: prefill gets its parallelism from blocks, a decode step from page ranges. Partial
//! results of a block are merged exactly. A row reads its sink and its recent pages in bf16 and what lies between
//! sealed, all into one softmax.

mod block;
mod parts;
mod plan;

use std::ops::Range;

use oscar_codec::{PageLayout, Side};

use super::CpuBackend;
use super::attention::{AttentionScratch, Span};
use super::cache::Cache;
use super::encode::SealScratch;
use super::isa::Isa;
use super::memory::DisjointSlice;
use super::per_thread::PerThread;
use super::pool::Pool;
use super::step::Step;
use crate::backend::AttentionSpec;
use block::BlockRows;
use parts::HeadStates;
pub(super) use parts::PartialStates;
pub(super) use plan::PlanCell;
use plan::{FIXED_PAGES, Split};

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

    /// Where the key or the value of a KV head is among these columns.
    pub(super) fn stored_cols(&self, head: usize, side: Side) -> Range<usize> {
        let before = match side {
            Side::Key => self.q_heads,
            Side::Value => self.q_heads + self.kv_heads,
        };
        (before + head) * self.head_dim..(before + head + 1) * self.head_dim
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
        match self.cache.sealed().map(|sealed| sealed.layouts[self.layer]) {
            Some(PageLayout::Codes(layout)) => 10 / layout.bits() as usize,
            _ => 1,
        }
    }
}

/// Stand-ins for the early positions of a sequence; see [`crate::inspect::StandIn`].
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
    workers: &PerThread<AttendScratch>,
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
    let plan = &*step.plan.get(step, heads, split);
    let states = partial.prepare(plan);
    let target = DisjointSlice::new(out);
    let isa = numerics.attention_isa();
    let end = |thread: usize| plan.end(thread, pool.threads());
    let rows_of = |block: usize| {
        let block = &plan.blocks[block];
        BlockRows { block, sequence: &step.sequences[block.sequence], heads }
    };
    let read = |worker: usize, index: usize| {
        let item = &plan.items[index];
        let rows = rows_of(item.block);
        let mut scratch = workers.of(worker);
        if rows.block.items.len() > 1 {
            return states.fill(index, |states| rows.read_item(isa, item, tiers, qkv, &mut scratch, states));
        }
        let mut states = std::mem::take(&mut scratch.states);
        rows.read_item(isa, item, tiers, qkv, &mut scratch, &mut states);
        for (head, state) in item.heads.clone().zip(&states) {
            rows.write_head(head, tiers, &[state], &mut scratch, &target);
        }
        scratch.states = states;
    };
    let put_together = |worker: usize| {
        let mut scratch = workers.of(worker);
        states.for_each_complete(worker, pool.threads(), |output, parts| {
            rows_of(output.block).write_head(output.head, tiers, parts, &mut scratch, &target);
        });
    };
    pool.for_each_in_runs(plan.items.len(), end, read, put_together);
}
