//! A GGUF file of GPT-OSS, written here from the Hugging Face checkpoint: `gpt-oss.*` keys, experts in MXFP4 (type 39), biases of
//! experts, and sinks. Both forms are one model.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use oscar_codec::{ExactSlot, PAGE_TOKENS};
use oscar_kernels::Backend;
use oscar_kernels::backend::{Batch, SequenceRows};
use oscar_kernels::cpu::CpuBackend;
use oscar_model::source::ModelPath;
use oscar_model::{ModelConfig, ModelFiles};
use safetensors::SafeTensors;
use serde_json::{Value, json};

use crate::files_writer::{F32, GgufWriter, array};

const BF16: u32 = 30;
const MXFP4: u32 = 39;
const LAYERS: usize = 3;

fn checkpoint() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/models/gpt-oss-mxfp4")
}

/// The tensors of the checkpoint: shape, and bytes.
fn tensors() -> BTreeMap<String, (Vec<usize>, Vec<u8>)> {
    let bytes = fs::read(checkpoint().join("model.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let stored = |(name, view): (String, safetensors::tensor::TensorView<'_>)| {
        (name, (view.shape().to_vec(), view.data().to_vec()))
    };
    file.tensors().into_iter().map(stored).collect()
}

fn widened(bytes: &[u8]) -> Vec<u8> {
    let wide = |pair: &[u8]| (u32::from(u16::from_le_bytes([pair[0], pair[1]])) << 16).to_le_bytes();
    bytes.chunks_exact(2).flat_map(wide).collect()
}

/// Every `step`th row of `row` bytes from `first` on.
fn taken(bytes: &[u8], row: usize, first: usize, step: usize) -> Vec<u8> {
    bytes.chunks_exact(row).skip(first).step_by(step).flatten().copied().collect()
}

/// Blocks of a scale and sixteen bytes, elements 0 to 15 in low nibbles and 16 to 31 in high ones, from scales and bytes that
/// hold two neighbours each.
fn blocks(scales: &[u8], neighbours: &[u8]) -> Vec<u8> {
    let nibble =
        |bytes: &[u8], at: usize| if at.is_multiple_of(2) { bytes[at / 2] & 15 } else { bytes[at / 2] >> 4 };
    let mut out = Vec::new();
    for (scale, bytes) in scales.iter().zip(neighbours.chunks_exact(16)) {
        out.push(*scale);
        out.extend((0..16).map(|at| nibble(bytes, at) | nibble(bytes, at + 16) << 4));
    }
    out
}

/// The checkpoint as a GGUF file; `pattern` says which layers have a window.
fn written(pattern: Option<&[bool]>) -> Vec<u8> {
    let tensors = tensors();
    let get = |name: &str| tensors.get(name).unwrap_or_else(|| panic!("{name}"));
    let words: Vec<String> = (0..120).map(|id| format!("word{id}")).collect();
    let mut file = GgufWriter::new()
        .str("general.architecture", "gpt-oss")
        .u32("gpt-oss.block_count", LAYERS as u32)
        .u32("gpt-oss.context_length", 256)
        .u32("gpt-oss.embedding_length", 32)
        .u32("gpt-oss.feed_forward_length", 64)
        .u32("gpt-oss.expert_feed_forward_length", 64)
        .u32("gpt-oss.attention.head_count", 8)
        .u32("gpt-oss.attention.head_count_kv", 2)
        .u32("gpt-oss.attention.key_length", 32)
        .u32("gpt-oss.attention.value_length", 32)
        .u32("gpt-oss.attention.sliding_window", 70)
        .f32("gpt-oss.attention.layer_norm_rms_epsilon", 1e-5)
        .u32("gpt-oss.expert_count", 6)
        .u32("gpt-oss.expert_used_count", 2)
        .f32("gpt-oss.rope.freq_base", 1000.0)
        .str("gpt-oss.rope.scaling.type", "yarn")
        .f32("gpt-oss.rope.scaling.factor", 4.0)
        .u32("gpt-oss.rope.scaling.original_context_length", 64)
        .str("tokenizer.ggml.model", "gpt2")
        .str("tokenizer.ggml.pre", "gpt-4o")
        .strings("tokenizer.ggml.tokens", &words)
        .strings::<&str>("tokenizer.ggml.merges", &[]);
    if let Some(flags) = pattern {
        let elements: Vec<u8> = flags.iter().map(|&flag| flag.into()).collect();
        let value = array(7, flags.len() as u64, &elements);
        file = file.raw("gpt-oss.attention.sliding_window_pattern", 9, &value);
    }
    let matrix = |file: GgufWriter, to: &str, from: &str| {
        let (shape, bytes) = get(from);
        let dims: Vec<u64> = shape.iter().rev().map(|&size| size as u64).collect();
        file.tensor(to, &dims, BF16, bytes.clone())
    };
    let vector = |file: GgufWriter, to: &str, from: &str| {
        let (shape, bytes) = get(from);
        let dims: Vec<u64> = shape.iter().rev().map(|&size| size as u64).collect();
        file.tensor(to, &dims, F32, widened(bytes))
    };
    file = matrix(file, "token_embd.weight", "model.embed_tokens.weight");
    file = vector(file, "output_norm.weight", "model.norm.weight");
    file = matrix(file, "output.weight", "lm_head.weight");
    for layer in 0..LAYERS {
        let (to, from) =
            (|name: &str| format!("blk.{layer}.{name}"), |name: &str| format!("model.layers.{layer}.{name}"));
        for (gguf, name) in
            [("attn_q", "q_proj"), ("attn_k", "k_proj"), ("attn_v", "v_proj"), ("attn_output", "o_proj")]
        {
            let name = format!("self_attn.{name}");
            file = matrix(file, &to(&format!("{gguf}.weight")), &from(&format!("{name}.weight")));
            file = vector(file, &to(&format!("{gguf}.bias")), &from(&format!("{name}.bias")));
        }
        for (gguf, name) in [
            ("attn_norm.weight", "input_layernorm.weight"),
            ("post_attention_norm.weight", "post_attention_layernorm.weight"),
            ("attn_sinks.weight", "self_attn.sinks"),
            ("ffn_gate_inp.weight", "mlp.router.weight"),
            ("ffn_gate_inp.bias", "mlp.router.bias"),
        ] {
            file = vector(file, &to(gguf), &from(name));
        }
        let experts =
            [("gate", "gate_up_proj", 0, 2), ("up", "gate_up_proj", 1, 2), ("down", "down_proj", 0, 1)];
        for (part, name, first, step) in experts {
            let name = from(&format!("mlp.experts.{name}"));
            let (shape, nibbles) = get(&format!("{name}_blocks"));
            let (_, scales) = get(&format!("{name}_scales"));
            let (outputs, across) = (shape[1] / step, shape[2]);
            let (nibbles, scales) =
                (taken(nibbles, 16 * across, first, step), taken(scales, across, first, step));
            let dims = [32 * across as u64, outputs as u64, shape[0] as u64];
            file =
                file.tensor(&to(&format!("ffn_{part}_exps.weight")), &dims, MXFP4, blocks(&scales, &nibbles));
            let (_, biases) = get(&format!("{name}_bias"));
            let biases = widened(&taken(biases, 2, first, step));
            file = file.tensor(&to(&format!("ffn_{part}_exps.bias")), &dims[1..], F32, biases);
        }
    }
    file.build()
}

fn logits(files: &ModelFiles) -> Vec<f32> {
    let tokens: Vec<u32> = (0..136).map(|index| (index * 37 + 11) % 120).collect();
    let model = files.load_model(Arc::new(CpuBackend::new(1).unwrap())).unwrap();
    let pages = tokens.len().div_ceil(PAGE_TOKENS);
    let (slots, every) = (ExactSlot::first(pages), (0..tokens.len()).collect::<Vec<_>>());
    let mut cache = model.cache(pages + 1).unwrap();
    let mut activations = model.activations(tokens.len(), tokens.len()).unwrap();
    let rows = SequenceRows::exact(0, tokens.len(), &slots);
    let batch = Batch { tokens: &tokens, sequences: &[rows] };
    model.forward(&batch, &every, &mut cache, &mut activations).unwrap();
    model.backend().read(activations.logits(), 0..tokens.len()).unwrap()
}

fn open(bytes: &[u8], folder: &Path) -> ModelFiles {
    let path = folder.join("model.gguf");
    fs::write(&path, bytes).unwrap();
    ModelFiles::open(&ModelPath::Gguf(path)).unwrap()
}

fn distance(a: &[f32], b: &[f32]) -> f64 {
    let square = |value: f32| f64::from(value).powi(2);
    let difference: f64 = a.iter().zip(b).map(|(a, b)| square(a - b)).sum();
    (difference / b.iter().map(|&b| square(b)).sum::<f64>()).sqrt()
}

/// The checkpoint with the activation that GGUF files do not describe because all published models have it.
fn as_published(folder: &Path) -> ModelFiles {
    let mut config: Value =
        serde_json::from_slice(&fs::read(checkpoint().join("config.json")).unwrap()).unwrap();
    (config["swiglu_alpha"], config["swiglu_limit"]) = (json!(1.702), json!(7.0));
    config["rope_scaling"].as_object_mut().unwrap().remove("attention_factor").unwrap();
    fs::write(folder.join("config.json"), config.to_string()).unwrap();
    for name in ["model.safetensors", "tokenizer.json"] {
        fs::copy(checkpoint().join(name), folder.join(name)).unwrap();
    }
    ModelFiles::open(&ModelPath::Folder(folder.to_path_buf())).unwrap()
}

#[test]
fn a_gguf_file_of_the_checkpoint_is_the_same_model() {
    let folder = tempfile::tempdir().unwrap();
    let expected = logits(&as_published(folder.path()));
    let files = open(&written(Some(&[false, true, false])), folder.path());
    let ModelConfig { experts, sliding, style, .. } = files.config();
    let experts = experts.as_ref().unwrap();
    assert_eq!((experts.count(), experts.top_k(), experts.inner), (6, 2, 64));
    let sliding = sliding.as_ref().unwrap();
    assert_eq!((sliding.window, &sliding.is_sliding[..]), (70, &[false, true, false][..]));
    assert!(style.learned_sinks);
    assert_eq!(distance(&logits(&files), &expected), 0.0);
    // Without a list the first layer has a window, and the second has none.
    let usual = open(&written(None), folder.path());
    assert_eq!(usual.config().sliding_layers(), [0, 2]);
    assert!(distance(&logits(&usual), &expected) > 1e-3);
}
