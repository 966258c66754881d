//! Models of which some layers see a sliding window and keep no history, with learned sinks and without.

use std::collections::HashSet;

use oscar_codec::{ExactSlot, PAGE_TOKENS};
use oscar_engine::{Answer, EngineOptions, GenerateOptions, KvOptions, Request, Serve, Summary};
use oscar_kernels::backend::{Batch, Sampling, SequenceRows};

use crate::support::*;

/// Windows of less than a page, of two pages and a bit, and of several.
const WINDOWS: [usize; 3] = [40, 130, 300];

/// Caches of two bits: plain, in bands, and with means of keys and values that are not zero.
const SEALED: [&str; 3] = ["int2", "band", "centred"];

/// A drawn answer and the log-probabilities of its tokens. Greedy answers of tiny models say one thing again and again, whatever a
/// cache holds; these depend on every bit of the logits.
fn drawn(engine: &TestEngine, prompt: &[u32], tokens: usize, seed: usize) -> Summary {
    ask(engine, prompt, &drawing(tokens, seed))
}

fn drawing(tokens: usize, seed: usize) -> GenerateOptions {
    let mut options = GenerateOptions { logprobs: Some(0), ..seeded(tokens, seed as u64) };
    (options.sampling.temperature, options.sampling.top_p) = (20.0, 1.0);
    options
}

/// What must be the same to the bit.
fn said(summary: &Summary) -> (&[u32], &[f32]) {
    (&summary.tokens, &summary.logprobs)
}

/// Every model with every window.
fn models() -> impl Iterator<Item = (&'static str, usize)> {
    SLIDING.into_iter().flat_map(|name| WINDOWS.map(|window| (name, window)))
}

/// The greedy answer of the forward pass alone, over bf16 pages of the whole sequence.
fn plain_answer(model: &TestModel, prompt: &[u32], tokens: usize) -> Vec<u32> {
    let forward = model.model();
    let pages = (prompt.len() + tokens).div_ceil(PAGE_TOKENS);
    let (mut cache, slots) = (forward.cache(pages + 1).unwrap(), ExactSlot::first(pages));
    let mut activations = forward.activations(prompt.len(), 1).unwrap();
    let (mut answer, mut next, mut start) = (Vec::new(), prompt.to_vec(), 0);
    while answer.len() < tokens {
        let rows = SequenceRows::exact(start, next.len(), &slots);
        let batch = Batch { tokens: &next, sequences: &[rows] };
        forward.forward(&batch, &[next.len() - 1], &mut cache, &mut activations).unwrap();
        let vocabulary = model.tokenizer().vocab_size();
        let settings = [Sampling { vocabulary, ..Sampling::default() }];
        let drawn = oscar_kernels::Backend::sample(&**forward.backend(), activations.logits(), &settings);
        let token = drawn.unwrap().remove(0).unwrap().token;
        start += next.len();
        next = vec![token];
        answer.push(token);
    }
    answer
}

#[test]
fn an_answer_is_that_of_a_cache_that_keeps_everything() {
    for (name, window) in models() {
        let model = sliding_model(name, window);
        let engine = TestEngine::new(model.clone(), &fixed_options(&model, "bf16", None)).unwrap();
        for (seed, length) in [(1, 7), (2, 100), (3, 333), (4, 900)] {
            let prompt = prompt(seed, length);
            let answer = ask(&engine, &prompt, &greedy(150)).tokens;
            assert_eq!(
                answer,
                plain_answer(&model, &prompt, 150),
                "{name}, window {window}, {length} tokens"
            );
        }
        assert_idle(&engine);
    }
}

/// Past several windows, with a sealed history: what a prompt and an answer read does not depend on how a prompt was cut, down to
/// single tokens.
#[test]
fn pieces_of_a_prompt_read_what_single_tokens_read() {
    for (name, window) in models() {
        let model = sliding_model(name, window);
        for format in SEALED {
            let options = EngineOptions { context: Some(2048), ..fixed_options(&model, format, None) };
            let engine = |prefill_chunk| {
                let options = EngineOptions { prefill_chunk, ..options.clone() };
                TestEngine::new(model.clone(), &options).unwrap()
            };
            let prompt = prompt(window, 4 * window.max(64) + 5);
            let whole = drawn(&engine(2048), &prompt, 200, 3);
            assert!(HashSet::<&u32>::from_iter(&whole.tokens).len() > 20, "{name}: {whole:?}");
            for chunk in [1, 48, 64, 77] {
                let cut = drawn(&engine(chunk), &prompt, 200, 3);
                assert_eq!(said(&cut), said(&whole), "{name}, window {window}, {format}, chunks of {chunk}");
            }
        }
    }
}

/// A prompt that leaves an earlier conversation in the middle: at the end of a turn, inside a page, inside a window.
#[test]
fn a_branch_of_a_conversation_is_the_same_with_and_without_the_tree() {
    for name in SLIDING {
        let model = sliding_model(name, 130);
        for format in SEALED {
            let options = EngineOptions { context: Some(2048), ..fixed_options(&model, format, Some(200)) };
            let engine = TestEngine::new(model.clone(), &options).unwrap();
            let kv = KvOptions { prefix_tree: false, ..options.kv.clone() };
            let cold = TestEngine::new(model.clone(), &EngineOptions { kv, ..options }).unwrap();
            let (mut history, mut ends) = (prompt(7, 150), Vec::new());
            for turn in 0..5 {
                history.extend(drawn(&engine, &history, 80, turn).tokens);
                ends.push(history.len());
                history.extend(prompt(turn + 40, 50));
            }
            let mut cached = 0;
            let places = [ends[0], ends[2], ends[2] + 64, ends[3] - 70, ends[4] - 1];
            for (seed, place) in places.into_iter().enumerate() {
                let branch = [&history[..place], &prompt(seed + 90, 45)].concat();
                let summary = drawn(&engine, &branch, 90, seed);
                cached += summary.cached_tokens;
                let expected = drawn(&cold, &branch, 90, seed);
                assert_eq!(said(&summary), said(&expected), "{name}, {format}, from token {place}");
            }
            assert!(cached > 500, "{name}, {format}: {cached} tokens found");
            assert_idle(&engine);
        }
    }
}

/// Memory for a part of what runs: answers lose their pages and are computed again, windows and all.
#[test]
fn answers_that_lost_their_pages_are_what_they_were() {
    for name in SLIDING {
        let model = sliding_model(name, 130);
        for format in SEALED {
            let with =
                |pages| EngineOptions { context: Some(1024), ..fixed_options(&model, format, Some(pages)) };
            let roomy = TestEngine::new(model.clone(), &with(400)).unwrap();
            let tight = TestEngine::new(model.clone(), &with(30)).unwrap();
            let request = |seed: usize| Request::new(prompt(seed, 120 + 60 * seed), drawing(500, seed));
            let answer = |engine: &TestEngine, seed| engine.answer(request(seed)).unwrap();
            let expected: Vec<Summary> =
                (0..6).map(|seed| answer(&roomy, seed).wait().unwrap().remove(0)).collect();
            let running: Vec<Answer> = (0..6).map(|seed| answer(&tight, seed)).collect();
            for (seed, answer) in running.into_iter().enumerate() {
                let summary = answer.wait().unwrap().remove(0);
                assert_eq!(said(&summary), said(&expected[seed]), "{name}, {format}, request {seed}");
            }
            let stats = tight.fresh_stats();
            assert!(stats.preemptions > 0, "{name}, {format}: {stats:?}\n{}", tight.budget());
            assert_idle(&tight);
        }
    }
}

#[test]
fn layers_with_a_window_take_no_memory_for_history() {
    let model = sliding_model("gemma3", 300);
    let context = Some(4096);
    let budget = |format: &str| {
        let options = EngineOptions { context, ..engine_options(&model, format, None) };
        TestEngine::new(model.clone(), &options).unwrap().budget().clone()
    };
    let bf16 = budget("bf16");
    // One layer of four keeps history. The windows are five pages and the one that is being filled.
    assert_eq!(bf16.sealed.page_bytes * 4, bf16.exact.page_bytes);
    assert_eq!(bf16.bytes_at(4096), 6 * bf16.exact.page_bytes + 58 * bf16.sealed.page_bytes);
    assert!(bf16.exact.pages < 20, "{} pages", bf16.exact.pages);
    assert_eq!(bf16.history_bits(), 16.0);
    let int4 = budget("int4");
    assert_eq!((int4.windows.sink, int4.windows.recent), (1, 5));
    assert!(int4.sealed.page_bytes * 3 < bf16.sealed.page_bytes);
}

#[test]
fn turns_of_a_conversation_are_the_same_with_and_without_the_cache() {
    for (name, format) in SLIDING.into_iter().flat_map(|name| FORMATS.map(|format| (name, format))) {
        let model = sliding_model(name, 130);
        // With little memory the windows of older turns are lost, and what depends on them is computed again.
        for pages in [None, Some(31)] {
            let options = EngineOptions { context: Some(1024), ..fixed_options(&model, format, pages) };
            let engine = TestEngine::new(model.clone(), &options).unwrap();
            let kv = KvOptions { prefix_tree: false, memory: None, ..options.kv.clone() };
            let cold = TestEngine::new(model.clone(), &EngineOptions { kv, ..options }).unwrap();
            let mut conversations = [prompt(5, 90), prompt(6, 260)];
            let mut cached = 0;
            for turn in 0..10 {
                let history = &mut conversations[turn % 2];
                let summary = drawn(&engine, history, 40, turn);
                let expected = drawn(&cold, history, 40, turn);
                assert_eq!(said(&summary), said(&expected), "{name}, {format}, turn {turn}");
                cached += summary.cached_tokens;
                history.extend(&summary.tokens);
                history.extend(prompt(turn + 20, 30));
            }
            assert!(cached > 500, "{name}, {format}, {pages:?}: {cached} tokens found");
            assert_idle(&engine);
            assert_idle(&cold);
        }
    }
}
