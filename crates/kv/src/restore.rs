//! Brings pages back from the host's memory when a prompt needs them again.

use oscar_codec::{HostCopy, HostPage};

use crate::PAGE_TOKENS;
use crate::block_hash::BlockHash;
use crate::error::PoolKind;
use crate::key::PrefixKey;
use crate::ledger::Ledger;
use crate::sequence::Sequence;

impl Ledger {
    /// Brings pages of `prompt` back from the host that follow what the prefix tree has of it, as many as there is room for:
    /// at most all pages before its last token. The tree has them then, for [`open`](Self::open) to find; the copies are
    /// among [`take_host_copies`](Self::take_host_copies).
    pub fn restore(&mut self, key: impl Into<PrefixKey>, prompt: &[u32]) {
        let key = key.into();
        if !self.options.prefix_tree || self.host.is_empty() {
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
            self.host.copy_back(copy);
            // A root without a page is gone with the next eviction.
            let above = parent.unwrap_or_else(|| self.tree.root(key));
            self.tree.touch(above, now);
            let node = self.tree.insert_page(&mut self.pools, above, page, hash, tokens, slots, now);
            parent = Some(node);
            self.push_entry(&mut holder, slots.0, slots.1);
        }
        self.close(holder);
    }

    /// Copies between the device and the host that are due, in order: before anything else is written to the pools.
    pub fn take_host_copies(&mut self) -> Vec<HostCopy> {
        self.host.take_copies()
    }

    /// Forgets the host's pages, because copies failed.
    pub fn forget_host_pages(&mut self) {
        self.host.clear();
        self.host.take_copies();
    }
}
