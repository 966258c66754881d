//! GGUF files whose metadata or tensors describe no model that can run.

use std::fs;

use oscar_model::files::FileError;
use oscar_model::files::gguf::{MetadataArray, MetadataValue};
use oscar_model::source::ModelPath;
use oscar_model::text::TextError;
use oscar_model::{ModelError, ModelFiles};

use crate::files_writer::{F32, IQ2_XXS, WrittenTensor, array, string};
use crate::support::{GgufParts, encode, f32_value, fixture, load, refused, run, str_value, u32_value};

const SIZES: [&str; 5] = [
    "llama.context_length",
    "llama.embedding_length",
    "llama.block_count",
    "llama.feed_forward_length",
    "llama.attention.head_count",
];

fn llama() -> GgufParts {
    GgufParts::copy("gguf-llama3-rope-f16")
}

fn plain() -> GgufParts {
    GgufParts::copy("gguf-llama-f16")
}

#[test]
fn a_rewritten_copy_runs_like_the_original() {
    for name in ["gguf-llama3-rope-f16", "gguf-qwen2-q8_0", "gguf-qwen3-bf16", "gguf-qwen2-yarn-f16"] {
        let original = ModelPath::Gguf(fixture(name).join("model.gguf"));
        let copy = GgufParts::copy(name);
        assert_eq!(
            run(&load(&copy.path()).unwrap()).unwrap(),
            run(&load(&original).unwrap()).unwrap(),
            "{name}"
        );
    }
}

#[test]
fn unknown_architectures_are_named() {
    for name in ["gptj", "", "llama4\n\u{1b}[31m", "clip"] {
        refused!(
            llama().set("general.architecture", str_value(name)),
            ModelError::UnsupportedArchitecture { .. },
            "`general.architecture`",
            "llama, qwen2, qwen3"
        );
    }
    refused!(
        llama().set("general.architecture", u32_value(1)),
        ModelError::File(FileError::WrongType { .. }),
        "`general.architecture`",
        "a string"
    );
}

#[test]
fn required_keys_must_be_there_and_sensible() {
    let others = [
        "general.architecture",
        "llama.attention.layer_norm_rms_epsilon",
        "tokenizer.ggml.model",
        "tokenizer.ggml.tokens",
    ];
    for key in SIZES.into_iter().chain(others) {
        let missing = llama().without(key);
        let error = crate::support::refusal(&missing.path(), &[key, "missing"]);
        assert!(
            matches!(
                error,
                ModelError::File(FileError::MissingKey { .. })
                    | ModelError::Text { source: TextError::ModelFile(FileError::MissingKey { .. }), .. }
            ),
            "{error:?}"
        );
    }
    for key in SIZES {
        let quoted = format!("`{key}`");
        let wrong_type = [
            str_value("32"),
            f32_value(32.0),
            encode(&MetadataValue::I32(-32)),
            encode(&MetadataValue::Array(MetadataArray::I32(vec![32, 32]))),
            encode(&MetadataValue::U64(1 << 40)),
        ];
        for value in wrong_type {
            refused!(
                llama().set(key, value),
                ModelError::File(FileError::WrongType { .. }),
                &quoted,
                "expected"
            );
        }
        for value in [0, 1 << 31, u32::MAX] {
            refused!(
                llama().set(key, u32_value(value)),
                ModelError::BadConfig { .. } | ModelError::File(FileError::WrongShape { .. }),
                &quoted,
                &format!("is {value}")
            );
        }
    }
}

#[test]
fn heads_must_fit_together() {
    let set = |key: &str, value: u32| plain().set(key, u32_value(value));
    refused!(
        set("llama.attention.head_count_kv", 4),
        ModelError::BadConfig { .. },
        "`llama.attention.head_count` is 6",
        "`llama.attention.head_count_kv`, which is 4"
    );
    refused!(
        set("llama.attention.head_count_kv", 0),
        ModelError::BadConfig { .. },
        "`llama.attention.head_count_kv` is 0"
    );
    refused!(
        set("llama.attention.key_length", 15),
        ModelError::BadConfig { .. },
        "`llama.attention.key_length` is 15"
    );
    refused!(
        set("llama.attention.value_length", 8),
        ModelError::BadConfig { .. },
        "`llama.attention.value_length` is 8"
    );
    for rotary in [0, 7, 18, u32::MAX] {
        refused!(
            set("llama.rope.dimension_count", rotary),
            ModelError::BadConfig { .. },
            "`llama.rope.dimension_count`"
        );
    }
    refused!(set("llama.expert_count", 8), ModelError::BadConfig { .. }, "`llama.expert_count`");
    load(&set("llama.expert_count", 0).path()).unwrap();
}

#[test]
fn floats_must_be_numbers_that_work() {
    for bad in [f32::NAN, f32::INFINITY, -1.0] {
        let key = "llama.attention.layer_norm_rms_epsilon";
        refused!(plain().set(key, f32_value(bad)), ModelError::BadConfig { .. }, key);
    }
    for bad in [f32::NAN, f32::INFINITY, 0.0, -1e4] {
        refused!(
            plain().set("llama.rope.freq_base", f32_value(bad)),
            ModelError::BadConfig { .. },
            "`llama.rope.freq_base`"
        );
    }
    for kind in ["linear", "yarn"] {
        for bad in [f32::NAN, f32::INFINITY, 0.0, -4.0] {
            let scaled = plain().set("llama.rope.scaling.type", str_value(kind));
            refused!(
                scaled.set("llama.rope.scaling.factor", f32_value(bad)),
                ModelError::BadConfig { .. },
                "`llama.rope.scaling.factor`"
            );
        }
    }
    for key in ["yarn_beta_fast", "yarn_beta_slow", "attn_factor"] {
        for bad in [f32::NAN, f32::INFINITY, 0.0, -1.0] {
            let scaled = plain().set("llama.rope.scaling.type", str_value("yarn"));
            let scaled = scaled.set("llama.rope.scaling.factor", f32_value(4.0));
            refused!(
                scaled.set(&format!("llama.rope.scaling.{key}"), f32_value(bad)),
                ModelError::BadConfig { .. },
                &format!("`llama.rope.scaling.{key}`")
            );
        }
    }
    refused!(
        plain().set("llama.rope.scaling.type", str_value("longrope")),
        ModelError::BadConfig { .. },
        "`llama.rope.scaling.type`",
        "\"longrope\"",
        "yarn"
    );
}

#[test]
fn rotary_divisors_are_checked() {
    let divisors = |values: Vec<f32>| {
        llama().tensor("rope_freqs.weight", |tensor| {
            tensor.dims = vec![values.len() as u64];
            tensor.data = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        })
    };
    load(&divisors(vec![2.0; 8]).path()).unwrap();
    for count in [1, 7, 9, 16] {
        refused!(
            divisors(vec![1.0; count]),
            ModelError::BadConfig { .. },
            "`rope_freqs.weight`",
            &format!("{count} entries"),
            "expected 8"
        );
    }
    for bad in [0.0, -1.0, f32::NAN, f32::INFINITY] {
        let mut values = vec![1.0; 8];
        values[5] = bad;
        refused!(
            divisors(values),
            ModelError::BadConfig { .. },
            "`rope_freqs.weight`",
            &format!("holds {bad}")
        );
    }
    let matrix = llama().tensor("rope_freqs.weight", |tensor| tensor.dims = vec![4, 2]);
    refused!(matrix, ModelError::File(FileError::WrongShape { .. }), "`rope_freqs.weight`", "a vector");
}

#[test]
fn every_tensor_must_be_there_and_no_other() {
    let names: Vec<String> =
        llama().tensors.iter().map(|tensor| String::from_utf8(tensor.name.clone()).unwrap()).collect();
    // These say by their absence that the model does without.
    let optional = ["rope_freqs.weight", "output.weight"];
    for name in names {
        let without = llama().without_tensor(&name);
        if optional.contains(&name.as_str()) {
            load(&without.path()).unwrap();
        } else {
            refused!(
                without,
                ModelError::File(FileError::MissingTensor { .. }),
                &format!("`{name}` is missing")
            );
        }
    }
    for (name, shown) in [
        ("blk.2.attn_norm.weight", "`blk.2.attn_norm.weight`"),
        ("blk.0.ffn_gate_exps.weight", "`blk.0.ffn_gate_exps.weight`"),
        ("two\nlines\u{1b}[31m", "two\\nlines\\u{1b}[31m"),
    ] {
        let mut extra = llama();
        let name = name.as_bytes().to_vec();
        extra.tensors.push(WrittenTensor {
            name,
            dims: vec![4],
            type_id: F32,
            data: vec![0; 16],
            ..Default::default()
        });
        refused!(extra, ModelError::UnexpectedTensor { .. }, shown, "llama");
    }
    // One bias says that there are more.
    let mut half = llama();
    let name = b"blk.0.attn_q.bias".to_vec();
    half.tensors.push(WrittenTensor {
        name,
        dims: vec![32],
        type_id: F32,
        data: vec![0; 128],
        ..Default::default()
    });
    refused!(half, ModelError::File(FileError::MissingTensor { .. }), "`blk.0.attn_k.bias` is missing");
}

#[test]
fn shapes_and_types_must_be_those_of_the_description() {
    let query = "blk.1.attn_q.weight";
    let reshape = |dims: &[u64]| llama().tensor(query, |tensor| tensor.dims = dims.to_vec());
    refused!(reshape(&[64, 16]), ModelError::TensorShape { .. }, query, "is 16x64", "asks for 32x32");
    refused!(reshape(&[1024]), ModelError::TensorShape { .. }, query, "is 1x1024");
    refused!(
        reshape(&[32, 16, 2]),
        ModelError::File(FileError::WrongShape { .. }),
        query,
        "a matrix",
        "[2, 16, 32]"
    );
    let listed = llama().tensor(query, |tensor| {
        (tensor.type_id, tensor.dims, tensor.data) = (IQ2_XXS, vec![256, 4], vec![0; 4 * 66]);
    });
    refused!(listed, ModelError::File(FileError::UnsupportedType { .. }), query, "IQ2_XXS", "Q4_K");
    let unknown = llama().tensor(query, |tensor| tensor.type_id = 99);
    refused!(unknown, ModelError::File(FileError::UnsupportedType { .. }), query, "unknown (99)");
    let cube = llama().tensor("token_embd.weight", |tensor| tensor.dims = vec![32, 60, 2]);
    refused!(cube, ModelError::File(FileError::WrongShape { .. }), "token_embd.weight");
    refused!(
        llama().set("llama.embedding_length", u32_value(64)),
        ModelError::TensorShape { .. } | ModelError::BadConfig { .. },
        "model.gguf"
    );
}

#[test]
fn the_vocabulary_must_fit_and_make_sense() {
    let tokens: Vec<String> = (0..121).map(|id| format!("t{id}")).collect();
    let vocabulary =
        |tokens: &[String]| encode(&MetadataValue::Array(MetadataArray::Strings(tokens.iter().collect())));
    let kinds = |count: usize| encode(&MetadataValue::Array(MetadataArray::I32(vec![1; count])));
    let merges = encode(&MetadataValue::Array(MetadataArray::Strings(Vec::<String>::new().iter().collect())));
    let with = |count: usize| {
        let parts = llama().set("tokenizer.ggml.tokens", vocabulary(&tokens[..count]));
        parts.set("tokenizer.ggml.token_type", kinds(count)).set("tokenizer.ggml.merges", merges.clone())
    };
    for fewer in [3, 100, 120] {
        assert_eq!(ModelFiles::open(&with(fewer).path()).unwrap().tokenizer().unwrap().vocab_size(), fewer);
    }
    refused!(
        with(121),
        ModelError::Text { source: TextError::LargerThanEmbedding { .. }, .. },
        "121 tokens",
        "120 embedding rows"
    );
    refused!(with(2), ModelError::Text { .. }, "`tokenizer.ggml.eos_token_id` is 2");
    refused!(with(0), ModelError::Text { source: TextError::EmptyVocabulary, .. }, "tokenizer.ggml.tokens");
    refused!(
        with(100).set("tokenizer.ggml.token_type", kinds(99)),
        ModelError::Text { source: TextError::LengthMismatch { .. }, .. },
        "`tokenizer.ggml.token_type` has 99"
    );
    refused!(
        with(100).set(
            "tokenizer.ggml.merges",
            encode(&MetadataValue::Array(MetadataArray::Strings(["no\nway"].iter().collect())))
        ),
        ModelError::Text { source: TextError::BadMerge { .. }, .. },
        "no\\nway"
    );
    for (key, value) in [("tokenizer.ggml.model", "unigram\n"), ("tokenizer.ggml.pre", "klingon\u{1b}")] {
        refused!(
            llama().set(key, str_value(value)),
            ModelError::Text { .. },
            &format!("`{key}`"),
            &value[..6]
        );
    }
    refused!(
        llama().set("tokenizer.ggml.tokens", u32_value(3)),
        ModelError::File(FileError::WrongType { .. }),
        "`tokenizer.ggml.tokens`"
    );
    refused!(
        llama().set("tokenizer.ggml.tokens", (9, array(8, 1, &string(b"\xff\xfe")))),
        ModelError::File(FileError::Invalid { .. }),
        "`tokenizer.ggml.tokens`",
        "UTF-8"
    );
}

#[test]
fn a_broken_template_waits_until_it_is_asked_for() {
    let cases = [
        (str_value("{% if %}"), "line 1"),
        // The tag closes itself and the word is one that is looked for.
        (str_value("{%}generation"), "line 1"),
        (str_value("{% generation"), "line 1"),
        (str_value(&format!("\n{}{{% if", " ".repeat(70_000))), "line 2"),
        (u32_value(3), "`tokenizer.chat_template`"),
    ];
    for (value, word) in cases {
        let parts = llama().set("tokenizer.chat_template", value);
        let files = ModelFiles::open(&parts.path()).unwrap();
        let error = files.chat_template().unwrap_err().to_string();
        assert!(error.contains(word) && !error.contains(char::is_control), "{error:?}");
        run(&files.load_model(crate::support::backend()).unwrap()).unwrap();
    }
}

#[test]
fn truncated_files_never_load() {
    let whole = llama().bytes();
    let parts = llama();
    let ModelPath::Gguf(path) = parts.path() else { panic!("a GGUF file") };
    for len in (0..whole.len()).step_by(997).chain([whole.len() - 1]) {
        fs::write(&path, &whole[..len]).unwrap();
        let error = crate::support::refusal(&ModelPath::Gguf(path.clone()), &[]);
        assert!(matches!(error, ModelError::File(_)), "{len}: {error:?}");
    }
}
