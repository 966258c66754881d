//! Gemma 3 files with settings that contradict each other or ask for what is not implemented.

use oscar_model::files::FileError;
use oscar_model::{ModelError, ModelFiles};
use serde_json::{Value, json};

use crate::support::{
    Folder, GgufParts, bools_value, f32_value, i32s_value, largest_allocation, load, refused, run, str_value,
    u32_value,
};

fn text() -> Folder {
    Folder::copy("gemma3")
}

fn images() -> Folder {
    Folder::copy("gemma3-images")
}

/// Changes a setting of the text model.
fn inside(folder: Folder, field: &str, value: Value) -> Folder {
    folder.json("config.json", |config| {
        let text = config.get_mut("text_config").and_then(Value::as_object_mut).unwrap();
        text.insert(field.to_owned(), value);
    })
}

#[test]
fn unchanged_copies_run() {
    for folder in [text(), images()] {
        run(&load(&folder.path()).unwrap()).unwrap();
    }
    run(&load(&GgufParts::copy("gguf-gemma3-f16").path()).unwrap()).unwrap();
}

#[test]
fn windows_and_kinds_of_layers_are_checked() {
    for (value, got) in [(json!(0), "got 0"), (json!(-1), "got -1"), (json!("40"), "got \"40\"")] {
        refused!(
            text().set("sliding_window", value),
            ModelError::File(FileError::WrongField { .. }),
            "config.json",
            "`sliding_window`",
            got
        );
    }
    refused!(
        text().without("sliding_window"),
        ModelError::File(FileError::WrongField { .. }),
        "`sliding_window`"
    );
    refused!(
        text().set("sliding_window_pattern", 0),
        ModelError::File(FileError::WrongField { .. }),
        "`sliding_window_pattern`"
    );
    refused!(
        inside(images(), "layer_types", json!(["sliding_attention"])),
        ModelError::BadConfig { .. },
        "`layer_types` has 1 entries for 3 layers"
    );
    refused!(
        inside(images(), "layer_types", json!(["full_attention", "linear_attention", "full_attention"])),
        ModelError::File(FileError::WrongField { .. }),
        "`text_config.layer_types`"
    );
    refused!(
        text().set("rope_local_base_freq", -1.0),
        ModelError::BadConfig { .. },
        "`rope_local_base_freq` is -1"
    );
    refused!(
        text().set("query_pre_attn_scalar", 0.0),
        ModelError::File(FileError::WrongField { .. }),
        "`query_pre_attn_scalar`"
    );
}

/// A window that is longer than any context is no window, and takes no memory.
#[test]
fn a_window_of_any_length_runs() {
    for window in [1, 41, 1 << 40, u64::MAX] {
        run(&load(&text().set("sliding_window", window).path()).unwrap()).unwrap();
    }
}

/// A period, whose last layer is global, or an entry for each layer.
#[test]
fn gguf_patterns_are_numbers_or_lists() {
    const KEY: &str = "gemma3.attention.sliding_window_pattern";
    let gguf = |value| GgufParts::copy("gguf-gemma3-f16").set(KEY, value);
    let layers = |file: &GgufParts| ModelFiles::open(&file.path()).unwrap().config().sliding_layers();
    let lists = [[true, false, true, true], [false, true, true, true], [true; 4]];
    for flags in lists {
        let expected: Vec<usize> = (0..4).filter(|&layer| flags[layer]).collect();
        for value in [bools_value(&flags), i32s_value(&flags.map(i32::from))] {
            let file = gguf(value);
            assert_eq!(layers(&file), expected);
            run(&load(&file.path()).unwrap()).unwrap();
        }
    }
    assert_eq!(layers(&gguf(u32_value(2))), [0, 2]);
    assert_eq!(layers(&gguf(u32_value(3))), [0, 1, 3]);
    assert_eq!(layers(&gguf(u32_value(9))), [0, 1, 2, 3]);
    for nowhere in [u32_value(1), bools_value(&[false; 4]), i32s_value(&[0; 4])] {
        assert_eq!(layers(&gguf(nowhere)), [0; 0]);
    }
    assert_eq!(layers(&GgufParts::copy("gguf-gemma3-f16").without(KEY)), [0, 1, 2, 3], "six is usual");
    // Lists of another length, whatever they say.
    for wrong in [&[][..], &[true; 3], &[false; 3], &[true; 5], &[false; 5]] {
        let entries = format!("`{KEY}` has {} entries for 4 layers", wrong.len());
        refused!(gguf(bools_value(wrong)), ModelError::BadConfig { .. }, "model.gguf", &entries);
    }
    refused!(gguf(i32s_value(&[0, 1, 2, 0])), ModelError::BadConfig { .. }, KEY, "holds 2", "true or false");
    refused!(gguf(i32s_value(&[0, -1, 1, 0])), ModelError::BadConfig { .. }, KEY, "holds -1");
    refused!(gguf(str_value("3")), ModelError::File(FileError::WrongType { .. }), KEY);
    refused!(gguf(f32_value(3.0)), ModelError::File(FileError::WrongType { .. }), KEY);
}

/// A number of layers that no file holds is refused before there is a list of so many.
#[test]
fn a_number_of_layers_that_lies_takes_no_memory() {
    for name in ["gemma3", "gpt-oss", "mistral", "phi3", "smollm3"] {
        let folder = Folder::copy(name).json("config.json", |config| {
            config.remove("layer_types");
            config.remove("no_rope_layers");
            config.insert("num_hidden_layers".to_owned(), json!(1u64 << 40));
        });
        let largest = largest_allocation(|| {
            refused!(
                folder,
                ModelError::BadConfig { .. },
                "config.json",
                "`num_hidden_layers` is 1099511627776"
            );
        });
        assert!(largest < 1 << 20, "{name}: {largest} bytes at once");
    }
    for (name, architecture) in [("gguf-gemma3-f16", "gemma3"), ("gguf-gpt-oss-mxfp4", "gpt-oss")] {
        let key = format!("{architecture}.block_count");
        let file = GgufParts::copy(name).set(&key, u32_value(u32::MAX));
        let largest = largest_allocation(|| {
            refused!(file, ModelError::BadConfig { .. }, "model.gguf", &key, "is 4294967295");
        });
        assert!(largest < 1 << 20, "{name}: {largest} bytes at once");
    }
}

#[test]
fn what_is_not_implemented_is_refused() {
    for field in ["final_logit_softcapping", "attn_logit_softcapping"] {
        refused!(
            text().set(field, 30.0),
            ModelError::File(FileError::WrongField { .. }),
            field,
            "softcapping"
        );
    }
    refused!(
        text().set("use_bidirectional_attention", true),
        ModelError::File(FileError::WrongField { .. }),
        "`use_bidirectional_attention`"
    );
    refused!(
        text().set("hidden_activation", "relu"),
        ModelError::File(FileError::WrongField { .. }),
        "`hidden_activation`",
        "gelu_pytorch_tanh"
    );
    refused!(
        GgufParts::copy("gguf-gemma3-f16").set("gemma3.final_logit_softcapping", f32_value(30.0)),
        ModelError::BadConfig { .. },
        "`gemma3.final_logit_softcapping` is 30"
    );
    for key in ["gemma3.attention.sliding_window", "gemma3.attention.sliding_window_pattern"] {
        refused!(
            GgufParts::copy("gguf-gemma3-f16").set(key, u32_value(0)),
            ModelError::BadConfig { .. },
            key,
            "is 0"
        );
    }
}

#[test]
fn parts_that_see_images_are_skipped_by_name_and_nothing_else_is() {
    let files = ModelFiles::open(&images().path()).unwrap();
    assert!(files.skipped_tensors() > 5, "{}", files.skipped_tensors());
    assert!(files.tensors().names().all(|name| name.starts_with("model.")));
    refused!(
        images().without("text_config"),
        ModelError::File(FileError::WrongField { .. }),
        "`text_config`"
    );
    let copied = |from: &'static str, to: &'static str| {
        images().tensors(|tensors| {
            let tensor = tensors[from].clone();
            tensors.insert(to.to_owned(), tensor);
        })
    };
    let norm = "language_model.model.norm.weight";
    refused!(
        copied(norm, "audio_tower.norm.weight"),
        ModelError::UnexpectedTensor { .. },
        "audio_tower.norm.weight",
        "gemma3"
    );
    refused!(
        copied(norm, "model.language_model.norm.weight"),
        ModelError::File(FileError::Invalid { .. }),
        "two tensors for `model.norm.weight`"
    );
}
