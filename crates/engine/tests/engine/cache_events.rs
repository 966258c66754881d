//! Following the prefix tree from outside: by what is told, one knows what is there.

use std::collections::HashMap;
use std::sync::mpsc::Receiver;

use crate::support::*;
use oscar_engine::{CacheEvent, GenerateOptions, Request, Serve};
use oscar_kv::{BlockHash, PAGE_TOKENS};

/// The pages that must be in the tree, with what comes before them.
#[derive(Default)]
struct Follower {
    pages: HashMap<BlockHash, Option<BlockHash>>,
    cleared: usize,
    removed: usize,
}

impl Follower {
    fn hear(&mut self, events: &Receiver<Vec<CacheEvent>>) {
        for event in events.try_iter().flatten() {
            match event {
                CacheEvent::Stored { mut parent, blocks, tokens } => {
                    for (block, tokens) in blocks.into_iter().zip(tokens.chunks(PAGE_TOKENS)) {
                        assert!(parent.is_none_or(|parent| self.pages.contains_key(&parent)));
                        if parent.is_some() {
                            assert_eq!(block, BlockHash::chain(parent, tokens));
                        }
                        assert_eq!(self.pages.insert(block, parent), None);
                        parent = Some(block);
                    }
                }
                CacheEvent::Removed { blocks } => {
                    self.removed += blocks.len();
                    blocks.iter().for_each(|block| assert!(self.pages.remove(block).is_some()));
                }
                CacheEvent::Cleared => {
                    self.cleared += 1;
                    self.pages.clear();
                }
            }
        }
    }

    fn has(&self, salt: u64, tokens: &[u32]) -> bool {
        let mut parent = BlockHash::root(salt);
        tokens.chunks_exact(PAGE_TOKENS).all(|tokens| {
            let hash = BlockHash::chain(parent, tokens);
            parent = Some(hash);
            self.pages.contains_key(&hash)
        })
    }
}

#[test]
fn whoever_listens_knows_what_is_cached() {
    let model = model(false);
    for format in FORMATS {
        let engine = TestEngine::new(model.clone(), &engine_options(&model, format, Some(40))).unwrap();
        let before = prompt(1, 200);
        ask(&engine, &before, &greedy(4));
        let events = engine.cache_events();
        let mut follower = Follower::default();
        for seed in 0..20 {
            let summary = ask(&engine, &prompt(seed, 150 + 30 * seed % 400), &greedy(70));
            let tree_pages = engine.fresh_stats().cache.tree_pages;
            follower.hear(&events);
            assert_eq!(follower.pages.len(), tree_pages, "{format}");
            if seed == 0 {
                assert!(follower.has(0, &before), "what was there before");
            }
            let said = [prompt(seed, 150 + 30 * seed % 400), summary.tokens].concat();
            // The last token that was drawn is not in the cache.
            assert!(follower.has(0, &said[..said.len() - 1]), "{format}: answers too");
        }
        assert!(follower.removed > 0, "{format}: nothing was evicted, this test shows too little");
        assert_eq!(follower.cleared, 1);
        engine.reset();
        follower.hear(&events);
        assert_eq!((follower.pages.len(), follower.cleared), (0, 2));
    }
}

#[test]
fn tenants_have_pages_of_their_own() {
    let model = model(false);
    let engine = TestEngine::new(model.clone(), &engine_options(&model, "int2", None)).unwrap();
    let events = engine.cache_events();
    let tokens = prompt(3, 260);
    let ask = |tenant: Option<&str>| {
        let options = GenerateOptions { cache_salt: tenant.map(str::to_owned), ..greedy(2) };
        engine.answer(Request::new(tokens.clone(), options)).unwrap().wait().unwrap();
        engine.fresh_stats().cache.tree_pages
    };
    let mut follower = Follower::default();
    let pages = ask(None);
    assert_eq!(ask(None), pages);
    assert_eq!(ask(Some("one")), 2 * pages);
    assert_eq!(ask(Some("two")), 3 * pages);
    follower.hear(&events);
    assert_eq!(follower.pages.len(), 3 * pages);
    assert!(follower.has(0, &tokens));
}

/// The engine does not wait for a follower, keeps nothing for it, and tells it everything when it is back.
#[test]
fn a_follower_that_sleeps_is_told_everything_anew() {
    let model = model(false);
    let engine = TestEngine::new(model.clone(), &engine_options(&model, "bf16", Some(60))).unwrap();
    let events = engine.cache_events();
    for seed in 0..400 {
        ask(&engine, &prompt(seed, 66), &greedy(1));
    }
    let mut follower = Follower::default();
    follower.hear(&events);
    let known = follower.pages.len();
    // Everything anew, without anything else happening.
    let begun = std::time::Instant::now();
    while follower.cleared < 2 {
        assert!(begun.elapsed() < std::time::Duration::from_secs(60), "{known} pages, and then nothing");
        std::thread::sleep(std::time::Duration::from_millis(10));
        follower.hear(&events);
    }
    assert_eq!(follower.pages.len(), engine.fresh_stats().cache.tree_pages);
    let last = prompt(399, 66);
    assert!(follower.has(0, &last));
    drop(events);
    ask(&engine, &prompt(500, 66), &greedy(1));
    assert_idle(&engine);
}
