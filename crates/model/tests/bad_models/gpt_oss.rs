//! GPT-OSS files that lie: sinks, stacked experts, MXFP4 blocks and scales.

use oscar_kernels::{DType, KernelError};
use oscar_model::files::FileError;
use oscar_model::{ModelError, ModelFiles};
use safetensors::tensor::Dtype;
use serde_json::json;

use crate::support::{Folder, GgufParts, bools_value, load, refused, run, u32_value};

const SINKS: &str = "model.layers.1.self_attn.sinks";
const GATES: &str = "model.layers.1.mlp.experts.gate_up_proj";

fn bf16() -> Folder {
    Folder::copy("gpt-oss")
}

fn mxfp4() -> Folder {
    Folder::copy("gpt-oss-mxfp4")
}

fn gguf() -> GgufParts {
    GgufParts::copy("gguf-gpt-oss-mxfp4")
}

#[test]
fn unchanged_copies_run() {
    for folder in [bf16(), mxfp4()] {
        run(&load(&folder.path()).unwrap()).unwrap();
    }
    run(&load(&gguf().path()).unwrap()).unwrap();
}

#[test]
fn every_query_head_has_one_finite_sink() {
    let shorter = bf16().tensor(SINKS, |tensor| {
        tensor.shape = vec![1];
        tensor.data.truncate(2);
    });
    refused!(shorter, ModelError::TensorShape { .. }, "model.safetensors", SINKS, "1x1", "1x2");
    let without = bf16().tensors(|tensors| drop(tensors.remove(SINKS).unwrap()));
    refused!(without, ModelError::File(FileError::MissingTensor { .. }), "model.safetensors", SINKS);
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let folder = bf16().tensor(SINKS, |tensor| {
            tensor.data[2..4].copy_from_slice(&half::bf16::from_f32(bad).to_le_bytes());
        });
        refused!(folder, ModelError::BadConfig { .. }, "model.safetensors", SINKS, "finite");
    }
    let name = "blk.0.attn_sinks.weight";
    let longer = gguf().tensor(name, |tensor| {
        tensor.dims = vec![3];
        tensor.data.extend([0; 4]);
    });
    refused!(longer, ModelError::TensorShape { .. }, "model.gguf", name, "1x3");
}

#[test]
fn stacked_experts_have_the_shape_of_the_description() {
    refused!(
        bf16().set("num_local_experts", 7),
        ModelError::TensorShape { .. },
        "model.layers.0.mlp.router.weight",
        "7x32"
    );
    let turned = bf16().tensor(GATES, |tensor| tensor.shape.swap(1, 2));
    refused!(turned, ModelError::TensorShape { .. }, GATES, "is 6x64x32", "asks for 6x32x64");
    let flat = bf16().tensor(GATES, |tensor| tensor.shape = vec![6 * 32, 64]);
    refused!(flat, ModelError::TensorShape { .. }, GATES, "is 192x64");
    let bytes = bf16().tensor(GATES, |tensor| {
        tensor.dtype = Dtype::F8_E4M3;
        tensor.data.truncate(6 * 32 * 64);
    });
    refused!(bytes, ModelError::BadConfig { .. }, GATES, "F8_E4M3", "BF16");
    for part in ["gate_up_proj_bias", "down_proj_bias"] {
        let name = format!("model.layers.2.mlp.experts.{part}");
        let without = bf16().tensors(|tensors| drop(tensors.remove(&name).unwrap()));
        refused!(without, ModelError::File(FileError::MissingTensor { .. }), &name);
        let short = bf16().tensor(&name, |tensor| {
            tensor.shape[1] -= 1;
            tensor.data.truncate(2 * tensor.shape.iter().product::<usize>());
        });
        refused!(short, ModelError::TensorShape { .. }, &name);
    }
    let router = "model.layers.0.mlp.router.bias";
    let without = bf16().tensors(|tensors| drop(tensors.remove(router).unwrap()));
    refused!(without, ModelError::File(FileError::MissingTensor { .. }), router);
}

#[test]
fn blocks_need_scales_that_fit() {
    let (blocks, scales) = (format!("{GATES}_blocks"), format!("{GATES}_scales"));
    let without = mxfp4().tensors(|tensors| drop(tensors.remove(&scales).unwrap()));
    refused!(without, ModelError::File(FileError::MissingTensor { .. }), "model.safetensors", &scales);
    // Without blocks there is nothing but scales.
    let without = mxfp4().tensors(|tensors| drop(tensors.remove(&blocks).unwrap()));
    refused!(without, ModelError::File(FileError::MissingTensor { .. }), "model.safetensors", GATES);
    let short = mxfp4().tensor(&scales, |tensor| {
        tensor.shape[1] -= 1;
        tensor.data.truncate(tensor.shape.iter().product());
    });
    refused!(short, ModelError::TensorShape { .. }, &scales, "is 6x127x1", "asks for 6x128x1");
    let flat = mxfp4().tensor(&blocks, |tensor| tensor.shape = vec![6, 128, 16]);
    refused!(flat, ModelError::TensorShape { .. }, &blocks, "asks for 6x128x1x16");
    let signed = mxfp4().tensor(&scales, |tensor| tensor.dtype = Dtype::I8);
    refused!(signed, ModelError::BadConfig { .. }, &scales, "type I8", "U8");
    let nan = mxfp4().tensor(&scales, |tensor| tensor.data[70] = 255);
    refused!(nan, ModelError::BadConfig { .. }, "model.safetensors", &scales, "255 at index 70");
    let both = mxfp4().tensors(|tensors| {
        let tensor = tensors[&scales].clone();
        tensors.insert(GATES.to_owned(), tensor);
    });
    refused!(both, ModelError::UnexpectedTensor { .. }, GATES, "gpt_oss");
    // Other families have no tensors to put it in.
    refused!(
        Folder::copy("qwen3-moe").set("quantization_config", json!({"quant_method": "mxfp4"})),
        ModelError::BadConfig { .. },
        "config.json",
        "mxfp4"
    );
    let experts = "blk.1.ffn_up_exps.weight";
    let other = gguf().tensor(experts, |tensor| tensor.dims = vec![32, 96, 2]);
    refused!(other, ModelError::TensorShape { .. }, "model.gguf", experts, "asks for 6x32x32");
    assert_eq!(DType::Mxfp4.bytes_for(48), None);
}

#[test]
fn settings_are_checked() {
    for field in ["swiglu_limit", "swiglu_alpha"] {
        for bad in [0.0, -1.0, 1e300] {
            refused!(bf16().set(field, bad), ModelError::File(_), "config.json", field, "above 0");
        }
    }
    refused!(bf16().set("sliding_window", 0), ModelError::File(_), "config.json", "`sliding_window`");
    refused!(
        bf16().set("layer_types", json!(["full_attention"])),
        ModelError::BadConfig { .. },
        "`layer_types` has 1 entries for 3 layers"
    );
    refused!(bf16().set("hidden_act", "relu"), ModelError::File(_), "`hidden_act`");
    refused!(bf16().without("rope_parameters"), ModelError::File(_), "`rope_scaling`", "YaRN");
    refused!(
        bf16().set("attention_bias", false),
        ModelError::UnexpectedTensor { .. },
        "model.layers.0.self_attn.k_proj.bias"
    );
    refused!(
        gguf().set("gpt-oss.attention.sliding_window", u32_value(0)),
        ModelError::BadConfig { .. },
        "`gpt-oss.attention.sliding_window` is 0"
    );
    refused!(
        gguf().set("gpt-oss.expert_used_count", u32_value(7)),
        ModelError::BadConfig { .. },
        "`gpt-oss.expert_used_count` is 7"
    );
}

#[test]
fn routers_hold_finite_numbers() {
    for name in ["model.layers.0.mlp.router.weight", "model.layers.2.mlp.router.bias"] {
        for bad in [f32::NAN, f32::INFINITY] {
            let folder = bf16().tensor(name, |tensor| {
                tensor.data[2..4].copy_from_slice(&half::bf16::from_f32(bad).to_le_bytes());
            });
            refused!(folder, ModelError::BadConfig { .. }, "model.safetensors", name, "finite");
        }
    }
    for name in ["blk.1.ffn_gate_inp.weight", "blk.1.ffn_gate_inp.bias", "blk.1.attn_sinks.weight"] {
        let file = gguf().tensor(name, |tensor| tensor.data[4..8].copy_from_slice(&f32::NAN.to_le_bytes()));
        refused!(file, ModelError::BadConfig { .. }, "model.gguf", name, "finite");
    }
}

#[test]
fn a_row_goes_to_no_more_experts_than_there_are() {
    let most = bf16().set("num_experts_per_tok", 6);
    run(&load(&most.path()).unwrap()).unwrap();
    refused!(
        bf16().set("num_experts_per_tok", 7),
        ModelError::BadConfig { .. },
        "config.json",
        "`num_experts_per_tok` is 7",
        "1 to 6"
    );
    let fewer = bf16().set("num_local_experts", 3);
    refused!(fewer, ModelError::BadConfig { .. }, "`num_experts_per_tok` is 4", "1 to 3");
    let more = gguf().set("gpt-oss.expert_count", u32_value(60_000));
    refused!(more, ModelError::TensorShape { .. }, "model.gguf", "ffn_gate_inp.weight", "60000x32");
}

#[test]
fn blocks_are_whole_and_as_many_as_the_description_says() {
    let (blocks, scales) = (format!("{GATES}_blocks"), format!("{GATES}_scales"));
    for (len, text) in [(15, "6x128x1x15"), (17, "6x128x1x17")] {
        let other = mxfp4().tensor(&blocks, |tensor| {
            tensor.shape[3] = len;
            tensor.data.resize(6 * 128 * len, 0);
        });
        refused!(other, ModelError::TensorShape { .. }, &blocks, text, "asks for 6x128x1x16");
    }
    let floats = mxfp4().tensor(&blocks, |tensor| {
        (tensor.dtype, tensor.shape[3]) = (Dtype::BF16, 8);
    });
    refused!(floats, ModelError::BadConfig { .. }, &blocks, "type BF16", "expected U8");
    let more = mxfp4().tensor(&scales, |tensor| {
        tensor.shape[2] = 2;
        tensor.data.resize(6 * 128 * 2, 127);
    });
    refused!(more, ModelError::TensorShape { .. }, &scales, "6x128x2", "asks for 6x128x1");
    // Inputs of experts that are no whole number of blocks have no such form.
    let narrow = mxfp4().set("intermediate_size", 40);
    refused!(
        narrow,
        ModelError::TensorShape { .. },
        "model.layers.0.mlp.experts.gate_up_proj_blocks",
        "6x80x1x16"
    );
    let name = "blk.0.ffn_down_exps.weight";
    let ragged = gguf().tensor(name, |tensor| tensor.dims[0] = 48);
    refused!(ragged, ModelError::File(_), "model.gguf", name);
    let short = gguf().tensor(name, |tensor| tensor.dims[2] = 5);
    refused!(short, ModelError::TensorShape { .. }, "model.gguf", name, "5x32x32", "asks for 6x32x32");
}

/// Files whose blocks are read where they are are not searched when they are opened: a request that meets such a block fails.
#[test]
fn a_block_whose_scale_is_no_number_fails_the_request() {
    let file = gguf().tensor("blk.2.ffn_up_exps.weight", |tensor| {
        tensor.data.chunks_exact_mut(17).for_each(|block| block[0] = 255);
    });
    let model = load(&file.path()).unwrap();
    assert!(matches!(run(&model), Err(KernelError::NotFinite { .. })));
}

#[test]
fn gguf_experts_have_biases_of_their_number_and_width() {
    for part in ["ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"] {
        let name = format!("blk.1.{part}.bias");
        refused!(gguf().without_tensor(&name), ModelError::File(FileError::MissingTensor { .. }), &name);
        for at in [0, 1] {
            let shorter = gguf().tensor(&name, |tensor| {
                tensor.dims[at] -= 1;
                tensor.data.truncate(4 * tensor.dims.iter().product::<u64>() as usize);
            });
            refused!(shorter, ModelError::TensorShape { .. }, "model.gguf", &name);
        }
    }
    refused!(
        gguf().without_tensor("blk.2.ffn_gate_inp.bias"),
        ModelError::File(FileError::MissingTensor { .. }),
        "blk.2.ffn_gate_inp.bias"
    );
    refused!(
        gguf().without_tensor("blk.0.attn_sinks.weight"),
        ModelError::File(FileError::MissingTensor { .. }),
        "blk.0.attn_sinks.weight"
    );
}

#[test]
fn gguf_layers_with_a_window_may_be_listed() {
    const KEY: &str = "gpt-oss.attention.sliding_window_pattern";
    let layers = |file: GgufParts| ModelFiles::open(&file.path()).unwrap().config().sliding_layers();
    assert_eq!(layers(gguf()), [0, 2], "every second layer where a file does not say");
    assert_eq!(layers(gguf().set(KEY, u32_value(3))), [0, 1]);
    assert_eq!(layers(gguf().set(KEY, bools_value(&[false, true, true]))), [1, 2]);
    refused!(
        gguf().set(KEY, bools_value(&[true, false])),
        ModelError::BadConfig { .. },
        "model.gguf",
        "`gpt-oss.attention.sliding_window_pattern` has 2 entries for 3 layers"
    );
}
