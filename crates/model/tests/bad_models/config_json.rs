//! `config.json` with fields missing, of the wrong type, out of range, or asking for what is not implemented.

use std::fs;

use oscar_model::ModelConfig;
use oscar_model::files::FileError;
use oscar_model::{ModelError, ModelFiles};
use serde_json::{Value, json};

use crate::support::{Folder, load, refused, run};

const SIZES: [&str; 6] = [
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "max_position_embeddings",
    "vocab_size",
];

fn llama() -> Folder {
    Folder::copy("llama-tied")
}

fn config(folder: &Folder) -> ModelConfig {
    ModelFiles::open(&folder.path()).unwrap().config().clone()
}

#[test]
fn the_unchanged_copy_runs() {
    for name in ["llama-tied", "qwen3", "llama3-rope", "qwen2-yarn"] {
        run(&load(&Folder::copy(name).path()).unwrap()).unwrap();
    }
}

#[test]
fn required_fields_must_be_there_and_positive() {
    for field in SIZES {
        let quoted = format!("`{field}`");
        refused!(
            llama().without(field),
            ModelError::File(FileError::WrongField { .. }),
            "config.json",
            &quoted,
            "got nothing"
        );
        for (value, got) in [
            (json!(null), "got nothing"),
            (json!(0), "got 0"),
            (json!(-3), "got -3"),
            (json!(2.5), "got 2.5"),
            (json!(1e40), "got 1e+40"),
            (json!("64"), "got \"64\""),
            (json!([64]), "got a list"),
            (json!({"a": 64}), "got an object"),
            (json!(true), "got true"),
        ] {
            refused!(
                llama().set(field, value),
                ModelError::File(FileError::WrongField { .. }),
                "config.json",
                &quoted,
                "positive integer",
                got
            );
        }
        for huge in [u64::MAX, 1 << 31, (1 << 24) + 1] {
            refused!(
                llama().set(field, huge),
                ModelError::BadConfig { .. },
                "config.json",
                &quoted,
                &huge.to_string()
            );
        }
    }
}

#[test]
fn optional_sizes_are_checked_too() {
    for field in ["head_dim", "num_key_value_heads"] {
        let quoted = format!("`{field}`");
        for bad in [json!(0), json!(-1), json!("2")] {
            refused!(
                llama().set(field, bad),
                ModelError::File(FileError::WrongField { .. }),
                "config.json",
                &quoted
            );
        }
        refused!(llama().set(field, 1 << 17), ModelError::BadConfig { .. }, "config.json", &quoted);
    }
    refused!(
        llama().set("head_dim", 15),
        ModelError::BadConfig { .. },
        "config.json",
        "`head_dim` is 15",
        "even"
    );
    refused!(
        llama().set("num_key_value_heads", 4),
        ModelError::BadConfig { .. },
        "config.json",
        "`num_attention_heads` is 6",
        "`num_key_value_heads`, which is 4"
    );
    // More KV heads than query heads cannot be shared either.
    refused!(llama().set("num_key_value_heads", 12), ModelError::BadConfig { .. }, "config.json");
    // 100 heads of a hidden size of 96 leave no channel for a head.
    refused!(
        llama().without("head_dim").set("num_attention_heads", 100).set("num_key_value_heads", 100),
        ModelError::BadConfig { .. },
        "config.json",
        "`head_dim` is 0"
    );
}

#[test]
fn families_we_do_not_know_are_named() {
    for name in ["mixtral", "", "LLAMA", "llama\n\u{1b}[31m", "qwen3_vl"] {
        refused!(
            llama().set("model_type", name),
            ModelError::UnsupportedArchitecture { .. },
            "config.json",
            "`model_type`",
            "llama, qwen2, qwen3"
        );
    }
    refused!(
        llama().without("model_type"),
        ModelError::File(FileError::WrongField { .. }),
        "config.json",
        "`model_type`"
    );
    refused!(
        llama().set("model_type", 7),
        ModelError::File(FileError::WrongField { .. }),
        "config.json",
        "`model_type`",
        "got 7"
    );
}

#[test]
fn what_would_change_the_result_is_refused() {
    let wrong = |field: &str, value: Value, word: &str| {
        refused!(
            llama().set(field, value),
            ModelError::File(FileError::WrongField { .. }),
            "config.json",
            &format!("`{field}`"),
            word
        );
    };
    wrong("hidden_act", json!("gelu"), "\"gelu\"");
    wrong("hidden_act", json!(3), "got 3");
    wrong("use_sliding_window", json!(true), "full attention");
    wrong("use_sliding_window", json!("yes"), "true or false");
    wrong("layer_types", json!(["full_attention", "sliding_attention"]), "full_attention");
    wrong("layer_types", json!([1, 2]), "list of strings");
    wrong("layer_types", json!("full_attention"), "list of strings");
    wrong("attention_bias", json!("no"), "true or false");
    wrong("mlp_bias", json!(0), "true or false");
    wrong("tie_word_embeddings", json!(1), "true or false");
    wrong("eos_token_id", json!(-1), "token id");
    refused!(
        llama().set("quantization_config", json!({"quant_method": "awq"})),
        ModelError::BadConfig { .. },
        "config.json",
        "`quantization_config`",
        "GGUF"
    );
}

#[test]
fn rope_settings_are_checked() {
    let scaling = |value: Value| llama().set("rope_scaling", value);
    for (kind, name) in [("longrope", "rope_type"), ("su", "type")] {
        refused!(
            scaling(json!({name: kind})),
            ModelError::File(FileError::WrongField { .. }),
            "config.json",
            "`rope_scaling.short_factor`",
            "list of numbers"
        );
    }
    for (kind, name) in [("dynamic", "type"), ("ntk", "rope_type"), ("", "rope_type")] {
        refused!(
            scaling(json!({name: kind})),
            ModelError::File(FileError::WrongField { .. }),
            "config.json",
            &format!("`rope_scaling.{name}`"),
            &format!("got {kind:?}"),
            "yarn"
        );
    }
    for kind in ["linear", "yarn", "llama3"] {
        for factor in [json!(null), json!(0), json!(-4.0), json!(0.5), json!("4"), json!(true)] {
            refused!(
                scaling(json!({"rope_type": kind, "factor": factor})),
                ModelError::File(FileError::WrongField { .. }),
                "config.json",
                "`rope_scaling.factor`"
            );
        }
    }
    for (low, high) in [(json!(4.0), json!(1.0)), (json!(1.0), json!(1.0)), (json!(0.0), json!(4.0))] {
        let llama3 =
            json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": low, "high_freq_factor": high});
        refused!(scaling(llama3), ModelError::BadConfig { .. }, "config.json", "`low_freq_factor`");
    }
    refused!(
        scaling(json!({"rope_type": "llama3", "factor": 8.0})),
        ModelError::File(FileError::WrongField { .. }),
        "config.json",
        "`rope_scaling.low_freq_factor`"
    );
    for field in ["beta_fast", "beta_slow", "attention_factor"] {
        for bad in [0.0, -1.0, 1e300] {
            refused!(
                scaling(json!({"rope_type": "yarn", "factor": 4.0, field: bad})),
                ModelError::BadConfig { .. },
                "config.json",
                &format!("`{field}` is {bad}")
            );
        }
    }
    refused!(
        scaling(json!({"rope_type": "yarn", "factor": 4.0, "mscale": "1"})),
        ModelError::File(FileError::WrongField { .. }),
        "config.json",
        "`rope_scaling.mscale`"
    );
    refused!(
        scaling(json!({"rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": -1e3})),
        ModelError::BadConfig { .. },
        "config.json",
        "`attention_factor`"
    );
    refused!(
        scaling(json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 0})),
        ModelError::File(FileError::WrongField { .. }),
        "config.json",
        "`rope_scaling.original_max_position_embeddings`"
    );
    refused!(
        scaling(json!("yarn")),
        ModelError::File(FileError::WrongField { .. }),
        "config.json",
        "`rope_scaling`",
        "an object"
    );
    for theta in [json!(0), json!(-1e4), json!(1e-300)] {
        refused!(
            llama().set("rope_theta", theta),
            ModelError::BadConfig { .. },
            "config.json",
            "`rope_theta`"
        );
    }
    for share in [0.0, -0.5, 1.5, 0.01, 0.2] {
        refused!(
            llama().set("partial_rotary_factor", share),
            ModelError::BadConfig { .. },
            "config.json",
            "`partial_rotary_factor`"
        );
    }
}

#[test]
fn a_base_beside_rope_parameters_counts() {
    let folder = llama().set("rope_parameters", json!({"rope_type": "default"})).set("rope_theta", 5000);
    assert_eq!(config(&folder).rope.theta, 5000.0);
    let folder = llama().set("rope_parameters", json!({"rope_theta": 7000.0})).set("rope_theta", 5000);
    assert_eq!(config(&folder).rope.theta, 7000.0);
    assert_eq!(config(&llama().without("rope_theta")).rope.theta, 10_000.0);
}

#[test]
fn norm_epsilons() {
    assert_eq!(config(&llama().without("rms_norm_eps")).norm_eps, 1e-6);
    assert_eq!(config(&llama().set("rms_norm_eps", 0)).norm_eps, 0.0);
    for bad in [-1e-6, 1e39] {
        refused!(
            llama().set("rms_norm_eps", bad),
            ModelError::BadConfig { .. },
            "config.json",
            "`rms_norm_eps`"
        );
    }
    refused!(
        llama().set("rms_norm_eps", "1e-5"),
        ModelError::File(FileError::WrongField { .. }),
        "config.json",
        "`rms_norm_eps`"
    );
}

#[test]
fn broken_json_names_its_file() {
    for bytes in [&b""[..], b"{", b"[1]", b"{\"hidden_size\": 1e999}", b"{\"model_type\": \"\xff\"}"] {
        for name in ["config.json", "generation_config.json", "tokenizer.json"] {
            let folder = llama();
            fs::write(folder.file(name), bytes).unwrap();
            refused!(folder, ModelError::File(_) | ModelError::Text { .. }, name);
        }
    }
}
