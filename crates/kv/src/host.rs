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

use crate::PAGE_TOKENS;
use crate::block_hash::BlockHash;
use crate::error::PoolKind;
use crate::key::PrefixKey;
use crate::ledger::Ledger;
use crate::pool::PagePool;
use crate::sequence::Sequence;

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
    fn find(&self, hash: BlockHash, tokens: &[u32]) -> Option<HostPage> {
        self.entries.get(&hash).filter(|entry| *entry.tokens == *tokens).map(|entry| entry.page)
    }

    /// Marks a page as used now. False if it is not there.
    fn touch(&mut self, hash: BlockHash, tokens: &[u32]) -> bool {
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

    pub(crate) fn clear(&mut self) {
        let pools =
            HostPools { exact_pages: self.exact.slots.pages(), sealed_pages: self.sealed.slots.pages() };
        let (stored, restored) = (self.stored, self.restored);
        // Copies to the device are for sequences that are open.
        let copies = std::mem::take(&mut self.copies);
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

impl Ledger {
    /// Brings pages of `prompt` back from the host that follow what the prefix tree has of it, as many as there is room for:
    /// at most all pages before its last token. The tree has them then, for [`open`](Self::open) to find; the copies are
    /// among [`take_host_copies`](Self::take_host_copies).
    pub fn restore(&mut self, key: impl Into<PrefixKey>, prompt: &[u32]) {
        let key = key.into();
        if !self.options.prefix_tree || self.host.entries.is_empty() {
            return;
        }
        let usable = prompt.len().saturating_sub(1) / PAGE_TOKENS;
        let found = self.tree.find(key, prompt, usable);
        let mut hash = found.hashes.last().copied().or_else(|| BlockHash::root(key));
        let mut pages = Vec::new();
        for (page, tokens) in
            prompt.chunks_exact(PAGE_TOKENS).enumerate().take(usable).skip(found.nodes.len())
        {
            let next = BlockHash::chain(hash, tokens);
            let Some(kept) = self.host.find(next, tokens) else { break };
            pages.push((page, next, kept));
            hash = Some(next);
        }
        if pages.is_empty() {
            return;
        }
        // A sequence holds what is there, so that it is not evicted for what comes after it.
        let mut holder = Sequence::new(key);
        self.counters.sequences += 1;
        for &node in &found.nodes {
            let (exact, sealed) = self.tree.slots(node);
            self.share_entry(&mut holder, exact.filter(|_| sealed.is_none()), sealed);
        }
        // The first page is the last to go. What is evicted on the way may still take the place of the last ones.
        for &(page, hash, _) in pages.iter().rev() {
            self.host.touch(hash, &prompt[page * PAGE_TOKENS..(page + 1) * PAGE_TOKENS]);
        }
        let now = self.tree.tick();
        for &node in &found.nodes {
            self.tree.touch(node, now);
        }
        let mut parent = found.nodes.last().copied();
        for &(page, hash, kept) in &pages {
            let tokens = &prompt[page * PAGE_TOKENS..(page + 1) * PAGE_TOKENS];
            let slots = match kept {
                HostPage::Exact(_) if self.available(PoolKind::Exact) > 0 => {
                    (Some(self.allocate_exact()), None)
                }
                HostPage::Sealed(_) => (None, self.try_allocate_sealed(key.tier)),
                HostPage::Exact(_) => (None, None),
            };
            let copy = match (self.host.find(hash, tokens), slots) {
                (Some(HostPage::Exact(from)), (Some(to), _)) => HostCopy::ExactIn { from, to },
                (Some(HostPage::Sealed(from)), (_, Some(to))) => HostCopy::SealedIn { from, to },
                _ => {
                    self.release_exact(slots.0);
                    self.release_sealed(slots.1);
                    break;
                }
            };
            self.host.copies.push(copy);
            // A root without a page is gone with the next eviction.
            let above = parent.unwrap_or_else(|| self.tree.root(key));
            self.tree.touch(above, now);
            let node = self.tree.insert_page(&mut self.pools, above, page, hash, tokens, slots, now);
            parent = Some(node);
            self.push_entry(&mut holder, slots.0, slots.1);
            self.host.restored += 1;
        }
        self.close(holder);
    }

    /// Copies between the device and the host that are due, in order: before anything else is written to the pools.
    pub fn take_host_copies(&mut self) -> Vec<HostCopy> {
        std::mem::take(&mut self.host.copies)
    }

    /// Forgets the host's pages, because copies failed.
    pub fn forget_host_pages(&mut self) {
        self.host.clear();
        self.host.copies.clear();
    }
}
