//! Counts of pages by owner and state, and of prefix hits.

use crate::host::HostStats;
use crate::ledger::Ledger;
use crate::pool::{PagePool, PageSlot};

/// Pages of one pool, by owner.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolStats {
    /// The number of pages that can be handed out.
    pub pages: usize,
    /// Pages that nobody owns.
    pub free: usize,
    /// Pages that only the prefix tree owns.
    pub tree_only: usize,
    /// Pages with more than one owner.
    pub shared: usize,
    /// Pages that one request owns.
    pub request_only: usize,
}

impl PoolStats {
    /// The number of pages that somebody holds.
    pub fn used(&self) -> usize {
        self.pages - self.free
    }

    fn count<P: PageSlot>(pool: &PagePool<P>, in_tree: impl Fn(P) -> bool) -> PoolStats {
        let mut stats = PoolStats { pages: pool.pages(), free: pool.free_pages(), ..PoolStats::default() };
        for (slot, owners) in pool.all() {
            match owners {
                0 => {}
                1 if in_tree(slot) => stats.tree_only += 1,
                1 => stats.request_only += 1,
                _ => stats.shared += 1,
            }
        }
        stats
    }
}

/// Pages of the open sequences, by state. A page of two sequences counts twice.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PageStates {
    /// Pages that are partly filled, in bf16.
    pub filling: usize,
    /// Full pages that exist in bf16 only.
    pub exact: usize,
    /// Pages that exist in bf16 and sealed.
    pub both: usize,
    /// Pages that exist sealed only.
    pub sealed: usize,
}

/// The state of a cache, by [`Ledger::stats`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LedgerStats {
    /// Counts of the pool of bf16 pages.
    pub exact: PoolStats,
    /// Counts of the pool of sealed pages.
    pub sealed: PoolStats,
    /// The pool of sealed pages of [`Tier::High`](crate::Tier).
    pub high: PoolStats,
    /// Counts of the scratch pages of prompts.
    pub scratch: PoolStats,
    /// The number of sequences that are open.
    pub sequences: usize,
    /// Pages of the open sequences, by state.
    pub states: PageStates,
    /// Full pages in the prefix tree.
    pub tree_pages: usize,
    /// Partly filled pages in the prefix tree.
    pub tree_tails: usize,
    /// Sealed pages of the tree that it has in bf16 too.
    pub warm_pages: usize,
    /// Prompts looked up in the tree.
    pub lookups: u64,
    /// Prompts of which the tree had something.
    pub hits: u64,
    /// Tokens of all prompts.
    pub prompt_tokens: u64,
    /// Tokens of prompts that came from the tree.
    pub cached_tokens: u64,
    /// Pages that were evicted from the tree.
    pub evicted_pages: u64,
    /// Warm copies that were evicted from the tree.
    pub evicted_warm: u64,
    /// Pages in the host's memory.
    pub host: HostStats,
}

impl Ledger {
    /// Counts of pages by owner and state, and of prefix hits. It walks all pools.
    pub fn stats(&self) -> LedgerStats {
        let (tree, counters) = (self.tree.counts(), &self.counters);
        LedgerStats {
            exact: PoolStats::count(&self.pools.exact, |slot| self.tree.owns_exact(slot)),
            sealed: PoolStats::count(&self.pools.sealed, |slot| self.tree.owns_sealed(slot)),
            high: PoolStats::count(&self.pools.high, |slot| self.tree.owns_sealed(slot)),
            scratch: PoolStats::count(&self.pools.scratch, |_| false),
            sequences: counters.sequences,
            states: PageStates {
                filling: counters.filling,
                exact: counters.exact - counters.filling,
                both: counters.both,
                sealed: counters.sealed,
            },
            tree_pages: tree.nodes,
            tree_tails: tree.tails,
            warm_pages: tree.warm,
            lookups: counters.lookups,
            hits: counters.hits,
            prompt_tokens: counters.prompt_tokens,
            cached_tokens: counters.cached_tokens,
            evicted_pages: tree.evicted_nodes,
            evicted_warm: tree.evicted_warm,
            host: self.host.stats(),
        }
    }
}
