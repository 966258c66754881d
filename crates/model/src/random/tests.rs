use oscar_codec::ExactSlot;
use oscar_kernels::Backend;
use oscar_kernels::backend::{Batch, SequenceRows};
use oscar_kernels::cpu::CpuBackend;

use super::*;

fn runs(files: &ModelFiles) {
    assert_eq!(files.tokenizer().unwrap().encode("ab c", false).unwrap().len(), 4);
    let model = files.load_model(Arc::new(CpuBackend::new(1).unwrap())).unwrap();
    let mut cache = model.cache(2).unwrap();
    let mut activations = model.activations(3, 1).unwrap();
    let pages = ExactSlot::first(1);
    let sequences = [SequenceRows::exact(0, 3, &pages)];
    let batch = Batch { tokens: &[1, 2, 3], sequences: &sequences };
    model.forward(&batch, &[2], &mut cache, &mut activations).unwrap();
    let logits = model.backend().read(activations.logits(), 0..1).unwrap();
    assert!(logits.iter().all(|logit| logit.is_finite()));
    assert!(logits.iter().any(|logit| logit.abs() > 1e-3), "there is more than nothing");
}

#[test]
fn random_models_run_and_say_something_finite() {
    let small = Geometry { hidden: 256, inner: 512, layers: 2, q_heads: 4, kv_heads: 2, ..GEOMETRIES[0] };
    let config = ModelConfig { vocab_size: 512, ..small.config() };
    let mixtures = MIXTURES.iter().map(|mixture| mixture.small().config().unwrap());
    for config in [config].into_iter().chain(mixtures) {
        let plain = ModelConfig { fp8: None, ..config.clone() };
        for dtype in [|_, _| DType::BF16, |_, _| DType::Q8_0, q4_k_m as TypeOf] {
            runs(&Described { config: plain.clone(), dtype }.files("tiny").unwrap());
        }
        for scales in [FP8_BLOCKS, WeightScales::Channel, WeightScales::Tensor] {
            let config = ModelConfig { fp8: Some(scales), ..config.clone() };
            runs(&Described { config, dtype: fp8 }.files("tiny").unwrap());
        }
    }
}

#[test]
fn names_that_are_not_known_are_refused_with_those_that_are() {
    let error = random_model("qwen3-9b").err().unwrap().to_string();
    assert!(error.contains("qwen3-8b"), "{error}");
    assert!(random_model("qwen3-8b:q3_k").is_err());
    assert_eq!(random_model("qwen3-32b").unwrap().config().layers, 64);
    assert!(random_model("glm-4.7-fp8:q8_0").is_err());
    for (name, billions) in
        [("qwen3-30b-a3b", 30.5), ("glm-4.5-air:fp8", 106.8), ("glm-4.7-fp8", 352.8), ("minimax-m2", 228.7)]
    {
        let files = random_model(name).unwrap();
        let scales = |name: &str| name.ends_with("_scale_inv") || name.ends_with("_scale");
        let entries = files.tensors().entries().iter().filter(|entry| !scales(&entry.name));
        let parameters = entries.map(|entry| entry.elements() as f64).sum::<f64>() / 1e9;
        assert!((parameters / billions - 1.0).abs() < 0.01, "{name}: {parameters}");
    }
}
