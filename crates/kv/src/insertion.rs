//! Giving the prefix tree what a sequence has computed.
//!
//! The tree keeps history sealed. Pages of a sequence's window are not sealed yet, so `plan_insert` has them sealed
//! early: the sequence goes on reading them in bf16, the tree gets both, and when the page leaves the window there is
//! nothing left to do but to let the bf16 go.

use crate::PAGE_TOKENS;
use crate::block_hash::BlockHash;
use crate::extension::SealWork;
use crate::ledger::Ledger;
use crate::sequence::Sequence;

impl Ledger {
    /// Pages of the window that must be sealed before the tree can own them, from the first on, as many as there are
    /// sealed pages for. To be carried out before [`insert`](Self::insert) and before the sequence goes on; if that
    /// fails, the sequence must be closed and not inserted. Nothing while an extension or append is in flight.
    pub fn plan_insert(&mut self, sequence: &mut Sequence) -> Vec<SealWork> {
        let mut work = Vec::new();
        if !self.options.prefix_tree || sequence.in_flight.is_some() {
            return work;
        }
        let now = self.tree.tick();
        let mut parent = self.tree.root(sequence.key);
        let mut in_tree = true;
        let mut hash = BlockHash::root(sequence.key);
        for page in 0..sequence.full_pages() {
            let next = sequence.next_hash(page, hash);
            if page == sequence.hashes.len() {
                sequence.hashes.push(next);
            }
            hash = Some(next);
            if in_tree {
                let tokens = &sequence.tokens[page * PAGE_TOKENS..(page + 1) * PAGE_TOKENS];
                match self.tree.child(parent, next, tokens) {
                    // What is in the tree needs no second sealed page; used now, it is not what makes room either.
                    Some(node) => {
                        self.tree.touch(node, now);
                        parent = node;
                        continue;
                    }
                    None => in_tree = false,
                }
            }
            if !self.seals(sequence.tier()) || page < self.options.windows.sink {
                continue;
            }
            let (Some(from), None) = (sequence.exact[page], sequence.sealed[page]) else { continue };
            let Some(to) = self.try_allocate_sealed(sequence.tier()) else { break };
            self.set_entry(sequence, page, Some(from), Some(to));
            work.push(SealWork { page, from, to });
        }
        self.tree.prune_root(sequence.key);
        work
    }

    /// Gives the tree the full pages of a sequence that it lacks, with bf16 copies of those in the window, and if the
    /// sequence is `finished` the partly filled last page too. Allocates nothing. What is in flight is left out.
    pub fn insert(&mut self, sequence: &Sequence, finished: bool) {
        if !self.options.prefix_tree || sequence.is_empty() {
            return;
        }
        let seals = self.seals(sequence.tier());
        let Ledger { tree, pools, options, .. } = self;
        let now = tree.tick();
        let full_pages = sequence.sharable_pages(options.windows.sink);
        let mut parent = tree.root(sequence.key);
        let mut hash = BlockHash::root(sequence.key);
        let mut complete = !sequence.is_demoted();
        for page in 0..full_pages {
            let next = sequence.next_hash(page, hash);
            hash = Some(next);
            let tokens = &sequence.tokens[page * PAGE_TOKENS..(page + 1) * PAGE_TOKENS];
            let exact = sequence.exact[page];
            if let Some(node) = tree.child(parent, next, tokens) {
                tree.touch(node, now);
                if let Some(exact) = exact {
                    match tree.slots(node).0 {
                        None => tree.add_warm_copy(pools, node, exact, now),
                        Some(_) => tree.touch_warm(node, now),
                    }
                }
                parent = node;
                continue;
            }
            let stays_exact = !seals || page < options.windows.sink;
            let sealed = sequence.settled_sealed(page);
            if !stays_exact && sealed.is_none() {
                complete = false;
                break;
            }
            parent = tree.insert_page(pools, parent, page, next, tokens, (exact, sealed), now);
        }
        let rest = &sequence.tokens[full_pages * PAGE_TOKENS..];
        if finished
            && complete
            && sequence.in_flight.is_none()
            && !rest.is_empty()
            && let Some(exact) = sequence.exact[full_pages]
        {
            tree.insert_tail(pools, parent, full_pages, rest, exact, now);
        }
        tree.prune_root(sequence.key);
        self.replace_duplicates(sequence);
    }

    /// Where the tree has a second copy of a page of this sequence, which nobody else uses and which cannot be evicted
    /// because of nodes below it, the tree shares the sequence's page instead. True if that freed a page.
    ///
    /// So a sequence that is alone can never be short of pages because of copies of itself.
    pub(crate) fn replace_duplicates(&mut self, sequence: &Sequence) -> bool {
        let Ledger { tree, pools, options, .. } = self;
        let mut freed = false;
        let (mut parent, mut hash) = (tree.find_root(sequence.key), BlockHash::root(sequence.key));
        for page in 0..sequence.sharable_pages(options.windows.sink) {
            let next = sequence.next_hash(page, hash);
            hash = Some(next);
            let tokens = &sequence.tokens[page * PAGE_TOKENS..(page + 1) * PAGE_TOKENS];
            let Some(node) = parent.and_then(|parent| tree.child(parent, next, tokens)) else { break };
            freed |=
                tree.replace_duplicate(pools, node, (sequence.exact[page], sequence.settled_sealed(page)));
            parent = Some(node);
        }
        freed
    }
}
