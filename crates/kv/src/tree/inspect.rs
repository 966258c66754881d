//! A list of what the tree holds, and checks of its invariants, for tests.

use std::collections::BTreeSet;

use oscar_codec::{ExactSlot, SealedSlot};

use super::{NO_NODE, NodeId, Tree};
use crate::key::{PrefixKey, Tier};
use crate::pools::Pools;

/// One page that the prefix tree owns.
#[derive(Clone, Debug)]
pub struct TreeEntry<'a> {
    /// Index of the entry with the page before this one; `None` for first pages.
    pub parent: Option<usize>,
    /// Key of the sequences that may use the page.
    pub key: PrefixKey,
    /// Index of the page in its sequences.
    pub page: usize,
    /// Tokens of the page; fewer than 64 for the partly filled last page of a finished request.
    pub tokens: &'a [u32],
    /// Slot of the page in bf16, if the tree has it so.
    pub exact: Option<ExactSlot>,
    /// Slot of the sealed page, if the tree has it so.
    pub sealed: Option<SealedSlot>,
}

impl Tree {
    /// Every page of the tree, parents before children.
    pub(crate) fn entries(&self) -> Vec<TreeEntry<'_>> {
        let mut roots: Vec<NodeId> = self.roots.values().copied().collect();
        roots.sort_unstable_by_key(|&root| self.node(root).key);
        let mut entries = Vec::new();
        let mut open: Vec<(NodeId, Option<usize>)> = roots.into_iter().map(|root| (root, None)).collect();
        while let Some((id, parent)) = open.pop() {
            let node = self.node(id);
            let mut above = None;
            if node.parent != NO_NODE {
                above = Some(entries.len());
                entries.push(TreeEntry {
                    parent,
                    key: node.key,
                    page: node.page as usize,
                    tokens: &node.tokens,
                    exact: node.exact,
                    sealed: node.sealed,
                });
            }
            open.extend(node.children.iter().chain(node.tails.values()).map(|&child| (child, above)));
        }
        entries
    }

    /// Whether a bf16 slot belongs to the tree.
    pub(crate) fn owns_exact(&self, slot: ExactSlot) -> bool {
        self.exact_owner[slot.index()] != NO_NODE
    }

    /// Whether a sealed slot belongs to the tree.
    pub(crate) fn owns_sealed(&self, slot: SealedSlot) -> bool {
        self.sealed_owner[slot.index()] != NO_NODE
    }

    /// Recomputes everything that is kept as the tree changes and says what differs.
    pub(crate) fn audit(&self, pools: &Pools) -> Result<(), String> {
        let living: Vec<NodeId> =
            (0..self.nodes.len() as NodeId).filter(|&id| self.nodes[id as usize].is_some()).collect();
        let mut found = super::TreeCounts { ..self.counts };
        (found.nodes, found.tails, found.warm) = (0, 0, 0);
        let (mut warm, mut exact) = (BTreeSet::new(), BTreeSet::new());
        let (mut sealed, mut high) = (BTreeSet::new(), BTreeSet::new());
        for &id in &living {
            let node = self.node(id);
            let below = || node.children.iter().chain(node.tails.values()).map(|&child| self.node(child));
            let busy_children = below().filter(|child| child.busy).count();
            if busy_children != node.busy_children as usize || below().any(|child| child.parent != id) {
                return Err(format!(
                    "node {id} has {busy_children} busy children, not {}",
                    node.busy_children
                ));
            }
            if node.parent == NO_NODE {
                if node.children.is_empty() && node.tails.is_empty() || self.roots.get(&node.key) != Some(&id)
                {
                    return Err(format!("root {id} of {:?} should not be there", node.key));
                }
                continue;
            }
            if below().any(|child| child.last_use > node.last_use || child.page != node.page + 1) {
                return Err(format!("node {id} is older than what is below it, or on the wrong level"));
            }
            if node.exact.is_some_and(|slot| self.exact_owner[slot.index()] != id)
                || node.sealed.is_some_and(|slot| self.sealed_owner[slot.index()] != id)
            {
                return Err(format!("node {id} is not known as the owner of its pages"));
            }
            let own = match (node.exact, node.sealed) {
                (None, None) => return Err(format!("node {id} has no page")),
                (Some(slot), None) => pools.exact.owners(slot),
                (_, Some(slot)) => pools.sealed_owners(slot),
            };
            let busy = own > 1 || busy_children > 0;
            if busy != node.busy {
                return Err(format!("node {id}: busy is {busy}"));
            }
            let is_tail = node.hash.is_none();
            let alone = node.exact.is_some_and(|exact| pools.exact.owners(exact) == 1);
            if alone && (node.sealed.is_some() || is_tail && self.has_sealed) {
                warm.insert(id);
            } else if alone && !busy {
                exact.insert(id);
            }
            if node.sealed.is_some() && !busy {
                if node.key.tier == Tier::High { &mut high } else { &mut sealed }.insert(id);
            }
            found.nodes += usize::from(!is_tail);
            found.tails += usize::from(is_tail);
            found.warm += usize::from(node.exact.is_some() && node.sealed.is_some());
        }
        for (name, set, expected) in [
            ("warm", &self.candidates.warm, warm),
            ("bf16", &self.candidates.exact, exact),
            ("sealed", &self.candidates.sealed, sealed),
            ("high", &self.candidates.high, high),
        ] {
            let listed: BTreeSet<NodeId> = set.iter().map(|key| key.2).collect();
            let time = |node: &super::Node| if name == "warm" { node.warm_use } else { node.last_use };
            let stale = set.iter().any(|key| time(self.node(key.2)) != key.0);
            if listed != expected || set.len() != listed.len() || stale {
                return Err(format!("{name} candidates are {set:?}, not {expected:?}"));
            }
        }
        if found != self.counts
            || self.by_hash.len() != found.nodes
            || living.len() + self.free.len() != self.nodes.len()
        {
            return Err(format!("counted {found:?}, kept {:?}", self.counts));
        }
        let owned = |owners: &[NodeId]| owners.iter().filter(|&&id| id != NO_NODE).count();
        let pages = living.iter().map(|&id| self.node(id));
        let (exact, sealed) = pages.fold((0, 0), |(exact, sealed), node| {
            (exact + usize::from(node.exact.is_some()), sealed + usize::from(node.sealed.is_some()))
        });
        if (owned(&self.exact_owner), owned(&self.sealed_owner)) != (exact, sealed) {
            return Err("a slot has an owner that does not own it".to_owned());
        }
        Ok(())
    }
}
