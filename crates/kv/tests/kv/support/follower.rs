//! Somebody who knows the prefix tree by its events alone.

use std::collections::HashMap;

use oscar_kv::{BlockHash, CacheEvent, Ledger, PAGE_TOKENS};

/// The full pages that must be in the tree, by what was told: the page before, and the tokens.
#[derive(Debug, Default)]
pub struct Follower(HashMap<BlockHash, (Option<BlockHash>, Vec<u32>)>);

impl Follower {
    /// Follows a ledger from now on.
    pub fn new(ledger: &mut Ledger) -> Follower {
        let mut follower = Follower::default();
        let now = ledger.watch();
        assert_eq!(now[0], CacheEvent::Cleared);
        follower.hear(now);
        follower
    }

    /// Every event must make sense to someone who knows only those before it.
    pub fn hear(&mut self, events: Vec<CacheEvent>) {
        for event in events {
            match event {
                CacheEvent::Stored { mut parent, blocks, tokens } => {
                    assert_eq!(tokens.len(), blocks.len() * PAGE_TOKENS);
                    for (block, tokens) in blocks.into_iter().zip(tokens.chunks(PAGE_TOKENS)) {
                        assert!(parent.is_none_or(|parent| self.0.contains_key(&parent)), "after nothing");
                        let before = self.0.insert(block, (parent, tokens.to_vec()));
                        assert!(before.is_none(), "stored twice");
                        parent = Some(block);
                    }
                }
                CacheEvent::Removed { blocks } => {
                    for block in blocks {
                        assert!(self.0.remove(&block).is_some(), "removed without being there");
                        let orphan = self.0.values().any(|(parent, _)| *parent == Some(block));
                        assert!(!orphan, "removed before what follows it");
                    }
                }
                CacheEvent::Cleared => self.0.clear(),
            }
        }
    }

    /// What was told is what is there.
    pub fn assert_knows(&self, ledger: &Ledger) {
        let entries = ledger.tree_entries();
        let mut hashes: Vec<Option<BlockHash>> = Vec::new();
        let mut pages = HashMap::new();
        for entry in entries {
            let parent = entry.parent.and_then(|parent| hashes[parent]);
            let mut hash = None;
            if entry.tokens.len() == PAGE_TOKENS {
                let before = parent.or_else(|| BlockHash::root(entry.key));
                let name = BlockHash::chain(before, entry.tokens);
                pages.insert(name, (parent, entry.tokens.to_vec()));
                hash = Some(name);
            }
            hashes.push(hash);
        }
        assert_eq!(self.0, pages);
    }
}
