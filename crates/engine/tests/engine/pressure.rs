//! Too little memory, too many requests, requests that go away: nobody gets a wrong answer and nothing is lost.

use std::time::Duration;

use crate::support::*;
use oscar_engine::{
    Answer, EngineError, EngineOptions, Event, FinishReason, GenerateOptions, Request, Serve,
};
use oscar_kv::TailPolicy;
use oscar_random::Random;

#[test]
fn a_pool_a_quarter_of_the_need_changes_no_answer() {
    let model = model(true);
    for format in FORMATS {
        let roomy = EngineOptions { context: Some(640), ..fixed_options(&model, format, Some(400)) };
        let unloaded = TestEngine::new(model.clone(), &roomy).unwrap();
        let mut random = Random::new(7);
        let common = prompt(99, 150);
        let requests: Vec<(Vec<u32>, GenerateOptions)> = (0..48)
            .map(|seed| {
                let own = prompt(seed, 1 + random.below(250));
                let prompt = if seed % 2 == 0 { own } else { [common.clone(), own].concat() };
                let length = 20 + random.below(120);
                (prompt, if seed % 3 == 0 { seeded(length, seed as u64) } else { greedy(length) })
            })
            .collect();
        let expected: Vec<Vec<u32>> = requests
            .iter()
            .map(|(prompt, options)| {
                unloaded.reset();
                ask(&unloaded, prompt, options).tokens
            })
            .collect();
        // What all of them hold at their ends: windows in bf16, the rest sealed.
        let geometry = model.config().kv_geometry();
        let bf16 = geometry.page_bytes(geometry.bf16());
        let sealed = roomy.kv.codec.as_ref().map_or(bf16, |codec| codec.page_bytes());
        let need: usize = requests
            .iter()
            .map(|(prompt, options)| prompt.len() + options.max_tokens.unwrap())
            .map(|tokens| {
                let (exact, history) = roomy.kv.windows.pages(tokens);
                exact * bf16 + history * sealed
            })
            .sum();
        let mut tight = EngineOptions { max_running: 24, ..fixed_options(&model, format, None) };
        tight.kv.memory = Some(need / 4);
        let engine = TestEngine::new(model.clone(), &EngineOptions { context: Some(640), ..tight }).unwrap();
        println!("{format}\n{}", engine.budget());
        let mut answers: Vec<(usize, Answer)> = Vec::new();
        for (index, (prompt, options)) in requests.iter().enumerate() {
            answers.push((index, engine.answer(Request::new(prompt.clone(), options.clone())).unwrap()));
            match random.below(4) {
                // Some go away, at any stage.
                0 => drop(answers.remove(random.below(answers.len()))),
                1 => std::thread::sleep(Duration::from_millis(random.below(4) as u64)),
                _ => {}
            }
        }
        assert!(answers.len() > 24);
        for (index, answer) in answers {
            let summary = answer.wait().unwrap().remove(0);
            assert_eq!(summary.tokens, expected[index], "{format}, request {index}");
        }
        let stats = engine.fresh_stats();
        assert!(stats.preemptions > 0, "{format}: {stats:?}");
        assert_idle(&engine);
    }
}

/// Breaks a request off after every possible event and looks whether all pages come back.
#[test]
fn cancelling_at_every_stage_leaves_nothing_behind() {
    let model = model(true);
    for format in ["bf16", "int2"] {
        let options = EngineOptions { context: Some(640), ..fixed_options(&model, format, Some(60)) };
        let engine = TestEngine::new(model.clone(), &options).unwrap();
        let whole = ask(&engine, &prompt(3, 400), &greedy(40)).tokens;
        for stop_after in 0..40 {
            engine.reset();
            let other = engine.answer(Request::new(prompt(4, 200), greedy(10))).unwrap();
            let mut answer = engine.answer(Request::new(prompt(3, 400), greedy(40))).unwrap();
            let seen = answer.by_ref().take(stop_after).count();
            answer.cancel();
            let end = answer.by_ref().last();
            if seen == stop_after
                && let Some(Event::Finished { summary, .. }) = end
            {
                let common = summary.tokens.len();
                assert_eq!(summary.tokens, whole[..common]);
            }
            assert_eq!(other.wait().unwrap()[0].tokens.len(), 10);
            drop(answer);
            assert_eq!(ask(&engine, &prompt(3, 400), &greedy(40)).tokens, whole, "{format}, {stop_after}");
        }
        assert_idle(&engine);
    }
}

#[test]
fn a_full_queue_refuses_and_recovers() {
    let model = model(false);
    let options = EngineOptions { max_running: 1, max_queued: 2, ..engine_options(&model, "int4", None) };
    let engine = TestEngine::new(model.clone(), &options).unwrap();
    let submit = || engine.answer(Request::new(prompt(1, 50), greedy(3000)));
    let mut first = submit().unwrap();
    assert!(matches!(first.next(), Some(Event::Prefill { .. })));
    let second = submit().unwrap();
    let third = submit().unwrap();
    assert!(matches!(submit(), Err(EngineError::QueueFull { queued: 2 })));
    drop(second);
    drop(first);
    while engine.fresh_stats().queued > 0 {
        std::thread::sleep(Duration::from_millis(1));
    }
    let fourth = submit().unwrap();
    drop((third, fourth));
    assert_idle(&engine);
}

#[test]
fn requests_that_can_never_run_are_refused() {
    let model = model(false);
    let options = EngineOptions { context: Some(300), ..engine_options(&model, "int4", None) };
    let engine = TestEngine::new(model.clone(), &options).unwrap();
    let refuse = |prompt: Vec<u32>, options| engine.answer(Request::new(prompt, options)).unwrap_err();
    let long = refuse(prompt(1, 301), greedy(1));
    assert!(matches!(long, EngineError::PromptTooLong { tokens: 301, context: 300 }), "{long}");
    assert!(matches!(refuse(vec![120], greedy(1)), EngineError::TokenOutOfRange { .. }));
    assert!(matches!(refuse(vec![], greedy(1)), EngineError::EmptyPrompt));
    let many = GenerateOptions { n: 33, ..greedy(1) };
    assert!(matches!(refuse(vec![1], many), EngineError::BadOption { name: "n", .. }));
    // A limit that is far too large ends with the context.
    let huge = ask(&engine, &prompt(1, 290), &greedy(usize::MAX));
    assert_eq!((huge.tokens.len(), huge.finish), (10, FinishReason::Context));
    assert_idle(&engine);
}

/// A prompt of many chunks must not hold up an answer: at most one item of prompt work between two tokens.
#[test]
fn a_long_prompt_does_not_stop_answers() {
    use std::sync::mpsc;
    let model = model(false);
    for (format, paced) in [("bf16", false), ("int2", false), ("bf16", true), ("int2", true)] {
        let options = EngineOptions { context: Some(4096), paced, ..engine_options(&model, format, None) };
        let engine = TestEngine::new(model.clone(), &EngineOptions { prefill_chunk: 64, ..options }).unwrap();
        let (sender, events) = mpsc::channel();
        let submit = |name: &'static str, prompt: Vec<u32>, tokens: usize| {
            let sender = sender.clone();
            let sink = Box::new(move |event| drop(sender.send((name, event))));
            engine.submit(Request::new(prompt, greedy(tokens)), sink).unwrap()
        };
        let answer = submit("answer", prompt(1, 10), 200);
        loop {
            if let ("answer", Event::Token { .. }) = events.recv().unwrap() {
                break;
            }
        }
        let long = submit("prompt", prompt(2, 2500), 3);
        let (mut between, mut most, mut ended, mut chunks) = (0, 0, 0, 0);
        let mut answer_running = true;
        while ended < 2 {
            match events.recv().unwrap() {
                ("answer", Event::Token { .. }) => between = 0,
                ("prompt", Event::Prefill { .. }) => {
                    chunks += 1;
                    between += usize::from(answer_running);
                    most = most.max(between);
                }
                (name, event) if event.is_last() => {
                    ended += 1;
                    answer_running &= name != "answer";
                }
                _ => {}
            }
        }
        assert!(chunks > 30, "{format}, paced {paced}: {chunks}");
        // The last item ends with two events: the item's own and that of the complete prompt.
        assert!(most <= 2, "{format}, paced {paced}: {most}");
        drop((answer, long));
    }
}

#[test]
fn an_engine_that_goes_away_ends_its_answers() {
    let model = model(false);
    let options = EngineOptions { max_running: 1, ..engine_options(&model, "int2", None) };
    let engine = TestEngine::new(model.clone(), &options).unwrap();
    let answers: Vec<Answer> =
        (0..3).map(|seed| engine.answer(Request::new(prompt(seed, 300), greedy(3000))).unwrap()).collect();
    drop(engine);
    for answer in answers {
        assert!(matches!(*answer.wait().unwrap_err(), EngineError::Stopped));
    }
}

/// Pages of layers differ in size and format: requests that share a prefix and lose pages to each other answer as alone.
#[test]
fn layers_of_different_widths_answer_under_pressure_as_alone() {
    let model = model_with("llama3.2-wide", 2048, true, |_| ());
    let options = |pages| EngineOptions { context: Some(1024), ..fixed_options(&model, "band", pages) };
    let codec = options(None).kv.codec.unwrap();
    assert_ne!(codec.head_bytes(0), codec.head_bytes(1));
    let tight = TestEngine::new(model.clone(), &options(Some(24))).unwrap();
    let prompts: Vec<Vec<u32>> = (0..6).map(|i| [prompt(1, 300), prompt(2 + i, 150)].concat()).collect();
    let running: Vec<_> = prompts
        .iter()
        .map(|prompt| tight.answer(Request::new(prompt.clone(), greedy(200))).unwrap())
        .collect();
    // A device works for one engine at a time.
    let answers: Vec<_> =
        running.into_iter().map(|answer| answer.wait().unwrap()[0].tokens.clone()).collect();
    for (prompt, answer) in prompts.iter().zip(answers) {
        let alone = TestEngine::new(model.clone(), &options(None)).unwrap();
        assert_eq!(answer, ask(&alone, prompt, &greedy(200)).tokens);
    }
    let stats = tight.fresh_stats();
    assert!(stats.preemptions > 0, "{stats:?}");
    assert_idle(&tight);
}

/// A model whose token 7 is not a number: requests that read it fail, their neighbours do not.
#[test]
fn numbers_that_are_not_finite_fail_their_own_request_only() {
    let damaged = model_with(FIXTURE, 2048, true, |bytes| break_token(bytes, 7));
    for format in FORMATS {
        let options = EngineOptions { context: Some(1024), ..fixed_options(&damaged, format, Some(100)) };
        let engine = TestEngine::new(damaged.clone(), &options).unwrap();
        // Never draws the damaged token.
        let sound = GenerateOptions {
            sampling: oscar_engine::SamplingOptions { logit_bias: vec![(7, -1e9)], ..Default::default() },
            ..greedy(60)
        };
        let without_seven = |seed, len| -> Vec<u32> {
            prompt(seed, len).into_iter().map(|token| if token == 7 { 8 } else { token }).collect()
        };
        let expected = ask(&engine, &without_seven(1, 100), &sound).tokens;
        for length in [10, 64, 300] {
            let mut bad = without_seven(2, length);
            bad[length / 2] = 7;
            let neighbour = engine.answer(Request::new(without_seven(1, 100), sound.clone())).unwrap();
            let failed = engine.answer(Request::new(bad, sound.clone())).unwrap().wait().unwrap_err();
            assert!(failed.to_string().contains("finite"), "{format} {length}: {failed}");
            assert_eq!(neighbour.wait().unwrap()[0].tokens, expected, "{format} {length}");
        }
        // Drawn in the middle of an answer.
        let drawn = GenerateOptions {
            sampling: oscar_engine::SamplingOptions { logit_bias: vec![(7, 1e9)], ..Default::default() },
            ..greedy(60)
        };
        let neighbour = engine.answer(Request::new(without_seven(1, 100), sound.clone())).unwrap();
        assert!(engine.answer(Request::new(without_seven(3, 80), drawn)).unwrap().wait().is_err());
        assert_eq!(neighbour.wait().unwrap()[0].tokens, expected, "{format}");
        assert_eq!(engine.fresh_stats().failed, 4);
        assert_idle(&engine);

        // In one pass with others: found out when a page is sealed on the way, when the tree gets it, or when a token
        // is drawn, depending on the length.
        let options = EngineOptions { prefill_chunk: 512, ..options.clone() };
        let engine = TestEngine::new(damaged.clone(), &options).unwrap();
        let good = |seed| without_seven(seed, 20 + seed);
        let expected: Vec<_> = (20..24).map(|seed| ask(&engine, &good(seed), &sound).tokens).collect();
        engine.reset();
        for length in [10, 150, 300] {
            let mut bad = without_seven(2, length);
            bad[length / 2] = 7;
            let (resume, held) = std::sync::mpsc::channel::<()>();
            let (entered, inside) = std::sync::mpsc::channel();
            let sink = Box::new(move |_| {
                let _ = entered.send(());
                let _ = held.recv();
            });
            let first = engine.submit(Request::new(without_seven(9, 3), greedy(1)), sink).unwrap();
            inside.recv().unwrap();
            let submit = |prompt| engine.answer(Request::new(prompt, sound.clone())).unwrap();
            let before: Vec<Answer> = (20..22).map(|seed| submit(good(seed))).collect();
            let failed = submit(bad);
            let after: Vec<Answer> = (22..24).map(|seed| submit(good(seed))).collect();
            drop(resume);
            assert!(failed.wait().unwrap_err().to_string().contains("finite"), "{format} {length}");
            for (answer, expected) in before.into_iter().chain(after).zip(&expected) {
                assert_eq!(&answer.wait().unwrap()[0].tokens, expected, "{format} {length}");
            }
            drop(first);
            engine.reset();
        }
        assert_eq!(engine.fresh_stats().failed, 3);
        assert!(engine.fresh_stats().batched_prompts >= 10, "{format}");
        assert_idle(&engine);
    }
}

/// Long answers that lose their pages and are computed again: the prompt as a prompt, the answer as an answer, whatever the
/// tree has kept of them and whatever a new request would be content with.
#[test]
fn what_is_computed_again_is_read_as_it_was() {
    let model = model_with("qwen3", 4096, true, |_| ());
    for (format, exact, pages) in
        [("bf16", true, 60), ("int2", true, 72), ("int2", false, 72), ("fp8", true, 100)]
    {
        for tail in [None, Some(TailPolicy::Recompute), Some(TailPolicy::Sealed)] {
            let with = |pages| {
                let mut options = EngineOptions {
                    context: Some(2048),
                    deterministic: !exact,
                    ..engine_options(&model, format, Some(pages))
                };
                options.kv.windows.recent = 1;
                options.kv.prefix_tree = tail.is_some();
                options.kv.tail = tail.unwrap_or_default();
                options
            };
            let ask_for = |seed: usize| Request::new(prompt(seed, 150 + 90 * seed), greedy(1400));
            let idle = TestEngine::new(model.clone(), &with(400)).unwrap();
            let tight = TestEngine::new(model.clone(), &with(pages)).unwrap();
            let expected: Vec<Vec<u32>> = (0..4)
                .map(|seed| idle.answer(ask_for(seed)).unwrap().wait().unwrap().remove(0).tokens)
                .collect();
            let answers: Vec<Answer> = (0..4).map(|seed| tight.answer(ask_for(seed)).unwrap()).collect();
            let mut late = 0;
            for (answer, expected) in answers.into_iter().zip(&expected) {
                let summary = answer.wait().unwrap().remove(0);
                late += summary.preemptions;
                assert_eq!(&summary.tokens, expected, "{format} {exact} {tail:?}");
            }
            println!("{format} {exact} {tail:?}: {late} preemptions\n{}", tight.budget());
            assert!(late > 0, "{format} {exact} {tail:?}\n{}", tight.budget());
            assert_idle(&tight);
        }
    }
}

/// The same for an answer that began on pages of another request, which its prompt read sealed.
#[test]
fn what_began_on_a_hit_is_computed_again_after_it() {
    let model = model_with("qwen3", 4096, true, |_| ());
    for (format, pages) in [("int2", 72), ("fp8", 100)] {
        for tail in [TailPolicy::Recompute, TailPolicy::Sealed] {
            let with = |pages| {
                let options = engine_options(&model, format, Some(pages));
                let mut options = EngineOptions { context: Some(2048), ..options };
                (options.kv.windows.recent, options.kv.tail) = (1, tail);
                options
            };
            let common = prompt(99, 320);
            let young = || Request::new([common.clone(), prompt(1, 30)].concat(), greedy(1650));
            let begin = |engine: &TestEngine| ask(engine, &common, &greedy(1));
            let idle = TestEngine::new(model.clone(), &with(400)).unwrap();
            begin(&idle);
            let expected = idle.answer(young()).unwrap().wait().unwrap().remove(0);
            assert_eq!(expected.cached_tokens, 320, "{format} {tail:?}");
            let tight = TestEngine::new(model.clone(), &with(pages)).unwrap();
            begin(&tight);
            let old = |seed: usize| Request::new(prompt(seed, 600), greedy(1400));
            let old: Vec<Answer> = (2..5).map(|seed| tight.answer(old(seed)).unwrap()).collect();
            let summary = tight.answer(young()).unwrap().wait().unwrap().remove(0);
            println!("{format} {tail:?}: {} preemptions\n{}", summary.preemptions, tight.budget());
            assert_eq!(summary.cached_tokens, expected.cached_tokens, "{format} {tail:?}");
            assert!(summary.preemptions > 0, "{format} {tail:?}\n{}", tight.budget());
            assert_eq!(summary.tokens, expected.tokens, "{format} {tail:?}");
            old.into_iter().for_each(|old| assert_eq!(old.wait().unwrap()[0].tokens.len(), 1400));
            assert_idle(&tight);
        }
    }
}
