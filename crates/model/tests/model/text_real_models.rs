//! Tokenizers of real models. Runs where `OSCAR_TEST_MODELS` names a folder of `.gguf` files and of folders with
//! a `tokenizer.json`; `NAME.ids.json` beside a model (`[{"text", "parse_special", "ids"}, …]`, made by
//! `tools/make_text_fixtures.py ids`) holds the ids another implementation found.

use std::path::PathBuf;

use oscar_model::files::gguf::Gguf;
use oscar_model::text::Tokenizer;

#[derive(serde::Deserialize)]
struct Case {
    text: String,
    parse_special: bool,
    ids: Vec<u32>,
}

#[test]
fn real_vocabularies_round_trip_and_agree_with_recorded_ids() {
    let Some(folder) = std::env::var_os("OSCAR_TEST_MODELS").map(PathBuf::from) else {
        oscar_testing::skipped("OSCAR_TEST_MODELS does not name a folder of models");
        return;
    };
    let mut checked = 0;
    let mut failures = Vec::new();
    for entry in std::fs::read_dir(&folder).expect("OSCAR_TEST_MODELS is a folder") {
        let path = entry.expect("readable folder").path();
        let tokenizer = if path.join("tokenizer.json").exists() {
            Tokenizer::from_folder(&path).expect("a tokenizer")
        } else if path.extension().is_some_and(|extension| extension == "gguf") {
            Tokenizer::from_gguf(&Gguf::open(&path).expect("a GGUF file")).expect("a tokenizer")
        } else {
            continue;
        };
        let text = "Hello, world! 12345 \u{1f980}\n\n  fn main() {}\tçé 中文";
        let ids = tokenizer.encode(text, false).expect("encodes");
        assert_eq!(tokenizer.decode(&ids, true).expect("decodes"), text, "{}", path.display());
        let recorded = PathBuf::from(format!("{}.ids.json", path.display()));
        if recorded.exists() {
            let json = std::fs::read_to_string(&recorded).expect("readable");
            let cases: Vec<Case> = serde_json::from_str(&json).expect("cases");
            for case in &cases {
                let ids = if case.parse_special {
                    tokenizer.encode_with_special_tokens_parsed(&case.text, false)
                } else {
                    tokenizer.encode(&case.text, false)
                };
                let ids = ids.expect("encodes");
                if ids != case.ids {
                    let at = ids.iter().zip(&case.ids).take_while(|(a, b)| a == b).count();
                    let near = |ids: &[u32]| {
                        ids[at.saturating_sub(2)..ids.len().min(at + 6)]
                            .iter()
                            .map(|id| format!("{id}={:?}", tokenizer.token_text(*id).unwrap_or_default()))
                            .collect::<Vec<_>>()
                            .join(" ")
                    };
                    failures.push(format!(
                        "{} special={} token {at} of {}: {:?}\n   ours {}\n theirs {}",
                        path.file_name().unwrap_or_default().to_string_lossy(),
                        case.parse_special,
                        case.ids.len(),
                        case.text.chars().take(60).collect::<String>(),
                        near(&ids),
                        near(&case.ids)
                    ));
                }
            }
            println!("{}: {} recorded cases", path.display(), cases.len());
        }
        checked += 1;
    }
    assert!(checked > 0, "no model in {}", folder.display());
    assert!(failures.is_empty(), "{} cases differ:\n{}", failures.len(), failures.join("\n"));
}
