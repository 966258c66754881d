//! Requests with their history in bf16 beside those whose history is sealed.

use crate::support::*;
use oscar_codec::PageWindows;
use oscar_engine::{EngineError, EngineOptions, GenerateOptions, PrefillMode, Request, Serve, Tier};

fn exact(options: GenerateOptions) -> GenerateOptions {
    GenerateOptions { tier: Tier::Exact, ..options }
}

/// Options of a server that offers both.
fn with_tier(mut options: EngineOptions) -> EngineOptions {
    options.kv.bf16_tier = true;
    options
}

/// In the same basis: a server with the same codec whose window is never left.
#[test]
fn a_bf16_history_gives_the_answers_of_a_bf16_server_in_the_same_basis() {
    let model = model(true);
    for format in FORMATS.into_iter().filter(|&format| format != "bf16") {
        let options = EngineOptions { context: Some(1024), ..fixed_options(&model, format, None) };
        let mut bf16 = options.clone();
        bf16.kv.windows = PageWindows { sink: 1, recent: 100 };
        let (both, bf16) = (with_tier(options), bf16);
        let both = TestEngine::new(model.clone(), &both).unwrap();
        let bf16 = TestEngine::new(model.clone(), &bf16).unwrap();
        let mut differ = 0;
        for (seed, length) in [1, 63, 300, 448, 449, 700].into_iter().enumerate() {
            let (prompt, options) = (prompt(seed, length), scored(greedy(140)));
            let expected = ask(&bf16, &prompt, &options);
            let got = ask(&both, &prompt, &exact(options.clone()));
            assert_eq!((&got.tokens, &got.logprobs), (&expected.tokens, &expected.logprobs), "{format}");
            differ += usize::from(ask(&both, &prompt, &options).logprobs != expected.logprobs);
        }
        assert!(differ > 0, "{format}: sealed history is not as exact");
        let stats = bf16.fresh_stats();
        assert_eq!(stats.cache.sealed.used(), stats.cache.warm_pages, "nothing but early copies is sealed");
        assert_idle(&both);
        assert_idle(&bf16);
    }
}

#[test]
fn tiers_in_one_batch_and_short_of_memory_answer_as_alone() {
    let model = model(true);
    let options = EngineOptions { context: Some(640), ..fixed_options(&model, "int2", None) };
    let alone = TestEngine::new(model.clone(), &with_tier(options.clone())).unwrap();
    let common = prompt(99, 150);
    let requests: Vec<(Vec<u32>, GenerateOptions)> = (0..24)
        .map(|seed| {
            let prompt = [common.clone(), prompt(seed / 2, 40 + 15 * seed)].concat();
            let options = scored(seeded(30 + 2 * seed, seed as u64));
            (prompt, if seed % 2 == 0 { exact(options) } else { options })
        })
        .collect();
    let tight = with_tier(fixed_options(&model, "int2", Some(40)));
    let tight = EngineOptions { max_running: 12, context: Some(640), ..tight };
    let engine = TestEngine::new(model.clone(), &tight).unwrap();
    println!("{}", engine.budget());
    let answers = assert_answers_as_alone(&alone, &engine, &requests);
    assert!(answers.iter().all(|answer| answer.demoted_tokens == 0));
    let stats = engine.fresh_stats();
    assert!(stats.preemptions > 0 && stats.cached_tokens > 0, "{stats:?}");
    assert_idle(&engine);
}

#[test]
fn a_prompt_is_found_by_requests_of_its_tier_only() {
    let model = model(false);
    let options = with_tier(engine_options(&model, "int2", None));
    let engine = TestEngine::new(model.clone(), &options).unwrap();
    let prompt = prompt(5, 400);
    for (options, again) in [(exact(greedy(4)), 400 / 64 * 64), (greedy(4), 400 / 64 * 64)] {
        assert_eq!(ask(&engine, &prompt, &options).cached_tokens, 0);
        assert!(ask(&engine, &prompt, &options).cached_tokens >= again);
    }
    assert_idle(&engine);
}

/// A request that may be demoted gives way where another would be preempted.
#[test]
fn demotion_comes_before_preemption() {
    let model = model(true);
    let options = with_tier(engine_options(&model, "int2", Some(28)));
    let mut options = EngineOptions { context: Some(640), ..options };
    options.kv.prefill = PrefillMode::Uniform;
    let run = |demote: bool| {
        let engine = TestEngine::new(model.clone(), &options).unwrap();
        // Two that fill the bf16 pages nearly, and grow.
        let length = engine.budget().exact.pages * 32 - 40;
        let ask = |seed: usize| {
            let options = GenerateOptions { demote, ..exact(greedy(100)) };
            engine.answer(Request::new(prompt(seed, length), options)).unwrap()
        };
        let answers = [ask(1), ask(2)];
        let summaries = answers.map(|answer| answer.wait().unwrap().remove(0));
        let stats = engine.fresh_stats();
        assert_idle(&engine);
        assert!(summaries.iter().all(|summary| summary.tokens.len() == 100));
        let demoted: usize = summaries.iter().map(|summary| summary.demoted_tokens).sum();
        assert_eq!(demoted as u64, 64 * stats.demoted_pages);
        (stats.preemptions, demoted)
    };
    let (preemptions, demoted) = run(false);
    assert!(preemptions > 0 && demoted == 0, "{preemptions} preemptions, {demoted} tokens demoted");
    let (preemptions, demoted) = run(true);
    assert!(preemptions == 0 && demoted > 0, "{preemptions} preemptions, {demoted} tokens demoted");
}

#[test]
fn a_lone_request_that_may_be_demoted_fills_the_context() {
    let model = model(false);
    let options =
        EngineOptions { context: Some(1024), ..with_tier(engine_options(&model, "int2", Some(32))) };
    let engine = TestEngine::new(model.clone(), &options).unwrap();
    let most = engine.info().bf16_context.unwrap();
    assert!(most < 1024, "{}", engine.budget());
    let ends = |demote: bool| {
        let options = GenerateOptions { demote, ..exact(greedy(2000)) };
        let summary = ask(&engine, &prompt(1, most - 100), &options);
        assert_eq!((summary.preemptions, summary.demoted_tokens > 0), (0, demote));
        summary.prompt_tokens + summary.tokens.len()
    };
    assert_eq!((ends(false), ends(true)), (most, 1024));
    assert_idle(&engine);
}

#[test]
fn what_cannot_be_is_refused() {
    let model = model(true);
    let refused = |options: &EngineOptions| match TestEngine::new(model.clone(), options) {
        Err(EngineError::BadOption { name, .. }) => name,
        _ => panic!("not refused"),
    };
    assert_eq!(refused(&with_tier(fixed_options(&model, "bf16", None))), "kv_tiers");
    let ask = |options: &EngineOptions, request: GenerateOptions| {
        let engine = TestEngine::new(model.clone(), options).unwrap();
        engine.answer(Request::new(prompt(1, 10), request)).map(|_| ()).unwrap_err().to_string()
    };
    let plain = fixed_options(&model, "int2", None);
    assert!(ask(&plain, exact(greedy(1))).starts_with("kv_precision is bf16, expected"));
    let demoted = GenerateOptions { demote: true, ..exact(greedy(1)) };
    assert!(ask(&with_tier(plain), demoted).starts_with("kv_demote is true, expected"));
}

#[test]
fn sliding_windows_have_one_tier() {
    let model = sliding_model(SLIDING[0], 130);
    let options = with_tier(engine_options(&model, "int4", None));
    let error = TestEngine::new(model, &options).map(|_| ()).unwrap_err();
    assert!(error.to_string().contains("sliding windows"), "{error}");
}
