//! The prefix tree: which pages hold which tokens after which tokens.
//!
//! A node is one full page, found by its chained hash and compared token by token. It owns the page in the form in
//! which it is kept for good (sealed, or bf16 for sinks and in a cache without sealed pages) and perhaps a *warm* bf16
//! copy. A *tail* is a leaf with the partly filled last page of a finished request, matched token by token.
//!
//! Owning is a reference count like any other: what a sequence took from the tree stays valid when the tree lets go.
//! What is let go, and when, is decided in `eviction.rs`.

mod eviction;
mod inspect;
mod journal;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Bound;

pub use inspect::TreeEntry;
pub use journal::CacheEvent;

use oscar_codec::{ExactSlot, SealedSlot};

use crate::PAGE_TOKENS;
use crate::block_hash::BlockHash;
use crate::key::PrefixKey;
use crate::pools::Pools;
use eviction::EvictionCandidates;

/// Index of a node.
pub(crate) type NodeId = u32;

/// The id that stands for no node, and the parent of a root.
pub(crate) const NO_NODE: NodeId = u32::MAX;

#[derive(Debug)]
struct Node {
    parent: NodeId,
    key: PrefixKey,
    /// Index of the page in its sequences; roots have none and say 0.
    page: u32,
    /// `None` for tails and roots, which are not found by hash.
    hash: Option<BlockHash>,
    /// 64 token ids, fewer for a tail, none for a root.
    tokens: Box<[u32]>,
    exact: Option<ExactSlot>,
    sealed: Option<SealedSlot>,
    children: BTreeSet<NodeId>,
    /// In order of their tokens, so that the one with the longest common beginning is a neighbour of what is looked for.
    tails: BTreeMap<Box<[u32]>, NodeId>,
    /// Never less than that of any node below.
    last_use: u64,
    /// When its bf16 copy was last part of somebody's window. Being on the way to what is used does not count.
    warm_use: u64,
    /// Number of children (full pages and tails) that are busy.
    busy_children: u32,
    /// A sequence holds the page of this node or of one below.
    busy: bool,
    listed: eviction::EvictionListing,
}

/// The full pages of a prompt that are in the tree.
#[derive(Debug, Default)]
pub(crate) struct PrefixMatch {
    /// Nodes of the full pages, from the first page.
    pub(crate) nodes: Vec<NodeId>,
    pub(crate) hashes: Vec<BlockHash>,
}

/// Counts of the tree, kept as it changes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct TreeCounts {
    pub(crate) nodes: usize,
    pub(crate) tails: usize,
    pub(crate) warm: usize,
    pub(crate) evicted_nodes: u64,
    pub(crate) evicted_warm: u64,
}

#[derive(Debug)]
pub(crate) struct Tree {
    nodes: Vec<Option<Node>>,
    free: Vec<NodeId>,
    roots: HashMap<PrefixKey, NodeId>,
    by_hash: HashMap<BlockHash, NodeId>,
    /// Node that owns a bf16 or sealed slot.
    exact_owner: Vec<NodeId>,
    sealed_owner: Vec<NodeId>,
    candidates: EvictionCandidates,
    counts: TreeCounts,
    clock: u64,
    /// Without sealed pages a tail is a page like any other; with them it is as cheap to lose as a warm copy.
    has_sealed: bool,
    journal: journal::Journal,
}

impl Tree {
    pub(crate) fn new(pools: &Pools, has_sealed: bool) -> Tree {
        Tree {
            nodes: Vec::new(),
            free: Vec::new(),
            roots: HashMap::new(),
            by_hash: HashMap::new(),
            exact_owner: vec![NO_NODE; pools.exact.slots()],
            sealed_owner: vec![NO_NODE; pools.sealed_slots()],
            candidates: EvictionCandidates::default(),
            counts: TreeCounts::default(),
            clock: 0,
            has_sealed,
            journal: journal::Journal::default(),
        }
    }

    fn node(&self, id: NodeId) -> &Node {
        self.nodes[id as usize].as_ref().expect("node ids are of living nodes")
    }

    fn node_mut(&mut self, id: NodeId) -> &mut Node {
        self.nodes[id as usize].as_mut().expect("node ids are of living nodes")
    }

    pub(crate) fn counts(&self) -> TreeCounts {
        self.counts
    }

    /// bf16 and sealed slot of a node.
    pub(crate) fn slots(&self, id: NodeId) -> (Option<ExactSlot>, Option<SealedSlot>) {
        let node = self.node(id);
        (node.exact, node.sealed)
    }

    /// A logical time later than all before.
    pub(crate) fn tick(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }

    /// Finds the full pages at the start of `tokens`, at most `pages`.
    pub(crate) fn find(&self, key: PrefixKey, tokens: &[u32], pages: usize) -> PrefixMatch {
        let mut found = PrefixMatch::default();
        let Some(&root) = self.roots.get(&key) else { return found };
        let (mut parent, mut hash) = (root, BlockHash::root(key));
        for block in tokens.chunks_exact(PAGE_TOKENS).take(pages) {
            let next = BlockHash::chain(hash, block);
            let Some(node) = self.child(parent, next, block) else { break };
            found.nodes.push(node);
            found.hashes.push(next);
            (parent, hash) = (node, Some(next));
        }
        found
    }

    /// The full page with `tokens` below `parent`.
    pub(crate) fn child(&self, parent: NodeId, hash: BlockHash, tokens: &[u32]) -> Option<NodeId> {
        let id = *self.by_hash.get(&hash)?;
        let node = self.node(id);
        (node.parent == parent && *node.tokens == *tokens).then_some(id)
    }

    /// The tail below the last of `path` (or the root of `key`) that has most tokens in common with `tokens`, and how
    /// many.
    pub(crate) fn find_tail(
        &self,
        key: PrefixKey,
        path: &[NodeId],
        tokens: &[u32],
    ) -> Option<(NodeId, usize)> {
        let parent = path.last().or_else(|| self.roots.get(&key))?;
        let tails = &self.node(*parent).tails;
        let before = tails.range::<[u32], _>((Bound::Unbounded, Bound::Included(tokens))).next_back();
        let after = tails.range::<[u32], _>((Bound::Excluded(tokens), Bound::Unbounded)).next();
        [before, after]
            .into_iter()
            .flatten()
            .map(|(tail, &id)| (id, tail.iter().zip(tokens).take_while(|(a, b)| a == b).count()))
            .filter(|&(_, common)| common > 0)
            .max_by_key(|&(_, common)| common)
    }

    /// Marks a path from the first page as used now, the root included.
    pub(crate) fn touch(&mut self, id: NodeId, now: u64) {
        self.node_mut(id).last_use = now;
        self.relist(id);
    }

    /// Marks the bf16 copy of a page, or a tail, as used now.
    pub(crate) fn touch_warm(&mut self, id: NodeId, now: u64) {
        self.node_mut(id).warm_use = now;
        self.relist(id);
    }

    /// The root of a key, if there is one.
    pub(crate) fn find_root(&self, key: PrefixKey) -> Option<NodeId> {
        self.roots.get(&key).copied()
    }

    /// The root of a key, made if it is not there.
    pub(crate) fn root(&mut self, key: PrefixKey) -> NodeId {
        if let Some(&root) = self.roots.get(&key) {
            return root;
        }
        let root = self.add(NO_NODE, key, 0, None, &[]);
        self.roots.insert(key, root);
        root
    }

    /// Removes the root of a key if nothing hangs on it.
    pub(crate) fn prune_root(&mut self, key: PrefixKey) {
        if let Some(&root) = self.roots.get(&key)
            && self.node(root).children.is_empty()
            && self.node(root).tails.is_empty()
        {
            self.roots.remove(&key);
            self.nodes[root as usize] = None;
            self.free.push(root);
        }
    }

    /// Adds a full page below `parent` and makes the tree an owner of its slots.
    pub(crate) fn insert_page(
        &mut self,
        pools: &mut Pools,
        parent: NodeId,
        page: usize,
        hash: BlockHash,
        tokens: &[u32],
        slots: (Option<ExactSlot>, Option<SealedSlot>),
        now: u64,
    ) -> NodeId {
        self.drop_prefixes(pools, parent, tokens);
        let key = self.node(parent).key;
        let id = self.add(parent, key, page, Some(hash), tokens);
        self.node_mut(parent).children.insert(id);
        self.by_hash.insert(hash, id);
        self.journal.stored(self.node(parent).hash, hash, tokens);
        self.counts.nodes += 1;
        self.own(pools, id, slots, now);
        id
    }

    /// Adds a partly filled page below `parent`, unless one that begins with the same tokens is there.
    pub(crate) fn insert_tail(
        &mut self,
        pools: &mut Pools,
        parent: NodeId,
        page: usize,
        tokens: &[u32],
        exact: ExactSlot,
        now: u64,
    ) {
        // A fork of a sequence that was growing may hold the beginning of a page that the tree has by now as a whole.
        if self.exact_owner[exact.index()] != NO_NODE {
            return;
        }
        let tails = &self.node(parent).tails;
        let next = tails.range::<[u32], _>((Bound::Included(tokens), Bound::Unbounded)).next();
        if let Some((tail, &id)) = next
            && tail.starts_with(tokens)
        {
            self.touch_warm(id, now);
            return self.touch(id, now);
        }
        self.drop_prefixes(pools, parent, tokens);
        let key = self.node(parent).key;
        let id = self.add(parent, key, page, None, tokens);
        self.node_mut(parent).tails.insert(tokens.into(), id);
        self.counts.tails += 1;
        self.own(pools, id, (Some(exact), None), now);
    }

    /// Gives a node a bf16 copy of the page it has sealed.
    pub(crate) fn add_warm_copy(&mut self, pools: &mut Pools, id: NodeId, exact: ExactSlot, now: u64) {
        debug_assert!(self.node(id).exact.is_none() && self.node(id).sealed.is_some());
        self.drop_tail_of(pools, exact);
        pools.exact.share(exact);
        self.exact_owner[exact.index()] = id;
        let node = self.node_mut(id);
        (node.exact, node.warm_use) = (Some(exact), now);
        self.counts.warm += 1;
        self.refresh(pools, id);
    }

    /// Lets a node share a sequence's page in place of its own, which has the same rows, which nobody else uses and which
    /// cannot be evicted because a sequence holds a node below. True if that freed a page.
    pub(crate) fn replace_duplicate(
        &mut self,
        pools: &mut Pools,
        id: NodeId,
        (exact, sealed): (Option<ExactSlot>, Option<SealedSlot>),
    ) -> bool {
        let node = self.node(id);
        if !node.busy {
            return false;
        }
        if let Some(old) = node.sealed {
            let Some(sealed) = sealed.filter(|&sealed| sealed != old && pools.sealed_owners(old) == 1) else {
                return false;
            };
            debug_assert_eq!(self.sealed_owner[sealed.index()], NO_NODE);
            pools.share_sealed(sealed);
            pools.release_sealed(old);
            self.sealed_owner[old.index()] = NO_NODE;
            self.sealed_owner[sealed.index()] = id;
            self.node_mut(id).sealed = Some(sealed);
        } else {
            let (Some(exact), Some(old)) = (exact, node.exact) else { return false };
            if exact == old || pools.exact.owners(old) > 1 {
                return false;
            }
            self.drop_tail_of(pools, exact);
            pools.exact.share(exact);
            pools.exact.release(old);
            self.exact_owner[old.index()] = NO_NODE;
            self.exact_owner[exact.index()] = id;
            self.node_mut(id).exact = Some(exact);
        }
        self.refresh(pools, id);
        true
    }

    /// Removes the tail that the tree has in this slot, if there is one: the page is full now.
    fn drop_tail_of(&mut self, pools: &mut Pools, exact: ExactSlot) {
        let tail = self.exact_owner[exact.index()];
        if tail != NO_NODE {
            debug_assert!(self.node(tail).hash.is_none(), "one page in two nodes");
            self.remove(pools, tail);
        }
    }

    /// Removes tails whose tokens are a beginning of `tokens`: what is new below `parent` includes them.
    fn drop_prefixes(&mut self, pools: &mut Pools, parent: NodeId, tokens: &[u32]) {
        for length in 1..tokens.len() {
            let tails = &self.node(parent).tails;
            if tails.is_empty() {
                return;
            }
            if let Some(&tail) = tails.get(&tokens[..length]) {
                self.remove(pools, tail);
            }
        }
    }

    fn add(
        &mut self,
        parent: NodeId,
        key: PrefixKey,
        page: usize,
        hash: Option<BlockHash>,
        tokens: &[u32],
    ) -> NodeId {
        let node = Node {
            parent,
            key,
            page: u32::try_from(page).expect("pages of a sequence are fewer than slots of a pool"),
            hash,
            tokens: tokens.into(),
            exact: None,
            sealed: None,
            children: BTreeSet::new(),
            tails: BTreeMap::new(),
            last_use: 0,
            warm_use: 0,
            busy_children: 0,
            busy: false,
            listed: eviction::EvictionListing::default(),
        };
        match self.free.pop() {
            Some(id) => {
                self.nodes[id as usize] = Some(node);
                id
            }
            None => {
                self.nodes.push(Some(node));
                NodeId::try_from(self.nodes.len() - 1).expect("nodes are fewer than slots")
            }
        }
    }

    fn own(
        &mut self,
        pools: &mut Pools,
        id: NodeId,
        (exact, sealed): (Option<ExactSlot>, Option<SealedSlot>),
        now: u64,
    ) {
        if let Some(exact) = exact {
            pools.exact.share(exact);
            self.exact_owner[exact.index()] = id;
        }
        if let Some(sealed) = sealed {
            pools.share_sealed(sealed);
            self.sealed_owner[sealed.index()] = id;
        }
        self.counts.warm += usize::from(exact.is_some() && sealed.is_some());
        let node = self.node_mut(id);
        (node.exact, node.sealed, node.last_use, node.warm_use) = (exact, sealed, now, now);
        self.refresh(pools, id);
    }

    /// Lets go of a node without anything below it.
    fn remove(&mut self, pools: &mut Pools, id: NodeId) {
        self.unlist(id);
        let node = self.nodes[id as usize].take().expect("node ids are of living nodes");
        debug_assert!(node.children.is_empty() && node.tails.is_empty());
        self.free.push(id);
        if let Some(exact) = node.exact {
            self.exact_owner[exact.index()] = NO_NODE;
            pools.exact.release(exact);
        }
        if let Some(sealed) = node.sealed {
            self.sealed_owner[sealed.index()] = NO_NODE;
            pools.release_sealed(sealed);
        }
        self.counts.warm -= usize::from(node.exact.is_some() && node.sealed.is_some());
        match &node.hash {
            Some(hash) => {
                self.by_hash.remove(hash);
                self.journal.removed(*hash);
                self.node_mut(node.parent).children.remove(&id);
                self.counts.nodes -= 1;
            }
            None => {
                self.node_mut(node.parent).tails.remove(&node.tokens);
                self.counts.tails -= 1;
            }
        }
        if node.busy {
            self.node_mut(node.parent).busy_children -= 1;
            self.refresh(pools, node.parent);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A hash that two pages had in common would not make one pass for the other.
    #[test]
    fn a_page_is_found_by_its_tokens_not_by_its_hash_alone() {
        let mut pools = Pools::new(4, 0, 0, 0);
        let mut tree = Tree::new(&pools, false);
        let page = pools.exact.allocate().unwrap();
        let tokens: Vec<u32> = (0..64).collect();
        let hash = BlockHash::chain(None, &tokens);
        let root = tree.root(0.into());
        let node = tree.insert_page(&mut pools, root, 0, hash, &tokens, (Some(page), None), 1);
        assert_eq!(tree.child(root, hash, &tokens), Some(node));
        let others: Vec<u32> = (1..65).collect();
        assert_eq!(tree.child(root, hash, &others), None);
        let other_root = tree.root(1.into());
        assert_eq!(tree.child(other_root, hash, &tokens), None);
    }
}
