//! Sequences whose history stays in bf16 beside those whose history is sealed, and their demotion.

use crate::support::{Cache, options, text};
use oscar_kv::{LedgerOptions, PAGE_TOKENS, PoolKind, PrefillMode, PrefixKey, SealedPools, Tier};

const EXACT: PrefixKey = PrefixKey { salt: 0, tier: Tier::Exact };
const HIGH: PrefixKey = PrefixKey { salt: 0, tier: Tier::High };

#[test]
fn a_history_in_bf16_is_never_sealed() {
    let mut cache = Cache::new(options(1, 2));
    for mode in [PrefillMode::Exact, PrefillMode::Uniform] {
        let mut open = cache.prompt(EXACT, &text(0, 10 * PAGE_TOKENS + 5), mode);
        for token in 0..200 {
            cache.append(&mut open, token).unwrap();
        }
        assert_eq!(cache.insert(&mut open, true), 0);
        assert_eq!(open.pages(), ((0..14).collect(), vec![]));
        cache.close(open);
        let stats = cache.ledger.stats();
        assert_eq!((stats.sealed.used(), stats.scratch.used()), (0, 0));
        cache.ledger.flush();
    }
    cache.assert_empty();
}

#[test]
fn tiers_share_nothing_with_each_other() {
    let mut cache = Cache::new(options(1, 2));
    let prompt = text(0, 8 * PAGE_TOKENS + 1);
    let keys = [PrefixKey::from(0), HIGH, EXACT];
    for (key, other) in keys.into_iter().flat_map(|key| keys.map(|other| (key, other))) {
        if key == other {
            continue;
        }
        let mut open = cache.prompt(key, &prompt, PrefillMode::Exact);
        cache.insert(&mut open, true);
        cache.close(open);
        for (key, expected) in [(key, 8), (other, 0)] {
            let open = cache.open(key, &prompt);
            assert_eq!(open.sequence.cached_tokens(), expected * PAGE_TOKENS, "{key:?}");
            cache.close(open);
        }
        cache.ledger.flush();
    }
    cache.assert_empty();
}

#[test]
fn a_demotion_seals_the_oldest_pages_and_no_more_than_are_needed() {
    let mut cache = Cache::new(options(1, 2));
    let mut open = cache.prompt(EXACT, &text(0, 10 * PAGE_TOKENS), PrefillMode::Exact);
    assert_eq!(cache.demote(&mut open, 2), 2);
    assert_eq!(open.pages(), ([0].into_iter().chain(3..10).collect(), vec![1, 2]));
    assert_eq!(cache.demote(&mut open, 1), 1);
    // The sink and the recent window stay: pages 4 to 6 are all that is left.
    assert_eq!(cache.demote(&mut open, 100), 3);
    assert_eq!(open.pages(), (vec![0, 7, 8, 9], (1..7).collect()));
    assert_eq!(cache.demote(&mut open, 1), 0);
    // New pages are in bf16 as before.
    cache.extend(&mut open, &text(1, 3 * PAGE_TOKENS), PrefillMode::Uniform).unwrap();
    assert_eq!(open.pages(), ([0].into_iter().chain(7..13).collect(), (1..7).collect()));
    cache.close(open);
    cache.assert_empty();
}

#[test]
fn only_bf16_histories_are_demoted() {
    let mut cache = Cache::new(options(1, 2));
    let mut open = cache.prompt(0, &text(0, 10 * PAGE_TOKENS), PrefillMode::Exact);
    assert_eq!(cache.demote(&mut open, 1), 0);
    cache.close(open);
    let mut cache = Cache::new(LedgerOptions { sealed: None, ..options(1, 2) });
    let mut open = cache.prompt(EXACT, &text(0, 10 * PAGE_TOKENS), PrefillMode::Exact);
    assert_eq!(cache.demote(&mut open, 1), 0);
    cache.close(open);
}

#[test]
fn the_tree_lets_go_of_what_is_demoted() {
    let mut cache = Cache::new(options(1, 2));
    let prompt = text(0, 10 * PAGE_TOKENS + 1);
    let mut open = cache.prompt(EXACT, &prompt, PrefillMode::Exact);
    cache.insert(&mut open, false);
    let before = cache.ledger.available(PoolKind::Exact);
    assert_eq!(cache.demote(&mut open, 3), 3);
    // The tree's own pages behind them stay with the sequence.
    assert_eq!(cache.ledger.available(PoolKind::Exact), before + 3);
    for token in 0..150 {
        cache.append(&mut open, token).unwrap();
    }
    // What was computed from sealed history is not for others.
    cache.insert(&mut open, true);
    cache.close(open);
    cache.check_tree();
    let next = cache.open(EXACT, &prompt);
    assert_eq!(next.sequence.cached_tokens(), PAGE_TOKENS);
    cache.close(next);
    cache.ledger.flush();
    cache.assert_empty();
}

#[test]
fn pages_of_others_are_not_worth_a_demotion() {
    let mut cache = Cache::new(options(1, 2));
    let mut open = cache.prompt(EXACT, &text(0, 10 * PAGE_TOKENS), PrefillMode::Exact);
    let mut fork = cache.fork(&open);
    assert_eq!(cache.demote(&mut fork, 1), 0);
    // Its own pages are, and those before them go with them.
    cache.extend(&mut fork, &text(1, 4 * PAGE_TOKENS), PrefillMode::Uniform).unwrap();
    assert_eq!(cache.demote(&mut fork, 1), 10);
    assert_eq!(open.pages().1, [0; 0]);
    assert_eq!(cache.demote(&mut open, 1), 1);
    cache.audit(&[&open, &fork]);
    cache.close(fork);
    cache.close(open);
    cache.assert_empty();
}

#[test]
fn no_more_is_demoted_than_there_are_sealed_pages() {
    let sealed = Some(SealedPools { pages: 3, high_pages: 0, scratch_pages: 0 });
    let mut cache = Cache::new(LedgerOptions { sealed, ..options(0, 0) });
    let mut open = cache.prompt(EXACT, &text(0, 10 * PAGE_TOKENS), PrefillMode::Exact);
    let shortage = cache.ledger.demote(&mut open.sequence, 4).unwrap_err();
    assert_eq!((shortage.pool, shortage.needed, shortage.available), (PoolKind::Sealed, 4, 3));
    assert_eq!(cache.demote(&mut open, 5), 3);
    assert_eq!(cache.demote(&mut open, 1), 0);
    cache.close(open);
    cache.assert_empty();
}

#[test]
fn a_tier_of_its_own_codec_has_pages_of_its_own_pool() {
    let sealed = Some(SealedPools { pages: 20, high_pages: 8, scratch_pages: 20 });
    let mut cache = Cache::new(LedgerOptions { sealed, ..options(1, 2) });
    let mut open = cache.prompt(HIGH, &text(0, 8 * PAGE_TOKENS), PrefillMode::Exact);
    assert_eq!(open.pages(), (vec![0, 5, 6, 7], (1..5).collect()));
    let stats = cache.ledger.stats();
    assert_eq!((stats.sealed.used(), stats.high.used()), (0, 4));
    // The other pool is of no use to it, and it is no use to others.
    let shortage = cache.extend(&mut open, &text(1, 5 * PAGE_TOKENS), PrefillMode::Uniform).unwrap_err();
    assert_eq!((shortage.pool, shortage.needed, shortage.available), (PoolKind::High, 5, 4));
    assert_eq!(cache.ledger.available(PoolKind::Sealed), 20);
    cache.insert(&mut open, true);
    assert_eq!(cache.demote(&mut open, 1), 0);
    cache.close(open);
    // What the tree keeps of it is evicted for its own kind alone.
    let other = cache.prompt(0, &text(2, 20 * PAGE_TOKENS), PrefillMode::Exact);
    let used = cache.ledger.stats().high.used();
    assert_eq!(used, 7);
    let high = cache.prompt(HIGH, &text(3, 8 * PAGE_TOKENS), PrefillMode::Exact);
    assert!(cache.ledger.stats().evicted_pages > 0);
    cache.audit(&[&other, &high]);
    cache.close(other);
    cache.close(high);
    cache.ledger.flush();
    cache.assert_empty();
}
