//! Eviction from the prefix tree: what may go, and in which order.
//!
//! Ordered sets hold what may go: warm copies (and tails, in a cache with sealed pages), full pages in bf16, and sealed
//! pages, those of [`Tier::High`] apart. A node is *busy* while a sequence holds its page, or that of a node below it; busy nodes stay, but
//! their warm copies may go. The sizes of the sets are therefore exactly what can be had, and every step costs the
//! logarithm of the tree's size.
//!
//! The order is least recently used first, the deepest first among equals. A node is never older than one below it, so
//! the first page of a set has no other page of that set below it. Warm copies go by when they were last part of a
//! window: a conversation touches every page before its end, but goes on from the last ones only, and copies that older
//! turns left along the way must not outlive those.

use std::cmp::Reverse;
use std::collections::BTreeSet;

use oscar_codec::{ExactSlot, SealedSlot};

use super::{NO_NODE, NodeId, Tree};
use crate::host::HostStore;
use crate::key::Tier;
use crate::pools::Pools;

/// A candidate in order of eviction: time of last use, then the deepest page first.
pub(super) type LruKey = (u64, Reverse<u32>, NodeId);

/// The candidate sets that a node is in, and its times of use there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct EvictionListing {
    last_use: u64,
    warm_use: u64,
    warm: bool,
    exact: bool,
    sealed: bool,
}

/// Pages that may be evicted, the next one first.
#[derive(Debug, Default)]
pub(super) struct EvictionCandidates {
    /// Evicting one frees a bf16 page and costs the recomputation of a window at most.
    pub(super) warm: BTreeSet<LruKey>,
    /// Evicting one frees a bf16 page and removes a node.
    pub(super) exact: BTreeSet<LruKey>,
    /// Evicting one frees a sealed page and removes a node.
    pub(super) sealed: BTreeSet<LruKey>,
    /// The same for sealed pages of [`Tier::High`].
    pub(super) high: BTreeSet<LruKey>,
}

impl EvictionCandidates {
    /// Nodes whose sealed page is in the pool of a tier.
    fn sealed_of(&self, tier: Tier) -> &BTreeSet<LruKey> {
        if tier == Tier::High { &self.high } else { &self.sealed }
    }
}

impl Tree {
    /// bf16 pages that eviction can free.
    pub(crate) fn evictable_exact(&self) -> usize {
        self.candidates.warm.len() + self.candidates.exact.len()
    }

    /// Sealed pages of a tier that eviction can free.
    pub(crate) fn evictable_sealed(&self, tier: Tier) -> usize {
        self.candidates.sealed_of(tier).len()
    }

    /// Evicts one bf16 page, warm copies first. False if there is no candidate. The host keeps full pages.
    pub(crate) fn evict_exact(&mut self, pools: &mut Pools, host: &mut HostStore) -> bool {
        if let Some(&(_, _, id)) = self.candidates.warm.first() {
            if self.node(id).sealed.is_none() {
                self.counts.evicted_nodes += 1;
                self.remove_and_prune(pools, id);
            } else {
                self.counts.evicted_warm += 1;
                self.evict_warm_copy(pools, id);
            }
            return true;
        }
        let Some(&(_, _, id)) = self.candidates.exact.first() else { return false };
        self.evict_subtree(pools, host, id);
        true
    }

    /// Evicts one sealed page of a tier. False if there is no candidate. The host keeps full pages.
    pub(crate) fn evict_sealed(&mut self, pools: &mut Pools, host: &mut HostStore, tier: Tier) -> bool {
        let Some(&(_, _, id)) = self.candidates.sealed_of(tier).first() else { return false };
        self.evict_subtree(pools, host, id);
        true
    }

    /// Removes the tail in a bf16 slot that the tree and one sequence own, so that the sequence can write to it.
    pub(crate) fn evict_tail(&mut self, pools: &mut Pools, exact: ExactSlot) -> bool {
        if !self.shares_tail(pools, exact) {
            return false;
        }
        self.counts.evicted_nodes += 1;
        self.remove_and_prune(pools, self.exact_owner[exact.index()]);
        true
    }

    /// Whether [`evict_tail`](Self::evict_tail) would leave the page to one sequence.
    pub(crate) fn shares_tail(&self, pools: &Pools, exact: ExactSlot) -> bool {
        let id = self.exact_owner[exact.index()];
        id != NO_NODE && self.node(id).hash.is_none() && pools.exact.owners(exact) == 2
    }

    /// Removes every node; a host that is given keeps their pages. Pages that sequences hold stay theirs.
    pub(crate) fn clear(&mut self, pools: &mut Pools, mut host: Option<&mut HostStore>) {
        let mut roots: Vec<NodeId> = self.roots.values().copied().collect();
        roots.sort_unstable();
        let evicted = self.counts.evicted_nodes;
        let mut journal = std::mem::take(&mut self.journal);
        for root in roots {
            let below: Vec<NodeId> =
                self.node(root).children.iter().chain(self.node(root).tails.values()).copied().collect();
            for id in below {
                match host.as_deref_mut() {
                    Some(host) => self.evict_subtree(pools, host, id),
                    None => self.remove_subtree(pools, id),
                }
            }
        }
        self.counts.evicted_nodes = evicted;
        journal.cleared();
        self.journal = journal;
    }

    /// Lets go of the node with this bf16 page and of all below it, busy or not. Pages that sequences hold stay theirs.
    pub(crate) fn forget(&mut self, pools: &mut Pools, exact: ExactSlot) {
        let id = self.exact_owner[exact.index()];
        if id != NO_NODE {
            self.remove_subtree(pools, id);
        }
    }

    /// To be called when the number of owners of a bf16 slot has changed.
    pub(crate) fn exact_changed(&mut self, pools: &Pools, slot: ExactSlot) {
        let id = self.exact_owner[slot.index()];
        if id != NO_NODE {
            self.refresh(pools, id);
        }
    }

    /// To be called when the number of owners of a sealed slot has changed.
    pub(crate) fn sealed_changed(&mut self, pools: &Pools, slot: SealedSlot) {
        let id = self.sealed_owner[slot.index()];
        if id != NO_NODE {
            self.refresh(pools, id);
        }
    }

    /// Updates whether a node is busy and which sets it is in, and its parents as far as they change.
    pub(super) fn refresh(&mut self, pools: &Pools, mut id: NodeId) {
        loop {
            let node = self.node(id);
            if node.parent == NO_NODE {
                return;
            }
            // A sequence that only has the bf16 page in common with a node does not need the node's own page.
            let owners = match (node.sealed, node.exact) {
                (Some(sealed), _) => pools.sealed_owners(sealed),
                (None, Some(exact)) => pools.exact.owners(exact),
                (None, None) => 0,
            };
            let busy = owners > 1 || node.busy_children > 0;
            let is_tail = node.hash.is_none();
            let as_warm = node.sealed.is_some() || is_tail && self.has_sealed;
            let alone = node.exact.is_some_and(|exact| pools.exact.owners(exact) == 1);
            let listed = EvictionListing {
                last_use: node.last_use,
                warm_use: node.warm_use,
                warm: alone && as_warm,
                exact: alone && !as_warm && !busy,
                sealed: node.sealed.is_some() && !busy,
            };
            let (was_busy, parent) = (node.busy, node.parent);
            if listed != node.listed {
                self.list(id, listed);
            }
            if busy == was_busy {
                return;
            }
            self.node_mut(id).busy = busy;
            let above = self.node_mut(parent);
            if busy {
                above.busy_children += 1;
            } else {
                above.busy_children -= 1;
            }
            id = parent;
        }
    }

    /// Updates the position of a node in its sets after its times of use have changed.
    pub(super) fn relist(&mut self, id: NodeId) {
        let node = self.node(id);
        if node.parent != NO_NODE {
            let listed = EvictionListing { last_use: node.last_use, warm_use: node.warm_use, ..node.listed };
            self.list(id, listed);
        }
    }

    pub(super) fn unlist(&mut self, id: NodeId) {
        self.list(id, EvictionListing::default());
    }

    fn list(&mut self, id: NodeId, listed: EvictionListing) {
        let node = self.nodes[id as usize].as_mut().expect("node ids are of living nodes");
        let was = std::mem::replace(&mut node.listed, listed);
        let key = |time: u64| (time, Reverse(node.page), id);
        let sets = &mut self.candidates;
        let sealed = if node.key.tier == Tier::High { &mut sets.high } else { &mut sets.sealed };
        for (set, was, is, old, new) in [
            (&mut sets.warm, was.warm, listed.warm, key(was.warm_use), key(listed.warm_use)),
            (&mut sets.exact, was.exact, listed.exact, key(was.last_use), key(listed.last_use)),
            (sealed, was.sealed, listed.sealed, key(was.last_use), key(listed.last_use)),
        ] {
            if was && (!is || old != new) {
                set.remove(&old);
            }
            if is && (!was || old != new) {
                set.insert(new);
            }
        }
    }

    /// Frees the warm copy of a node that stays.
    fn evict_warm_copy(&mut self, pools: &mut Pools, id: NodeId) {
        let Some(exact) = self.node_mut(id).exact.take() else { return };
        self.exact_owner[exact.index()] = NO_NODE;
        self.counts.warm -= 1;
        pools.exact.release(exact);
        self.refresh(pools, id);
    }

    fn remove_subtree(&mut self, pools: &mut Pools, top: NodeId) {
        for id in self.subtree(top).into_iter().rev() {
            self.counts.evicted_nodes += 1;
            self.remove_and_prune(pools, id);
        }
    }

    /// Removes a node and all below it; the host keeps full pages. The first of them is used last and goes last there.
    fn evict_subtree(&mut self, pools: &mut Pools, host: &mut HostStore, top: NodeId) {
        for id in self.subtree(top).into_iter().rev() {
            self.counts.evicted_nodes += 1;
            let node = self.node(id);
            // Pages of the high tier are of another size than those that the host has room for.
            let high = node.sealed.is_some_and(|slot| pools.is_high(slot));
            if let Some(hash) = node.hash.filter(|_| !high) {
                host.keep(hash, &node.tokens, node.exact, node.sealed);
            }
            self.remove_and_prune(pools, id);
        }
    }

    /// A node and all below it, from top to bottom.
    fn subtree(&self, top: NodeId) -> Vec<NodeId> {
        let mut order = vec![top];
        let mut next = 0;
        while let Some(&id) = order.get(next) {
            let node = self.node(id);
            order.extend(node.children.iter().chain(node.tails.values()));
            next += 1;
        }
        order
    }

    fn remove_and_prune(&mut self, pools: &mut Pools, id: NodeId) {
        let key = self.node(id).key;
        self.remove(pools, id);
        self.prune_root(key);
    }
}
