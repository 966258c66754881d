//! How the attention of a step is cut into items for the worker pool.

use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use oscar_codec::PAGE_TOKENS;

use crate::cpu::heads::Heads;
use crate::sequence::StepSequence;

/// Query rows (tokens times heads of a group) a block aims for.
const BLOCK_ROWS: usize = 64;

/// Work items per thread where there are several blocks, so that uneven ones balance out.
const ITEMS_PER_THREAD: usize = 6;

/// Shares of a thread's part of a lone block, one item each. The last one is small, and is what a thread that is done early
/// takes over.
const SHARES: [usize; 2] = [4, 1];

/// The sum of [`SHARES`].
const SHARES_WHOLE: usize = SHARES[0] + SHARES[1];

/// Heads are read together where an item gets at least this many pages of each.
const PAGES_TOGETHER: usize = 4;

/// Pages of an item when results must not depend on what else is computed.
pub(super) const FIXED_PAGES: usize = 16;

/// Tokens of one sequence, and KV heads they read.
pub(super) struct Block {
    /// Index of the sequence in the step.
    pub(super) sequence: usize,
    /// One when there are many rows. Of few rows all heads are read together: their pages are neighbours in memory.
    pub(super) heads: Range<usize>,
    /// Tokens inside the sequence's rows.
    pub(super) tokens: Range<usize>,
    /// Pages up to its last token.
    pub(super) pages: usize,
    /// The work items that this block is cut into.
    pub(super) items: Range<usize>,
    /// Index of its heads' first partial output, if the block is several items.
    pub(super) outputs: usize,
}

/// One range of pages of a block, for some of its heads.
pub(super) struct Item {
    pub(super) block: usize,
    pub(super) heads: Range<usize>,
    pub(super) pages: Range<usize>,
}

/// A head of a block whose result comes in parts, from several items.
pub(super) struct Output {
    pub(super) block: usize,
    pub(super) head: usize,
    /// Number of items that read pages of this head.
    pub(super) parts: usize,
}

/// The work of a step; the same for all layers of a kind.
#[derive(Default)]
pub(in crate::cpu) struct Plan {
    pub(super) blocks: Vec<Block>,
    pub(super) items: Vec<Item>,
    /// Heads of blocks that are several items, in the order of the blocks.
    pub(super) outputs: Vec<Output>,
    /// Where the items of each thread end; evenly where there are none.
    ends: Vec<usize>,
}

impl Plan {
    /// Adds a block whose items are those from `first` on.
    fn push_block(
        &mut self,
        sequence: usize,
        heads: Range<usize>,
        tokens: Range<usize>,
        pages: usize,
        first: usize,
    ) {
        let (block, items, outputs) = (self.blocks.len(), first..self.items.len(), self.outputs.len());
        if items.len() > 1 {
            let parts = |head| self.items[first..].iter().filter(|item| item.heads.contains(&head)).count();
            let outputs = heads.clone().map(|head| Output { block, head, parts: parts(head) });
            self.outputs.extend(outputs.collect::<Vec<_>>());
        }
        self.blocks.push(Block { sequence, heads, tokens, pages, items, outputs });
    }

    /// One block of all heads of these items.
    #[cfg(test)]
    pub(super) fn of_one_block(items: Vec<Item>) -> Plan {
        let heads = items.iter().map(|item| item.heads.end).max().unwrap_or(0);
        let mut plan = Plan { items, ..Plan::default() };
        plan.push_block(0, 0..heads, 0..1, 1, 0);
        plan
    }

    /// Where the items of one of `threads` threads end.
    pub(super) fn end(&self, thread: usize, threads: usize) -> usize {
        match self.ends.is_empty() {
            true => self.items.len() * (thread + 1) / threads,
            false => self.ends[thread],
        }
    }
}

/// How the pages of a block are cut.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Split {
    /// For so many threads, where a bf16 page takes as long as so many sealed ones.
    Threads(usize, usize),
    /// This many pages to an item, whatever else there is.
    Pages(usize),
}

/// What a plan was made for: query heads of a KV head, KV heads, the window, and the cut.
type Purpose = (usize, usize, Option<usize>, Split);

/// The plan of a step, which layers of the same kind share.
#[derive(Default)]
pub(in crate::cpu) struct PlanCell(Mutex<Option<(Purpose, Arc<Plan>)>>);

impl PlanCell {
    /// The plan for these heads and this cut.
    pub(super) fn get(&self, sequences: &[StepSequence], heads: Heads, split: Split) -> Arc<Plan> {
        let purpose = (heads.group(), heads.kv_heads, heads.window, split);
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match &*kept {
            Some((made_for, plan)) if *made_for == purpose => Arc::clone(plan),
            _ => {
                let plan = Arc::new(plan(sequences, heads, split));
                *kept = Some((purpose, Arc::clone(&plan)));
                plan
            }
        }
    }
}

/// Cuts a step into blocks and their page ranges. Long items go first: a range comes after those of later pages, which are
/// bf16 at the end of a sequence, except in [`lone`].
fn plan(sequences: &[StepSequence], heads: Heads, split: Split) -> Plan {
    let block_tokens = (BLOCK_ROWS / heads.group()).max(1);
    let block_count: usize = sequences.iter().map(|sequence| sequence.len.div_ceil(block_tokens)).sum();
    let ranges = match split {
        Split::Threads(1, _) | Split::Pages(_) => 1,
        Split::Threads(threads, _) if block_count == 1 => threads * SHARES.len(),
        Split::Threads(threads, _) => (threads * ITEMS_PER_THREAD).div_ceil(block_count.max(1)),
    };
    let mut plan = Plan::default();
    for (index, sequence) in sequences.iter().enumerate() {
        for first in (0..sequence.len).step_by(block_tokens) {
            let tokens = first..(first + block_tokens).min(sequence.len);
            let pages = (sequence.start + tokens.end).div_ceil(PAGE_TOKENS);
            let first_page = heads.first_seen(sequence.start + tokens.start) / PAGE_TOKENS;
            let history = match heads.window {
                None => sequence.history(sequence.start + tokens.end - 1),
                Some(_) => 0..0,
            };
            let together = tokens.len() == 1 && pages - first_page >= ranges * PAGES_TOGETHER;
            let block_heads = if together { heads.kv_heads } else { 1 };
            let cut: Vec<Range<usize>> = match split {
                Split::Threads(threads, exact_cost) => {
                    let cost = |page: usize| if history.contains(&page) { 1 } else { exact_cost };
                    if together
                        && block_count == 1
                        && let Some((items, ends)) =
                            lone(heads.kv_heads, pages, history.clone(), threads, exact_cost)
                    {
                        plan = Plan { items, ends, ..Plan::default() };
                        plan.push_block(index, 0..heads.kv_heads, tokens, pages, 0);
                        return plan;
                    }
                    let shares: Vec<usize> = match (together, block_count) {
                        (true, 1) => SHARES.into_iter().cycle().take(ranges).collect(),
                        (true, _) => vec![1; ranges],
                        (false, _) => vec![1; ranges.div_ceil(heads.kv_heads)],
                    };
                    cut(first_page..pages, cost, &shares)
                }
                Split::Pages(count) => (first_page / count..pages.div_ceil(count))
                    .rev()
                    .map(|n| (n * count).max(first_page)..((n + 1) * count).min(pages))
                    .collect(),
            };
            for head in (0..heads.kv_heads).step_by(block_heads) {
                let (first, heads) = (plan.items.len(), head..head + block_heads);
                for pages in &cut {
                    let (block, pages) = (plan.blocks.len(), pages.clone());
                    plan.items.push(Item { block, heads: heads.clone(), pages });
                }
                plan.push_block(index, heads, tokens.clone(), pages, first);
            }
        }
    }
    plan
}

/// The items of a lone row with a history, and where those of each thread end; `None` where they would not be even.
///
/// Beginning with sealed pages costs some microseconds, so a thread does that once and for all heads. Its bf16 pages follow
/// head by head, and are what a thread that is done early takes over; where they are less than a fifth of all work, some of
/// the sealed pages are as well.
fn lone(
    kv_heads: usize,
    pages: usize,
    history: Range<usize>,
    threads: usize,
    exact_cost: usize,
) -> Option<(Vec<Item>, Vec<usize>)> {
    if threads == 1 || history.is_empty() {
        return None;
    }
    let mut exact: Vec<Vec<Item>> = (0..threads).map(|_| Vec::new()).collect();
    let mut loads = vec![0; threads];
    for pages in [history.end..pages, 0..history.start] {
        for head in (0..kv_heads).filter(|_| !pages.is_empty()) {
            let least = (0..threads).min_by_key(|&thread| loads[thread]).unwrap_or(0);
            loads[least] += pages.len() * exact_cost;
            exact[least].push(Item { block: 0, heads: head..head + 1, pages: pages.clone() });
        }
    }
    let loaded: usize = loads.iter().sum();
    let all = loaded + history.len() * kv_heads;
    if loads.iter().any(|load| load * threads > all) {
        return None;
    }
    let few = SHARES_WHOLE * loaded < all;
    // Sealed pages go where there is slack under the average.
    let slack: Vec<usize> = loads.iter().map(|load| all - threads * load).collect();
    let whole = slack.iter().sum::<usize>().max(1);
    let (mut items, mut ends) = (Vec::new(), Vec::new());
    let (mut start, mut passed) = (history.start, 0);
    for (exact, slack) in exact.into_iter().zip(slack) {
        passed += slack;
        let end = history.start + (history.len() * passed + whole / 2) / whole;
        let spare = if few { (end - start) * SHARES[1] / SHARES_WHOLE } else { 0 };
        for pages in [start + spare..end, start..start + spare] {
            if !pages.is_empty() {
                items.push(Item { block: 0, heads: 0..kv_heads, pages });
            }
        }
        items.extend(exact);
        ends.push(items.len());
        start = end;
    }
    Some((items, ends))
}

/// Cuts pages into ranges whose costs are about as the shares, from the last page to the first. Ranges are not empty,
/// so there may be fewer.
fn cut(pages: Range<usize>, cost: impl Fn(usize) -> usize, shares: &[usize]) -> Vec<Range<usize>> {
    let total: usize = pages.clone().map(&cost).sum();
    let whole: usize = shares.iter().sum();
    let mut ranges = Vec::new();
    let (mut start, mut passed, mut due) = (pages.end, 0, 0);
    for share in shares {
        due += share;
        let end = start;
        // A page belongs where its middle lies.
        while start > pages.start && (2 * passed + cost(start - 1)) * whole <= 2 * due * total {
            start -= 1;
            passed += cost(start);
        }
        if start < end {
            ranges.push(start..end);
        }
    }
    ranges
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_cut_by_what_they_cost() {
        // A sink of one page, a history of 100 and four recent pages that cost as much as four each.
        let cost = |page: usize| if (1..101).contains(&page) { 1 } else { 4 };
        assert_eq!(cut(0..105, cost, &[4, 1, 4, 1]), [69..105, 57..69, 9..57, 0..9]);
        assert_eq!(cut(0..105, cost, &[1, 1]), [57..105, 0..57]);
        assert!(cut(0..0, cost, &[4, 1]).is_empty());
    }

    #[test]
    fn every_page_is_in_one_range() {
        for pages in 0..40 {
            for shares in [&[1][..], &[4, 1, 4, 1], &[1; 12], &[1; 50]] {
                for exact in [1, 2, 4] {
                    let cost = |page: usize| if (1..20).contains(&page) { 1 } else { exact };
                    for first in [0, pages / 3, pages] {
                        let ranges = cut(first..pages, cost, shares);
                        assert!(ranges.len() <= shares.len());
                        assert!(ranges.iter().all(|range| !range.is_empty()));
                        let all = ranges.into_iter().rev().flatten();
                        assert!(all.eq(first..pages), "{first}..{pages} {shares:?} {exact}");
                    }
                }
            }
        }
    }

    #[test]
    fn a_lone_row_reads_every_page_of_every_head_once() {
        for threads in [2, 3, 8, 40] {
            for (pages, history) in [(6, 1..2), (40, 1..35), (125, 1..120), (400, 4..395), (30, 0..30)] {
                for kv_heads in [1, 2, 3, 8] {
                    let Some((items, ends)) = lone(kv_heads, pages, history.clone(), threads, 5) else {
                        continue;
                    };
                    let mut read = vec![0; kv_heads * pages];
                    for item in &items {
                        assert!(!item.pages.is_empty());
                        let sealed = item.pages.clone().filter(|page| history.contains(page)).count();
                        assert!(sealed == 0 || sealed == item.pages.len(), "an item is of one kind");
                        for head in item.heads.clone() {
                            item.pages.clone().for_each(|page| read[head * pages + page] += 1);
                        }
                    }
                    assert!(read.iter().all(|&times| times == 1), "{threads} {pages} {history:?} {kv_heads}");
                    assert_eq!((ends.len(), ends[threads - 1]), (threads, items.len()));
                    assert!(ends.is_sorted());
                }
            }
        }
    }

    #[test]
    fn a_lone_row_is_shared_evenly() {
        let (items, ends) = lone(3, 125, 1..120, 2, 5).unwrap();
        let cost = |item: &Item| {
            let page = if (1..120).contains(&item.pages.start) { 1 } else { 5 };
            item.heads.len() * item.pages.len() * page
        };
        let loads = [&items[..ends[0]], &items[ends[0]..]].map(|items| items.iter().map(cost).sum::<usize>());
        assert!(loads[0].abs_diff(loads[1]) <= 3, "{loads:?}");
        // Two heads with wide windows are no work for eight threads, if every head is one item; nor is a row without a
        // history.
        assert!(lone(2, 141, 1..12, 8, 5).is_none());
        assert!(lone(2, 141, 0..0, 8, 5).is_none());
    }
}
