//! What can go wrong: options that make no cache, and pools that are short.

use std::fmt;

/// One of the three pools of a cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PoolKind {
    /// bf16 pages, all layers.
    Exact,
    /// Pages of codes, all layers.
    Sealed,
    /// bf16 pages of one layer, for prompts on their way to sealed pages.
    Scratch,
}

impl fmt::Display for PoolKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            PoolKind::Exact => "bf16",
            PoolKind::Sealed => "sealed",
            PoolKind::Scratch => "prefill scratch",
        })
    }
}

/// Options that no cache can be made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KvError {
    /// A pool that every sequence needs has no page.
    #[error("the {0} pool of the KV cache has no page")]
    EmptyPool(PoolKind),
    /// Slot numbers are 32 bits.
    #[error("{0} pages are more than a KV cache can number")]
    TooManyPages(usize),
}

/// An operation needs more pages than can be had now. Nothing has changed but what was evicted from the prefix tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{needed} {pool} pages are needed and {available} of {pages} can be had")]
pub struct Shortage {
    /// The pool that is short.
    pub pool: PoolKind,
    /// Pages that the operation needs at once.
    pub needed: usize,
    /// Pages that are free or held by the prefix tree alone.
    pub available: usize,
    /// Pages of the pool.
    pub pages: usize,
}

impl Shortage {
    /// Whether there would be enough pages if nobody else had any.
    pub fn can_pass(&self) -> bool {
        self.needed <= self.pages
    }
}
