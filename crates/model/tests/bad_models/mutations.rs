//! A short fuzz run over whole models: random damage to a checkpoint, then open, encode, load and three tokens.
//! Errors and odd logits are fine, a panic is not.
//!
//! The seed is fixed so that a run can be repeated; `OSCAR_FUZZ_SEED` and `OSCAR_FUZZ_ROUNDS` change it.

use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::{Path, PathBuf};

use oscar_model::source::ModelPath;
use oscar_model::text::{ChatTemplate, RenderOptions, TextError};
use oscar_model::{ModelError, ModelFiles};
use oscar_random::Random;
use serde_json::{Value, json};

use crate::support::{Folder, backend, fixture, run};

/// Changes a few bytes; three times out of four among the first `header` bytes, where they matter most.
fn damage(bytes: &mut [u8], header: usize, random: &mut Random) {
    for _ in 0..1 + random.below(4) {
        let limit = if random.below(4) > 0 { header.min(bytes.len()) } else { bytes.len() };
        let at = random.below(limit.max(1));
        match random.below(4) {
            0 => bytes[at] ^= 1 << random.below(8),
            1 => bytes[at] = random.next_u64() as u8,
            // Small numbers and digits keep a file readable for longer.
            2 => bytes[at] = random.below(8) as u8,
            _ => bytes[at] = b'0' + random.below(10) as u8,
        }
    }
}

/// Replaces one value anywhere in a JSON document by another.
fn damage_json(value: &mut Value, random: &mut Random) {
    let inside = match value {
        Value::Array(items) if !items.is_empty() && random.below(8) > 0 => {
            let at = random.below(items.len());
            items.get_mut(at)
        }
        Value::Object(fields) if !fields.is_empty() && random.below(16) > 0 => {
            let at = random.below(fields.len());
            fields.values_mut().nth(at)
        }
        _ => None,
    };
    match inside {
        Some(inside) => damage_json(inside, random),
        None => {
            let nasty = [
                json!(null),
                json!(true),
                json!(0),
                json!(1),
                json!(2),
                json!(-1),
                json!(0.5),
                json!(1e-300),
                json!(1e300),
                json!(1 << 16),
                json!(u32::MAX),
                json!(u64::MAX),
                json!(""),
                json!("yarn"),
                json!("a"),
                json!("\\"),
                json!("[(?"),
                json!([]),
                json!({}),
            ];
            *value = nasty[random.below(nasty.len())].clone();
        }
    }
}

fn from_environment(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

/// Damages and runs a model `rounds` times and counts how far it came: opened and loaded, and run to a token.
fn rounds(what: &str, path: &ModelPath, rounds: u64, mut damage: impl FnMut(&mut Random)) {
    let seed = from_environment("OSCAR_FUZZ_SEED", 0x0b5e_55ed);
    let rounds = from_environment("OSCAR_FUZZ_ROUNDS", rounds);
    let (mut loaded, mut drawn) = (0, 0);
    for round in 0..rounds {
        let mut random = Random::new(seed ^ round.wrapping_mul(0xd134_2543_de82_ef95));
        damage(&mut random);
        let outcome = catch_unwind(AssertUnwindSafe(|| match attempt(path) {
            Ok(drew) => (1, u64::from(drew)),
            Err(error) => {
                assert!(!error.to_string().contains(char::is_control), "more than one line: {error}");
                (0, 0)
            }
        }));
        match outcome {
            Ok((one, two)) => (loaded, drawn) = (loaded + one, drawn + two),
            Err(panic) => {
                eprintln!("{what}: round {round} of OSCAR_FUZZ_SEED={seed}");
                resume_unwind(panic);
            }
        }
    }
    println!("{what}: {rounds} rounds of OSCAR_FUZZ_SEED={seed}, {loaded} loaded, {drawn} drew a token");
    // Damage that always or never shows would test nothing.
    assert!(rounds < 100 || (1..rounds).contains(&loaded), "{what}: {loaded} of {rounds} loaded");
}

/// Takes a model as far as it goes; whether a token could be drawn.
fn attempt(path: &ModelPath) -> Result<bool, ModelError> {
    let files = ModelFiles::open(path)?;
    if let Some(tokenizer) = files.tokenizer() {
        for text in ["the rain in <|im_start|> Spain\n\n  fällt 12345\u{0}\u{1f600}", "", " "] {
            if let Ok(ids) = tokenizer.encode_with_special_tokens_parsed(text, true) {
                let _ = tokenizer.decode(&ids, false);
            }
        }
    }
    Ok(run(&files.load_model(backend())?).is_ok())
}

fn damaged_gguf(name: &str) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    let whole = fs::read(fixture(name).join("model.gguf")).unwrap();
    rounds(name, &ModelPath::Gguf(path.clone()), 1000, |random| {
        let mut bytes = whole.clone();
        damage(&mut bytes, 6000, random);
        fs::write(&path, bytes).unwrap();
    });
}

#[test]
fn damaged_llama_gguf() {
    damaged_gguf("gguf-llama3-rope-f16");
}

#[test]
fn damaged_qwen_gguf() {
    damaged_gguf("gguf-qwen2-q8_0");
}

#[test]
fn damaged_safetensors() {
    let folder = Folder::copy("qwen2-yarn");
    let path = folder.file("model.safetensors");
    let whole = fs::read(&path).unwrap();
    rounds("safetensors", &folder.path(), 1000, |random| {
        let mut bytes = whole.clone();
        damage(&mut bytes, 2500, random);
        replace(&path, &bytes);
    });
}

/// A mapped file must not change under its map, so a new one takes its place.
fn replace(path: &Path, bytes: &[u8]) {
    let _ = fs::remove_file(path);
    fs::write(path, bytes).unwrap();
}

fn damaged_json(name: &str, count: u64) {
    let folder = Folder::copy("qwen2-yarn");
    let path = folder.file(name);
    let whole = fs::read(&path).unwrap();
    let value: Value = serde_json::from_slice(&whole).unwrap();
    rounds(name, &folder.path(), count, |random| {
        let mut bytes = whole.clone();
        if random.below(4) == 0 {
            damage(&mut bytes, whole.len(), random);
        } else {
            let mut value = value.clone();
            (0..1 + random.below(2)).for_each(|_| damage_json(&mut value, random));
            bytes = value.to_string().into_bytes();
        }
        replace(&path, &bytes);
    });
}

#[test]
fn damaged_configs() {
    damaged_json("config.json", 1000);
}

#[test]
fn damaged_tokenizers() {
    damaged_json("tokenizer.json", 1000);
}

/// Cuts pieces out of a text and puts them elsewhere, where characters begin.
fn splice(text: &mut String, other: &str, random: &mut Random) {
    let place = |text: &str, random: &mut Random| {
        let at = random.below(text.len() + 1);
        (at..=text.len()).find(|&at| text.is_char_boundary(at)).unwrap()
    };
    for _ in 0..1 + random.below(4) {
        let (start, end) = (place(other, random), place(other, random));
        let piece = &other[start.min(end)..start.max(end)];
        let (start, end) = (place(text, random), place(text, random));
        let (from, to) = (start.min(end), start.max(end));
        match random.below(3) {
            0 => text.insert_str(from, &piece[..place(piece, random)]),
            1 => text.replace_range(from..to.min(place(text, random).max(from)), ""),
            _ => text.replace_range(from..to, piece),
        }
    }
}

#[test]
fn damaged_templates() {
    let mut paths: Vec<PathBuf> =
        fs::read_dir(fixture("../text/templates")).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "jinja"));
    paths.sort();
    let templates: Vec<String> = paths.iter().map(|path| fs::read_to_string(path).unwrap()).collect();
    assert!(templates.len() >= 2, "fixtures are missing");
    let messages = [
        json!({"role": "system", "content": "Be <b>brief</b>.\n"}),
        json!({"role": "user", "content": "é 日本 '\""}),
        json!({"role": "assistant", "content": null, "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}),
    ];
    let seed = from_environment("OSCAR_FUZZ_SEED", 0x0b5e_55ed);
    let mut rendered = 0;
    for round in 0..from_environment("OSCAR_FUZZ_ROUNDS", 2000) {
        let mut random = Random::new(seed ^ round.wrapping_mul(0xd134_2543_de82_ef95));
        let mut source = templates[random.below(templates.len())].clone();
        let other = templates[random.below(templates.len())].clone()
            + "{%}generation{# {{ -1 ** {%- endgeneration -%}";
        splice(&mut source, &other, &mut random);
        let outcome = catch_unwind(|| {
            let template = ChatTemplate::from_source(&source)?;
            let options = RenderOptions { add_generation_prompt: true, ..RenderOptions::default() };
            Ok(template.render(&messages, &options))
        });
        match outcome {
            Ok(Ok(Ok(_))) => rendered += 1,
            // What a template says of itself may have lines.
            Ok(Ok(Err(TextError::TemplateRefused { .. }))) => {}
            Ok(Ok(Err(error)) | Err(error)) => {
                let message = error.to_string();
                assert!(!message.contains(char::is_control), "more than one line: {message:?}");
                // The thread that renders must not die either.
                assert!(!message.contains("unexpectedly"), "{message} in round {round} of {seed}: {source}");
            }
            Err(panic) => {
                eprintln!("round {round} of OSCAR_FUZZ_SEED={seed}: {source}");
                resume_unwind(panic);
            }
        }
    }
    println!("templates: OSCAR_FUZZ_SEED={seed}, {rendered} rendered");
    assert!(rendered > 0, "all damage showed");
}
