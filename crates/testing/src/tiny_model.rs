//! Tiny random models with a longer context than their files say.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use oscar_kernels::Backend;
use oscar_model::LoadedModel;
use oscar_model::source::ModelPath;

/// A model of two layers and 120 tokens on any device, with room for `context` tokens.
pub fn tiny_model<B: Backend>(context: usize, backend: Arc<B>) -> Arc<LoadedModel<B>> {
    tiny_model_with("qwen3", context, backend, |_| ())
}

/// A model of which one layer sees everything and the others `window` positions: `gemma3`, of four layers, or `gpt-oss`, of
/// three, with learned sinks and experts.
pub fn tiny_sliding_model<B: Backend>(
    name: &str,
    context: usize,
    window: usize,
    backend: Arc<B>,
) -> Arc<LoadedModel<B>> {
    let change =
        |config: String| config.replace("\"sliding_window\": 40", &format!("\"sliding_window\": {window}"));
    let model = tiny_model_from(name, context, backend, change, |_| ());
    assert_eq!(model.config().window(0), Some(window));
    model
}

/// The fixture of this name with room for `context` tokens; `change` may damage its weights file.
pub fn tiny_model_with<B: Backend>(
    name: &str,
    context: usize,
    backend: Arc<B>,
    change: impl FnOnce(&mut Vec<u8>),
) -> Arc<LoadedModel<B>> {
    tiny_model_from(name, context, backend, |config| config, change)
}

/// The fixture of this name with room for `context` tokens and without sliding windows, as most published models of a family
/// are.
pub fn tiny_global_model<B: Backend>(name: &str, context: usize, backend: Arc<B>) -> Arc<LoadedModel<B>> {
    let change = |config: String| match config.find("\"sliding_window\": ") {
        None => config,
        Some(at) => {
            let end = config[at..].find([',', '\n']).map_or(config.len(), |length| at + length);
            config.replace(&config[at..end], "\"sliding_window\": null")
        }
    };
    let model = tiny_model_from(name, context, backend, change, |_| ());
    assert_eq!(model.config().window(0), None);
    model
}

fn tiny_model_from<B: Backend>(
    name: &str,
    context: usize,
    backend: Arc<B>,
    change_config: impl FnOnce(String) -> String,
    change: impl FnOnce(&mut Vec<u8>),
) -> Arc<LoadedModel<B>> {
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("../model/tests/fixtures/models").join(name);
    let read = |file: &str| fs::read(fixture.join(file)).expect("the fixture is there");
    let folder = tempfile::tempdir().expect("a folder for a model");
    let write =
        |file: &str, bytes: &[u8]| fs::write(folder.path().join(file), bytes).expect("a file of a model");
    for file in ["generation_config.json", "tokenizer.json"] {
        write(file, &read(file));
    }
    let config = String::from_utf8(read("config.json")).expect("JSON is UTF-8");
    let longer = format!("\"max_position_embeddings\": {context}");
    let config = change_config(config.replace("\"max_position_embeddings\": 256", &longer));
    write("config.json", config.as_bytes());
    let mut weights = read("model.safetensors");
    change(&mut weights);
    write("model.safetensors", &weights);
    let path = ModelPath::Folder(folder.path().to_path_buf());
    let model = LoadedModel::load(&path, backend).expect("the fixture is a model");
    assert_eq!(model.config().max_context, context);
    Arc::new(model)
}
