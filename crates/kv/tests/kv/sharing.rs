//! What sequences share: prefixes, tails, forks; and what goes when there is not enough for all.

use crate::support::{Cache, Flight, Open, options, text};
use oscar_kv::{LedgerOptions, PAGE_TOKENS, PoolKind, PrefillMode, SealedPools, TailPolicy};

const PAGE: usize = PAGE_TOKENS;

/// Computes a prompt, gives it to the tree and closes it.
fn serve(cache: &mut Cache, prompt: &[u32]) -> usize {
    let mut open = cache.prompt(0, prompt, PrefillMode::Exact);
    cache.insert(&mut open, true);
    let cached = open.sequence.cached_tokens();
    cache.close(open);
    cached
}

fn small(exact_pages: usize, pages: usize) -> LedgerOptions {
    LedgerOptions {
        exact_pages,
        sealed: Some(SealedPools { pages, high_pages: 0, scratch_pages: 100 }),
        ..options(1, 2)
    }
}

fn cached(cache: &mut Cache, prompt: &[u32]) -> usize {
    let open = cache.open(0, prompt);
    let cached = open.sequence.cached_tokens();
    cache.close(open);
    cached
}

#[test]
fn a_conversation_is_computed_once() {
    for tail in [TailPolicy::Recompute, TailPolicy::Sealed, TailPolicy::Exact] {
        for sealed in [true, false] {
            let mut options = LedgerOptions { tail, ..options(1, 4) };
            if !sealed {
                options.sealed = None;
            }
            let mut cache = Cache::new(options);
            let (mut history, mut prompts, mut hits) = (text(0, 500), 0, 0);
            for turn in 0..30 {
                history.extend(text(turn + 1, 40));
                let mut open = cache.prompt(0, &history, PrefillMode::Uniform);
                assert_eq!(open.sequence.sealed_until(), 0);
                prompts += history.len();
                hits += open.sequence.cached_tokens();
                for token in 0..90 {
                    cache.append(&mut open, token).unwrap();
                }
                history = open.sequence.tokens().to_vec();
                cache.insert(&mut open, true);
                cache.close(open);
            }
            // All but the first prompt and what is new in each turn.
            assert_eq!(prompts - hits, 500 + 30 * 40, "{tail:?}");
            assert!(hits * 100 >= prompts * 95);
            cache.ledger.flush();
            cache.assert_empty();
        }
    }
}

#[test]
fn a_tail_is_matched_token_by_token_and_copied_before_it_is_written() {
    let mut cache = Cache::new(options(1, 2));
    let prompt = text(0, 3 * PAGE + 30);
    serve(&mut cache, &prompt);
    // Twenty tokens of the tail, then something else.
    let mut other = prompt[..3 * PAGE + 20].to_vec();
    other.extend([7, 8, 9]);
    let mut open = cache.open(0, &other);
    assert_eq!(open.sequence.cached_tokens(), 3 * PAGE + 20);
    cache.begin_extend(&mut open, &[7, 8, 9], PrefillMode::Exact).unwrap();
    let Some(Flight::Extension(extension)) = &open.flight else { panic!("an extension is in flight") };
    assert_eq!(extension.copies.len(), 1);
    cache.finish(&mut open);
    // The tail itself is as it was.
    cache.check_tree();
    assert_eq!(cached(&mut cache, &[&*prompt, &[1]].concat()), 3 * PAGE + 30);
    // Both tails are there, and the longer beginning wins.
    cache.insert(&mut open, true);
    assert_eq!(cache.ledger.stats().tree_tails, 2);
    assert_eq!(cached(&mut cache, &[&*other, &[1]].concat()), 3 * PAGE + 23);
    // A tail that another goes on from is not kept twice.
    for token in 0..10 {
        cache.append(&mut open, token).unwrap();
    }
    cache.insert(&mut open, true);
    assert_eq!(cache.ledger.stats().tree_tails, 2);
    for token in 0..40 {
        cache.append(&mut open, token).unwrap();
    }
    cache.insert(&mut open, false);
    assert_eq!((cache.ledger.stats().tree_tails, cache.ledger.stats().tree_pages), (1, 4));
    cache.check_tree();
    cache.close(open);
}

#[test]
fn the_last_token_of_a_prompt_is_always_computed() {
    let mut cache = Cache::new(options(1, 2));
    for length in [1, 2, PAGE, PAGE + 1, 5 * PAGE, 5 * PAGE + 1] {
        let prompt = text(length as u32, length);
        assert_eq!(serve(&mut cache, &prompt), 0);
        let again = cached(&mut cache, &prompt);
        // Of a prompt that ends with a page, that page is not shared in part.
        let expected = if length.is_multiple_of(PAGE) { length - PAGE } else { length - 1 };
        assert_eq!(again, expected, "{length}");
    }
}

#[test]
fn salts_share_nothing() {
    let mut cache = Cache::new(options(1, 2));
    let prompt = text(0, 300);
    let mut open = cache.prompt(5, &prompt, PrefillMode::Exact);
    cache.insert(&mut open, true);
    cache.close(open);
    for (salt, expected) in [(0, 0), (5, 299), (6, 0)] {
        let open = cache.open(salt, &prompt);
        assert_eq!(open.sequence.cached_tokens(), expected);
        cache.close(open);
    }
}

#[test]
fn without_a_tree_nothing_is_kept() {
    let mut cache = Cache::new(LedgerOptions { prefix_tree: false, ..options(1, 2) });
    assert_eq!(serve(&mut cache, &text(0, 700)), 0);
    cache.assert_empty();
    assert_eq!(cached(&mut cache, &text(0, 700)), 0);
}

#[test]
fn forks_share_until_they_write() {
    let mut cache = Cache::new(options(1, 2));
    let mut first = cache.prompt(0, &text(0, 6 * PAGE + 10), PrefillMode::Exact);
    cache.insert(&mut first, false);
    let used = cache.ledger.stats().exact.used();
    let mut forks: Vec<Open> = (0..3).map(|_| cache.fork(&first)).collect();
    assert_eq!(cache.ledger.stats().exact.used(), used);
    let mut copies = 0;
    forks.push(first);
    for (index, fork) in forks.iter_mut().enumerate() {
        cache.begin_append(fork, index as u32).unwrap();
        if let Some(Flight::Append(append)) = &fork.flight {
            copies += usize::from(append.copy.is_some());
        }
    }
    // Every copy is still in flight, so every one of them sees a shared page, the last one too.
    assert_eq!(copies, 4);
    for fork in &mut forks {
        cache.finish(fork);
    }
    assert_eq!(cache.ledger.stats().exact.used(), used + 3);
    for token in 0..4 * PAGE as u32 {
        for fork in &mut forks {
            cache.append(fork, token).unwrap();
        }
    }
    cache.audit(&forks.iter().collect::<Vec<_>>());
    // What was sealed before the fork is sealed once: pages 1 to 5. Each seals its own page 6 and 7.
    assert_eq!(cache.ledger.stats().sealed.used(), 5 + 4 * 2);
    for mut fork in forks {
        cache.insert(&mut fork, true);
        cache.close(fork);
    }
    cache.check_tree();
    cache.ledger.flush();
    cache.assert_empty();
}

#[test]
fn a_cancelled_extension_gives_the_tree_nothing() {
    let mut cache = Cache::new(options(1, 2));
    let prompt = text(0, 10 * PAGE + 5);
    for part in 0..4 {
        let mut open = cache.open(0, &prompt);
        cache.begin_extend(&mut open, &prompt, PrefillMode::Exact).unwrap();
        cache.ledger.insert(&open.sequence, true);
        if part > 0 {
            cache.abandon(&mut open, part);
            cache.ledger.insert(&open.sequence, true);
        }
        cache.close(open);
        assert_eq!(cache.ledger.stats().tree_pages, 0);
        cache.assert_empty();
    }
    // In the middle of a second turn the first is still given.
    let mut open = cache.prompt(0, &prompt, PrefillMode::Exact);
    cache.begin_extend(&mut open, &text(1, 10 * PAGE), PrefillMode::Exact).unwrap();
    cache.ledger.insert(&open.sequence, true);
    cache.check_tree();
    let stats = cache.ledger.stats();
    // Pages 0 to 7 are settled; 8 and 9 are in the window and were not sealed early.
    assert_eq!((stats.tree_pages, stats.tree_tails), (8, 0));
    cache.close(open);
}

#[test]
fn warm_copies_go_first_then_the_least_recently_used() {
    let mut cache = Cache::new(small(20, 100));
    for prompt in 0..3 {
        serve(&mut cache, &text(prompt, 6 * PAGE + 1));
    }
    // Per prompt: a sink, two warm pages (4, 5) and a tail; the sealed pages are 1 to 5.
    let stats = cache.ledger.stats();
    assert_eq!((stats.warm_pages, stats.tree_tails, stats.exact.used(), stats.sealed.used()), (6, 3, 12, 15));
    let mut open = cache.open(1, &[]);
    cache.extend(&mut open, &text(9, PAGE), PrefillMode::Exact).unwrap();
    // Eight bf16 pages are free, one is taken; a sequence without history takes what it needs from the oldest.
    let mut others: Vec<Open> = Vec::new();
    for pages in [7, 1, 1, 1] {
        let mut other = cache.open(2, &[]);
        for _ in 0..pages {
            let mut fill = cache.open(3, &[]);
            cache.extend(&mut fill, &[1], PrefillMode::Exact).unwrap();
            others.push(fill);
        }
        cache.extend(&mut other, &[], PrefillMode::Exact).unwrap();
        others.push(other);
    }
    let stats = cache.ledger.stats();
    // Three of the first prompt are gone: its tail and its two warm pages; not its sink.
    assert_eq!((stats.warm_pages, stats.tree_tails, stats.tree_pages), (4, 2, 18));
    assert_eq!((stats.evicted_pages, stats.evicted_warm), (1, 2));
    // Its pages are still there sealed; the window is to be computed again.
    let again = cache.open(0, &text(0, 6 * PAGE + 1));
    assert_eq!((again.sequence.cached_tokens(), again.sequence.sealed_until()), (4 * PAGE, 4));
    cache.close(again);
    // When every warm copy is gone, the page of the sink goes, and all that hangs on it.
    for _ in 0..7 {
        let mut fill = cache.open(3, &[]);
        cache.extend(&mut fill, &[1], PrefillMode::Exact).unwrap();
        others.push(fill);
    }
    let stats = cache.ledger.stats();
    assert_eq!((stats.warm_pages, stats.tree_tails, stats.tree_pages), (0, 0, 12));
    // Prompt 0 was looked at last, so it was prompt 1 that went.
    assert_eq!(cached(&mut cache, &text(1, 6 * PAGE + 1)), 0);
    assert_eq!(cached(&mut cache, &text(2, 6 * PAGE + 1)), 4 * PAGE);
    others.push(open);
    cache.audit(&others.iter().collect::<Vec<_>>());
    for open in others {
        cache.close(open);
    }
}

#[test]
fn what_an_open_sequence_uses_is_not_evicted() {
    let mut cache = Cache::new(small(40, 12));
    let prompt = text(0, 6 * PAGE + 1);
    serve(&mut cache, &prompt);
    serve(&mut cache, &text(1, 4 * PAGE + 1));
    let user = cache.open(0, &[&prompt[..5 * PAGE], &[1]].concat());
    assert_eq!(user.sequence.cached_tokens(), 3 * PAGE);
    // The second prompt (3) and the pages of the first that nobody uses (3) can be had, and the four that are free.
    let mut open = cache.open(9, &[]);
    let shortage = cache.begin_extend(&mut open, &text(5, 15 * PAGE), PrefillMode::Exact).unwrap_err();
    assert_eq!(
        (shortage.pool, shortage.needed, shortage.available, shortage.pages),
        (PoolKind::Sealed, 11, 10, 12)
    );
    // Nothing has changed.
    assert_eq!(cache.ledger.stats().tree_pages, 10);
    assert!(open.sequence.is_empty());
    cache.extend(&mut open, &text(5, 14 * PAGE), PrefillMode::Exact).unwrap();
    assert_eq!(cache.ledger.stats().tree_pages, 1 + 2 + 1);
    cache.check(&user);
    cache.check_tree();
    // The last bf16 of a sink that is not in use stays: only sealed pages were short.
    assert_eq!(cached(&mut cache, &text(1, 4 * PAGE + 1)), PAGE);
    cache.close(user);
    cache.close(open);
}

#[test]
fn a_warm_copy_of_a_page_in_use_may_go() {
    let mut cache = Cache::new(small(9, 40));
    let prompt = text(0, 8 * PAGE + 1);
    serve(&mut cache, &prompt);
    assert_eq!(cache.ledger.stats().warm_pages, 2);
    // Uses pages 0 to 5; the window of the tree is 6 and 7.
    let user = cache.open(0, &prompt[..6 * PAGE + 1]);
    assert_eq!(user.sequence.cached_tokens(), 4 * PAGE);
    let mut open = cache.open(9, &[]);
    let taken = text(5, 8 * PAGE);
    cache.extend(&mut open, &taken[..3 * PAGE], PrefillMode::Exact).unwrap();
    assert_eq!(cache.ledger.stats().warm_pages, 2);
    let mut more = cache.open(8, &[]);
    cache.extend(&mut more, &taken[..4 * PAGE], PrefillMode::Exact).unwrap();
    let stats = cache.ledger.stats();
    assert_eq!((stats.warm_pages, stats.tree_tails, stats.tree_pages), (1, 0, 8));
    cache.check(&user);
    cache.close(user);
    cache.close(open);
    cache.close(more);
}

#[test]
fn a_tail_is_taken_over_when_there_is_no_room_for_a_copy() {
    for sealed in [Some(SealedPools { pages: 10, high_pages: 0, scratch_pages: 10 }), None] {
        let mut cache = Cache::new(LedgerOptions { exact_pages: 1, sealed, ..options(1, 2) });
        serve(&mut cache, &text(0, 30));
        let mut open = cache.open(0, &text(0, 40));
        assert_eq!(open.sequence.cached_tokens(), 30);
        cache.begin_extend(&mut open, &text(0, 40)[30..], PrefillMode::Exact).unwrap();
        let Some(Flight::Extension(extension)) = &open.flight else { panic!("an extension is in flight") };
        assert!(extension.copies.is_empty());
        cache.finish(&mut open);
        assert_eq!(cache.ledger.stats().tree_tails, 0);
        cache.close(open);
        cache.assert_empty();
    }
}

#[test]
fn sealing_early_takes_what_there_is() {
    for (spare, inserted) in [(0, 4), (1, 5), (2, 6), (9, 6)] {
        let mut cache = Cache::new(small(40, 3 + spare));
        let prompt = text(0, 6 * PAGE + 9);
        let mut open = cache.prompt(0, &prompt, PrefillMode::Exact);
        assert_eq!(open.pages().1, [1, 2, 3]);
        assert_eq!(cache.insert(&mut open, true), spare.min(2));
        assert_eq!(cache.ledger.stats().tree_pages, inserted);
        assert_eq!(cache.ledger.stats().tree_tails, usize::from(inserted == 6));
        // Decoding goes on when there is a page to seal to, and says so when not.
        let outcome = (0..3 * PAGE as u32).try_for_each(|token| cache.append(&mut open, token));
        assert_eq!(outcome.is_ok(), spare >= 3, "{spare}");
        if let Err(shortage) = outcome {
            assert_eq!((shortage.pool, shortage.needed, shortage.available), (PoolKind::Sealed, 1, 0));
            assert!(open.sequence.len().is_multiple_of(PAGE));
        }
        cache.audit(&[&open]);
        cache.close(open);
    }
}

#[test]
fn a_second_copy_of_a_prefix_does_not_stay_in_the_tree() {
    let mut cache = Cache::new(small(40, 40));
    let prompt = text(0, 8 * PAGE);
    // Two requests arrive together and compute the same.
    let mut first = cache.prompt(0, &prompt, PrefillMode::Exact);
    let mut second = cache.prompt(0, &prompt, PrefillMode::Exact);
    cache.insert(&mut first, true);
    let tokens = text(1, 4 * PAGE);
    cache.extend(&mut second, &tokens, PrefillMode::Exact).unwrap();
    cache.insert(&mut second, true);
    assert_eq!(cache.ledger.stats().tree_pages, 12);
    cache.close(first);
    // The tree had the pages of the first. They hang above those of the second and could not be evicted.
    cache.insert(&mut second, true);
    let stats = cache.ledger.stats();
    assert_eq!(stats.sealed.tree_only, 0);
    assert_eq!(stats.exact.tree_only, 3, "warm copies of pages 5 to 7");
    cache.check_tree();
    cache.audit(&[&second]);
    cache.close(second);
}

#[test]
fn a_preempted_request_goes_on_where_it_was() {
    let mut cache = Cache::new(options(1, 4));
    let mut open = cache.prompt(0, &text(0, 700), PrefillMode::Exact);
    for token in 0..100 {
        cache.append(&mut open, token).unwrap();
    }
    let tokens = open.sequence.tokens().to_vec();
    cache.insert(&mut open, true);
    cache.close(open);
    let open = cache.open(0, &[&*tokens, &[100]].concat());
    assert_eq!((open.sequence.cached_tokens(), open.sequence.sealed_until()), (800, 0));
    cache.close(open);
}

/// As above, but the first is still there when the second gives its pages: the copies are found when pages are short.
#[test]
fn copies_that_hang_above_pages_in_use_are_had_when_pages_are_short() {
    let options = LedgerOptions { exact_pages: 20, ..small(0, 20) };
    let mut cache = Cache::new(options);
    let prompt = text(0, 8 * PAGE);
    let mut first = cache.prompt(0, &prompt, PrefillMode::Exact);
    let mut second = cache.prompt(0, &prompt, PrefillMode::Exact);
    cache.insert(&mut first, true);
    cache.extend(&mut second, &text(1, 4 * PAGE), PrefillMode::Exact).unwrap();
    cache.insert(&mut second, true);
    cache.close(first);
    // The tree alone has pages 1 to 7 of the first, and below them pages of the second.
    let stats = cache.ledger.stats();
    assert_eq!((stats.sealed.tree_only, stats.sealed.free), (7, 2));
    assert_eq!(cache.ledger.available(PoolKind::Sealed), 2);
    // Pages 12 to 18; 12 to 15 go to sealed pages.
    cache.extend(&mut second, &text(2, 7 * PAGE), PrefillMode::Exact).unwrap();
    cache.audit(&[&second]);
    cache.check_tree();
    assert_eq!(cache.ledger.stats().sealed.tree_only, 0);
    cache.close(second);
    cache.ledger.flush();
    cache.assert_empty();
}

/// A fork of a sequence that is growing holds the beginning of a page that is full by the time it is given away.
#[test]
fn a_page_is_a_tail_or_a_warm_copy_but_not_both() {
    let mut cache = Cache::new(options(0, 1));
    let tokens = text(0, 4 * PAGE);
    let mut growing = cache.prompt(0, &tokens[..10], PrefillMode::Exact);
    cache.begin_extend(&mut growing, &tokens[10..PAGE], PrefillMode::Exact).unwrap();
    let mut fork = cache.fork(&growing);
    assert_eq!(fork.sequence.len(), 10);
    cache.finish(&mut growing);
    // Somebody else gave the tree page 0, sealed and long out of its window.
    let mut other = cache.open(0, &[]);
    cache.extend(&mut other, &tokens, PrefillMode::Exact).unwrap();
    cache.insert(&mut other, true);
    cache.insert(&mut fork, true);
    assert_eq!((cache.ledger.stats().tree_tails, cache.ledger.stats().warm_pages), (1, 2));
    cache.insert(&mut growing, true);
    assert_eq!((cache.ledger.stats().tree_tails, cache.ledger.stats().warm_pages), (0, 3));
    cache.audit(&[&growing, &fork, &other]);
    cache.check_tree();
    // And the other way round.
    cache.insert(&mut fork, true);
    assert_eq!(cache.ledger.stats().tree_tails, 0);
    for token in 0..100 {
        cache.append(&mut fork, token).unwrap();
        cache.append(&mut growing, token).unwrap();
    }
    cache.audit(&[&growing, &fork, &other]);
    for open in [growing, fork, other] {
        cache.close(open);
    }
}

#[test]
fn a_shortage_says_whether_waiting_helps() {
    let mut cache = Cache::new(small(6, 3));
    let mut first = cache.prompt(0, &text(0, 4 * PAGE), PrefillMode::Exact);
    let mut open = cache.open(1, &[]);
    let shortage = cache.begin_extend(&mut open, &text(1, 3 * PAGE), PrefillMode::Exact).unwrap_err();
    assert_eq!((shortage.pool, shortage.needed, shortage.available), (PoolKind::Exact, 3, 2));
    assert!(shortage.needed <= shortage.pages);
    assert_eq!(shortage.to_string(), "3 bf16 pages are needed and 2 of 6 can be had");
    let shortage = cache.begin_extend(&mut open, &text(1, 9 * PAGE), PrefillMode::Exact).unwrap_err();
    assert!(shortage.pool == PoolKind::Exact && shortage.needed <= shortage.pages);
    cache.append(&mut first, 1).unwrap();
    cache.close(first);
    let shortage = cache.begin_extend(&mut open, &text(1, 9 * PAGE), PrefillMode::Exact).unwrap_err();
    assert!(shortage.pool == PoolKind::Sealed && shortage.needed > shortage.pages);
    cache.close(open);
}

/// A sequence that lost its pages takes a hit only where it goes on as it was computed.
#[test]
fn a_sequence_is_taken_up_again_only_where_it_can_be() {
    for tail in [TailPolicy::Recompute, TailPolicy::Sealed, TailPolicy::Exact] {
        let mut cache = Cache::new(LedgerOptions { tail, ..small(5, 40) });
        let tokens = text(0, 7 * PAGE + 30);
        serve(&mut cache, &tokens);
        let again = |cache: &mut Cache, lengths: &[usize]| {
            let sequence = cache.ledger.reopen(0, &tokens, |length| lengths.contains(&length));
            let found = (sequence.cached_tokens(), sequence.sealed_until());
            cache.ledger.close(sequence);
            found
        };
        // All tokens: nothing is drawn from the logits of the last one.
        assert_eq!(again(&mut cache, &[tokens.len()]), (tokens.len(), 0), "{tail:?}");
        // The tail may be in the way, and then the prompt itself, but not its sink.
        assert_eq!(again(&mut cache, &[7 * PAGE]), (7 * PAGE, 0));
        assert_eq!(again(&mut cache, &[6 * PAGE]), (PAGE, 0), "its window is not there");
        assert_eq!(again(&mut cache, &[]), (PAGE, 0));
        // Another one takes the place of the window.
        let other = cache.prompt(0, &text(1, 7 * PAGE), PrefillMode::Exact);
        assert_eq!(again(&mut cache, &[7 * PAGE, tokens.len()]), (PAGE, 0), "{tail:?}");
        cache.close(other);
        cache.ledger.flush();
        cache.assert_empty();
        // Without sealed pages there is nothing to be careful about.
        let mut cache = Cache::new(LedgerOptions { tail, sealed: None, ..options(1, 2) });
        serve(&mut cache, &tokens);
        assert_eq!(again(&mut cache, &[]), (tokens.len(), 0));
    }
}
