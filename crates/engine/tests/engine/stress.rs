//! Random requests from several threads on a cache that is far too small: choices, conversations, salts,
//! cancellations. Whoever gets an answer gets the one of an idle engine, and at the end every page is back.

use std::sync::Mutex;

use crate::support::*;
use oscar_engine::{EngineOptions, FinishReason, GenerateOptions, Request, Serve, Summary};
use oscar_random::Random;

/// What was asked and what came of it.
struct Asked {
    prompt: Vec<u32>,
    options: GenerateOptions,
    tokens: Vec<u32>,
}

/// One client: some requests, one after the other.
fn client(engine: &TestEngine, seed: u64, asked: &Mutex<Vec<Asked>>) {
    let mut random = Random::new(seed);
    let note = |prompt: &[u32], options: &GenerateOptions, summaries: Vec<Summary>| {
        for summary in summaries.into_iter().filter(|summary| summary.finish != FinishReason::Cancelled) {
            let mut options = GenerateOptions { n: 1, ..options.clone() };
            options.sampling.seed = Some(summary.seed);
            let (prompt, tokens) = (prompt.to_vec(), summary.tokens);
            asked.lock().unwrap().push(Asked { prompt, options, tokens });
        }
    };
    for _ in 0..6 {
        let common = prompt(90 + random.below(2), 64 * random.below(4));
        let mut history = [common, prompt(random.below(5), 1 + random.below(150))].concat();
        let mut options = seeded(1 + random.below(90), random.below(1000) as u64);
        if random.below(2) == 0 {
            options.sampling.temperature = 0.0;
        }
        options.cache_salt = (random.below(4) == 0).then(|| "tenant".to_owned());
        match random.below(4) {
            0 => {
                options.n = 1 + random.below(4);
                let answer = engine.answer(Request::new(&history, options.clone())).unwrap();
                note(&history, &options, answer.wait().unwrap());
            }
            1 => {
                for _ in 0..=random.below(4) {
                    let answer = engine.answer(Request::new(&history, options.clone())).unwrap();
                    let summary = answer.wait().unwrap().remove(0);
                    note(&history, &options, vec![summary.clone()]);
                    history.extend(&summary.tokens);
                    history.extend(prompt(random.below(9), 1 + random.below(60)));
                    if history.len() + 90 > engine.context() {
                        break;
                    }
                }
            }
            2 => {
                let mut answer = engine.answer(Request::new(&history, options.clone())).unwrap();
                let _ = answer.by_ref().take(random.below(40)).count();
                if random.below(2) == 0 {
                    answer.cancel();
                    if let Ok(summaries) = answer.wait() {
                        note(&history, &options, summaries);
                    }
                }
            }
            _ => {
                let answer = engine.answer(Request::new(&history, options.clone())).unwrap();
                note(&history, &options, answer.wait().unwrap());
            }
        }
    }
}

#[test]
fn nobody_gets_a_wrong_answer_whatever_happens() {
    let model = model(true);
    // Another number here is another test; CI runs one.
    let offset: u64 = std::env::var("OSCAR_STRESS_SEED").map_or(0, |seed| seed.parse().unwrap());
    let mut preemptions = 0;
    for (format, pages, recent, seed) in
        [("bf16", 20, 2, 1), ("int2", 50, 2, 2), ("int4", 44, 1, 3), ("fp8", 60, 0, 4), ("int2", 44, 1, 5)]
    {
        let seed = seed + 10 * offset;
        let with = |pages| {
            let mut options = fixed_options(&model, format, Some(pages));
            options.paced = true;
            (options.context, options.max_running) = (Some(768), 7);
            options.kv.windows.recent = recent;
            options
        };
        let engine = TestEngine::new(model.clone(), &with(pages)).unwrap();
        let asked = Mutex::new(Vec::new());
        std::thread::scope(|scope| {
            for thread in 0..8 {
                let (engine, asked) = (&engine, &asked);
                scope.spawn(move || client(engine, seed * 100 + thread, asked));
            }
        });
        let stats = engine.fresh_stats();
        preemptions += stats.preemptions;
        assert_eq!(stats.failed, 0, "{format}");
        assert_idle(&engine);
        let idle = TestEngine::new(model.clone(), &EngineOptions { ..with(300) }).unwrap();
        let asked = asked.into_inner().unwrap();
        assert!(asked.len() > 30);
        for Asked { prompt, options, tokens } in asked {
            let alone = ask(&idle, &prompt, &options).tokens;
            assert_eq!(tokens, alone, "{format}, seed {seed}, prompt of {}", prompt.len());
        }
    }
    // Which of these pools was too small for what ran at the same time depends on how fast threads were.
    assert!(preemptions > 0, "nobody lost pages");
}
