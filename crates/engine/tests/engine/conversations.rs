//! Conversations: what was said is found again, and finding it changes nothing.

use std::sync::Arc;

use crate::support::*;
use oscar_codec::PageCodec;
use oscar_engine::{EngineOptions, Event, FinishReason, KvOptions, Request, Serve};
use oscar_kv::TailPolicy;

/// 30 turns; returns all answers and the share of prompt tokens that came from the cache.
fn conversation(engine: &TestEngine) -> (Vec<Vec<u32>>, f64) {
    let mut history = prompt(2, 200);
    let (mut answers, mut cached, mut total) = (Vec::new(), 0, 0);
    for turn in 0..30 {
        let summary = ask(engine, &history, &greedy(12 + turn % 5));
        cached += summary.cached_tokens;
        total += summary.prompt_tokens;
        history.extend(&summary.tokens);
        history.extend(prompt(turn + 3, 9 + turn % 4));
        answers.push(summary.tokens);
    }
    (answers, cached as f64 / total as f64)
}

#[test]
fn thirty_turns_are_the_same_with_and_without_the_cache() {
    let model = model(true);
    for format in FORMATS {
        let options = EngineOptions { context: Some(2048), ..fixed_options(&model, format, None) };
        let engine = TestEngine::new(model.clone(), &options).unwrap();
        let (answers, share) = conversation(&engine);
        assert!(share > 0.95, "{format}: {share}");
        let kv = KvOptions { prefix_tree: false, ..options.kv.clone() };
        let cold = TestEngine::new(model.clone(), &EngineOptions { kv, ..options }).unwrap();
        let (expected, none) = conversation(&cold);
        assert_eq!(none, 0.0);
        assert_eq!(answers, expected, "{format}");
        assert_idle(&engine);
        assert_idle(&cold);
    }
}

#[test]
fn a_turn_on_a_warm_tail_computes_only_what_is_new() {
    for deterministic in [false, true] {
        let model = model(true);
        for format in FORMATS {
            let options = EngineOptions {
                context: Some(2048),
                deterministic,
                ..engine_options(&model, format, Some(120))
            };
            let engine = TestEngine::new(model.clone(), &options).unwrap();
            let kv = KvOptions { prefix_tree: false, ..options.kv.clone() };
            let cold = TestEngine::new(model.clone(), &EngineOptions { kv, ..options }).unwrap();
            let mut history = prompt(4, 333);
            let mut cached = 0;
            for turn in 0..6 {
                let summary = ask(&engine, &history, &greedy(90));
                assert_eq!(summary.cached_tokens, cached, "{format}, turn {turn}");
                // Where pages depend on the tokens alone, finding them changes nothing.
                if deterministic || format == "bf16" || turn == 0 {
                    let expected = ask(&cold, &history, &greedy(90)).tokens;
                    assert_eq!(summary.tokens, expected, "{format}, turn {turn}");
                }
                history.extend(&summary.tokens);
                // The last token that was drawn has no keys yet.
                cached = history.len() - 1;
                history.extend(prompt(turn + 50, 40 + turn));
            }
            assert_idle(&engine);
            assert_idle(&cold);
        }
    }
}

/// Others may need the pages of a conversation; what is missing of it is then computed again.
#[test]
fn a_conversation_survives_the_loss_of_its_pages() {
    let model = model(true);
    for format in FORMATS {
        let options = EngineOptions { context: Some(1024), ..fixed_options(&model, format, None) };
        let engine = TestEngine::new(model.clone(), &options).unwrap();
        let first = ask(&engine, &prompt(4, 300), &greedy(100)).tokens;
        assert_eq!(first.len(), 100);
        let next = [prompt(4, 300), first, prompt(9, 30)].concat();
        let undisturbed = ask(&engine, &next, &greedy(50));
        assert_eq!(undisturbed.cached_tokens, 399, "{format}");
        // Fills the whole cache.
        assert_eq!(ask(&engine, &prompt(5, 900), &greedy(100)).tokens.len(), 100);
        let disturbed = ask(&engine, &next, &greedy(50));
        assert!(disturbed.cached_tokens < 399, "{format}");
        assert_eq!(disturbed.tokens, undisturbed.tokens, "{format}");
        assert_idle(&engine);
    }
}

#[test]
fn a_turn_that_is_cancelled_can_be_followed_by_another() {
    let model = model(true);
    let options = EngineOptions { context: Some(2048), ..fixed_options(&model, "int2", None) };
    let engine = TestEngine::new(model.clone(), &options).unwrap();
    let mut answer = engine.answer(Request::new(prompt(1, 100), greedy(1500))).unwrap();
    let mut tokens = 0;
    let mut last = None;
    for event in answer.by_ref() {
        tokens += usize::from(event.text().is_some());
        if tokens == 5 {
            break;
        }
    }
    answer.cancel();
    for event in answer.by_ref() {
        last = Some(event);
    }
    let Some(Event::Finished { summary, .. }) = last else { panic!("{last:?}") };
    assert_eq!(summary.finish, FinishReason::Cancelled);
    let whole = [prompt(1, 100), summary.tokens.clone(), prompt(8, 20)].concat();
    let next = ask(&engine, &whole, &greedy(30));
    assert_eq!(next.cached_tokens, whole.len() - 21);
    let cold = TestEngine::new(model.clone(), &options).unwrap();
    assert_eq!(next.tokens, ask(&cold, &whole, &greedy(30)).tokens);
    assert_idle(&engine);
}

/// A request holds what its visibility needs and no more.
#[test]
fn a_request_costs_no_more_than_its_pages() {
    let model = model(true);
    for format in FORMATS {
        let mut options = EngineOptions { context: Some(1024), ..engine_options(&model, format, Some(100)) };
        options.kv.prefix_tree = false;
        let engine = TestEngine::new(model.clone(), &options).unwrap();
        let mut answer = engine.answer(Request::new(prompt(4, 640), greedy(300))).unwrap();
        let first = answer.find(|event| matches!(event, Event::Token { .. }));
        assert!(first.is_some());
        let mut seen = 0;
        while let Some(sequence) = engine.fresh_stats().sequences.first() {
            let (exact, sealed) = match format {
                "bf16" => (sequence.tokens.div_ceil(64), 0),
                _ => options.kv.windows.pages(sequence.tokens),
            };
            assert_eq!((sequence.exact_pages, sequence.sealed_pages), (exact, sealed), "{sequence:?}");
            let budget = engine.budget();
            let bytes = exact * budget.exact.page_bytes + sealed * budget.sealed.page_bytes;
            assert_eq!(budget.bytes_at(sequence.tokens), bytes);
            seen += 1;
        }
        assert!(seen > 0, "{format}: the answer was over too soon to be looked at");
        drop(answer);
        assert_idle(&engine);
    }
}

/// With pages that lose nothing, a prefix hit must change nothing either, whatever became of its window.
#[test]
fn cold_tails_are_computed_again_or_read_sealed() {
    let model = model(true);
    let geometry = model.config().kv_geometry();
    let layers: Vec<usize> = (0..geometry.layers).collect();
    let copies = PageCodec::int4(geometry, None).unwrap().keep_bf16(&layers).unwrap();
    let turn = |engine: &TestEngine, histories: &mut [Vec<u32>], turn: usize| {
        let mut cached = 0;
        for (seed, history) in histories.iter_mut().enumerate() {
            let summary = ask(engine, history, &greedy(20));
            cached += summary.cached_tokens;
            history.extend(&summary.tokens);
            history.extend(prompt(10 * turn + seed, 30));
        }
        cached
    };
    let begin = || (0..5).map(|seed| prompt(seed, 300)).collect::<Vec<_>>();
    let mut expected = begin();
    let plain = TestEngine::new(model.clone(), &fixed_options(&model, "bf16", Some(300))).unwrap();
    for index in 0..6 {
        turn(&plain, &mut expected, index);
    }
    for tail in [TailPolicy::Recompute, TailPolicy::Sealed] {
        let mut options = engine_options(&model, "bf16", Some(100));
        (options.context, options.max_running) = (Some(640), 1);
        options.kv.codec = Some(Arc::new(copies.clone()));
        options.kv.tail = tail;
        let engine = TestEngine::new(model.clone(), &options).unwrap();
        let mut histories = begin();
        let cached: usize = (0..6).map(|index| turn(&engine, &mut histories, index)).sum();
        let cache = engine.fresh_stats().cache;
        assert!(cache.evicted_warm > 0 && cached > 4000, "{tail:?}: {cached} {cache:?}");
        assert_eq!(histories, expected, "{tail:?}");
        assert_idle(&engine);
    }
}

/// A turn that is cancelled before it began takes nothing away from the conversation.
#[test]
fn a_turn_that_is_cancelled_while_it_waits_loses_nothing() {
    let model = model(true);
    let options =
        EngineOptions { context: Some(1024), max_running: 1, ..fixed_options(&model, "int4", Some(200)) };
    let engine = TestEngine::new(model.clone(), &options).unwrap();
    let first = ask(&engine, &prompt(4, 300), &greedy(40)).tokens;
    // Somebody else holds the only place, so the turn waits.
    let other = engine.answer(Request::new(prompt(5, 100), greedy(400))).unwrap();
    let turn = [prompt(4, 300), first, prompt(6, 20)].concat();
    let waiting = engine.answer(Request::new(turn.clone(), greedy(30))).unwrap();
    while engine.fresh_stats().queued == 0 {
        std::thread::yield_now();
    }
    waiting.cancel();
    let cancelled = waiting.wait().unwrap().remove(0);
    assert_eq!((cancelled.finish, cancelled.tokens.len()), (FinishReason::Cancelled, 0));
    drop(other);
    let again = ask(&engine, &turn, &greedy(20));
    assert_eq!(again.cached_tokens, 339, "the tree has it");
    let cold = TestEngine::new(model.clone(), &options).unwrap();
    assert_eq!(again.tokens, ask(&cold, &turn, &greedy(20)).tokens);
    assert_idle(&engine);
}
