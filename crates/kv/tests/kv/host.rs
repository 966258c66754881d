//! Pages that were evicted and come back from the host's memory.

use crate::support::{Cache, options, text};
use oscar_kv::{HostPools, LedgerOptions, PAGE_TOKENS, PrefillMode, SealedPools, TailPolicy};

/// A cache for one sequence of ten pages, and room for `host` pages of each kind beside it.
fn small(host: usize) -> LedgerOptions {
    LedgerOptions {
        exact_pages: 7,
        sealed: Some(SealedPools { pages: 14, high_pages: 0, scratch_pages: 10 }),
        tail: TailPolicy::Recompute,
        host: HostPools { exact_pages: host, sealed_pages: host },
        ..options(1, 2)
    }
}

fn compute(cache: &mut Cache, number: u32) -> usize {
    let prompt = text(number, 10 * PAGE_TOKENS + 1);
    cache.restore(0, &prompt);
    let mut open = cache.prompt(0, &prompt, PrefillMode::Exact);
    let cached = open.sequence.cached_tokens();
    cache.insert(&mut open, true);
    cache.close(open);
    cache.check_tree();
    cached
}

#[test]
fn what_was_evicted_comes_back() {
    let mut cache = Cache::new(small(40));
    assert_eq!(compute(&mut cache, 0), 0);
    // Two others take the place of the first.
    assert_eq!((compute(&mut cache, 1), compute(&mut cache, 2)), (0, 0));
    let stats = cache.ledger.stats();
    assert!(stats.host.stored >= 10 && stats.host.restored == 0, "{stats:?}");
    // All but the window, which is computed again.
    assert_eq!(compute(&mut cache, 0), 8 * PAGE_TOKENS);
    let again = cache.ledger.stats().host;
    assert!(again.restored >= 8 && again.sealed_used >= 8, "{again:?}");
    cache.audit(&[]);
}

#[test]
fn without_room_nothing_is_kept() {
    let mut cache = Cache::new(small(0));
    for number in 0..3 {
        assert_eq!(compute(&mut cache, number), 0);
    }
    // At most the sink is still in the tree.
    assert!(compute(&mut cache, 0) <= PAGE_TOKENS);
    assert_eq!(cache.ledger.stats().host, oscar_kv::HostStats::default());
}

#[test]
fn the_oldest_go_first_and_no_page_without_those_before_it() {
    // Room for less than one text.
    let mut cache = Cache::new(small(5));
    for number in 0..4 {
        compute(&mut cache, number);
    }
    let used = cache.ledger.stats().host;
    assert!(used.sealed_used <= 5 && used.exact_used <= 5, "{used:?}");
    for number in 0..4 {
        // Whatever comes back is a beginning of the text; the checks are those of the cache.
        compute(&mut cache, number);
        cache.audit(&[]);
    }
}

#[test]
fn a_flush_forgets_the_host_and_clearing_the_tree_does_not() {
    let mut cache = Cache::new(small(40));
    for number in 0..3 {
        compute(&mut cache, number);
    }
    cache.ledger.clear_tree();
    let kept = cache.ledger.stats().host;
    assert!(kept.sealed_used > 0 && kept.exact_used > 0, "{kept:?}");
    assert_eq!(compute(&mut cache, 0), 8 * PAGE_TOKENS);
    cache.ledger.flush();
    assert_eq!(cache.ledger.stats().host.sealed_used, 0);
    assert_eq!(compute(&mut cache, 1), 0);
    cache.ledger.flush();
    cache.assert_empty();
}

#[test]
fn texts_of_other_keys_do_not_come_back() {
    let mut cache = Cache::new(small(40));
    for number in 0..3 {
        compute(&mut cache, number);
    }
    let prompt = text(0, 10 * PAGE_TOKENS + 1);
    cache.restore(5, &prompt);
    assert_eq!(cache.ledger.stats().host.restored, 0);
    let open = cache.open(5, &prompt);
    assert_eq!(open.sequence.cached_tokens(), 0);
    cache.close(open);
}
