//! Attention of a step over the worker pool.
//!
//! The rows of a sequence are cut into blocks of tokens, and the pages a block reads into ranges, until there is
//! enough work for all threads: prefill gets its parallelism from blocks, a decode step from page ranges. Partial
//! results of a block are merged exactly. A row reads its sink and its recent pages in bf16 and what lies between
//! sealed, all into one softmax.

mod block;
mod parts;
mod plan;
mod tiers;

use super::heads::Heads;
use super::isa::Isa;
use super::memory::DisjointSlice;
use super::per_thread::PerThread;
use super::pool::Pool;
use crate::sequence::StepSequence;
pub(super) use block::AttendScratch;
use block::BlockRows;
pub(super) use parts::PartialStates;
pub(super) use plan::PlanCell;
use plan::{FIXED_PAGES, Split};
pub(super) use tiers::{History, Tiers};

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

/// Attends all rows of a step; `out` has `q_heads * head_dim` columns.
pub(super) fn attend(
    numerics: Numerics,
    pool: &Pool,
    workers: &PerThread<AttendScratch>,
    partial: &mut PartialStates,
    plan: &PlanCell,
    sequences: &[StepSequence],
    heads: Heads,
    tiers: &Tiers<'_>,
    qkv: &[f32],
    out: &mut [f32],
) {
    let split = match numerics.fixed {
        false => Split::Threads(pool.threads(), tiers.exact_cost()),
        true => Split::Pages(FIXED_PAGES),
    };
    let plan = &*plan.get(sequences, heads, split);
    let states = partial.prepare(plan);
    let target = DisjointSlice::new(out);
    let isa = numerics.attention_isa();
    let end = |thread: usize| plan.end(thread, pool.threads());
    let rows_of = |block: usize| {
        let block = &plan.blocks[block];
        BlockRows { block, sequence: &sequences[block.sequence], heads }
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
            rows.write_head(head, tiers, qkv, &[state], &mut scratch, &target);
        }
        scratch.states = states;
    };
    let put_together = |worker: usize| {
        let mut scratch = workers.of(worker);
        states.for_each_complete(worker, pool.threads(), |output, parts| {
            rows_of(output.block).write_head(output.head, tiers, qkv, parts, &mut scratch, &target);
        });
    };
    pool.for_each_in_ranges(plan.items.len(), end, read, put_together);
}
