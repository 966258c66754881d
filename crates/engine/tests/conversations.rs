//! Conversations: what was said is found again, and finding it changes nothing.

#![allow(clippy::unwrap_used)]

mod support;

use std::sync::Arc;

use oscar_codec::PageCodec;
use oscar_engine::{
    EngineError, EngineOptions, Event, FinishReason, GenerateOptions, KvOptions, Request, RequestHandle,
    Serve,
};
use oscar_kv::TailPolicy;
use support::*;

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

fn keep(max_tokens: usize) -> GenerateOptions {
    GenerateOptions { keep_open: true, ..greedy(max_tokens) }
}

/// Begins a request that is kept open.
fn open(engine: &TestEngine, prompt: Vec<u32>, options: GenerateOptions) -> (Vec<u32>, RequestHandle) {
    let mut answer = engine.answer(Request::new(prompt, options)).unwrap();
    let tokens = answer.finish().unwrap().remove(0).tokens;
    (tokens, answer.into_handle().unwrap())
}

#[test]
fn a_conversation_on_its_warm_tail_equals_a_request_kept_open() {
    for deterministic in [false, true] {
        let model = model(true);
        for format in FORMATS {
            let options = EngineOptions {
                context: Some(2048),
                deterministic,
                ..engine_options(&model, format, Some(120))
            };
            let kept_open = TestEngine::new(model.clone(), &options).unwrap();
            let continued = TestEngine::new(model.clone(), &options).unwrap();
            let mut history = prompt(4, 333);
            let (mut answer, handle) = open(&kept_open, history.clone(), keep(90));
            let mut cached = 0;
            for turn in 0..6 {
                let summary = ask(&continued, &history, &greedy(90));
                assert_eq!(
                    (&summary.tokens, summary.cached_tokens),
                    (&answer, cached),
                    "{format}, turn {turn}"
                );
                history.extend(&answer);
                let more = prompt(turn + 50, 40 + turn);
                history.extend(&more);
                let next = kept_open.continue_with(&handle, Request::new(more, keep(90))).unwrap();
                let next = next.wait().unwrap().remove(0);
                assert_eq!(
                    (next.prompt_tokens, next.cached_tokens),
                    (history.len(), history.len() - 41 - turn)
                );
                (answer, cached) = (next.tokens, next.cached_tokens);
            }
            drop(handle);
            assert_idle(&kept_open);
            assert_idle(&continued);
        }
    }
}

/// Others may need the pages of a request that is kept open; it is then computed again.
#[test]
fn a_kept_request_survives_the_loss_of_its_pages() {
    let model = model(true);
    for format in FORMATS {
        let options = EngineOptions { context: Some(1024), ..fixed_options(&model, format, None) };
        let engine = TestEngine::new(model.clone(), &options).unwrap();
        let (first, handle) = open(&engine, prompt(4, 300), keep(100));
        let undisturbed = {
            let engine = TestEngine::new(model.clone(), &options).unwrap();
            let (_, handle) = open(&engine, prompt(4, 300), keep(100));
            let next = engine.continue_with(&handle, Request::new(prompt(9, 30), keep(50))).unwrap();
            next.wait().unwrap().remove(0).tokens
        };
        assert_eq!(first.len(), 100);
        // Fills the whole cache.
        assert_eq!(ask(&engine, &prompt(5, 900), &greedy(100)).tokens.len(), 100);
        let next = engine.continue_with(&handle, Request::new(prompt(9, 30), keep(50))).unwrap();
        assert_eq!(next.wait().unwrap().remove(0).tokens, undisturbed, "{format}");
        drop(handle);
        assert_idle(&engine);
    }
}

#[test]
fn an_append_that_makes_no_sense_fails_alone() {
    let model = model(false);
    let options = EngineOptions { context: Some(256), ..engine_options(&model, "int4", None) };
    let engine = TestEngine::new(model.clone(), &options).unwrap();
    let (_, handle) = open(&engine, prompt(4, 100), keep(20));
    let append = |prompt: Vec<u32>, options| {
        engine.continue_with(&handle, Request::new(prompt, options)).map(|answer| answer.wait())
    };
    let long = append(prompt(1, 200), keep(5)).unwrap().unwrap_err();
    assert!(matches!(*long, EngineError::PromptTooLong { tokens: 320, context: 256 }), "{long}");
    assert!(append(vec![], keep(5)).is_err());
    assert!(append(vec![1], GenerateOptions { n: 2, ..greedy(5) }).is_err());
    assert!(append(vec![1], GenerateOptions { prompt_logprobs: Some(0), ..greedy(5) }).is_err());
    // It is still open after all that, and closed after an answer that is not kept.
    assert_eq!(append(prompt(1, 10), greedy(5)).unwrap().unwrap()[0].tokens.len(), 5);
    let closed = append(prompt(1, 10), greedy(5)).unwrap().unwrap_err();
    assert!(matches!(*closed, EngineError::NotOpen { .. }), "{closed}");
    drop(handle);
    assert_idle(&engine);
}

#[test]
fn a_turn_that_is_cancelled_can_be_followed_by_another() {
    let model = model(true);
    let options = EngineOptions { context: Some(2048), ..fixed_options(&model, "int2", None) };
    let engine = TestEngine::new(model.clone(), &options).unwrap();
    let mut answer = engine.answer(Request::new(prompt(1, 100), keep(1500))).unwrap();
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
    let handle = answer.into_handle().unwrap();
    let next = engine.continue_with(&handle, Request::new(prompt(8, 20), keep(30))).unwrap();
    let next = next.wait().unwrap().remove(0);
    let whole = [prompt(1, 100), summary.tokens.clone(), prompt(8, 20)].concat();
    let cold = TestEngine::new(model.clone(), &options).unwrap();
    assert_eq!(next.tokens, ask(&cold, &whole, &greedy(30)).tokens);
    drop(handle);
    assert_idle(&engine);
}

/// An open request holds what its visibility needs and no more, and still shares when somebody asks.
#[test]
fn open_requests_cost_no_more_than_their_pages_and_are_shared_on_demand() {
    let model = model(true);
    for deterministic in [false, true] {
        let options =
            EngineOptions { context: Some(1024), deterministic, ..engine_options(&model, "int2", Some(100)) };
        let engine = TestEngine::new(model.clone(), &options).unwrap();
        let (_, handle) = open(&engine, prompt(4, 640), keep(1));
        let cache = engine.fresh_stats().cache;
        // Ten pages: one sink, six sealed, two recent and the last one.
        assert_eq!((cache.exact.used(), cache.sealed.used(), cache.scratch.used()), (4, 6, 0));
        let longer = [prompt(4, 640), prompt(5, 30)].concat();
        assert_eq!(ask(&engine, &longer, &greedy(5)).cached_tokens, 640);
        drop(handle);
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

/// What is kept open stays under the salt it was begun with: a continuation that names none must not publish it.
#[test]
fn a_continuation_keeps_the_salt_of_its_conversation() {
    let model = model(true);
    let options = EngineOptions { context: Some(1024), ..fixed_options(&model, "bf16", Some(20)) };
    let engine = TestEngine::new(model, &options).unwrap();
    let salted = GenerateOptions { cache_salt: Some("tenant".to_owned()), ..keep(1) };
    let (first, handle) = open(&engine, prompt(4, 640), salted);
    let more = |seed| engine.continue_with(&handle, Request::new(prompt(seed, 20), keep(1))).unwrap();
    let second = more(5).wait().unwrap().remove(0);
    // Somebody else needs the pages, so that the next continuation computes everything again.
    assert_eq!(ask(&engine, &prompt(6, 900), &greedy(1)).cached_tokens, 0);
    let third = more(7).wait().unwrap().remove(0);
    drop(handle);
    let said = [&first[..], &prompt(5, 20), &second.tokens, &prompt(7, 20), &third.tokens].concat();
    let whole = [prompt(4, 640), said].concat();
    assert_eq!(ask(&engine, &whole, &greedy(1)).cached_tokens, 0, "another tenant's pages");
    let own = GenerateOptions { cache_salt: Some("tenant".to_owned()), ..greedy(1) };
    engine.reset();
    assert_eq!(ask(&engine, &whole, &own).cached_tokens, 0);
    assert!(ask(&engine, &whole, &own).cached_tokens >= 640);
    assert_idle(&engine);
}

/// Nobody can continue a request whose handle was given away, so it does not stay open for ever.
#[test]
fn a_request_that_is_left_to_itself_is_closed_at_its_end() {
    let model = model(true);
    let options = EngineOptions { context: Some(1024), ..fixed_options(&model, "int2", None) };
    let engine = TestEngine::new(model, &options).unwrap();
    let after = |engine: &TestEngine| {
        let stats = engine.fresh_stats();
        (stats.running, stats.kept_open)
    };
    // Before its answer, in the midst of it, and when it has ended.
    for (index, tokens) in [0, 5, 60].into_iter().enumerate() {
        let (sender, events) = std::sync::mpsc::channel();
        let sink = Box::new(move |event| drop(sender.send(event)));
        let handle = engine.submit(Request::new(prompt(index, 300), keep(60)), sink).unwrap();
        let mut heard = events.iter();
        let said = heard.by_ref().filter(|event| matches!(event, Event::Token { .. })).take(tokens).count();
        assert_eq!(said, tokens);
        handle.detach();
        let Some(Event::Finished { summary, .. }) = heard.last() else { panic!("not finished") };
        assert_eq!((summary.finish, summary.tokens.len()), (FinishReason::Length, 60));
        assert_eq!(after(&engine), (0, 0));
        // What it said is found all the same.
        let whole = [prompt(index, 300), summary.tokens].concat();
        let nothing = GenerateOptions { max_tokens: Some(0), ..GenerateOptions::default() };
        assert!(ask(&engine, &whole, &nothing).cached_tokens >= 320);
    }
    assert_idle(&engine);
}

/// A turn that is cancelled before it began: the request stays open, or its pages go to the tree, as the turn said.
#[test]
fn a_turn_that_is_cancelled_while_it_waits_loses_nothing() {
    let model = model(true);
    let options =
        EngineOptions { context: Some(1024), max_running: 1, ..fixed_options(&model, "int4", Some(200)) };
    for kept in [true, false] {
        let engine = TestEngine::new(model.clone(), &options).unwrap();
        let (first, handle) = open(&engine, prompt(4, 300), keep(40));
        // Somebody else holds the only place, so the turn waits.
        let other = engine.answer(Request::new(prompt(5, 100), greedy(400))).unwrap();
        let turn = if kept { keep(30) } else { greedy(30) };
        let waiting = engine.continue_with(&handle, Request::new(prompt(6, 20), turn)).unwrap();
        while engine.fresh_stats().queued == 0 {
            std::thread::yield_now();
        }
        handle.cancel();
        let cancelled = waiting.wait().unwrap().remove(0);
        assert_eq!((cancelled.finish, cancelled.tokens.len()), (FinishReason::Cancelled, 0));
        assert_eq!(engine.fresh_stats().kept_open, usize::from(kept));
        drop(other);
        let said = [prompt(4, 300), first].concat();
        if kept {
            let next = engine.continue_with(&handle, Request::new(prompt(7, 10), keep(20))).unwrap();
            let next = next.wait().unwrap().remove(0);
            let whole = [said, prompt(6, 20), prompt(7, 10)].concat();
            let cold = TestEngine::new(model.clone(), &options).unwrap();
            assert_eq!(next.prompt_tokens, whole.len());
            assert_eq!(next.tokens, ask(&cold, &whole, &greedy(20)).tokens);
        } else {
            assert!(ask(&engine, &said, &greedy(1)).cached_tokens >= 320, "the tree has it");
        }
        drop(handle);
        assert_idle(&engine);
    }
}
