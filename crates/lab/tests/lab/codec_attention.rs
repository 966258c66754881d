//! A codec behind the engine answers as the evaluator does with the same codec.

use std::sync::Arc;

use oscar_codec::{KvGeometry, Windows};
use oscar_engine::{Engine, EngineOptions, GenerateOptions, KvOptions, Request, Serve};
use oscar_kernels::cpu::CpuBackend;
use oscar_lab::eval::codec_attention::CodecAttention;
use oscar_lab::eval::codecs::CodecSource;
use oscar_lab::eval::evaluator::Evaluator;
use oscar_lab::eval::history::Reading;
use oscar_model::LoadedModel;
use oscar_random::Random;
use oscar_testing::tiny_model;

const WINDOWS: Windows = Windows { sink: 8, recent: 16 };

fn model() -> Arc<LoadedModel<CpuBackend>> {
    tiny_model(512, Arc::new(CpuBackend::new(2).expect("threads").deterministic()))
}

fn engine(model: &Arc<LoadedModel<CpuBackend>>, codec: &str) -> Engine<CpuBackend> {
    let options = EngineOptions {
        max_running: 1,
        // Prompts take several passes.
        prefill_chunk: 100,
        kv: KvOptions { prefix_tree: false, ..KvOptions::default() },
        ..EngineOptions::default()
    };
    let codec = source(model.config().kv_geometry()).build(codec).expect("codec");
    Engine::with_attention(Arc::clone(model), &options, |slots| {
        CodecAttention::new(model, codec, WINDOWS, slots)
    })
    .expect("engine")
}

fn source(geometry: KvGeometry) -> CodecSource<'static> {
    CodecSource::of_shape(geometry)
}

fn prompt(seed: u64, tokens: usize) -> Vec<u32> {
    let mut random = Random::new(seed);
    (0..tokens).map(|_| random.below(100) as u32).collect()
}

/// The lab's own path: an exact prefix, then the last token and the answer through the codec.
fn expected(model: &Arc<LoadedModel<CpuBackend>>, codec: &str, prompt: &[u32], tokens: usize) -> Vec<u32> {
    let codec = source(model.config().kv_geometry()).build(codec).expect("codec");
    let mut evaluator = Evaluator::new(Arc::clone(model), 512).expect("evaluator");
    let (last, prefix) = prompt.split_last().expect("a prompt");
    evaluator.prefill(prefix, |_| ()).expect("prefill");
    let reading = Reading { codec: &*codec, windows: WINDOWS, chunk: None };
    evaluator.answer(&[*last], Some(reading), tokens).expect("answer")
}

#[test]
fn the_engine_answers_as_the_evaluator_does() {
    let model = model();
    let mut differ_from_exact = 0;
    for codec in ["bf16", "kivi2", "naive-int2", "int4"] {
        let engine = engine(&model, codec);
        // One after the other: a history must not be taken for that of the next request.
        for (seed, tokens) in [(1, 260), (2, 40), (3, 101), (4, 300), (4, 300)] {
            let prompt = prompt(seed, tokens);
            let options = GenerateOptions { max_tokens: Some(60), ..GenerateOptions::default() };
            let answer = engine.answer(Request::new(prompt.clone(), options)).expect("answer");
            let summary = answer.wait().expect("summary").remove(0);
            let mut tokens = summary.tokens;
            tokens.retain(|&token| !model.is_end(token));
            assert_eq!(tokens, expected(&model, codec, &prompt, 60), "{codec}, prompt {seed}");
            differ_from_exact += usize::from(tokens != expected(&model, "bf16", &prompt, 60));
        }
    }
    assert!(differ_from_exact > 0, "no codec changed an answer, so this test sees nothing");
}

#[test]
fn options_that_share_pages_are_refused() {
    let model = model();
    let open = |options: EngineOptions| {
        Engine::with_attention(Arc::clone(&model), &options, |slots| {
            let codec = source(model.config().kv_geometry()).build("bf16").expect("codec");
            CodecAttention::new(&model, codec, WINDOWS, slots)
        })
        .map(|_| ())
        .map_err(|error| error.to_string())
    };
    let kv = KvOptions { prefix_tree: false, ..KvOptions::default() };
    assert!(open(EngineOptions { max_running: 1, kv: kv.clone(), ..EngineOptions::default() }).is_ok());
    let error =
        open(EngineOptions { max_running: 2, kv, ..EngineOptions::default() }).expect_err("two at a time");
    assert!(error.contains("max_running"), "{error}");
    let error =
        open(EngineOptions { max_running: 1, ..EngineOptions::default() }).expect_err("a prefix tree");
    assert!(error.contains("prefix_tree"), "{error}");
}
