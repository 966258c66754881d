//! Models that cannot run: exit code 1, one line that names the file and the field, nothing on standard output.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::support::{Machine, fixture};

/// A copy of a fixture: a folder, or a single GGUF file.
fn copy(machine: &Machine, name: &str) -> PathBuf {
    let gguf = fixture(name).join("model.gguf");
    if gguf.exists() {
        let path = machine.path("model.gguf");
        fs::copy(gguf, &path).expect("copy");
        return path;
    }
    let folder = machine.path("model");
    fs::create_dir(&folder).expect("folder");
    for file in ["config.json", "model.safetensors", "tokenizer.json"] {
        fs::copy(fixture(name).join(file), folder.join(file)).expect(file);
    }
    folder
}

/// Replaces bytes by as many others, so that every length in the file stays true.
fn replace(path: &Path, from: &[u8], to: &[u8]) {
    assert_eq!(from.len(), to.len());
    let mut bytes = fs::read(path).expect("read");
    let at = bytes.windows(from.len()).position(|window| window == from).expect("the bytes are there");
    bytes[at..at + to.len()].copy_from_slice(to);
    fs::write(path, bytes).expect("write");
}

fn edit(path: &Path, change: impl FnOnce(&mut Value)) {
    let mut value = serde_json::from_slice(&fs::read(path).expect("read")).expect("JSON");
    change(&mut value);
    fs::write(path, value.to_string()).expect("write");
}

/// Every command that loads the model refuses it with `words`, with and without `--json`.
fn refused(machine: &Machine, model: &Path, words: &[&str]) {
    let model = model.to_str().expect("path");
    for command in [
        &["generate", model, "--prompt", "hello"][..],
        &["generate", model, "--prompt", "hello", "--json"],
        &["bench", "model", model, "--prompt-tokens", "8", "--gen-tokens", "1", "--json"],
        &["chat", model],
    ] {
        let outcome = machine.run(command).failure(1, words);
        assert_eq!(outcome.stdout, "", "{command:?}");
    }
    assert_eq!(machine.cached(), [""; 0]);
}

#[test]
fn a_missing_tensor_is_named() {
    let machine = Machine::new();
    let model = copy(&machine, "llama-tied");
    replace(&model.join("model.safetensors"), b"\"model.norm.weight\"", b"\"model.norm.wait!!\"");
    refused(&machine, &model, &["model.safetensors", "tensor `model.norm.weight` is missing"]);
}

#[test]
fn a_tensor_of_an_unknown_type_is_named() {
    let machine = Machine::new();
    let model = copy(&machine, "llama-head48");
    // The first tensor of the data; types of the same width keep every offset.
    replace(&model.join("model.safetensors"), b"\"F16\"", b"\"I16\"");
    refused(&machine, &model, &["model.safetensors", "tensor `model.", "type I16", "supported: "]);
}

#[test]
fn an_unknown_family_is_named() {
    let machine = Machine::new();
    let model = copy(&machine, "llama-tied");
    edit(&model.join("config.json"), |config| config["model_type"] = json!("mamba"));
    refused(&machine, &model, &["config.json", "`model_type`", "\"mamba\"", "llama, qwen2, qwen3"]);

    let model = copy(&machine, "gguf-llama-f16");
    replace(&model, b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0mamba");
    refused(&machine, &model, &["model.gguf", "`general.architecture`", "\"mamba\""]);
}

#[test]
fn a_wrong_field_is_named() {
    let machine = Machine::new();
    let model = copy(&machine, "llama-tied");
    let config = model.join("config.json");
    for (field, value) in
        [("hidden_size", json!(0)), ("num_hidden_layers", json!(1u64 << 31)), ("head_dim", json!(15))]
    {
        let before = fs::read(&config).expect("read");
        edit(&config, |config| config[field] = value);
        refused(&machine, &model, &["config.json", &format!("`{field}`")]);
        let outcome = machine
            .run(["inspect", model.to_str().expect("path"), "--json"])
            .failure(1, &["config.json", field]);
        assert_eq!(outcome.stdout, "");
        fs::write(&config, before).expect("write");
    }
}

#[test]
fn a_truncated_file_is_named() {
    let machine = Machine::new();
    let model = copy(&machine, "gguf-qwen2-q8_0");
    let bytes = fs::read(&model).expect("read");
    fs::write(&model, &bytes[..bytes.len() / 2]).expect("write");
    refused(&machine, &model, &["model.gguf", "tensor `", "truncated"]);

    let model = copy(&machine, "llama-tied");
    let weights = model.join("model.safetensors");
    let bytes = fs::read(&weights).expect("read");
    fs::write(&weights, &bytes[..bytes.len() - 1]).expect("write");
    refused(&machine, &model, &["model.safetensors", "tensor data", "truncated"]);
}

#[test]
fn a_tokenizer_of_another_model_is_named() {
    let machine = Machine::new();
    let model = copy(&machine, "llama-tied");
    edit(&model.join("tokenizer.json"), |tokenizer| {
        tokenizer["model"]["vocab"]["stranger"] = json!(500);
    });
    let folder = model.to_str().expect("path").to_owned();
    refused(&machine, &model, &[&folder, "501 tokens", "120 embedding rows"]);
}

#[test]
fn a_folder_without_a_description_is_named() {
    let machine = Machine::new();
    let model = copy(&machine, "llama-tied");
    fs::remove_file(model.join("config.json")).expect("remove");
    let folder = model.to_str().expect("path").to_owned();
    refused(&machine, &model, &[&folder, "config.json"]);
}

#[test]
fn control_characters_of_a_file_do_not_reach_the_terminal() {
    let machine = Machine::new();
    let model = copy(&machine, "gguf-llama-f16");
    // The same key twice, with what clears a screen and a line end inside.
    let evil = b"llama.\x1b[2J\nt_lengths";
    replace(&model, b"llama.context_length", evil);
    replace(&model, b"llama.rope.freq_base", evil);
    refused(&machine, &model, &["model.gguf", "key `llama.\\u{1b}[2J\\nt_lengths`", "twice"]);
}

#[test]
fn weights_that_are_not_numbers_are_an_error() {
    let machine = Machine::new();
    let model = copy(&machine, "llama-tied");
    let weights = model.join("model.safetensors");
    let mut bytes = fs::read(&weights).expect("read");
    let header = 8 + u64::from_le_bytes(bytes[..8].try_into().expect("eight bytes")) as usize;
    bytes[header..].fill(0xff);
    fs::write(&weights, bytes).expect("write");
    for more in [&[][..], &["--json"], &["--temperature", "1"]] {
        let arguments = [&["generate", model.to_str().expect("path"), "--prompt", "hello"], more].concat();
        let outcome = machine.run(arguments).failure(1, &["logits", "not finite"]);
        assert_eq!(outcome.stdout, "");
    }
}
