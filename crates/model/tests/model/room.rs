//! Weights that do not fit on a device are refused before anything is copied there.

use std::path::Path;
use std::sync::Arc;

use oscar_model::source::ModelPath;
use oscar_model::{ModelError, ModelFiles};
use oscar_testing::HashBackend;

fn load(name: &str, free: usize) -> Result<(), ModelError> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/models").join(name);
    let backend = HashBackend::default().with_free_memory(free);
    // The first operation would fail.
    backend.lose_after(Some(0));
    let files = ModelFiles::open(&ModelPath::Folder(folder))?;
    files.load_model(Arc::new(backend)).map(drop)
}

#[test]
fn the_error_says_how_much_is_missing() {
    for name in ["qwen3", "llama-tied", "glm4-moe", "gpt-oss", "gemma3"] {
        let Err(ModelError::WeightsTooLarge { needed, free: 0, missing, .. }) = load(name, 0) else {
            panic!("{name} fits nowhere")
        };
        assert_eq!(needed, missing);
        let most = std::fs::metadata(
            Path::new(env!("CARGO_MANIFEST_DIR"))
                .join(format!("tests/fixtures/models/{name}/model.safetensors")),
        );
        assert!(needed > 0 && needed as u64 <= most.unwrap().len(), "{name}: {needed}");
        assert!(
            !matches!(load(name, needed), Err(ModelError::WeightsTooLarge { .. })),
            "{name}: as much as it needs"
        );
        let Err(error) = load(name, needed - 1) else { panic!("{name} fits") };
        let ModelError::WeightsTooLarge { free, missing: 1, .. } = error else { panic!("{error}") };
        assert_eq!(free, needed - 1);
    }
    let error = ModelError::WeightsTooLarge {
        path: "model.gguf".into(),
        needed: 15 << 30,
        free: 19 << 29,
        missing: 11 << 29,
    };
    let text =
        "model.gguf: the weights need 15.00 GiB on the device and 9.50 GiB are free: 5.50 GiB are missing";
    assert_eq!(error.to_string(), text);
}
