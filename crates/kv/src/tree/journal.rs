//! KV events: what changes in the tree, for routers that send a prompt to the server that has its pages.
//!
//! Only full pages have events: a partly filled one has no hash. Nothing is recorded until somebody watches. Pages that
//! continue each other become one event, so a long prompt is one event and not one per page.

use crate::block_hash::BlockHash;

/// Bound on the pages of one event, so that no message grows without limit.
const MAX_BLOCKS_PER_EVENT: usize = 1024;

/// A change of the prefix tree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CacheEvent {
    /// Pages that follow each other were added.
    Stored {
        /// The page before the first of them; `None` at the start of a sequence.
        parent: Option<BlockHash>,
        /// Hashes of the pages, in order.
        blocks: Vec<BlockHash>,
        /// Tokens of all the pages, 64 a page.
        tokens: Vec<u32>,
    },
    /// Pages were removed.
    Removed {
        /// Hashes of the pages.
        blocks: Vec<BlockHash>,
    },
    /// The tree was emptied.
    Cleared,
}

/// The events since they were last taken, while somebody watches.
#[derive(Debug, Default)]
pub(super) struct Journal(Option<Vec<CacheEvent>>);

impl Journal {
    /// Begins to record, with no events.
    pub(super) fn start(&mut self) {
        self.0 = Some(Vec::new());
    }

    pub(super) fn stop(&mut self) {
        self.0 = None;
    }

    pub(super) fn take(&mut self) -> Vec<CacheEvent> {
        self.0.as_mut().map(std::mem::take).unwrap_or_default()
    }

    pub(super) fn stored(&mut self, parent: Option<BlockHash>, hash: BlockHash, page: &[u32]) {
        let Some(events) = &mut self.0 else { return };
        if let Some(CacheEvent::Stored { blocks, tokens, .. }) = events.last_mut()
            && blocks.len() < MAX_BLOCKS_PER_EVENT
            && parent.is_some()
            && blocks.last() == parent.as_ref()
        {
            blocks.push(hash);
            tokens.extend_from_slice(page);
        } else {
            events.push(CacheEvent::Stored { parent, blocks: vec![hash], tokens: page.to_vec() });
        }
    }

    pub(super) fn removed(&mut self, hash: BlockHash) {
        let Some(events) = &mut self.0 else { return };
        match events.last_mut() {
            Some(CacheEvent::Removed { blocks }) if blocks.len() < MAX_BLOCKS_PER_EVENT => blocks.push(hash),
            _ => events.push(CacheEvent::Removed { blocks: vec![hash] }),
        }
    }

    /// Replaces all events before, which do not matter any more.
    pub(super) fn cleared(&mut self) {
        if let Some(events) = &mut self.0 {
            events.clear();
            events.push(CacheEvent::Cleared);
        }
    }
}

impl super::Tree {
    /// Records changes from now on, and returns what is there as if it had just been added.
    pub(crate) fn watch(&mut self) -> Vec<CacheEvent> {
        let mut now = Journal::default();
        now.start();
        now.cleared();
        let mut open: Vec<super::NodeId> = self.roots.values().copied().collect();
        while let Some(id) = open.pop() {
            let node = self.node(id);
            if let Some(hash) = node.hash {
                now.stored(self.node(node.parent).hash, hash, &node.tokens);
            }
            open.extend(&node.children);
        }
        self.journal.start();
        now.take()
    }

    /// Changes since they were last taken.
    pub(crate) fn take_events(&mut self) -> Vec<CacheEvent> {
        self.journal.take()
    }

    pub(crate) fn unwatch(&mut self) {
        self.journal.stop();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chain(count: u32) -> Vec<BlockHash> {
        let mut hashes = Vec::new();
        for page in 0..count {
            hashes.push(BlockHash::chain(hashes.last().copied(), &[page]));
        }
        hashes
    }

    #[test]
    fn pages_that_follow_each_other_are_one_event() {
        let hashes = chain(3);
        let mut journal = Journal::default();
        journal.stored(None, hashes[0], &[0]);
        assert_eq!(journal.take(), [], "nobody watches");
        journal.start();
        journal.stored(None, hashes[0], &[0]);
        journal.stored(Some(hashes[0]), hashes[1], &[1]);
        // A first page continues nothing, and nor does a sibling.
        journal.stored(None, hashes[2], &[7]);
        journal.stored(Some(hashes[0]), hashes[2], &[2]);
        journal.removed(hashes[2]);
        journal.removed(hashes[1]);
        let stored = |parent, blocks: &[BlockHash], tokens: &[u32]| CacheEvent::Stored {
            parent,
            blocks: blocks.to_vec(),
            tokens: tokens.to_vec(),
        };
        let expected = [
            stored(None, &hashes[..2], &[0, 1]),
            stored(None, &hashes[2..], &[7]),
            stored(Some(hashes[0]), &hashes[2..], &[2]),
            CacheEvent::Removed { blocks: vec![hashes[2], hashes[1]] },
        ];
        assert_eq!(journal.take(), expected);
        assert_eq!(journal.take(), []);
        journal.removed(hashes[0]);
        journal.cleared();
        assert_eq!(journal.take(), [CacheEvent::Cleared]);
    }

    #[test]
    fn events_are_bounded() {
        let hashes = chain(MAX_BLOCKS_PER_EVENT as u32 + 1);
        let mut journal = Journal::default();
        journal.start();
        let mut parent = None;
        for &hash in &hashes {
            journal.stored(parent, hash, &[1]);
            parent = Some(hash);
        }
        let [CacheEvent::Stored { blocks, .. }, CacheEvent::Stored { parent, blocks: rest, .. }] =
            &journal.take()[..]
        else {
            panic!("two events")
        };
        assert_eq!(
            (blocks.len(), *parent, rest.len()),
            (MAX_BLOCKS_PER_EVENT, Some(hashes[MAX_BLOCKS_PER_EVENT - 1]), 1)
        );
    }
}
