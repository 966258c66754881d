//! Mixtures of experts and FP8 weights that lie about themselves.

use half::bf16;
use oscar_kernels::KernelError;
use oscar_model::ModelError;
use oscar_model::files::FileError;
use safetensors::tensor::Dtype;
use serde_json::{Value, json};

use crate::support::{Folder, GgufParts, Stored, load, refused, run, u32_value};

const ROUTER: &str = "model.layers.2.mlp.gate.weight";
const EXPERT: &str = "model.layers.0.mlp.experts.5.up_proj.weight";
const SCALES: &str = "model.layers.0.mlp.experts.5.up_proj.weight_scale_inv";

fn qwen() -> Folder {
    Folder::copy("qwen3-moe")
}

fn glm() -> Folder {
    Folder::copy("glm4-moe")
}

fn fp8() -> Folder {
    Folder::copy("qwen3-moe-fp8-blocks")
}

/// A bf16 number at an index of a tensor.
fn put(folder: Folder, name: &str, index: usize, value: f32) -> Folder {
    folder.tensor(name, |tensor| match tensor.dtype {
        Dtype::F32 => tensor.data[4 * index..4 * index + 4].copy_from_slice(&value.to_le_bytes()),
        _ => tensor.data[2 * index..2 * index + 2].copy_from_slice(&bf16::from_f32(value).to_le_bytes()),
    })
}

#[test]
fn experts_must_be_as_many_as_the_description_says() {
    for count in [7, 9, 65_536] {
        let words = ["model.layers.0.mlp.gate.weight", "is 8x32"];
        refused!(
            qwen().set("num_local_experts", count),
            ModelError::TensorShape { .. },
            "model.safetensors",
            words[0],
            words[1]
        );
    }
    // The router lies too.
    let grown = |count: usize| {
        let grow = |name: &str, folder: Folder| {
            folder.tensor(name, |tensor| {
                tensor.shape[0] = count;
                tensor.data.resize(count * 32 * 2, 0);
            })
        };
        let folder = grow("model.layers.0.mlp.gate.weight", qwen().set("num_local_experts", count));
        grow(ROUTER, folder)
    };
    refused!(
        grown(9),
        ModelError::File(FileError::MissingTensor { .. }),
        "model.safetensors",
        "model.layers.0.mlp.experts.8.gate_proj.weight"
    );
    refused!(
        grown(7),
        ModelError::UnexpectedTensor { .. },
        "model.safetensors",
        "mlp.experts.7.",
        "qwen3_moe"
    );
    for count in [json!(0), json!(-1), json!(1u64 << 60), json!("8"), Value::Null] {
        let folder = qwen().set("num_local_experts", count);
        let error = load(&folder.path()).err().expect("refused").to_string();
        assert!(error.contains("experts`"), "{error}");
    }
}

#[test]
fn a_row_cannot_go_to_more_experts_than_there_are() {
    for top_k in [9, 1000] {
        let folder = qwen().set("num_experts_per_tok", top_k);
        refused!(
            folder,
            ModelError::BadConfig { .. },
            "config.json",
            "`num_experts_per_tok`",
            &format!("is {top_k}"),
            "1 to 8"
        );
    }
    refused!(qwen().set("num_experts_per_tok", 0), ModelError::File(_), "config.json", "num_experts_per_tok");
    // Two groups of two.
    refused!(glm().set("num_experts_per_tok", 5), ModelError::BadConfig { .. }, "config.json", "1 to 4");
    refused!(
        glm().set("n_group", 3),
        ModelError::BadConfig { .. },
        "config.json",
        "`n_group` is 3",
        "8 experts"
    );
    refused!(
        glm().set("topk_group", 5),
        ModelError::BadConfig { .. },
        "config.json",
        "`topk_group` is 5",
        "1 to 4"
    );
    refused!(
        glm().set("scoring_func", "softmax"),
        ModelError::BadConfig { .. },
        "config.json",
        "`scoring_func`",
        "sigmoid"
    );
    refused!(
        glm().set("routed_scaling_factor", "2"),
        ModelError::File(_),
        "config.json",
        "routed_scaling_factor"
    );
    refused!(qwen().set("mlp_only_layers", "1"), ModelError::File(_), "config.json", "mlp_only_layers");
    refused!(qwen().set("decoder_sparse_step", 0), ModelError::File(_), "config.json", "decoder_sparse_step");
    refused!(
        qwen().set("moe_intermediate_size", 1u64 << 40),
        ModelError::BadConfig { .. },
        "config.json",
        "`moe_intermediate_size`"
    );
    refused!(
        glm().set("n_shared_experts", 1u64 << 60),
        ModelError::BadConfig { .. },
        "config.json",
        "shared"
    );
    refused!(
        qwen().set("num_hidden_layers", 1u64 << 60),
        ModelError::BadConfig { .. },
        "config.json",
        "`num_hidden_layers`"
    );
    refused!(
        glm().set("num_nextn_predict_layers", 1u64 << 60),
        ModelError::BadConfig { .. },
        "config.json",
        "`num_nextn_predict_layers`"
    );
}

#[test]
fn layers_are_dense_where_the_description_says() {
    refused!(
        qwen().set("mlp_only_layers", json!([])),
        ModelError::File(FileError::MissingTensor { .. }),
        "model.safetensors",
        "model.layers.1.mlp.gate.weight"
    );
    refused!(
        glm().set("first_k_dense_replace", 2),
        ModelError::File(FileError::MissingTensor { .. }),
        "model.safetensors",
        "model.layers.1.mlp.gate_proj.weight"
    );
}

#[test]
fn routers_hold_finite_numbers() {
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        refused!(
            put(qwen(), ROUTER, 77, bad),
            ModelError::BadConfig { .. },
            "model.safetensors",
            ROUTER,
            "finite"
        );
        let correction = "model.layers.1.mlp.gate.e_score_correction_bias";
        refused!(
            put(glm(), correction, 3, bad),
            ModelError::BadConfig { .. },
            "model.safetensors",
            correction,
            "finite"
        );
    }
}

/// What is not a number comes from elsewhere: the request fails, and nothing else does.
#[test]
fn a_router_without_scores_is_an_error_of_the_row() {
    let folder = put(qwen(), "model.layers.0.self_attn.o_proj.weight", 5, f32::NAN);
    let model = load(&folder.path()).unwrap();
    assert!(matches!(run(&model), Err(KernelError::NotFinite { .. })));
}

#[test]
fn layers_that_predict_further_tokens_are_skipped_and_others_refused() {
    load(&glm().path()).unwrap();
    refused!(
        glm().set("num_nextn_predict_layers", 0),
        ModelError::UnexpectedTensor { .. },
        "model.safetensors",
        "model.layers.3."
    );
    let folder = glm().tensors(|tensors| {
        let one = Stored { dtype: Dtype::F32, shape: vec![1], data: vec![0; 4] };
        tensors.insert("model.layers.4.eh_proj.weight".to_owned(), one);
    });
    refused!(folder, ModelError::UnexpectedTensor { .. }, "model.safetensors", "model.layers.4.");
}

#[test]
fn fp8_numbers_need_scales_that_fit() {
    load(&fp8().path()).unwrap();
    let without = fp8().tensors(|tensors| drop(tensors.remove(SCALES).unwrap()));
    refused!(without, ModelError::BadConfig { .. }, "model.safetensors", EXPERT, SCALES, "no `");
    let wide = fp8().tensor(SCALES, |tensor| {
        tensor.shape = vec![1, 2];
        tensor.data.extend_from_within(..);
    });
    refused!(wide, ModelError::TensorShape { .. }, "model.safetensors", SCALES, "is 1x2", "asks for 1x1");
    let flat = fp8().tensor(SCALES, |tensor| tensor.shape = vec![1]);
    refused!(flat, ModelError::TensorShape { .. }, "model.safetensors", SCALES, "asks for 1x1");
    for bad in [f32::NAN, f32::INFINITY, -0.5] {
        refused!(
            put(fp8(), SCALES, 0, bad),
            ModelError::BadConfig { .. },
            "model.safetensors",
            SCALES,
            "not finite"
        );
    }
    // Blocks of 16 rows would be two.
    let blocks = |size: Value| {
        fp8().json("config.json", |config| config["quantization_config"]["weight_block_size"] = size)
    };
    refused!(
        blocks(json!([16, 128])),
        ModelError::TensorShape { .. },
        "model.safetensors",
        "_scale_inv",
        "asks for"
    );
    for bad in [json!([0, 128]), json!([128]), json!([-1, 2]), json!("128")] {
        refused!(blocks(bad), ModelError::File(_), "config.json", "weight_block_size");
    }
    refused!(
        fp8().without("quantization_config"),
        ModelError::BadConfig { .. },
        "model.safetensors",
        "FP8",
        "`quantization_config`"
    );
    // Scales of a matrix that has none.
    let leftover = fp8().tensors(|tensors| {
        let one = Stored { dtype: Dtype::F32, shape: vec![1, 1], data: vec![0; 4] };
        tensors.insert("lm_head.weight_scale_inv".to_owned(), one);
    });
    refused!(leftover, ModelError::UnexpectedTensor { .. }, "model.safetensors", "lm_head.weight_scale_inv");
    let vector = fp8().tensor("model.norm.weight", |tensor| {
        tensor.dtype = Dtype::F8_E4M3;
        tensor.data.truncate(32);
    });
    refused!(vector, ModelError::BadConfig { .. }, "model.safetensors", "model.norm.weight", "vector");
    let router = fp8().tensors(|tensors| {
        let router = tensors.get_mut(ROUTER).unwrap();
        router.dtype = Dtype::F8_E4M3;
        router.data.truncate(8 * 32);
        let one = Stored { dtype: Dtype::F32, shape: vec![1, 1], data: 1f32.to_le_bytes().to_vec() };
        tensors.insert(format!("{ROUTER}_scale_inv"), one);
    });
    refused!(router, ModelError::BadConfig { .. }, "model.safetensors", ROUTER, "FP8");
}

#[test]
fn scales_of_activations_are_not_needed() {
    let folder = fp8().tensors(|tensors| {
        let one = Stored { dtype: Dtype::F32, shape: vec![1], data: vec![0; 4] };
        tensors.insert(EXPERT.replace("weight", "input_scale"), one);
    });
    load(&folder.path()).unwrap();
}

#[test]
fn other_ways_to_quantise_are_refused() {
    let config = |value: Value| qwen().set("quantization_config", value);
    refused!(config(json!({})), ModelError::BadConfig { .. }, "config.json", "`quantization_config`", "GGUF");
    refused!(
        config(json!({"quant_method": "gptq"})),
        ModelError::BadConfig { .. },
        "config.json",
        "gptq",
        "GGUF"
    );
    refused!(config(json!(7)), ModelError::File(_), "config.json", "quantization_config");
    refused!(
        config(json!({"quant_method": "fp8", "fmt": "e5m2"})),
        ModelError::File(_),
        "config.json",
        "fmt"
    );
    let group = |weights: Value| {
        config(
            json!({"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": weights}}}),
        )
    };
    let good = json!({"type": "float", "num_bits": 8, "strategy": "channel", "symmetric": true});
    load(&group(good.clone()).path()).unwrap();
    for (field, value) in [
        ("type", json!("int")),
        ("num_bits", json!(4)),
        ("strategy", json!("group")),
        ("strategy", json!("block")),
        ("symmetric", json!(false)),
    ] {
        let mut bad = good.clone();
        bad[field] = value;
        let folder = group(bad);
        let error = load(&folder.path()).err().expect("refused").to_string();
        assert!(error.contains("config_groups.group_0.weights."), "{error}");
    }
    for bad in [
        json!({"quant_method": "compressed-tensors"}),
        json!({"quant_method": "compressed-tensors", "config_groups": {}}),
    ] {
        refused!(config(bad), ModelError::File(_), "config.json", "config_groups");
    }
}

#[test]
fn gguf_experts_must_fit_the_metadata() {
    let qwen = || GgufParts::copy("gguf-qwen3-moe-q8_0");
    load(&qwen().path()).unwrap();
    let set = |key: &str, value: u32| qwen().set(&format!("qwen3moe.{key}"), u32_value(value));
    refused!(set("expert_count", 9), ModelError::TensorShape { .. }, "ffn_gate_inp.weight", "is 8x32");
    refused!(set("expert_count", 0), ModelError::BadConfig { .. }, "`qwen3moe.expert_count` is 0");
    refused!(set("expert_count", u32::MAX), ModelError::BadConfig { .. }, "`qwen3moe.expert_count`");
    refused!(
        set("expert_used_count", 9),
        ModelError::BadConfig { .. },
        "`qwen3moe.expert_used_count` is 9",
        "1 to 8"
    );
    refused!(
        set("expert_gating_func", 7),
        ModelError::BadConfig { .. },
        "`qwen3moe.expert_gating_func` is 7"
    );
    refused!(
        set("expert_group_count", 3),
        ModelError::BadConfig { .. },
        "`qwen3moe.expert_group_count` is 3"
    );
    refused!(
        set("expert_feed_forward_length", 64),
        ModelError::TensorShape { .. },
        "ffn_gate_exps.weight",
        "asks for 8x64x32"
    );
    refused!(qwen().without("qwen3moe.expert_count"), ModelError::File(_), "qwen3moe.expert_count");
    let name = "blk.2.ffn_down_exps.weight";
    refused!(qwen().without_tensor(name), ModelError::File(FileError::MissingTensor { .. }), name);
    let flat = qwen().tensor(name, |tensor| tensor.dims = vec![32, 256]);
    refused!(flat, ModelError::TensorShape { .. }, name, "asks for 8x32x32");
    let glm = || GgufParts::copy("gguf-glm4-moe-f16");
    load(&glm().path()).unwrap();
    refused!(
        glm().set("glm4moe.nextn_predict_layers", u32_value(0)),
        ModelError::File(FileError::MissingTensor { .. }),
        "blk.3."
    );
    refused!(
        glm().set("glm4moe.nextn_predict_layers", u32_value(9)),
        ModelError::BadConfig { .. },
        "`glm4moe.block_count`"
    );
}
