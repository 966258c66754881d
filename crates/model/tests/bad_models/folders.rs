//! Checkpoint folders whose weights or tokenizer do not fit the description.

use std::fs;

use oscar_model::files::FileError;
use oscar_model::text::TextError;
use oscar_model::{ModelError, ModelFiles};
use safetensors::tensor::Dtype;
use serde_json::{Value, json};

use crate::support::{Folder, Stored, backend, load, refused, run};

const EMBEDDING: &str = "model.embed_tokens.weight";
const QUERY: &str = "model.layers.1.self_attn.q_proj.weight";

fn llama() -> Folder {
    Folder::copy("llama-tied")
}

#[test]
fn every_tensor_must_be_there() {
    let mut names = Vec::new();
    llama().tensors(|tensors| names.extend(tensors.keys().cloned()));
    assert!(names.len() > 18 && names.iter().any(|name| name == QUERY), "{names:?}");
    for name in names {
        let folder = llama().tensors(|tensors| drop(tensors.remove(&name).unwrap()));
        refused!(
            folder,
            ModelError::File(FileError::MissingTensor { .. }),
            "model.safetensors",
            &format!("tensor `{name}` is missing")
        );
    }
    // A bias belongs to this family, a head norm to that.
    for (model, name) in [
        ("qwen2-tied", "model.layers.0.self_attn.k_proj.bias"),
        ("qwen3", "model.layers.1.self_attn.k_norm.weight"),
    ] {
        let folder = Folder::copy(model).tensors(|tensors| drop(tensors.remove(name).unwrap()));
        refused!(folder, ModelError::File(FileError::MissingTensor { .. }), "model.safetensors", name);
    }
}

#[test]
fn extra_tensors_are_a_model_we_do_not_understand() {
    for (name, shown) in [
        ("model.layers.0.self_attn.q_proj.bias", "q_proj.bias"),
        ("model.layers.2.input_layernorm.weight", "layers.2."),
        ("visual.patch_embed.weight", "visual.patch_embed.weight"),
        ("", "tensor ``"),
        ("two\nlines\u{1b}[31m", "two\\nlines\\u{1b}[31m"),
    ] {
        let folder = llama().tensors(|tensors| {
            let one = Stored { dtype: Dtype::F32, shape: vec![1], data: vec![0; 4] };
            tensors.insert(name.to_owned(), one);
        });
        refused!(folder, ModelError::UnexpectedTensor { .. }, "model.safetensors", shown, "llama");
    }
    // Old checkpoints store what is computed anyway.
    let folder = llama().tensors(|tensors| {
        let one = Stored { dtype: Dtype::F32, shape: vec![8], data: vec![0; 32] };
        tensors.insert("model.layers.0.self_attn.rotary_emb.inv_freq".to_owned(), one);
    });
    load(&folder.path()).unwrap();
}

#[test]
fn shapes_must_be_those_of_the_description() {
    let transposed = llama().tensor("model.layers.0.mlp.down_proj.weight", |tensor| tensor.shape.reverse());
    refused!(
        transposed,
        ModelError::TensorShape { .. },
        "model.safetensors",
        "model.layers.0.mlp.down_proj.weight",
        "is 32x96",
        "asks for 96x32"
    );
    let flat = llama().tensor(QUERY, |tensor| tensor.shape = vec![tensor.shape.iter().product()]);
    refused!(flat, ModelError::TensorShape { .. }, "model.safetensors", QUERY, "asks for 96x96");
    let cube = llama().tensor(QUERY, |tensor| tensor.shape = vec![6, 16, 96]);
    refused!(
        cube,
        ModelError::File(FileError::WrongShape { .. }),
        "model.safetensors",
        QUERY,
        "a matrix",
        "[6, 16, 96]"
    );
    let scalar = llama().tensor("model.norm.weight", |tensor| {
        tensor.shape = vec![];
        tensor.data.truncate(tensor.dtype.bitsize() / 8);
    });
    refused!(
        scalar,
        ModelError::File(FileError::WrongShape { .. }),
        "model.safetensors",
        "model.norm.weight",
        "[]"
    );
    let empty = llama().tensor("model.norm.weight", |tensor| {
        tensor.shape = vec![0];
        tensor.data.clear();
    });
    refused!(empty, ModelError::TensorShape { .. }, "model.safetensors", "model.norm.weight", "is 1x0");
    // The description is what changed.
    for (field, value, tensor) in [
        ("vocab_size", 121, EMBEDDING),
        ("hidden_size", 64, EMBEDDING),
        ("intermediate_size", 64, "mlp.gate_proj.weight"),
        ("head_dim", 32, "self_attn.q_proj.weight"),
        ("num_key_value_heads", 3, "self_attn.k_proj.weight"),
    ] {
        refused!(llama().set(field, value), ModelError::TensorShape { .. }, "model.safetensors", tensor);
    }
    let more = llama().set("num_hidden_layers", 3);
    refused!(more, ModelError::File(FileError::MissingTensor { .. }), "model.safetensors", "model.layers.2.");
    let fewer = llama().set("num_hidden_layers", 1);
    refused!(fewer, ModelError::UnexpectedTensor { .. }, "model.safetensors", "model.layers.1.");
}

#[test]
fn element_types_without_a_kernel_are_named() {
    for (dtype, name) in [(Dtype::I64, "I64"), (Dtype::F64, "F64"), (Dtype::U8, "U8"), (Dtype::F8_E5M2, "F8")]
    {
        let folder = llama().tensor(QUERY, |tensor| {
            tensor.dtype = dtype;
            tensor.data = vec![0; tensor.shape.iter().product::<usize>() * dtype.bitsize() / 8];
        });
        refused!(
            folder,
            ModelError::File(FileError::UnsupportedType { .. }),
            "model.safetensors",
            QUERY,
            name,
            "supported: "
        );
    }
}

#[test]
fn tied_and_untied_heads() {
    load(&llama().without("tie_word_embeddings").path()).unwrap();
    refused!(
        llama().set("tie_word_embeddings", false),
        ModelError::File(FileError::MissingTensor { .. }),
        "model.safetensors",
        "`lm_head.weight` is missing"
    );
    // A tied model may store the head again; an untied one is taken at its word when the flag is absent.
    load(&Folder::copy("qwen3").set("tie_word_embeddings", true).path()).unwrap();
    load(&Folder::copy("qwen3").without("tie_word_embeddings").path()).unwrap();
    let short = Folder::copy("qwen3").tensor("lm_head.weight", |tensor| {
        tensor.shape[0] -= 1;
        tensor.data.truncate(tensor.data.len() / 120 * 119);
    });
    refused!(short, ModelError::TensorShape { .. }, "model.safetensors", "lm_head.weight", "is 119x64");
}

/// Adds `count` ordinary tokens to the tokenizer.
fn with_more_tokens(folder: Folder, count: u64) -> Folder {
    folder.json("tokenizer.json", |tokenizer| {
        let vocabulary = tokenizer["model"]["vocab"].as_object_mut().unwrap();
        let first = vocabulary.len() as u64;
        for id in first..first + count {
            vocabulary.insert(format!("token{id}"), json!(id));
        }
    })
}

#[test]
fn the_tokenizer_must_fit_the_embedding() {
    let tokens = ModelFiles::open(&llama().path()).unwrap().tokenizer().unwrap().vocab_size();
    let rows = 120;
    assert!(tokens <= rows, "the fixture has padding or none");
    load(&with_more_tokens(llama(), (rows - tokens) as u64).path()).unwrap();
    refused!(
        with_more_tokens(llama(), (rows - tokens) as u64 + 1),
        ModelError::Text { source: TextError::LargerThanEmbedding { .. }, .. },
        "121 tokens",
        "120 embedding rows"
    );
    // Fewer tokens than rows are padding.
    let fewer = llama().json("tokenizer.json", |tokenizer| {
        tokenizer["model"]["merges"].as_array_mut().unwrap().pop();
        let vocabulary = tokenizer["model"]["vocab"].as_object_mut().unwrap();
        let last = vocabulary.iter().max_by_key(|(_, id)| id.as_u64()).unwrap().0.clone();
        vocabulary.remove(&last);
    });
    let files = ModelFiles::open(&fewer.path()).unwrap();
    assert_eq!(files.tokenizer().unwrap().vocab_size(), tokens - 1);
    files.load_model(backend()).unwrap();
    // The embedding may be the smaller one too.
    let cut = llama().set("vocab_size", tokens - 1).tensor(EMBEDDING, |tensor| {
        let row = tensor.data.len() / tensor.shape[0];
        tensor.shape[0] = tokens - 1;
        tensor.data.truncate(row * (tokens - 1));
    });
    refused!(cut, ModelError::Text { source: TextError::LargerThanEmbedding { .. }, .. }, "embedding rows");
}

#[test]
fn tokenizers_that_cannot_work_are_refused() {
    type Change = fn(&mut serde_json::Map<String, Value>);
    let cases: [(Change, &str); 7] = [
        (|tokenizer| drop(tokenizer.remove("model")), "model"),
        (|tokenizer| tokenizer["model"]["type"] = json!("Wavelet"), "tokenizer.json"),
        (|tokenizer| tokenizer["model"]["vocab"] = json!(3), "tokenizer.json"),
        (|tokenizer| tokenizer["model"]["merges"] = json!(["nowhere else"]), "nowhere"),
        (|tokenizer| tokenizer["model"]["merges"] = json!(["one"]), "not two tokens"),
        (|tokenizer| tokenizer["decoder"] = json!({"type": "WordPiece"}), "decoder"),
        (|tokenizer| tokenizer["model"]["vocab"]["far"] = json!(u32::MAX), "token ids"),
    ];
    for (change, word) in cases {
        let folder = llama().json("tokenizer.json", change);
        refused!(folder, ModelError::Text { .. }, "tokenizer.json", word);
    }
}

#[test]
fn missing_files_are_named() {
    let without = |name: &str| {
        let folder = llama();
        fs::remove_file(folder.file(name)).unwrap();
        folder
    };
    refused!(without("config.json"), ModelError::File(FileError::Io { .. }), "config.json");
    refused!(without("model.safetensors"), ModelError::File(FileError::Invalid { .. }), "model.safetensors");
    // Token ids need no tokenizer, text does.
    let silent = without("tokenizer.json");
    load(&silent.path()).unwrap();
    let Err(error) = ModelFiles::open(&silent.path()).unwrap().load(backend()) else {
        panic!("no tokenizer")
    };
    assert!(error.to_string().contains("`tokenizer.json`"), "{error}");
    let absent = llama();
    fs::remove_dir_all(absent.file("")).unwrap();
    refused!(absent, ModelError::File(FileError::Io { .. }), "config.json");
}

#[test]
fn shards_must_be_those_of_the_index() {
    const INDEX: &str = "model.safetensors.index.json";
    let sharded = || Folder::copy("llama3-rope");
    let gone = sharded();
    fs::remove_file(gone.file("model-00002-of-00003.safetensors")).unwrap();
    refused!(
        gone,
        ModelError::File(FileError::MissingShard { .. }),
        INDEX,
        "`model-00002-of-00003.safetensors`"
    );
    let moved = sharded().json(INDEX, |index| {
        index["weight_map"]["model.norm.weight"] = json!("model-00001-of-00003.safetensors");
    });
    refused!(
        moved,
        ModelError::File(FileError::Invalid { .. }),
        INDEX,
        "`model.norm.weight`",
        "no such tensor"
    );
    let forgotten = sharded().json(INDEX, |index| {
        index["weight_map"].as_object_mut().unwrap().remove("model.norm.weight").unwrap();
    });
    refused!(forgotten, ModelError::File(FileError::MissingTensor { .. }), INDEX, "`model.norm.weight`");
    let escaping = sharded().json(INDEX, |index| {
        index["weight_map"]["model.norm.weight"] = json!("../elsewhere.safetensors");
    });
    refused!(escaping, ModelError::File(FileError::Invalid { .. }), INDEX, "elsewhere");
    let strange = sharded().json(INDEX, |index| {
        index["weight_map"]["model.norm.weight"] = json!("two\nlines\u{1b}[31m");
    });
    refused!(strange, ModelError::File(FileError::MissingShard { .. }), INDEX, "two\\nlines");
    let cut = sharded();
    let path = cut.file("model-00003-of-00003.safetensors");
    let bytes = fs::read(&path).unwrap();
    fs::write(&path, &bytes[..bytes.len() - 1]).unwrap();
    refused!(
        cut,
        ModelError::File(FileError::Truncated { .. }),
        "model-00003-of-00003.safetensors",
        "tensor data"
    );
}

#[test]
fn truncated_weights_never_load() {
    let whole = fs::read(llama().file("model.safetensors")).unwrap();
    for len in [0, 7, 8, 100, whole.len() / 2, whole.len() - 1] {
        let folder = llama();
        fs::write(folder.file("model.safetensors"), &whole[..len]).unwrap();
        refused!(folder, ModelError::File(FileError::Truncated { .. }), "model.safetensors", "truncated");
    }
    let folder = llama();
    fs::write(folder.file("model.safetensors"), [&whole[..], b"more"].concat()).unwrap();
    refused!(folder, ModelError::File(FileError::Invalid { .. }), "model.safetensors", "tensor data");
}

#[test]
fn files_that_cannot_be_read_are_named() {
    let folder = llama();
    fs::remove_file(folder.file("model.safetensors")).unwrap();
    fs::create_dir(folder.file("model.safetensors")).unwrap();
    refused!(folder, ModelError::File(FileError::NotAFile { .. }), "model.safetensors");
}

#[cfg(unix)]
#[test]
fn files_we_may_not_read_are_named() {
    use std::os::unix::fs::PermissionsExt;

    let folder = llama();
    fs::set_permissions(folder.file("config.json"), fs::Permissions::from_mode(0o000)).unwrap();
    // Root may read everything.
    if fs::read(folder.file("config.json")).is_err() {
        refused!(folder, ModelError::File(FileError::Io { .. }), "config.json", "cannot read");
    }
}

#[test]
fn a_copy_with_every_tensor_rewritten_still_runs() {
    run(&load(&llama().tensors(|_| {}).path()).unwrap()).unwrap();
}
