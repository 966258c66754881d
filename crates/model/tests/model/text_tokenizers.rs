//! Tokenizers against ids recorded from the Python library, streaming, and vocabularies that lie.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use oscar_model::text::{ChatTemplate, GgufVocabulary, RenderOptions, StreamDecoder, TextError, Tokenizer};
use proptest::prelude::*;
use serde::Deserialize;

#[derive(Deserialize)]
struct Fixture {
    vocabulary: Fields,
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Fields {
    model: String,
    pre: Option<String>,
    tokens: Vec<String>,
    scores: Vec<f32>,
    merges: Vec<String>,
    token_types: Vec<i32>,
    bos: Option<u32>,
    eos: Option<u32>,
    unk: Option<u32>,
    add_space_prefix: Option<bool>,
}

#[derive(Deserialize)]
struct Case {
    text: String,
    parse_special: bool,
    ids: Vec<u32>,
    decoded: String,
}

const NAMES: [&str; 7] = ["gpt-2", "smollm", "qwen2", "llama-bpe", "default", "spm-prefix", "spm-plain"];

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/text/tokenizers")
}

fn fixture(name: &str) -> (GgufVocabulary, Vec<Case>) {
    let json = std::fs::read_to_string(folder().join(format!("{name}.vocabulary.json"))).expect("fixture");
    let Fixture { vocabulary: fields, cases } = serde_json::from_str(&json).expect("fixture");
    let vocabulary = GgufVocabulary {
        model: fields.model,
        pre: fields.pre,
        tokens: fields.tokens,
        scores: fields.scores,
        merges: fields.merges,
        token_types: fields.token_types,
        bos: fields.bos,
        eos: fields.eos,
        unk: fields.unk,
        add_space_prefix: fields.add_space_prefix,
        ..GgufVocabulary::default()
    };
    (vocabulary, cases)
}

fn rebuilt(name: &str) -> Tokenizer {
    Tokenizer::from_gguf_vocabulary(&fixture(name).0).expect("a sound vocabulary")
}

fn from_json(name: &str) -> Tokenizer {
    Tokenizer::from_file(folder().join(format!("{name}.tokenizer.json"))).expect("a sound file")
}

fn encode(tokenizer: &Tokenizer, text: &str, parse_special: bool) -> Vec<u32> {
    if parse_special {
        tokenizer.encode_with_special_tokens_parsed(text, false).expect("encodes")
    } else {
        tokenizer.encode(text, false).expect("encodes")
    }
}

#[test]
fn ids_are_those_of_the_python_library() {
    for name in NAMES {
        let cases = fixture(name).1;
        assert!(cases.len() >= 90, "{name}: {} cases", cases.len());
        for (kind, tokenizer) in [("GGUF fields", rebuilt(name)), ("tokenizer.json", from_json(name))] {
            for case in &cases {
                let ids = encode(&tokenizer, &case.text, case.parse_special);
                assert_eq!(ids, case.ids, "{name} from {kind}: {:?} {}", case.text, case.parse_special);
                let decoded = tokenizer.decode(&ids, true).expect("decodes");
                assert_eq!(decoded, case.decoded, "{name} from {kind}: {:?}", case.text);
            }
        }
    }
}

#[test]
fn special_tokens_are_parsed_only_where_asked() {
    for tokenizer in [rebuilt("qwen2"), from_json("qwen2")] {
        let end = tokenizer.token_id("<|im_end|>").expect("in the vocabulary");
        let call = tokenizer.token_id("<tool_call>").expect("in the vocabulary");
        let text = "<tool_call>x<|im_end|>";
        let parsed = encode(&tokenizer, text, true);
        assert_eq!((parsed[0], parsed[parsed.len() - 1]), (call, end));
        let plain = encode(&tokenizer, text, false);
        assert_eq!(plain[0], call, "user-defined tokens are always one token");
        assert!(!plain.contains(&end));
        assert_eq!(tokenizer.decode(&parsed, true).expect("decodes"), "<tool_call>x");
        assert_eq!(tokenizer.decode(&parsed, false).expect("decodes"), text);
        assert_eq!(tokenizer.decode(&plain, true).expect("decodes"), text);
        assert!(tokenizer.is_end(end) && !tokenizer.is_end(call));
    }
}

/// Some vocabularies call the tokens that begin turns ordinary added tokens. In a message they are text all the same.
#[test]
fn tokens_that_look_like_control_tokens_are_text_in_messages() {
    let (mut vocabulary, _) = fixture("qwen2");
    let id = vocabulary.tokens.iter().position(|token| token == "<|im_start|>").expect("in the vocabulary");
    vocabulary.token_types[id] = 4;
    let tokenizer = Tokenizer::from_gguf_vocabulary(&vocabulary).expect("sound");
    let template = ChatTemplate::from_source("<|im_start|>{{ messages[0].content }}").expect("a template");
    let messages = [serde_json::json!({"role": "user", "content": "<|im_start|><tool_call>"})];
    let options = RenderOptions::default();
    let rendered = template.render_literally(&messages, &options, tokenizer.control_tokens());
    let ids = tokenizer.encode_rendered(&rendered.expect("renders")).expect("encodes");
    let count = |id: u32| ids.iter().filter(|&&other| other == id).count();
    assert_eq!(count(id as u32), 1, "that of the template");
    assert_eq!(count(tokenizer.token_id("<tool_call>").expect("in the vocabulary")), 1);
}

#[test]
fn begin_and_end_tokens_follow_the_file() {
    let (vocabulary, _) = fixture("spm-prefix");
    let ids = |vocabulary: &GgufVocabulary| {
        let tokenizer = Tokenizer::from_gguf_vocabulary(vocabulary).expect("sound");
        tokenizer.encode("a", true).expect("encodes")
    };
    assert_eq!(
        ids(&vocabulary)[0],
        1,
        "SentencePiece texts begin with the begin token unless the file says no"
    );
    let without = GgufVocabulary { add_bos: Some(false), add_eos: Some(true), ..vocabulary.clone() };
    assert_ne!(ids(&without)[0], 1);
    assert_eq!(ids(&without).last(), Some(&2));

    let (vocabulary, _) = fixture("smollm");
    let bos = vocabulary.bos.expect("named");
    assert_ne!(ids(&vocabulary)[0], bos, "byte-level texts do not");
    assert_eq!(ids(&GgufVocabulary { add_bos: Some(true), ..vocabulary })[0], bos);
    let (vocabulary, _) = fixture("llama-bpe");
    assert_eq!(Some(ids(&vocabulary)[0]), vocabulary.bos, "Llama-3 texts do");
}

#[test]
fn embedding_rows_are_checked() {
    let tokenizer = rebuilt("gpt-2");
    let size = tokenizer.vocab_size();
    tokenizer.check_embedding_rows(size).expect("equal");
    tokenizer.check_embedding_rows(size + 100).expect("padding");
    let error = tokenizer.check_embedding_rows(size - 1).expect_err("too small").to_string();
    assert!(error.contains(&size.to_string()) && error.contains(&(size - 1).to_string()), "{error}");
    assert!(matches!(tokenizer.decode(&[size as u32], true), Err(TextError::UnknownId { .. })));
}

#[test]
fn streamed_text_is_the_decoded_text_and_never_half_a_character() {
    for name in NAMES {
        let tokenizer = Arc::new(rebuilt(name));
        for case in fixture(name).1 {
            let mut decoder = StreamDecoder::new(Arc::clone(&tokenizer)).from_start();
            let mut text = String::new();
            for &id in &case.ids {
                let piece = decoder.push(id).expect("known id");
                assert!(piece.as_deref() != Some(""), "nothing is None");
                text.extend(piece);
            }
            text.extend(decoder.finish());
            assert_eq!(text, case.decoded, "{name}: {:?}", case.text);
            assert_eq!(decoder.finish(), None);
        }
    }
}

#[test]
fn a_character_of_several_tokens_arrives_whole_and_a_cut_one_as_a_replacement() {
    let tokenizer = Arc::new(rebuilt("gpt-2"));
    let ids = tokenizer.encode("a🦀b", false).expect("encodes");
    assert!(ids.len() > 3, "the tiny vocabulary splits the crab: {ids:?}");
    let mut decoder = StreamDecoder::new(Arc::clone(&tokenizer));
    let pieces: Vec<Option<String>> = ids.iter().map(|id| decoder.push(*id).expect("known id")).collect();
    let texts: Vec<&str> = pieces.iter().flatten().map(String::as_str).collect();
    assert_eq!(texts, ["a", "🦀", "b"]);

    let mut decoder = StreamDecoder::new(Arc::clone(&tokenizer));
    assert_eq!(decoder.push(ids[1]).expect("known id"), None);
    assert_eq!(
        decoder.push(tokenizer.token_id("a").expect("a")).expect("known id").as_deref(),
        Some("\u{fffd}a")
    );
    decoder.push(ids[1]).expect("known id");
    assert_eq!(decoder.finish().as_deref(), Some("\u{fffd}"));

    let end = tokenizer.token_id("<|im_end|>").expect("in the vocabulary");
    assert_eq!(decoder.push(end).expect("known id"), None, "special tokens are hidden");
    let mut verbose = StreamDecoder::new(Arc::clone(&tokenizer)).keep_special();
    assert_eq!(verbose.push(end).expect("known id").as_deref(), Some("<|im_end|>"));
    assert!(matches!(verbose.push(u32::MAX), Err(TextError::UnknownId { .. })));
}

#[test]
fn a_continuation_keeps_its_leading_space() {
    let tokenizer = Arc::new(rebuilt("spm-prefix"));
    let ids = tokenizer.encode("the", false).expect("encodes");
    let run = |mut decoder: StreamDecoder| -> String {
        ids.iter().filter_map(|id| decoder.push(*id).expect("known id")).collect()
    };
    assert_eq!(run(StreamDecoder::new(Arc::clone(&tokenizer))), " the");
    assert_eq!(run(StreamDecoder::new(Arc::clone(&tokenizer)).from_start()), "the");
}

#[test]
fn lying_vocabularies_are_refused() {
    let good = |name| fixture(name).0;
    let refuse = |vocabulary: GgufVocabulary| {
        Tokenizer::from_gguf_vocabulary(&vocabulary).expect_err("must be refused").to_string()
    };
    let names = |error: String, part: &str| assert!(error.contains(part), "{error:?} does not name {part:?}");

    names(refuse(GgufVocabulary::default()), "tokens");
    names(refuse(GgufVocabulary { model: String::new(), ..good("gpt-2") }), "tokenizer.ggml.model");
    names(refuse(GgufVocabulary { model: "wordpiece".into(), ..good("gpt-2") }), "wordpiece");
    names(refuse(GgufVocabulary { pre: Some("new-thing".into()), ..good("gpt-2") }), "new-thing");
    names(refuse(GgufVocabulary { token_types: vec![1; 3], ..good("gpt-2") }), "token_type");
    names(refuse(GgufVocabulary { scores: vec![0.0; 3], ..good("spm-plain") }), "scores");
    names(refuse(GgufVocabulary { scores: vec![], ..good("spm-plain") }), "scores");
    names(refuse(GgufVocabulary { bos: Some(1_000_000), ..good("gpt-2") }), "bos_token_id");
    names(refuse(GgufVocabulary { bos: None, add_bos: Some(true), ..good("gpt-2") }), "bos_token_id");
    names(refuse(GgufVocabulary { merges: vec!["Ġ nowhere".into()], ..good("gpt-2") }), "nowhere");
    names(refuse(GgufVocabulary { merges: vec!["single".into()], ..good("gpt-2") }), "single");
    names(refuse(GgufVocabulary { merges: vec!["z ÿ".into()], ..good("gpt-2") }), "zÿ");
    names(refuse(GgufVocabulary { merges: vec![String::new()], ..good("gpt-2") }), "merge rule 0");

    let mut duplicate = good("gpt-2");
    duplicate.tokens[7] = duplicate.tokens[3].clone();
    names(refuse(duplicate), "ids 3 and 7");
    let mut kinds = good("gpt-2");
    kinds.token_types[5] = 99;
    names(refuse(kinds), "99");
    let mut scores = good("spm-plain");
    scores.scores[300] = f32::NAN;
    names(refuse(scores), "300");
    let mut byte = good("spm-plain");
    byte.tokens[10] = "<0xZZ>".into();
    names(refuse(byte), "<0xZZ>");
}

#[test]
fn broken_tokenizer_files_are_refused() {
    let folder = tempfile::tempdir().expect("folder");
    let path = folder.path().join("tokenizer.json");
    assert!(matches!(Tokenizer::from_folder(folder.path()), Err(TextError::Read { .. })));
    let sound = std::fs::read_to_string(self::folder().join("gpt-2.tokenizer.json")).expect("fixture");
    let sound: serde_json::Value = serde_json::from_str(&sound).expect("JSON");
    let refuse = |change: &dyn Fn(&mut serde_json::Value), part: &str| {
        let mut value = sound.clone();
        change(&mut value);
        std::fs::write(&path, value.to_string()).expect("write");
        let error = Tokenizer::from_file(&path).expect_err("must be refused").to_string();
        assert!(error.contains(part) && error.contains("tokenizer.json"), "{error:?} does not name {part:?}");
    };
    refuse(&|value| value["model"]["merges"] = serde_json::json!([["a", "nowhere"]]), "nowhere");
    refuse(&|value| value["model"]["merges"] = serde_json::json!(["lonely"]), "lonely");
    // The joined text is longer than every token: the library alone would panic here.
    refuse(&|value| value["model"]["merges"] = serde_json::json!([["Ġ", "<|im_start|>"]]), "merges");
    refuse(&|value| value["model"]["vocab"] = serde_json::json!([]), "vocab");
    refuse(
        &|value| {
            value["decoder"] = serde_json::json!({"type": "CTC", "pad_token": "", "word_delimiter_token": "", "cleanup": true})
        },
        "decoder",
    );
    refuse(&|value| value["decoder"] = serde_json::Value::Null, "decoder");
    refuse(&|value| value["model"]["vocab"]["far"] = serde_json::json!(4_000_000_000_u32), "4000000000");
    refuse(
        &|value| value["pre_tokenizer"] = serde_json::json!({"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": false}),
        "",
    );
    for text in ["", "{", "[]", "null", "{\"model\": 3}"] {
        std::fs::write(&path, text).expect("write");
        assert!(matches!(Tokenizer::from_file(&path), Err(TextError::File { .. })), "{text:?}");
    }
}

/// `<|end|>` ends an answer, unless answers are several messages that it ends.
#[test]
fn where_answers_are_several_messages_the_end_of_one_is_not_the_end() {
    let json = std::fs::read_to_string(folder().join("gpt-2.tokenizer.json")).expect("fixture");
    for (tokens, ends) in [
        (&["<|end|>"][..], &["<|end|>"][..]),
        (&["<|end|>", "<|return|>", "<|call|>"], &["<|return|>", "<|call|>"]),
    ] {
        let mut value: serde_json::Value = serde_json::from_str(&json).expect("JSON");
        let added = value["added_tokens"].as_array_mut().expect("a list");
        let first = added.iter().filter_map(|token| token["id"].as_u64()).max().expect("tokens") + 1;
        for (index, text) in tokens.iter().enumerate() {
            let mut token = added[0].clone();
            token["content"] = (*text).into();
            token["id"] = (first + 1000 + index as u64).into();
            token["special"] = true.into();
            added.push(token);
        }
        let file = tempfile::NamedTempFile::new().expect("file");
        std::fs::write(file.path(), value.to_string()).expect("write");
        let tokenizer = Tokenizer::from_file(file.path()).expect("loads");
        for text in tokens {
            let id = tokenizer.token_id(text).expect("known");
            assert_eq!(tokenizer.is_end(id), ends.contains(text), "{text} of {tokens:?}");
        }
    }
}

#[test]
fn folders_name_begin_and_end_tokens() {
    let folder = tempfile::tempdir().expect("folder");
    let path = folder.path();
    std::fs::copy(self::folder().join("gpt-2.tokenizer.json"), path.join("tokenizer.json")).expect("copy");
    let tokenizer = Tokenizer::from_folder(path).expect("loads");
    assert_eq!((tokenizer.bos_id(), tokenizer.eos_id()), (None, None));
    let end = tokenizer.token_id("<|im_end|>").expect("known");
    let text = tokenizer.token_id("<|endoftext|>").expect("known");
    let call = tokenizer.token_id("<tool_call>").expect("known");
    let config =
        r#"{"bos_token": {"content": "<|endoftext|>"}, "eos_token": "<|im_end|>", "pad_token": null}"#;
    std::fs::write(path.join("tokenizer_config.json"), config).expect("write");
    let generation = format!(r#"{{"eos_token_id": [{end}, {call}, 99999999]}}"#);
    std::fs::write(path.join("generation_config.json"), generation).expect("write");
    let tokenizer = Tokenizer::from_folder(path).expect("loads");
    assert_eq!((tokenizer.bos_id(), tokenizer.eos_id()), (Some(text), Some(end)));
    assert_eq!(tokenizer.end_ids(), [text, end, call], "ids the tokenizer does not have are left out");
    assert!(!tokenizer.adds_bos());
    std::fs::write(path.join("generation_config.json"), "{").expect("write");
    assert!(matches!(Tokenizer::from_folder(path), Err(TextError::ModelFile(_))));
}

#[test]
fn truncation_left_in_a_file_is_ignored() {
    let folder = tempfile::tempdir().expect("folder");
    let path = folder.path().join("tokenizer.json");
    let sound = std::fs::read_to_string(self::folder().join("gpt-2.tokenizer.json")).expect("fixture");
    let mut value: serde_json::Value = serde_json::from_str(&sound).expect("JSON");
    value["truncation"] =
        serde_json::json!({"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0});
    std::fs::write(&path, value.to_string()).expect("write");
    let tokenizer = Tokenizer::from_file(&path).expect("loads");
    let text = "long enough to be cut";
    let ids = tokenizer.encode(text, true).expect("encodes");
    assert_eq!(tokenizer.decode(&ids, true).expect("decodes"), text);
}

#[test]
fn long_runs_are_encoded() {
    for name in NAMES {
        let tokenizer = rebuilt(name);
        for text in [" ".repeat(200_000), "a".repeat(200_000), "\n".repeat(200_000), "中".repeat(50_000)] {
            let ids = tokenizer.encode(&text, false).expect("encodes");
            assert_eq!(tokenizer.decode(&ids, true).expect("decodes"), text, "{name}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn any_text_survives_the_round_trip(text in "\\PC{0,40}|[ \\t\\r\\na-z0-9'<|>▁Ġé中🦀]{0,60}") {
        use std::sync::LazyLock;
        static TOKENIZERS: LazyLock<Vec<(&str, Tokenizer)>> =
            LazyLock::new(|| NAMES.into_iter().map(|name| (name, rebuilt(name))).collect());
        for (name, tokenizer) in TOKENIZERS.iter() {
            // Qwen normalises, and SentencePiece cannot tell `▁` from a space.
            if *name == "qwen2" || (name.starts_with("spm") && text.contains('▁')) {
                continue;
            }
            let ids = tokenizer.encode(&text, false).expect("encodes");
            prop_assert_eq!(tokenizer.decode(&ids, false).expect("decodes"), text.as_str(), "{}", name);
            prop_assert!(ids.iter().all(|id| !tokenizer.is_special(*id)), "{} made a control token", name);
        }
    }
}
