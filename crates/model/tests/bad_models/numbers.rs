//! Absurd numbers fail fast and without memory; weights that are not numbers fail at sampling; odd sizes run.

use std::sync::Arc;

use oscar_kernels::KernelError;
use oscar_kernels::cpu::CpuBackend;
use oscar_kernels::cpu::isa::Isa;
use oscar_model::ModelFiles;
use oscar_model::source::ModelPath;

use crate::files_writer::{F32, GgufWriter};
use crate::support::{Folder, GgufParts, largest_allocation, load, run, u32_value};

/// A tokenizer of a hundred tokens and a table of twenty tensors stay well below this.
const LARGEST: usize = 4 << 20;

#[test]
fn the_allocation_check_can_fail() {
    let largest = largest_allocation(|| drop(std::hint::black_box(vec![0u8; 2 * LARGEST])));
    assert!(largest >= 2 * LARGEST);
}

fn fails_fast(path: &ModelPath, what: &str) {
    let largest = largest_allocation(|| assert!(load(path).is_err(), "{what} was taken"));
    assert!(largest < LARGEST, "{what}: {largest} bytes in one piece");
}

#[test]
fn absurd_sizes_fail_fast() {
    // The last ones pass for sizes of a model, so the tensors have to give them away.
    let sizes = [u64::MAX, 1 << 62, 1 << 31, 1 << 24, 1 << 16];
    for field in [
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "intermediate_size",
        "vocab_size",
    ] {
        for size in sizes {
            fails_fast(&Folder::copy("llama-tied").set(field, size).path(), &format!("{field} {size}"));
        }
    }
    for key in [
        "embedding_length",
        "block_count",
        "feed_forward_length",
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
    ] {
        for size in [u32::MAX, 1 << 31, 1 << 24, 1 << 16] {
            let key = format!("llama.{key}");
            let parts = GgufParts::copy("gguf-llama-f16").set(&key, u32_value(size));
            fails_fast(&parts.path(), &format!("{key} {size}"));
        }
    }
}

#[test]
fn the_largest_description_has_a_size() {
    // Nothing is loaded here, so nothing but the description bounds the arithmetic.
    let folder = Folder::copy("llama-tied")
        .set("num_hidden_layers", 1 << 16)
        .set("num_attention_heads", 1 << 16)
        .set("num_key_value_heads", 1 << 16)
        .set("head_dim", 1 << 16);
    let geometry = ModelFiles::open(&folder.path()).unwrap().config().kv_geometry();
    assert_eq!(geometry.bytes_per_token(geometry.bf16()), 1 << 50);
}

#[test]
fn a_long_context_costs_nothing_until_it_is_used() {
    let folder = Folder::copy("llama-tied").set("max_position_embeddings", 1 << 24);
    let largest = largest_allocation(|| {
        run(&load(&folder.path()).unwrap()).unwrap();
    });
    assert!(largest < LARGEST, "{largest} bytes in one piece");
}

#[test]
fn weights_that_are_not_numbers_fail_at_sampling() {
    for (name, bad) in
        [("embed_tokens", 0x7fc0u16), ("q_proj", 0x7fc0), ("down_proj", 0x7f80), ("norm", 0xff80)]
    {
        let folder = Folder::copy("llama-tied").tensors(|tensors| {
            for (found, tensor) in tensors.iter_mut().filter(|(found, _)| found.contains(name)) {
                assert_eq!(tensor.dtype, safetensors::tensor::Dtype::BF16, "{found}");
                tensor.data = bad.to_le_bytes().repeat(tensor.data.len() / 2);
            }
        });
        for isa in Isa::available() {
            let files = ModelFiles::open(&folder.path()).unwrap();
            let model = files.load_model(Arc::new(CpuBackend::with_isa(1, isa))).unwrap();
            let outcome = run(&model);
            assert!(
                matches!(outcome, Err(KernelError::NotFinite { what: "logits", .. })),
                "{name} on {isa}: {outcome:?}"
            );
        }
    }
}

#[test]
fn quantised_scales_that_are_not_numbers_fail_at_sampling() {
    for bad in [0x7e00u16, 0x7c00, 0xfc00] {
        let parts = GgufParts::copy("gguf-qwen2-q8_0").tensor("blk.0.ffn_down.weight", |tensor| {
            assert_eq!(tensor.type_id, crate::files_writer::Q8_0);
            tensor.data.chunks_exact_mut(34).for_each(|block| block[..2].copy_from_slice(&bad.to_le_bytes()));
        });
        let outcome = run(&load(&parts.path()).unwrap());
        assert!(matches!(outcome, Err(KernelError::NotFinite { .. })), "{bad:x}: {outcome:?}");
    }
}

/// A Llama of any shape with small weights and a vocabulary of `vocab` tokens.
fn tiny(hidden: u32, heads: u32, kv_heads: u32, head_dim: u32, inner: u32, vocab: u32) -> Vec<u8> {
    let tokens: Vec<String> = (0..vocab).map(|id| format!("t{id}")).collect();
    let mut writer = GgufWriter::new()
        .str("general.architecture", "llama")
        .u32("llama.context_length", 64)
        .u32("llama.embedding_length", hidden)
        .u32("llama.block_count", 1)
        .u32("llama.feed_forward_length", inner)
        .u32("llama.attention.head_count", heads)
        .u32("llama.attention.head_count_kv", kv_heads)
        .u32("llama.attention.key_length", head_dim)
        .f32("llama.attention.layer_norm_rms_epsilon", 1e-5)
        .str("tokenizer.ggml.model", "gpt2")
        .str("tokenizer.ggml.pre", "smollm")
        .strings("tokenizer.ggml.tokens", &tokens);
    let (hidden, inner) = (u64::from(hidden), u64::from(inner));
    let (q, kv) = (u64::from(heads * head_dim), u64::from(kv_heads * head_dim));
    for (name, dims) in [
        ("token_embd", vec![hidden, u64::from(vocab)]),
        ("output_norm", vec![hidden]),
        ("blk.0.attn_norm", vec![hidden]),
        ("blk.0.attn_q", vec![hidden, q]),
        ("blk.0.attn_k", vec![hidden, kv]),
        ("blk.0.attn_v", vec![hidden, kv]),
        ("blk.0.attn_output", vec![q, hidden]),
        ("blk.0.ffn_norm", vec![hidden]),
        ("blk.0.ffn_gate", vec![hidden, inner]),
        ("blk.0.ffn_up", vec![hidden, inner]),
        ("blk.0.ffn_down", vec![inner, hidden]),
    ] {
        let count = dims.iter().product::<u64>() as u32;
        let values = (0..count)
            .flat_map(|i| ((i.wrapping_mul(2654435761) >> 16) as f32 / 65536.0 - 0.5).to_le_bytes());
        writer = writer.tensor(&format!("{name}.weight"), &dims, F32, values.collect());
    }
    writer.build()
}

#[test]
fn sizes_that_fill_no_register_run_the_same_on_every_path() {
    let folder = tempfile::tempdir().unwrap();
    let path = ModelPath::Gguf(folder.path().join("tiny.gguf"));
    for (hidden, heads, kv_heads, head_dim, inner, vocab) in [
        (1, 1, 1, 2, 1, 1),
        (3, 1, 1, 2, 5, 7),
        (7, 3, 1, 6, 1, 2),
        (33, 5, 5, 10, 17, 31),
        (65, 4, 2, 34, 129, 3),
    ] {
        std::fs::write(path.path(), tiny(hidden, heads, kv_heads, head_dim, inner, vocab)).unwrap();
        let expected = run(&load(&path).unwrap()).unwrap();
        for isa in Isa::available() {
            let files = ModelFiles::open(&path).unwrap();
            let model = files.load_model(Arc::new(CpuBackend::with_isa(1, isa))).unwrap();
            let drawn = run(&model).unwrap();
            let distance = drawn.logprob.unwrap() - expected.logprob.unwrap();
            assert!(distance.abs() < 0.05, "{hidden} on {isa}: {drawn:?} {expected:?}");
        }
    }
}
