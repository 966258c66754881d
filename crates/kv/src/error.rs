//! What can go wrong: options that describe no cache, and pools without enough pages.

use std::fmt;

/// One of the pools of a cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PoolKind {
    /// bf16 pages, all layers.
    Exact,
    /// Pages of codes, all layers.
    Sealed,
    /// Pages of the codes of [`Tier::High`](crate::Tier), all layers.
    High,
    /// bf16 pages of one layer, for prompts on their way to sealed pages.
    Scratch,
}

impl fmt::Display for PoolKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            PoolKind::Exact => "bf16",
            PoolKind::Sealed => "sealed",
            PoolKind::High => "high",
            PoolKind::Scratch => "prefill scratch",
        })
    }
}

/// Options that describe no cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum KvError {
    /// A pool that every sequence needs has no page.
    #[error("the {0} pool of the KV cache has no page")]
    EmptyPool(PoolKind),
    /// There are more pages than 32-bit slot numbers can name.
    #[error("{0} pages are more than a KV cache can number")]
    TooManyPages(usize),
}

/// An operation needs more pages than are available now. Nothing has changed except that prefixes may have been evicted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{needed} {pool} pages are needed and {available} of {pages} can be had")]
pub struct Shortage {
    /// The pool that is short.
    pub pool: PoolKind,
    /// Pages that the operation needs at once.
    pub needed: usize,
    /// Pages that are free or that only the prefix tree holds.
    pub available: usize,
    /// All pages of the pool, in use or not.
    pub pages: usize,
}
