//! The generate loop on a tiny random model: reproducible, stoppable, and the same with a warm cache.

use std::ops::ControlFlow;
use std::sync::Arc;

use crate::support::{OTHER_FIXTURE, TestEngine, model_with};
use oscar_engine::{
    Engine, EngineError, EngineOptions, FinishReason, GenerateOptions, SamplingOptions, Summary,
};

fn engine(options: &EngineOptions) -> TestEngine {
    Engine::new(model_with(OTHER_FIXTURE, 256, false, |_| ()), options).unwrap()
}

fn prompt(len: usize) -> Vec<u32> {
    (0..len as u32).map(|index| (index * 37 + 11) % 112).collect()
}

fn options(max_tokens: usize) -> GenerateOptions {
    let logprobs = Some(0);
    GenerateOptions { max_tokens: Some(max_tokens), ignore_end: true, logprobs, ..GenerateOptions::default() }
}

fn run(engine: &TestEngine, prompt: &[u32], options: &GenerateOptions) -> (Summary, String) {
    let mut text = String::new();
    let summary = engine
        .generate(prompt, options, |event| {
            text.push_str(event.text().unwrap_or_default());
            ControlFlow::Continue(())
        })
        .unwrap();
    (summary, text)
}

#[test]
fn greedy_answers_repeat_exactly() {
    let first = run(&engine(&EngineOptions::default()), &prompt(50), &options(40)).0;
    let again = engine(&EngineOptions::default());
    for _ in 0..2 {
        again.reset();
        let second = run(&again, &prompt(50), &options(40)).0;
        assert_eq!((&first.tokens, &first.logprobs), (&second.tokens, &second.logprobs));
    }
    assert_eq!((first.tokens.len(), first.finish), (40, FinishReason::Length));
}

#[test]
fn seeded_answers_repeat_and_seeds_differ() {
    let engine = engine(&EngineOptions::default());
    let answer = |seed| {
        engine.reset();
        let sampling = SamplingOptions {
            temperature: 1.0,
            top_p: 0.95,
            top_k: 40,
            min_p: 0.01,
            seed,
            ..SamplingOptions::default()
        };
        run(&engine, &prompt(20), &GenerateOptions { sampling, ..options(30) }).0
    };
    let first = answer(Some(1));
    assert_eq!(first.tokens, answer(Some(1)).tokens);
    assert_ne!(first.tokens, answer(Some(2)).tokens);
    let unseeded = answer(None);
    assert_eq!(unseeded.tokens, answer(Some(unseeded.seed)).tokens);
}

#[test]
fn a_continued_conversation_equals_a_fresh_one() {
    let warm = engine(&EngineOptions::default());
    let mut conversation = prompt(70);
    for turn in 0..4 {
        let cold = engine(&EngineOptions::default());
        let (kept, _) = run(&warm, &conversation, &options(25));
        let (fresh, _) = run(&cold, &conversation, &options(25));
        // The kept keys came from decode steps, the fresh ones from prefill: equal up to rounding, so compare only
        // while the tokens agree and nothing but a near-tie can part them.
        let same = kept.tokens.iter().zip(&fresh.tokens).take_while(|(a, b)| a == b).count();
        assert!(same > 0, "turn {turn}");
        for (kept, fresh) in kept.logprobs.iter().zip(&fresh.logprobs).take(same) {
            assert!((kept - fresh).abs() < 0.05, "turn {turn}: {kept} {fresh}");
        }
        assert_eq!(fresh.cached_tokens, 0);
        if turn > 0 {
            // All of the last turn but its final token, which has no keys yet.
            assert_eq!(kept.cached_tokens, conversation.len() - 5 - 1, "turn {turn}");
        }
        conversation.extend(&kept.tokens);
        conversation.extend([1, 2, 3, 4, 5]);
    }
}

#[test]
fn a_diverging_prompt_keeps_only_what_is_common() {
    let engine = engine(&EngineOptions::default());
    let first = run(&engine, &prompt(100), &options(10)).0;
    let mut other = prompt(100);
    other[90] = 3;
    assert_eq!(run(&engine, &other, &options(10)).0.cached_tokens, 90);
    // The first one is still there, all but the token whose logits are wanted.
    let back = run(&engine, &prompt(100), &options(10)).0;
    assert_eq!((back.cached_tokens, back.tokens), (99, first.tokens));
}

#[test]
fn the_context_is_a_hard_limit() {
    let small = EngineOptions { context: Some(80), ..EngineOptions::default() };
    let engine = engine(&small);
    let error = engine.generate(&prompt(81), &options(1), |_| ControlFlow::Continue(())).unwrap_err();
    assert!(matches!(error, EngineError::PromptTooLong { tokens: 81, context: 80 }), "{error}");
    let summary = run(&engine, &prompt(80), &options(5)).0;
    assert_eq!((summary.tokens.len(), summary.finish), (1, FinishReason::Context));
    let summary = run(&engine, &prompt(70), &options(500)).0;
    assert_eq!((summary.tokens.len(), summary.finish), (10, FinishReason::Context));
}

#[test]
fn bad_requests_leave_the_engine_usable() {
    let engine = engine(&EngineOptions::default());
    let fails = |prompt: &[u32], sampling: SamplingOptions| {
        let options = GenerateOptions { sampling, ..options(4) };
        engine.generate(prompt, &options, |_| ControlFlow::Continue(())).unwrap_err().to_string()
    };
    assert!(fails(&[], SamplingOptions::default()).contains("empty"));
    assert!(fails(&[u32::MAX], SamplingOptions::default()).contains("vocabulary"));
    for temperature in [-1.0, f32::NAN, f32::INFINITY] {
        assert!(fails(&[1], SamplingOptions { temperature, ..Default::default() }).contains("temperature"));
    }
    assert!(fails(&[1], SamplingOptions { top_p: 0.0, ..Default::default() }).contains("top_p"));
    assert!(fails(&[1], SamplingOptions { min_p: 1.5, ..Default::default() }).contains("min_p"));
    assert_eq!(run(&engine, &prompt(10), &options(4)).0.tokens.len(), 4);
}

#[test]
fn the_caller_can_break_off_at_any_event() {
    let engine = engine(&EngineOptions { prefill_chunk: 16, ..EngineOptions::default() });
    let whole = run(&engine, &prompt(60), &options(20)).0;
    for stop_at in 0..10 {
        engine.reset();
        let mut events = 0;
        let summary = engine
            .generate(&prompt(60), &options(20), |_| {
                events += 1;
                if events > stop_at { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
            })
            .unwrap();
        assert_eq!(summary.finish, FinishReason::Cancelled);
        assert_eq!(run(&engine, &prompt(60), &options(20)).0.tokens, whole.tokens, "after {stop_at} events");
    }
}

#[test]
fn stop_texts_end_the_answer_and_are_not_shown() {
    let engine = engine(&EngineOptions::default());
    let (_, whole) = run(&engine, &prompt(30), &options(60));
    let middle: String = whole.chars().skip(20).take(3).collect();
    let (summary, text) =
        run(&engine, &prompt(30), &GenerateOptions { stop: vec![middle.clone()], ..options(60) });
    assert_eq!(summary.finish, FinishReason::Stop);
    assert_eq!(text, whole[..whole.find(&middle).unwrap()]);
}

#[test]
fn zero_tokens_reads_the_prompt_only() {
    let engine = engine(&EngineOptions::default());
    let summary = run(&engine, &prompt(10), &options(0)).0;
    assert!(summary.tokens.is_empty());
    assert_eq!(summary.prompt_tokens, 10);
}

#[test]
fn an_impossible_context_is_an_error() {
    let model = Arc::clone(engine(&EngineOptions::default()).model());
    for context in [0, 1 << 40] {
        let options = EngineOptions { context: Some(context), ..EngineOptions::default() };
        assert!(Engine::new(Arc::clone(&model), &options).is_err(), "{context}");
    }
}
