//! The tiny checkpoints on a card, against the logits of the standard Python library.

use std::path::Path;
use std::sync::Arc;

use oscar_kernels::cuda::{CudaBackend, Device};

use crate::logits::{distance, expected, fixtures, open, run};

/// How far `transformers` itself is from its logits in f32 when it computes in bf16. Products on a card take activations in bf16
/// or f16, so this is what may be expected of them.
fn bf16_distance(folder: &Path) -> f64 {
    let notes: serde_json::Value =
        serde_json::from_slice(&std::fs::read(folder.join("fixture.json")).unwrap()).unwrap();
    notes["bf16_distance"].as_f64().expect("a fixture that a card can run says how far bf16 is off")
}

#[test]
fn logits_agree_with_the_python_library() {
    let kernels = std::env::temp_dir().join("oscar-cuda-kernels");
    let device = Device::open(0, Some(kernels)).expect("a card for the suite that was built for one");
    let (mut compared, mut far) = (0, Vec::new());
    for folder in fixtures() {
        let name = folder.file_name().unwrap().to_string_lossy().into_owned();
        let expected = expected(&folder);
        let tokens = expected.tokens.len();
        for deterministic in [false, true] {
            let backend = CudaBackend::new(device.clone(), deterministic).unwrap();
            let model = open(&folder).load_model(Arc::new(backend)).unwrap();
            let head_dim = model.config().head_dim;
            if !head_dim.is_multiple_of(32) {
                oscar_testing::skipped(&format!("{name} on a card: heads of {head_dim} channels"));
                break;
            }
            let whole = run(&model, &expected.tokens, tokens);
            let mut check = |what: &str, distance: f64, limit: f64| {
                println!("{name}, deterministic {deterministic}, {what}: {distance:.2e}");
                if distance.is_nan() || distance >= limit {
                    far.push(format!("{name}, deterministic {deterministic}, {what}: {distance:.2e}"));
                }
            };
            let limit = bf16_distance(&folder);
            check("one pass", distance(&whole, &expected.logits, tokens), limit);
            for chunk in [1, 5, 64, 100] {
                let cut = run(&model, &expected.tokens, chunk);
                // Prompts, single tokens and rows in between take different kernels.
                let limit = if deterministic { f64::MIN_POSITIVE } else { limit };
                check(&format!("chunks of {chunk}"), distance(&cut, &whole, tokens), limit);
            }
            compared += 1;
        }
    }
    assert!(far.is_empty(), "{far:#?}");
    assert!(compared >= 36, "{compared} models compared");
}
