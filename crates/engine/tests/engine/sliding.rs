//! Models of which some layers see a sliding window and keep no history.

use oscar_codec::{ExactSlot, PAGE_TOKENS};
use oscar_engine::{EngineOptions, KvOptions};
use oscar_kernels::backend::{Batch, Sampling, SequenceRows};

use crate::support::*;

/// Windows of less than a page, of two pages and a bit, and of several.
const WINDOWS: [usize; 3] = [40, 130, 300];

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
    for window in WINDOWS {
        let model = sliding_model(window);
        let engine = TestEngine::new(model.clone(), &fixed_options(&model, "bf16", None)).unwrap();
        for (seed, length) in [(1, 7), (2, 100), (3, 333), (4, 900)] {
            let prompt = prompt(seed, length);
            let answer = ask(&engine, &prompt, &greedy(150)).tokens;
            assert_eq!(answer, plain_answer(&model, &prompt, 150), "window {window}, {length} tokens");
        }
        assert_idle(&engine);
    }
}

#[test]
fn layers_with_a_window_take_no_memory_for_history() {
    let model = sliding_model(300);
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
    let model = sliding_model(130);
    for format in FORMATS {
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
                let summary = ask(&engine, history, &greedy(40));
                assert_eq!(summary.tokens, ask(&cold, history, &greedy(40)).tokens, "{format}, turn {turn}");
                cached += summary.cached_tokens;
                history.extend(&summary.tokens);
                history.extend(prompt(turn + 20, 30));
            }
            assert!(cached > 500, "{format}, {pages:?}: {cached} tokens found");
            assert_idle(&engine);
            assert_idle(&cold);
        }
    }
}
