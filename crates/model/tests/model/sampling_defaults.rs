//! What a model's files say about drawing, from both kinds of files.

use std::fs;
use std::path::Path;

use crate::files_writer::GgufWriter;
use oscar_model::files::Gguf;
use oscar_model::source::ModelPath;
use oscar_model::{ModelFiles, SamplingDefaults};

fn of_gguf(writer: &GgufWriter) -> Result<SamplingDefaults, String> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    fs::write(&path, writer.clone().zeros("t", &[4]).build()).unwrap();
    SamplingDefaults::from_gguf(&Gguf::open(&path).unwrap()).map_err(|error| error.to_string())
}

#[test]
fn gguf_files_have_keys_for_it() {
    let writer = GgufWriter::new()
        .f32("general.sampling.temp", 0.6)
        .raw("general.sampling.top_k", 5, &20i32.to_le_bytes())
        .f32("general.sampling.top_p", 0.95)
        .raw("general.sampling.min_p", 12, &0.05f64.to_le_bytes())
        .f32("general.sampling.penalty_repeat", 1.05)
        .u32("general.sampling.mirostat", 0);
    let expected = SamplingDefaults {
        temperature: Some(0.6),
        top_k: Some(20),
        top_p: Some(0.95),
        min_p: Some(0.05),
        repetition_penalty: Some(1.05),
    };
    assert_eq!(of_gguf(&writer), Ok(expected));
    assert!(of_gguf(&GgufWriter::new()).unwrap().is_empty());
    let whole = of_gguf(&GgufWriter::new().u32("general.sampling.temp", 1)).unwrap();
    assert_eq!(whole.temperature, Some(1.0));
}

#[test]
fn gguf_values_that_cannot_be_are_named() {
    for writer in [
        GgufWriter::new().f32("general.sampling.temp", f32::NAN),
        GgufWriter::new().f32("general.sampling.temp", -0.5),
        GgufWriter::new().str("general.sampling.temp", "warm"),
    ] {
        let error = of_gguf(&writer).unwrap_err();
        assert!(error.contains("key `general.sampling.temp`: expected a number of 0 or more"), "{error}");
    }
}

#[test]
fn bad_settings_do_not_stop_who_needs_none() {
    let folder = tempfile::tempdir().unwrap();
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/models/qwen3");
    for file in ["config.json", "tokenizer.json", "model.safetensors"] {
        fs::copy(fixture.join(file), folder.path().join(file)).unwrap();
    }
    let open = |generation: &str| {
        fs::write(folder.path().join("generation_config.json"), generation).unwrap();
        ModelFiles::open(&ModelPath::Folder(folder.path().to_path_buf())).unwrap()
    };
    let files = open(r#"{"temperature": 0.6, "top_k": 20, "eos_token_id": 2}"#);
    let defaults = files.sampling_defaults().unwrap();
    assert_eq!((defaults.temperature, defaults.top_k), (Some(0.6), Some(20)));
    let error = open(r#"{"top_p": 3}"#).sampling_defaults().unwrap_err().to_string();
    assert!(error.ends_with("field `top_p`: expected a number above 0, at most 1, got 3"), "{error}");
}
