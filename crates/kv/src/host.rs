//! Pages that the prefix tree had to give up, kept in the host's memory.
//!
//! A page that is evicted from a device is copied out and stays known by the hash of its tokens and of all before them. Who
//! needs it again gets it copied back instead of computed. Copies are only listed here, in order; the caller has them done
//! before anything is written to the pools of the device.
//!
//! ```text
//!   tree   page 0 ── page 1                     page 0 ── page 1 ── page 2 ── page 3
//!                                 restore ──>
//!   host                page 2 ── page 3                            page 2 ── page 3
//! ```
//!
//! What was copied back stays here as well, so that evicting it again costs nothing.

use std::collections::{BTreeMap, HashMap};

use oscar_codec::{ExactSlot, HostCopy, HostPage, HostSlot, SealedSlot};

use crate::block_hash::BlockHash;
use crate::pool::PagePool;

/// Pages that there is room for in the host's memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostPools {
    /// bf16 pages, each with all layers.
    pub exact_pages: usize,
    /// Sealed pages, each with all layers.
    pub sealed_pages: usize,
}

/// Counts of the pages in the host's memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostStats {
    /// Room for bf16 pages.
    pub exact_pages: usize,
    /// bf16 pages that are there.
    pub exact_used: usize,
    /// Room for sealed pages.
    pub sealed_pages: usize,
    /// Sealed pages that are there.
    pub sealed_used: usize,
    /// Pages that were copied to the host.
    pub stored: u64,
    /// Pages that were copied back.
    pub restored: u64,
}

#[derive(Debug)]
struct Entry {
    page: HostPage,
    tokens: Box<[u32]>,
    last_use: u64,
}

/// The pages of one kind.
#[derive(Debug)]
struct HostPool {
    slots: PagePool<HostSlot>,
    /// The pages by when they were last used.
    order: BTreeMap<u64, BlockHash>,
}

impl HostPool {
    fn new(pages: usize) -> HostPool {
        HostPool { slots: PagePool::new(pages), order: BTreeMap::new() }
    }

    fn used(&self) -> usize {
        self.slots.pages() - self.slots.free_pages()
    }
}

/// The pages in the host's memory. Without room for any it keeps nothing.
#[derive(Debug)]
pub(crate) struct HostStore {
    exact: HostPool,
    sealed: HostPool,
    entries: HashMap<BlockHash, Entry>,
    copies: Vec<HostCopy>,
    clock: u64,
    stored: u64,
    restored: u64,
}

impl HostStore {
    pub(crate) fn new(pools: HostPools) -> HostStore {
        HostStore {
            exact: HostPool::new(pools.exact_pages),
            sealed: HostPool::new(pools.sealed_pages),
            entries: HashMap::new(),
            copies: Vec::new(),
            clock: 0,
            stored: 0,
            restored: 0,
        }
    }

    /// Keeps the page of a node that is evicted: sealed, or in bf16 where it is not sealed.
    pub(crate) fn keep(
        &mut self,
        hash: BlockHash,
        tokens: &[u32],
        exact: Option<ExactSlot>,
        sealed: Option<SealedSlot>,
    ) {
        if self.touch(hash, tokens) {
            return;
        }
        let copy = match (exact, sealed) {
            (_, Some(from)) => self.slot(true).map(|to| HostCopy::SealedOut { from, to }),
            (Some(from), None) => self.slot(false).map(|to| HostCopy::ExactOut { from, to }),
            (None, None) => None,
        };
        let Some(copy) = copy else { return };
        let page = match copy {
            HostCopy::SealedOut { to, .. } => HostPage::Sealed(to),
            HostCopy::ExactOut { to, .. } => HostPage::Exact(to),
            HostCopy::SealedIn { .. } | HostCopy::ExactIn { .. } => return,
        };
        self.copies.push(copy);
        self.stored += 1;
        self.entries.insert(hash, Entry { page, tokens: tokens.into(), last_use: 0 });
        self.touch(hash, tokens);
    }

    /// The page with these tokens, if it is there.
    pub(crate) fn find(&self, hash: BlockHash, tokens: &[u32]) -> Option<HostPage> {
        self.entries.get(&hash).filter(|entry| *entry.tokens == *tokens).map(|entry| entry.page)
    }

    /// Marks a page as used now. False if it is not there.
    pub(crate) fn touch(&mut self, hash: BlockHash, tokens: &[u32]) -> bool {
        let Some(entry) = self.entries.get_mut(&hash).filter(|entry| *entry.tokens == *tokens) else {
            return false;
        };
        self.clock += 1;
        let order = match entry.page {
            HostPage::Exact(_) => &mut self.exact.order,
            HostPage::Sealed(_) => &mut self.sealed.order,
        };
        order.remove(&entry.last_use);
        entry.last_use = self.clock;
        order.insert(self.clock, hash);
        true
    }

    /// A slot, from whoever has not been used for longest if there is none left.
    fn slot(&mut self, sealed: bool) -> Option<HostSlot> {
        let pool = if sealed { &mut self.sealed } else { &mut self.exact };
        if pool.slots.free_pages() == 0 {
            let (_, oldest) = pool.order.pop_first()?;
            let entry = self.entries.remove(&oldest)?;
            let (HostPage::Exact(slot) | HostPage::Sealed(slot)) = entry.page;
            pool.slots.release(slot);
        }
        pool.slots.allocate().ok()
    }

    /// Whether no page is kept.
    pub(crate) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Lists the copy of a page back to the device.
    pub(crate) fn copy_back(&mut self, copy: HostCopy) {
        self.copies.push(copy);
        self.restored += 1;
    }

    /// The copies that are due, in order. They are listed no more.
    pub(crate) fn take_copies(&mut self) -> Vec<HostCopy> {
        std::mem::take(&mut self.copies)
    }

    /// Forgets all pages. Copies to the device stay listed, because open sequences wait for them.
    pub(crate) fn clear(&mut self) {
        let pools =
            HostPools { exact_pages: self.exact.slots.pages(), sealed_pages: self.sealed.slots.pages() };
        let (stored, restored) = (self.stored, self.restored);
        let copies = self.take_copies();
        *self = HostStore { stored, restored, copies, ..HostStore::new(pools) };
    }

    pub(crate) fn stats(&self) -> HostStats {
        HostStats {
            exact_pages: self.exact.slots.pages(),
            exact_used: self.exact.used(),
            sealed_pages: self.sealed.slots.pages(),
            sealed_used: self.sealed.used(),
            stored: self.stored,
            restored: self.restored,
        }
    }

    /// Every page has a place in the order of its pool, and every slot that is taken a page.
    pub(crate) fn audit(&self) -> Result<(), String> {
        let kinds = [(&self.exact, false), (&self.sealed, true)];
        for (pool, sealed) in kinds {
            let pages =
                self.entries.values().filter(|entry| matches!(entry.page, HostPage::Sealed(_)) == sealed);
            let mut slots: Vec<HostSlot> = pages
                .map(|entry| match entry.page {
                    HostPage::Exact(slot) | HostPage::Sealed(slot) => slot,
                })
                .collect();
            slots.sort_unstable();
            slots.dedup();
            if slots.len() != pool.used() || pool.order.len() != pool.used() {
                return Err(format!(
                    "{} pages and {} times of use in {} slots of the host, sealed: {sealed}",
                    slots.len(),
                    pool.order.len(),
                    pool.used()
                ));
            }
        }
        Ok(())
    }
}
