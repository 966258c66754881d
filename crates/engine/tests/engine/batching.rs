//! Many requests at a time give the answers that each of them gives alone.

use std::sync::mpsc;

use crate::support::*;
use oscar_engine::{EngineOptions, GenerateOptions, KvOptions, PrefillMode, Request, Serve, Summary};

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
    let expected = ask(&plain, &prompt(5, 400), &scored(greedy(200)));
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
            let answer = ask(&engine, &prompt(5, 400), &scored(greedy(200)));
            assert_same_but_for_ties(&answer, &expected, &format!("{sink} {recent} {prefill:?}"));
            assert_idle(&engine);
        }
    }
}

/// Recorded steps of so many answers multiply with unpacked matrices, as a prompt does that is computed in chunks between them.
#[cfg(feature = "cuda-tests")]
#[test]
fn a_long_prompt_between_steps_of_many_answers_is_read_as_alone() {
    let model = model(false);
    let mut options = engine_options(&model, "int2", None);
    (options.context, options.max_running, options.prefill_chunk) = (Some(2048), 80, 128);
    options.kv.memory = Some(256 << 20);
    options.kv.prefix_tree = false;
    let engine = TestEngine::new(model.clone(), &options).unwrap();
    let long = prompt(7, 1500);
    let expected = ask(&engine, &long, &scored(greedy(20)));
    let answers: Vec<_> =
        (0..70).map(|seed| engine.answer(Request::new(prompt(seed, 20), greedy(300))).unwrap()).collect();
    // By now their steps are recorded.
    while engine.fresh_stats().running < 70 {
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    let got = ask(&engine, &long, &scored(greedy(20)));
    assert_same_but_for_ties(&got, &expected, "beside many answers");
    answers.into_iter().for_each(|answer| assert_eq!(answer.wait().unwrap()[0].tokens.len(), 300));
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

/// Submits prompts while the engine is held up, so that they all wait when it goes on.
fn arriving_together(engine: &TestEngine, prompts: &[Vec<u32>]) -> Vec<Summary> {
    let (resume, held) = mpsc::channel::<()>();
    let (entered, inside) = mpsc::channel();
    let sink = Box::new(move |_| {
        let _ = entered.send(());
        let _ = held.recv();
    });
    let first = engine.submit(Request::new(prompt(99, 3), greedy(1)), sink).unwrap();
    inside.recv().unwrap();
    let answers: Vec<_> =
        prompts.iter().map(|prompt| engine.answer(Request::new(prompt, greedy(12))).unwrap()).collect();
    drop(resume);
    let summaries = answers.into_iter().map(|answer| answer.wait().unwrap().remove(0)).collect();
    drop(first);
    summaries
}

#[test]
fn short_prompts_that_wait_together_are_computed_together() {
    let model = model(true);
    for format in FORMATS {
        let mut options = fixed_options(&model, format, Some(200));
        (options.context, options.prefill_chunk) = (Some(1024), 256);
        let kv = KvOptions { prefix_tree: false, ..options.kv.clone() };
        let cold = TestEngine::new(model.clone(), &EngineOptions { kv, ..options.clone() }).unwrap();
        let batched = |engine: &TestEngine| engine.fresh_stats().batched_prompts;
        let check = |engine: &TestEngine, prompts: &[Vec<u32>]| -> Vec<usize> {
            let summaries = arriving_together(engine, prompts);
            for (summary, prompt) in summaries.iter().zip(prompts) {
                assert_eq!(summary.tokens, ask(&cold, prompt, &greedy(12)).tokens, "{format}");
                assert_eq!(summary.prompt_tokens, prompt.len());
            }
            summaries.iter().map(|summary| summary.cached_tokens).collect()
        };

        // 1 + 20 + ... + 63 rows: one pass for the first seven, and the last is for the next turn.
        let engine = TestEngine::new(model.clone(), &options).unwrap();
        let lengths = [1, 20, 33, 40, 48, 50, 63, 63];
        let prompts: Vec<_> = lengths.iter().enumerate().map(|(seed, &len)| prompt(seed, len)).collect();
        check(&engine, &prompts);
        assert_eq!(batched(&engine), 7, "{format}");
        assert_idle(&engine);

        // After a common prefix that is in the cache, and long enough for windows to move.
        let engine = TestEngine::new(model.clone(), &options).unwrap();
        ask(&engine, &prompt(1, 512), &greedy(1));
        let longer = |seed: usize, len: usize| [prompt(1, 512), prompt(seed, len)].concat();
        let prompts: Vec<_> = (10..15).map(|seed| longer(seed, 3 * seed)).collect();
        let cached = check(&engine, &prompts);
        assert!(cached.iter().all(|&cached| cached >= 448), "{format}: {cached:?}");
        assert_eq!(batched(&engine), 5, "{format}");
        assert_idle(&engine);

        // Some of them after the prefix, others from the start, in one pass.
        let engine = TestEngine::new(model.clone(), &options).unwrap();
        ask(&engine, &prompt(1, 512), &greedy(1));
        let fresh = (30..33).map(|seed| prompt(seed, seed));
        let prompts: Vec<_> = (10..13).map(|seed| longer(seed, 3 * seed)).chain(fresh).collect();
        let cached = check(&engine, &prompts);
        assert!(cached[..3].iter().all(|&cached| cached >= 448) && cached[3..] == [0; 3], "{cached:?}");
        assert_eq!(batched(&engine), 6, "{format}");
        assert_idle(&engine);

        // Those that could share a page come one after the other, and share it.
        let engine = TestEngine::new(model.clone(), &options).unwrap();
        let prompts: Vec<_> = (20..24).map(|seed| [prompt(2, 64), prompt(seed, 10)].concat()).collect();
        let cached = check(&engine, &prompts);
        assert_eq!(cached[0], 0);
        if format == "bf16" {
            assert_eq!(cached[1..], [64; 3]);
        }
        assert!(batched(&engine) <= 3, "{format}: the first is not among them");
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
