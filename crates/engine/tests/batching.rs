//! Many requests at a time give the answers that each of them gives alone.

#![allow(clippy::unwrap_used)]

mod support;

use oscar_engine::{EngineOptions, GenerateOptions, KvOptions, PrefillMode, Request, Serve};
use support::*;

/// Lengths below, at and above pages, windows and chunks.
fn requests() -> Vec<(Vec<u32>, GenerateOptions)> {
    let lengths = [1, 47, 48, 64, 65, 128, 191, 257, 320, 500];
    lengths
        .iter()
        .enumerate()
        .map(|(seed, &length)| {
            let options = if seed % 3 == 2 { seeded(30 + seed, seed as u64) } else { greedy(40 + 7 * seed) };
            (prompt(seed, length), options)
        })
        .collect()
}

fn alone(model: &TestModel, options: &EngineOptions) -> Vec<Vec<u32>> {
    let kv = KvOptions { prefix_tree: false, ..options.kv.clone() };
    let options = EngineOptions { kv, ..options.clone() };
    let engine = TestEngine::new(model.clone(), &options).unwrap();
    requests().iter().map(|(prompt, options)| ask(&engine, prompt, options).tokens).collect()
}

#[test]
fn a_batch_equals_one_by_one() {
    let model = model(true);
    for format in FORMATS {
        let options = EngineOptions { context: Some(1024), ..fixed_options(&model, format, Some(200)) };
        let expected = alone(&model, &options);
        let engine = TestEngine::new(model.clone(), &options).unwrap();
        let answers: Vec<_> = requests()
            .into_iter()
            .map(|(prompt, options)| engine.answer(Request::new(prompt, options)).unwrap())
            .collect();
        for (answer, expected) in answers.into_iter().zip(&expected) {
            assert_eq!(&answer.wait().unwrap()[0].tokens, expected, "{format}");
        }
        assert_eq!(engine.fresh_stats().finished, expected.len() as u64);
        assert_idle(&engine);
    }
}

/// The size of chunks changes nothing but speed, layer by layer or not.
#[test]
fn chunks_do_not_change_answers() {
    let model = model(true);
    for format in FORMATS {
        for prefill in [PrefillMode::Exact, PrefillMode::Uniform] {
            let mut answers = Vec::new();
            for chunk in [17, 64, 200, 700] {
                let mut options = engine_options(&model, format, None);
                (options.prefill_chunk, options.context) = (chunk, Some(1024));
                options.kv.prefill = prefill;
                let engine = TestEngine::new(model.clone(), &options).unwrap();
                answers.push(ask(&engine, &prompt(3, 600), &greedy(150)).tokens);
                assert_idle(&engine);
            }
            answers.dedup();
            assert_eq!(answers.len(), 1, "{format} {prefill:?}");
        }
    }
}

/// With pages that lose nothing to speak of, sealed or not, early or late, answers are those of a bf16 cache.
#[test]
fn windows_and_modes_agree_when_sealing_is_lossless() {
    let model = model(true);
    let plain = TestEngine::new(model.clone(), &fixed_options(&model, "bf16", None)).unwrap();
    let expected = ask(&plain, &prompt(5, 400), &greedy(200)).tokens;
    let geometry = model.config().kv_geometry();
    let layers: Vec<usize> = (0..geometry.layers).collect();
    let copies = oscar_codec::PageCodec::int4(geometry, None).unwrap().keep_bf16(&layers).unwrap();
    let copies = std::sync::Arc::new(copies);
    for (sink, recent) in [(0, 0), (1, 0), (0, 1), (2, 3), (1, 100)] {
        for prefill in [PrefillMode::Exact, PrefillMode::Uniform] {
            let mut options = engine_options(&model, "bf16", None);
            options.context = Some(1024);
            options.kv.codec = Some(copies.clone());
            options.kv.windows = oscar_codec::PageWindows { sink, recent };
            options.kv.prefill = prefill;
            let engine = TestEngine::new(model.clone(), &options).unwrap();
            let tokens = ask(&engine, &prompt(5, 400), &greedy(200)).tokens;
            assert_eq!(tokens, expected, "{sink} {recent} {prefill:?}");
            assert_idle(&engine);
        }
    }
}

#[test]
fn requests_that_arrive_together_share_their_prefix() {
    let model = model(true);
    for format in FORMATS {
        let options = EngineOptions { context: Some(1024), ..fixed_options(&model, format, Some(300)) };
        let engine = TestEngine::new(model.clone(), &options).unwrap();
        let common = prompt(1, 512);
        let with_suffix = |seed: usize| [common.clone(), prompt(seed, 20)].concat();
        let answers: Vec<_> = (10..18)
            .map(|seed| engine.answer(Request::new(with_suffix(seed), greedy(16))).unwrap())
            .collect();
        let summaries: Vec<_> = answers.into_iter().map(|answer| answer.wait().unwrap().remove(0)).collect();
        assert_eq!(summaries[0].cached_tokens, 0);
        for summary in &summaries[1..] {
            assert!(summary.cached_tokens >= 448, "{format}: {}", summary.cached_tokens);
        }
        let kv = KvOptions { prefix_tree: false, ..options.kv.clone() };
        let cold = TestEngine::new(model.clone(), &EngineOptions { kv, ..options }).unwrap();
        for (summary, seed) in summaries.iter().zip(10..) {
            assert_eq!(summary.tokens, ask(&cold, &with_suffix(seed), &greedy(16)).tokens, "{format} {seed}");
        }
        assert_idle(&engine);
    }
}

#[test]
fn salts_keep_tenants_apart() {
    let model = model(false);
    let engine = TestEngine::new(model.clone(), &engine_options(&model, "int4", None)).unwrap();
    let salted = |salt: &str| GenerateOptions { cache_salt: Some(salt.into()), ..greedy(4) };
    ask(&engine, &prompt(1, 300), &salted("a"));
    assert_eq!(ask(&engine, &prompt(1, 300), &salted("b")).cached_tokens, 0);
    assert_eq!(ask(&engine, &prompt(1, 300), &greedy(4)).cached_tokens, 0);
    assert!(ask(&engine, &prompt(1, 300), &salted("a")).cached_tokens > 200);
}
