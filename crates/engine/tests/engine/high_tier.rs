//! Requests with their history in four bits of the same basis, beside those in two bits and in bf16.

use std::sync::Arc;

use crate::support::*;
use oscar_engine::{EngineError, EngineOptions, GenerateOptions, Request, Serve, Tier};

fn of_tier(tier: Tier, options: GenerateOptions) -> GenerateOptions {
    GenerateOptions { tier, ..options }
}

/// Options of a server that offers all tiers.
fn with_tiers(mut options: EngineOptions) -> EngineOptions {
    (options.kv.high_tier, options.kv.bf16_tier) = (true, true);
    options
}

/// A server all of whose pages are of the other codec.
#[test]
fn a_high_history_gives_the_answers_of_a_server_of_its_codec() {
    let model = model(true);
    for format in ["int2", "band"] {
        let options = EngineOptions { context: Some(1024), ..fixed_options(&model, format, None) };
        let mut high = options.clone();
        high.kv.codec = high.kv.codec.map(|codec| Arc::new(codec.high().unwrap()));
        let both = TestEngine::new(model.clone(), &with_tiers(options)).unwrap();
        let high = TestEngine::new(model.clone(), &high).unwrap();
        let mut differ = 0;
        for (seed, length) in [1, 63, 300, 448, 449, 700].into_iter().enumerate() {
            let (prompt, options) = (prompt(seed, length), scored(greedy(140)));
            let expected = ask(&high, &prompt, &options);
            let got = ask(&both, &prompt, &of_tier(Tier::High, options.clone()));
            assert_eq!((&got.tokens, &got.logprobs), (&expected.tokens, &expected.logprobs), "{format}");
            differ += usize::from(ask(&both, &prompt, &options).logprobs != expected.logprobs);
        }
        assert!(differ > 0, "{format}: two bits are not four");
        let stats = both.fresh_stats();
        assert!(stats.cache.high.used() > 0 && stats.cache.sealed.used() > 0, "{format}: {stats:?}");
        assert_idle(&both);
        assert_idle(&high);
    }
}

#[test]
fn three_tiers_in_one_batch_and_short_of_memory_answer_as_alone() {
    let model = model(true);
    let options = EngineOptions { context: Some(640), ..fixed_options(&model, "band", None) };
    let alone = TestEngine::new(model.clone(), &with_tiers(options)).unwrap();
    let common = prompt(99, 150);
    let requests: Vec<(Vec<u32>, GenerateOptions)> = (0..24)
        .map(|seed| {
            let prompt = [common.clone(), prompt(seed / 3, 40 + 15 * seed)].concat();
            let tier = [Tier::Sealed, Tier::High, Tier::Exact][seed % 3];
            (prompt, of_tier(tier, scored(seeded(30 + 2 * seed, seed as u64))))
        })
        .collect();
    let tight = with_tiers(fixed_options(&model, "band", Some(48)));
    let tight = EngineOptions { max_running: 12, context: Some(640), ..tight };
    let engine = TestEngine::new(model.clone(), &tight).unwrap();
    println!("{}", engine.budget());
    assert_eq!(engine.info().high_context, Some(640));
    assert_answers_as_alone(&alone, &engine, &requests);
    let stats = engine.fresh_stats();
    assert!(stats.preemptions > 0 && stats.cached_tokens > 0, "{stats:?}");
    assert_idle(&engine);
}

#[test]
fn a_prompt_is_found_by_requests_of_its_tier_only() {
    let model = model(false);
    let options = with_tiers(engine_options(&model, "band", None));
    let engine = TestEngine::new(model.clone(), &options).unwrap();
    let prompt = prompt(5, 400);
    for tier in [Tier::High, Tier::Exact, Tier::Sealed] {
        let options = of_tier(tier, greedy(4));
        assert_eq!(ask(&engine, &prompt, &options).cached_tokens, 0);
        assert!(ask(&engine, &prompt, &options).cached_tokens >= 400 / 64 * 64);
    }
    assert_idle(&engine);
}

#[test]
fn only_two_bits_have_four_beside_them() {
    let model = model(true);
    for format in ["bf16", "fp8", "int4"] {
        let mut options = fixed_options(&model, format, None);
        options.kv.high_tier = true;
        match TestEngine::new(model.clone(), &options) {
            Err(EngineError::BadOption { name, value, .. }) => {
                assert_eq!((name, value.as_str()), ("kv_tiers", "high"), "{format}");
            }
            _ => panic!("{format}: not refused"),
        }
    }
    let engine = TestEngine::new(model.clone(), &fixed_options(&model, "int2", None)).unwrap();
    let request = Request::new(prompt(1, 10), of_tier(Tier::High, greedy(1)));
    let error = engine.answer(request).map(|_| ()).unwrap_err();
    assert!(error.to_string().starts_with("kv_precision is high, expected"), "{error}");
}
