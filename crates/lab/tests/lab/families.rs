//! Every family's tiny checkpoint is calibrated and read at two bits: models where only part of a head rotates, heads are
//! normed together or have learned sinks, layers do not rotate at all, logits or embeddings have factors, or RoPE has
//! factors for long contexts.

use std::ops::ControlFlow;
use std::sync::Arc;

use oscar_codec::{PageLayout, Windows};
use oscar_engine::{Engine, EngineOptions, GenerateOptions, KvOptions, Request, Serve};
use oscar_kernels::cpu::CpuBackend;
use oscar_lab::calibrate::{Calibration, Corpus, calibrate};
use oscar_lab::eval::bit_allocation::allocate_bits;
use oscar_lab::eval::codecs::CodecSource;
use oscar_lab::eval::divergence::CodecComparison;
use oscar_lab::eval::history::Reading;
use oscar_model::LoadedModel;
use oscar_random::Random;
use oscar_rotations::codec::int2_codec;
use oscar_rotations::{
    CacheOptions, CachePlan, CacheType, Certificate, Int2Options, ModelIdentity, Notice, RotationFile,
    RotationFiles, RotationHeader, RotationSource, safetensors, verify,
};
use oscar_testing::{tiny_global_model, tiny_model_with};

const WINDOWS: Windows = Windows { sink: 16, recent: 32 };

type Model = Arc<LoadedModel<CpuBackend>>;

fn tokens(seed: u64, count: usize) -> Vec<u32> {
    let mut random = Random::new(seed);
    (0..count).map(|_| random.below(110) as u32 + 3).collect()
}

fn calibrated(name: &str, model: &Model) -> (RotationFile, Certificate) {
    let config = model.config();
    let header = RotationHeader {
        model: name.into(),
        kv_heads: config.kv_heads,
        head_dim: config.head_dim,
        ..RotationHeader::default()
    };
    let corpus = Corpus {
        sequences: (0..4).map(|seed| tokens(seed, 256)).collect(),
        held_out: tokens(9, 256),
        hash: "test".into(),
    };
    let calibration = Calibration { windows: WINDOWS, ..Calibration::new(header) };
    let (mut file, certificate) =
        calibrate(model, &corpus, &calibration, None, |_| ControlFlow::Continue(())).unwrap();
    let global = config.layers - config.sliding_layers().len();
    assert_eq!(certificate.heads.len(), global * config.kv_heads, "{name}");
    let findings = verify::verify(&file);
    assert!(findings.is_sound(), "{name}: {findings:?}");
    assert!(certificate.mean_output_error < 1.0, "{name}: {}", certificate.mean_output_error);
    file.fill_sliding_layers(&config.sliding_layers());
    (file, certificate)
}

/// Mean KL of the model with a cache from the model with an exact one.
fn divergences<const N: usize>(model: &Model, file: &RotationFile, codecs: [&str; N]) -> [f64; N] {
    let source = CodecSource::new(model, Some(file));
    let mut comparison = CodecComparison::new(model.clone(), 512).unwrap();
    comparison.set_text(&tokens(10, 400), 0, 64, |_| ()).unwrap();
    codecs.map(|codec| {
        let codec = source.build(codec).unwrap();
        let reading = Reading { codec: &*codec, windows: WINDOWS, chunk: None };
        comparison.measure(reading, |_| ()).unwrap().mean_kl()
    })
}

/// A greedy answer of the engine to a prompt of several pages, with the log-probabilities of its tokens.
fn answered(model: &Model, kv: KvOptions) -> (Vec<u32>, Vec<f32>) {
    let engine =
        Engine::new(model.clone(), &EngineOptions { kv, deterministic: true, ..EngineOptions::default() })
            .unwrap();
    let options = GenerateOptions {
        max_tokens: Some(80),
        ignore_end: true,
        logprobs: Some(0),
        ..GenerateOptions::default()
    };
    let summary = engine.answer(Request::new(tokens(11, 400), options)).unwrap().wait().unwrap().remove(0);
    (summary.tokens, summary.logprobs)
}

/// Calibrates a model, reads a text with its codec in the lab, and has the engine serve it.
fn check(name: &str, model: &Model) {
    let (file, _) = calibrated(name, model);
    let [int4, int2, naive] = divergences(model, &file, ["int4", "int2", "naive-int2"]);
    println!("{name}: KL int4 {int4:.4}, int2 {int2:.4}, without rotations {naive:.4}");
    // Random weights have no outliers for rotations to take care of; wrong ones would be much worse than none.
    assert!(int4 < 0.2 * int2 && int2 < 1.25 * naive, "{name}: {int4} {int2} {naive}");

    let codec = int2_codec("int2", &file, model.config().kv_geometry(), &Int2Options::of(model)).unwrap();
    let exact = answered(model, KvOptions::default());
    let served = answered(model, KvOptions { codec: Some(Arc::new(codec)), ..KvOptions::default() });
    assert_eq!((exact.0.len(), served.0.len()), (80, 80), "{name}");
    assert!(exact.1 != served.1, "{name}: nothing was read at two bits");
    assert!(served.1.iter().all(|logprob| logprob.is_finite()), "{name}");
}

#[test]
fn mixtures_and_models_with_windows_are_calibrated_and_served_at_two_bits() {
    for name in ["qwen3-moe", "glm4-moe", "minimax-m2", "gpt-oss-mxfp4", "gemma3"] {
        let backend = Arc::new(CpuBackend::new(2).unwrap().deterministic());
        check(name, &tiny_model_with(name, 512, backend, |_| ()));
    }
}

#[test]
fn dense_families_are_calibrated_and_served_at_two_bits() {
    for name in ["llama3.2", "qwen2-tied", "qwen3", "mistral", "smollm3", "granite", "phi3"] {
        check(name, &tiny_global_model(name, 512, Arc::new(CpuBackend::new(2).unwrap().deterministic())));
    }
}

/// Widths are chosen within the bytes of the default, and layers of different widths are served.
#[test]
fn layers_have_the_bits_that_they_need() {
    let name = "llama3.2-wide";
    let model = tiny_global_model(name, 512, Arc::new(CpuBackend::new(2).unwrap().deterministic()));
    let (file, _) = calibrated(name, &model);
    let (choosing, checking) = (tokens(20, 400), tokens(21, 400));
    let mut last = (0, usize::MAX);
    let mut allocate =
        |texts| allocate_bits(&model, &file, texts, WINDOWS, |done, all| last = (done, all)).unwrap();
    let allocation = allocate([&choosing, &checking]).expect("heads of 64 channels have a choice");
    assert_eq!(allocate([&choosing, &checking[..100]]), None, "too short");
    assert_eq!(last.0, last.1);
    let layers = model.config().layers;
    let bits: u32 = allocation.widths.values().map(|widths| widths.sum()).sum();
    assert!(bits <= 8 * layers as u32, "{allocation:?}");
    let relative = |part: usize| allocation.chosen[part] / allocation.default[part];
    assert!(relative(0) + relative(1) <= 2.0, "{allocation:?}");
    assert_eq!(allocation.widths.is_empty(), allocation.chosen == allocation.default, "{allocation:?}");

    let geometry = model.config().kv_geometry();
    let uniform = int2_codec("int2", &file, geometry, &Int2Options::of(&model)).unwrap();
    let widths = |layer: usize| ["4/4/2/2", "4/0/0/0"][layer % 2].parse().unwrap();
    let mixed = RotationFile { widths: (0..layers).map(|layer| (layer, widths(layer))).collect(), ..file };
    let [int2, default, high] = divergences(&model, &mixed, ["int2", "int2:widths=4/2/1/1", "high"]);
    assert!(int2 != default && high < 0.5 * int2, "{int2} {default} {high}");
    let codec = int2_codec("int2", &mixed, geometry, &Int2Options::of(&model)).unwrap();
    assert_eq!(codec.head_bytes(0) - uniform.head_bytes(0), 512);
    assert_eq!(uniform.head_bytes(1) - codec.head_bytes(1), 512);
    let served = |codec| answered(&model, KvOptions { codec: Some(Arc::new(codec)), ..KvOptions::default() });
    let (uniform, mixed) = (served(uniform), served(codec));
    assert!(mixed.1 != uniform.1 && mixed.1.iter().all(|logprob| logprob.is_finite()));
}

/// Files of version 2 have no bands. They are used if they are named, and the user is told what is better.
#[test]
fn old_rotation_files_are_named_as_such() {
    let model = tiny_global_model("llama3.2", 512, Arc::new(CpuBackend::new(2).unwrap()));
    let (mut file, _) = calibrated("llama3.2", &model);
    file.header.model_fingerprint = Some("ab".repeat(32));
    let identity = ModelIdentity {
        name: "tiny".to_owned(),
        model_fingerprint: "ab".repeat(32),
        weight_fingerprint: "cd".repeat(32),
    };
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("old.safetensors");
    let settled = |dtype| {
        let files = RotationFiles::Own(path.clone());
        let rotations = RotationSource { files, force: false };
        let options = CacheOptions { dtype, rotations, ..CacheOptions::default() };
        CachePlan::settle(&model, &identity, &options).unwrap()
    };
    safetensors::write(&path, &file).unwrap();
    let plan = settled(CacheType::Int2);
    assert!(matches!(plan.codec.unwrap().layout(0), PageLayout::Banded(_)));
    assert_eq!(plan.notices, []);

    let layers = file.heads.iter_mut().flat_map(|heads| heads.values_mut());
    layers.for_each(|layer| (layer.keys.bands, layer.keys.unturned_means) = (None, None));
    safetensors::write(&path, &file).unwrap();
    let bytes = std::fs::read(&path).unwrap();
    let at = bytes.windows(13).position(|bytes| bytes == b"\"version\":\"4\"").unwrap();
    std::fs::write(&path, [&bytes[..at], b"\"version\":\"2\"", &bytes[at + 13..]].concat()).unwrap();
    let plan = settled(CacheType::Int2);
    assert!(matches!(plan.codec.unwrap().layout(0), PageLayout::Codes(_)));
    let [notice @ Notice::OldRotations { version: 2, used: None, .. }] = &plan.notices[..] else {
        panic!("{:?}", plan.notices)
    };
    assert!(notice.to_string().contains("`oscar calibrate tiny`"), "{notice}");
    // Nothing is lost where bands are not asked for.
    assert_eq!(settled(CacheType::Int4).notices, []);
}
