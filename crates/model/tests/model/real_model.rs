//! Real models against outside references: SmolLM2-135M-Instruct on 128 tokens of Moby Dick, and Gemma-3-270M on 640 of
//! Alice in Wonderland, of which the last 128 lie beyond its sliding windows.
//!
//! The fixtures (made by `tools/exact_logits.py`) hold the most likely tokens of each position by float32 arithmetic
//! on the dequantised weights, and by llama.cpp, which rounds activations to 8 bits. A test runs when its model is in the
//! cache directory (`oscar pull smollm2`), and says so when it is not.

use std::path::Path;
use std::sync::Arc;

use oscar_codec::{ExactSlot, PAGE_TOKENS};
use oscar_kernels::Backend;
use oscar_kernels::backend::{Batch, SequenceRows};
use oscar_kernels::cpu::CpuBackend;
use oscar_kernels::cpu::isa::Isa;
use oscar_model::source::{FetchPolicy, Silent, resolve};
use oscar_model::{Model, ModelFiles};
use serde::Deserialize;

/// Most likely tokens of a position with their log-probabilities, best first.
type Top = Vec<(u32, f64)>;

#[derive(Deserialize)]
struct Reference {
    input_ids: Vec<u32>,
    exact: Vec<Top>,
    #[serde(default)]
    llamacpp: Vec<Top>,
}

fn reference(name: &str) -> Reference {
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name);
    serde_json::from_str(&std::fs::read_to_string(fixture).unwrap()).unwrap()
}

#[test]
fn smollm2_agrees_with_exact_arithmetic_and_with_llamacpp() {
    let Ok(path) = resolve("smollm2", FetchPolicy::Never, &Silent) else {
        oscar_testing::skipped("smollm2 is not in the cache directory; `oscar pull smollm2` fetches it");
        return;
    };
    let reference = reference("smollm2_reference.json");
    let files = ModelFiles::open(&path).unwrap();
    for isa in Isa::available().filter(|&isa| isa != Isa::Scalar) {
        let model = files.load_model(Arc::new(CpuBackend::with_isa(2, isa))).unwrap();
        let ours = log_probabilities(&model, &reference);
        let (agree, gap) = compare(&ours, &reference.exact);
        println!("{isa}: exact: top-1 {agree:.3}, log-probability gap {gap:.4}");
        assert!(agree >= 0.98 && gap < 0.02, "{isa} against exact arithmetic: {agree} {gap}");
        let (agree, gap) = compare(&ours, &reference.llamacpp);
        println!("{isa}: llama.cpp: top-1 {agree:.3}, log-probability gap {gap:.4}");
        // As close as exact arithmetic is; the distance is llama.cpp's rounding of activations to 8 bits.
        let floor = top_agreement(&reference.exact, &reference.llamacpp);
        assert!(agree >= floor - 0.02 && gap < 0.1, "{isa} against llama.cpp: {agree} of {floor}, {gap}");
    }
}

#[test]
fn gemma_agrees_with_exact_arithmetic_beyond_its_windows() {
    let Ok(path) = resolve("gemma-3-270m", FetchPolicy::Never, &Silent) else {
        oscar_testing::skipped(
            "gemma-3-270m is not in the cache directory; `oscar pull gemma-3-270m` fetches it",
        );
        return;
    };
    let reference = reference("gemma_reference.json");
    let files = ModelFiles::open(&path).unwrap();
    assert_eq!(files.config().window(0), Some(512));
    for isa in Isa::available().filter(|&isa| isa != Isa::Scalar) {
        let model = files.load_model(Arc::new(CpuBackend::with_isa(2, isa))).unwrap();
        let (agree, gap) = compare(&log_probabilities(&model, &reference), &reference.exact);
        println!("{isa}: exact: top-1 {agree:.3}, log-probability gap {gap:.4}");
        assert!(agree >= 0.98 && gap < 0.03, "{isa} against exact arithmetic: {agree} {gap}");
    }
}

/// Log-probabilities of the positions that the reference knows, the last ones.
fn log_probabilities(model: &Model<CpuBackend>, reference: &Reference) -> Vec<Vec<f64>> {
    let (tokens, known) = (&reference.input_ids[..], reference.exact.len());
    let pages = tokens.len().div_ceil(PAGE_TOKENS);
    let slots = ExactSlot::first(pages);
    let mut cache = model.cache(pages + 1).unwrap();
    let mut activations = model.activations(tokens.len(), known).unwrap();
    let rows = SequenceRows::exact(0, tokens.len(), &slots);
    let last: Vec<usize> = (tokens.len() - known..tokens.len()).collect();
    model.forward(&Batch { tokens, sequences: &[rows] }, &last, &mut cache, &mut activations).unwrap();
    let logits = model.backend().read(activations.logits(), 0..known).unwrap();
    let normalise = |row: &[f32]| {
        let largest = f64::from(row.iter().copied().fold(f32::NEG_INFINITY, f32::max));
        let total: f64 = row.iter().map(|&logit| (f64::from(logit) - largest).exp()).sum();
        row.iter().map(|&logit| f64::from(logit) - largest - total.ln()).collect()
    };
    logits.chunks(model.config().vocab_size).map(normalise).collect()
}

/// Share of positions in which two references have the same most likely token.
fn top_agreement(a: &[Top], b: &[Top]) -> f64 {
    a.iter().zip(b).filter(|(a, b)| a[0].0 == b[0].0).count() as f64 / a.len() as f64
}

/// Share of positions with the same most likely token, and mean difference of its log-probability.
fn compare(ours: &[Vec<f64>], reference: &[Top]) -> (f64, f64) {
    assert_eq!(ours.len(), reference.len());
    let (mut agree, mut gap) = (0, 0.0);
    for (ours, top) in ours.iter().zip(reference) {
        let best = (0..ours.len()).max_by(|&a, &b| ours[a].total_cmp(&ours[b])).unwrap();
        agree += usize::from(best == top[0].0 as usize);
        gap += (ours[top[0].0 as usize] - top[0].1).abs();
    }
    (agree as f64 / ours.len() as f64, gap / ours.len() as f64)
}
