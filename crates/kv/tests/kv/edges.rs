//! Page states at the edges of sinks, windows and pages, by every way to get there.

use crate::support::{Cache, Flight, Open, options, text};
use oscar_kv::{
    KvError, Ledger, LedgerOptions, PAGE_TOKENS, PageNeed, PageStates, PageWindows, PoolKind, PrefillMode,
    SealedPools, TailPolicy, Tier,
};

/// Pages that should be in bf16 and pages that should be sealed after `length` tokens, from the rule alone.
fn expected(sink: usize, recent: usize, length: usize) -> (Vec<usize>, Vec<usize>) {
    let pages = length.div_ceil(PAGE_TOKENS);
    (0..pages).partition(|&page| page < sink || page + recent + 1 >= pages)
}

fn lengths(sink: usize, recent: usize) -> Vec<usize> {
    let mut lengths = vec![1, 2];
    for pages in
        [1, 2, sink, sink + 1, recent, recent + 1, sink + recent, sink + recent + 1, sink + recent + 2]
    {
        let edge = pages * PAGE_TOKENS;
        lengths.extend([edge.saturating_sub(1).max(1), edge.max(1), edge + 1]);
    }
    lengths.sort_unstable();
    lengths.dedup();
    lengths
}

fn windows() -> impl Iterator<Item = (usize, usize)> {
    [0, 1, 2, 4].into_iter().flat_map(|sink| [0, 1, 2, 4].map(|recent| (sink, recent)))
}

#[test]
fn a_prompt_ends_in_the_states_of_the_rule() {
    for (sink, recent) in windows() {
        for length in lengths(sink, recent) {
            for mode in [PrefillMode::Exact, PrefillMode::Uniform] {
                let mut cache = Cache::new(options(sink, recent));
                let open = cache.prompt(0, &text(0, length), mode);
                assert_eq!(open.pages(), expected(sink, recent, length), "{sink} {recent} {length}");
                cache.audit(&[&open]);
                cache.close(open);
                cache.assert_empty();
            }
        }
    }
}

#[test]
fn token_by_token_and_chunk_by_chunk_end_in_the_same_states() {
    for (sink, recent) in windows() {
        let length = (sink + recent + 3) * PAGE_TOKENS + 1;
        let tokens = text(0, length);
        for chunk in [1, 2, 63, 64, 65, 100, 128, 300] {
            let mut cache = Cache::new(options(sink, recent));
            let mut open = cache.open(0, &tokens);
            for chunk in tokens.chunks(chunk) {
                let mode = if chunk.len() == 2 { PrefillMode::Uniform } else { PrefillMode::Exact };
                cache.extend(&mut open, chunk, mode).unwrap();
                assert_eq!(open.pages(), expected(sink, recent, open.sequence.len()));
            }
            cache.close(open);
            cache.assert_empty();
        }
        let mut cache = Cache::new(options(sink, recent));
        let mut open = cache.open(0, &tokens);
        for &token in &tokens {
            cache.append(&mut open, token).unwrap();
            assert_eq!(open.pages(), expected(sink, recent, open.sequence.len()));
        }
        cache.close(open);
        cache.assert_empty();
    }
}

/// A page is sealed when page p + R + 1 begins: once, in order, and at no other token.
#[test]
fn decoding_seals_one_page_when_a_page_begins() {
    for (sink, recent) in windows() {
        let mut cache = Cache::new(options(sink, recent));
        let mut open = cache.open(0, &[0]);
        let mut sealed = Vec::new();
        for position in 0..(sink + recent + 4) * PAGE_TOKENS {
            cache.begin_append(&mut open, 7).unwrap();
            let Some(Flight::Append(append)) = &open.flight else { panic!("an append is in flight") };
            assert!(append.copy.is_none());
            if let Some(work) = append.seal {
                assert_eq!(position, (work.page + recent + 1) * PAGE_TOKENS);
                sealed.push(work.page);
            }
            cache.finish(&mut open);
        }
        assert_eq!(sealed, (sink..sink + 3).collect::<Vec<_>>(), "{sink} {recent}");
        cache.close(open);
    }
}

#[test]
fn an_extension_says_what_lies_where() {
    let mut cache = Cache::new(options(1, 2));
    let mut open = cache.prompt(0, &text(0, 3 * PAGE_TOKENS + 10), PrefillMode::Exact);
    assert_eq!(open.pages(), (vec![0, 1, 2, 3], vec![]));
    let before = open.sequence.exact_slots().to_vec();
    // Pages 3 to 9; in the end 7, 8 and 9 are the window.
    cache.begin_extend(&mut open, &text(1, 6 * PAGE_TOKENS), PrefillMode::Exact).unwrap();
    let Some(Flight::Extension(extension)) = &open.flight else { panic!("an extension is in flight") };
    let slots = cache.ledger.slots();
    assert_eq!(extension.exact_from, 3);
    assert_eq!(extension.seal.iter().map(|work| work.page).collect::<Vec<_>>(), [1, 2, 3, 4, 5, 6]);
    for work in &extension.seal {
        let scratch = work.from.index() > slots.exact && work.from.index() < slots.exact + slots.scratch;
        assert_eq!(scratch, work.page > 3, "page {}", work.page);
        assert!(scratch || Some(work.from) == before[work.page]);
    }
    assert_eq!(cache.ledger.stats().scratch.used(), 3);
    cache.finish(&mut open);
    assert_eq!(open.pages(), (vec![0, 7, 8, 9], vec![1, 2, 3, 4, 5, 6]));
    assert_eq!(cache.ledger.stats().scratch.used(), 0);
    cache.close(open);
}

#[test]
fn an_abandoned_extension_leaves_no_trace() {
    for (sink, recent) in windows() {
        for length in [1, 63, 64, 65, 200, 64 * (sink + recent + 2)] {
            for part in 0..=4 {
                let mut cache = Cache::new(options(sink, recent));
                let mut open = cache.prompt(0, &text(0, length), PrefillMode::Uniform);
                let (pages, stats) = (open.pages(), cache.ledger.stats());
                let slots = (open.sequence.exact_slots().to_vec(), open.sequence.sealed_slots().to_vec());
                cache.begin_extend(&mut open, &text(1, 400), PrefillMode::Exact).unwrap();
                cache.abandon(&mut open, part);
                assert_eq!((open.pages(), cache.ledger.stats()), (pages, stats));
                assert_eq!(
                    (open.sequence.exact_slots(), open.sequence.sealed_slots()),
                    (&*slots.0, &*slots.1)
                );
                cache.begin_append(&mut open, 3).unwrap();
                cache.abandon(&mut open, part);
                assert_eq!(cache.ledger.stats(), stats);
                cache.audit(&[&open]);
                cache.close(open);
                cache.assert_empty();
            }
        }
    }
}

#[test]
fn without_sealed_pages_everything_is_bf16() {
    let mut cache = Cache::new(LedgerOptions { sealed: None, ..options(1, 1) });
    let mut open = cache.prompt(0, &text(0, 700), PrefillMode::Exact);
    for token in 0..200 {
        cache.append(&mut open, token).unwrap();
    }
    assert_eq!(open.pages(), ((0..15).collect(), vec![]));
    assert_eq!(cache.insert(&mut open, true), 0);
    let stats = cache.ledger.stats();
    assert_eq!((stats.tree_pages, stats.tree_tails, stats.warm_pages), (14, 1, 0));
    let mut again = cache.prompt(0, &[open.sequence.tokens(), &[1, 2]].concat(), PrefillMode::Uniform);
    assert_eq!((again.sequence.cached_tokens(), again.sequence.sealed_until()), (900, 0));
    cache.append(&mut again, 5).unwrap();
    cache.close(open);
    cache.close(again);
    cache.ledger.flush();
    cache.assert_empty();
}

/// The published system's worked examples (64 sink and 256 recent tokens) under the rules of pages.
#[test]
fn a_prompt_of_1000_tokens() {
    let mut cache = Cache::new(options(1, 4));
    let prompt = text(0, 1000);
    let mut first = cache.prompt(0, &prompt, PrefillMode::Exact);
    assert_eq!(first.pages(), (vec![0, 11, 12, 13, 14, 15], (1..11).collect()));
    // The tree gets every full page; those in the window are sealed early and stay in bf16 for their owner.
    assert_eq!(cache.insert(&mut first, false), 4);
    assert_eq!(first.pages(), (vec![0, 11, 12, 13, 14, 15], (1..15).collect()));
    assert_eq!((cache.ledger.stats().tree_pages, cache.ledger.stats().warm_pages), (15, 4));

    // A second request with the same prompt computes 40 tokens, not 272.
    let mut second = cache.open(0, &prompt);
    assert_eq!((second.sequence.cached_tokens(), second.sequence.sealed_until()), (960, 0));
    assert_eq!(second.pages(), (vec![0, 11, 12, 13, 14], (1..15).collect()));
    let used = (cache.ledger.stats().exact.used(), cache.ledger.stats().sealed.used());
    cache.extend(&mut second, &prompt[960..], PrefillMode::Exact).unwrap();
    assert_eq!(cache.ledger.stats().exact.used(), used.0 + 1);
    assert_eq!(cache.ledger.stats().sealed.used(), used.1);

    // Page 11 leaves the window with token 1024: it is sealed already, only its bf16 goes.
    for position in 1000..1100 {
        cache.begin_append(&mut first, 9).unwrap();
        let Some(Flight::Append(append)) = &first.flight else { panic!("an append is in flight") };
        assert!(append.seal.is_none() && append.copy.is_none());
        cache.finish(&mut first);
        assert_eq!(first.sequence.exact_slots()[11].is_some(), position < 1024);
        assert_eq!(first.sequence.exact_slots()[12].is_some(), position < 1088);
    }
    // Generated text survives.
    cache.insert(&mut first, true);
    let tokens = first.sequence.tokens().to_vec();
    cache.close(first);
    cache.close(second);
    let third = cache.open(0, &[&*tokens, &[1]].concat());
    assert_eq!(third.sequence.cached_tokens(), 1100);
    cache.close(third);
}

#[test]
fn prompts_of_40_and_100_tokens() {
    for length in [40, 100] {
        let mut cache = Cache::new(options(1, 4));
        let mut open = cache.prompt(0, &text(0, length), PrefillMode::Exact);
        let mut sealed = Vec::new();
        for position in length..600 {
            cache.begin_append(&mut open, 9).unwrap();
            if let Some(Flight::Append(append)) = &open.flight {
                sealed.extend(append.seal.map(|work| (position, work.page)));
            }
            cache.finish(&mut open);
        }
        // Positions 40 to 63 are in the sink although they were generated; the rest of the window is whole.
        assert_eq!(sealed, [(384, 1), (448, 2), (512, 3), (576, 4)]);
        cache.close(open);
    }
}

#[test]
fn a_prompt_of_8200_tokens_in_two_chunks() {
    let mut cache = Cache::new(options(1, 4));
    let prompt = text(0, 8200);
    let mut open = cache.open(0, &prompt);
    cache.extend(&mut open, &prompt[..8192], PrefillMode::Uniform).unwrap();
    assert_eq!(open.pages().0, [0, 123, 124, 125, 126, 127]);
    // Eight tokens do not shrink the window: one page leaves it, sealed from its own bf16.
    cache.begin_extend(&mut open, &prompt[8192..], PrefillMode::Uniform).unwrap();
    let Some(Flight::Extension(extension)) = &open.flight else { panic!("an extension is in flight") };
    assert_eq!(extension.seal.iter().map(|work| work.page).collect::<Vec<_>>(), [123]);
    cache.finish(&mut open);
    assert_eq!(open.pages(), (vec![0, 124, 125, 126, 127, 128], (1..124).collect()));
    // All of it can be had again, not only the first chunk.
    cache.insert(&mut open, true);
    let again = cache.open(0, &prompt);
    assert_eq!(again.sequence.cached_tokens(), 8199);
    cache.close(open);
    cache.close(again);
}

/// Pools of exactly what a long context needs hold a prompt that goes on after most of it was given to the tree.
#[test]
fn a_prompt_of_262144_tokens_goes_on_after_185000() {
    let defaults = options(1, 4);
    let PageNeed { exact, sealed, scratch } = PageNeed::of(262_144, defaults.windows, true, true);
    let pools = Some(SealedPools { pages: sealed, high_pages: 0, scratch_pages: scratch });
    let mut cache = Cache::new(LedgerOptions { exact_pages: exact, sealed: pools, ..defaults });
    let prompt = text(0, 262_144);
    let mut first = cache.prompt(0, &prompt[..185_000], PrefillMode::Exact);
    cache.insert(&mut first, true);
    cache.close(first);
    let mut open = cache.open(0, &prompt);
    assert_eq!(open.sequence.cached_tokens(), 185_000);
    cache.extend(&mut open, &prompt[185_000..], PrefillMode::Exact).unwrap();
    assert_eq!(open.pages().0, [0, 4091, 4092, 4093, 4094, 4095]);
    cache.close(open);
    cache.ledger.flush();
    cache.assert_empty();
}

#[test]
fn the_states_of_pages_are_counted() {
    let mut cache = Cache::new(options(1, 2));
    let mut open = cache.prompt(0, &text(0, 640 + 5), PrefillMode::Exact);
    let states = |cache: &Cache| cache.ledger.stats().states;
    assert_eq!(states(&cache), PageStates { filling: 1, exact: 3, both: 0, sealed: 7 });
    cache.insert(&mut open, false);
    assert_eq!(states(&cache), PageStates { filling: 1, exact: 1, both: 2, sealed: 7 });
    let stats = cache.ledger.stats();
    assert_eq!((stats.exact.shared, stats.exact.request_only, stats.exact.tree_only), (3, 1, 0));
    assert_eq!((stats.sealed.shared, stats.sealed.used()), (9, 9));
    cache.close(open);
    let stats = cache.ledger.stats();
    assert_eq!((stats.exact.tree_only, stats.sealed.tree_only, stats.sequences), (3, 9, 0));
    assert_eq!(states(&cache), PageStates::default());
}

#[test]
fn options_that_make_no_cache_are_refused() {
    let good = options(1, 4);
    let sealed = |pages, scratch_pages| Some(SealedPools { pages, high_pages: 0, scratch_pages });
    for (options, error) in [
        (LedgerOptions { exact_pages: 0, ..good }, KvError::EmptyPool(PoolKind::Exact)),
        (LedgerOptions { sealed: sealed(0, 1), ..good }, KvError::EmptyPool(PoolKind::Sealed)),
        (LedgerOptions { exact_pages: 1 << 33, ..good }, KvError::TooManyPages((1 << 33) + 800)),
        (LedgerOptions { sealed: sealed(usize::MAX, 1), ..good }, KvError::TooManyPages(usize::MAX)),
    ] {
        assert_eq!(Ledger::new(options).map(|_| ()), Err(error));
    }
}

#[test]
fn huge_windows_are_windows() {
    let windows = PageWindows { sink: usize::MAX, recent: usize::MAX };
    let mut cache = Cache::new(LedgerOptions { windows, ..options(0, 0) });
    assert!(
        cache.ledger.could_ever_fit(Tier::Sealed, 64 * 200)
            && !cache.ledger.could_ever_fit(Tier::Sealed, 64 * 200 + 1)
    );
    let mut open = cache.ledger.open(0, &[1, 2]);
    let extension = cache.ledger.extend(&mut open, &text(0, 1000), PrefillMode::Exact).unwrap();
    assert!(extension.seal.is_empty());
    cache.ledger.finish_extension(&mut open, extension);
    cache.ledger.close(open);
}

#[test]
fn an_empty_prompt_and_an_empty_extension_are_harmless() {
    let mut cache = Cache::new(options(1, 1));
    let mut open: Open = cache.open(0, &[]);
    cache.extend(&mut open, &[], PrefillMode::Exact).unwrap();
    cache.insert(&mut open, true);
    cache.extend(&mut open, &text(0, 64), PrefillMode::Exact).unwrap();
    cache.extend(&mut open, &[], PrefillMode::Uniform).unwrap();
    cache.insert(&mut open, true);
    cache.close(open);
    cache.ledger.flush();
    cache.assert_empty();
}

#[test]
#[cfg(debug_assertions)]
#[should_panic(expected = "dropped without being closed")]
fn a_sequence_must_be_closed() {
    let mut ledger = Ledger::new(options(1, 1)).unwrap();
    drop(ledger.open(0, &[1]));
}

/// Each turn leaves a thought behind that the next prompt does not have. What it goes on from is the end of the prompt
/// before; bf16 copies that earlier turns left along the way must not push that out.
#[test]
fn a_conversation_keeps_the_copies_at_the_end_of_its_prompt() {
    let mut cache = Cache::new(LedgerOptions { exact_pages: 14, tail: TailPolicy::Exact, ..options(1, 4) });
    let mut prompt = text(1, 300);
    let mut before = 0;
    for turn in 0..20 {
        let mut open = cache.prompt(0, &prompt, PrefillMode::Uniform);
        let cached = open.sequence.cached_tokens();
        assert_eq!(cached, before / PAGE_TOKENS * PAGE_TOKENS, "turn {turn}");
        cache.insert(&mut open, false);
        for thought in 0..100 {
            cache.append(&mut open, 90_000_000 + thought).expect("room for a thought");
        }
        cache.insert(&mut open, true);
        cache.close(open);
        before = prompt.len();
        prompt.extend(text(turn + 2, 110));
    }
}
