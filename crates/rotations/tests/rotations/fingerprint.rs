//! Fingerprints: one for every copy of a checkpoint, another for any other model.

use std::fs;
use std::path::Path;

use oscar_model::ModelFiles;
use oscar_model::source::ModelPath;
use oscar_rotations::identity;
use safetensors::Dtype;
use safetensors::tensor::TensorView;

fn model(name: &str) -> ModelFiles {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../model/tests/fixtures/models").join(name);
    let gguf = folder.join("model.gguf");
    let path = if gguf.exists() { ModelPath::Gguf(gguf) } else { ModelPath::Folder(folder) };
    ModelFiles::open(&path).unwrap_or_else(|error| panic!("{name}: {error}"))
}

#[test]
fn fingerprints_tell_models_apart_and_stay() {
    let names = ["llama-head48", "llama-tied", "llama3-rope", "qwen2-tied", "qwen3", "qwen3-tied"];
    let models: Vec<String> =
        names.iter().map(|name| identity::model_fingerprint(&model(name)).expect("fingerprint")).collect();
    let weights: Vec<String> =
        names.iter().map(|name| identity::weight_fingerprint(&model(name)).expect("fingerprint")).collect();
    for i in 0..names.len() {
        assert_eq!(models[i].len(), 64);
        assert_eq!(models[i], identity::model_fingerprint(&model(names[i])).expect("again"));
        for j in 0..i {
            assert_ne!(models[i], models[j], "{} and {}", names[i], names[j]);
            assert_ne!(weights[i], weights[j], "{} and {}", names[i], names[j]);
        }
    }
}

/// A copy of the `qwen3` fixture with some of its tensors changed.
fn changed_model(change: impl Fn(&str, Dtype, &[u8]) -> Option<(Dtype, Vec<u8>)>) -> (String, String) {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../model/tests/fixtures/models/qwen3");
    let folder = tempfile::tempdir().expect("folder");
    for name in ["config.json", "tokenizer.json"] {
        fs::copy(source.join(name), folder.path().join(name)).expect("copy");
    }
    let bytes = fs::read(source.join("model.safetensors")).expect("weights");
    let read = safetensors::SafeTensors::deserialize(&bytes).expect("safetensors");
    let tensors: Vec<(String, Dtype, Vec<usize>, Vec<u8>)> = read
        .iter()
        .map(|(name, tensor)| {
            let (dtype, data) = change(name, tensor.dtype(), tensor.data())
                .unwrap_or_else(|| (tensor.dtype(), tensor.data().to_vec()));
            (name.to_owned(), dtype, tensor.shape().to_vec(), data)
        })
        .collect();
    let views = tensors.iter().map(|(name, dtype, shape, data)| {
        (name, TensorView::new(*dtype, shape.clone(), data).expect("tensor"))
    });
    let bytes = safetensors::serialize(views, None).expect("serialise");
    fs::write(folder.path().join("model.safetensors"), bytes).expect("write");
    let files = ModelFiles::open(&ModelPath::Folder(folder.path().to_owned())).expect("model");
    let fingerprints = (identity::model_fingerprint(&files), identity::weight_fingerprint(&files));
    (fingerprints.0.expect("model"), fingerprints.1.expect("weights"))
}

#[test]
fn a_gguf_file_has_the_fingerprint_of_its_checkpoint() {
    for (checkpoint, gguf) in [("qwen3", "gguf-qwen3-bf16"), ("llama-tied", "gguf-llama-f16")] {
        let (checkpoint, gguf) = (model(checkpoint), model(gguf));
        let model = |files| identity::model_fingerprint(files).expect("fingerprint");
        assert_eq!(model(&checkpoint), model(&gguf));
        let weights = |files| identity::weight_fingerprint(files).expect("fingerprint");
        assert_ne!(weights(&checkpoint), weights(&gguf));
    }
}

#[test]
fn the_model_fingerprint_ignores_how_weights_are_stored() {
    let widened = |dtype: Dtype, data: &[u8]| -> Vec<f32> {
        match dtype {
            Dtype::F32 => data.as_chunks::<4>().0.iter().map(|&bytes| f32::from_le_bytes(bytes)).collect(),
            Dtype::BF16 => data
                .as_chunks::<2>()
                .0
                .iter()
                .map(|&bytes| half::bf16::from_le_bytes(bytes).to_f32())
                .collect(),
            other => panic!("the fixture holds {other}"),
        }
    };
    let (model, weights) = changed_model(|_, _, _| None);
    // Norms in float32 and bf16; projections requantised.
    let in_f32 = changed_model(|name, dtype, data| {
        let values = widened(dtype, data);
        name.contains("norm")
            .then(|| (Dtype::F32, values.iter().flat_map(|value| value.to_le_bytes()).collect()))
    });
    let in_bf16 = changed_model(|name, dtype, data| {
        let values = widened(dtype, data);
        let rounded = values.iter().flat_map(|&value| half::bf16::from_f32(value).to_le_bytes()).collect();
        Some((Dtype::BF16, rounded)).filter(|_| name.contains("norm"))
    });
    let other_projection = changed_model(|name, dtype, data| {
        let zeros = vec![0; data.len()];
        name.ends_with("layers.1.self_attn.v_proj.weight").then_some((dtype, zeros))
    });
    assert_eq!((&in_f32.0, &in_bf16.0, &other_projection.0), (&model, &model, &model));
    assert_eq!((&in_f32.1, &in_bf16.1), (&weights, &weights));
    assert_ne!(other_projection.1, weights);
    let other_norm = changed_model(|name, dtype, data| {
        let zeros = vec![0; data.len()];
        name.ends_with("layers.1.input_layernorm.weight").then_some((dtype, zeros))
    });
    assert_ne!(other_norm.0, model);
    assert_eq!(other_norm.1, weights);
}
