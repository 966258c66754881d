//! Embeddings and scores against a forward pass that is done by hand.

use oscar_codec::{ExactSlot, PAGE_TOKENS};
use oscar_engine::{EngineOptions, EngineStats, MockOptions, Serve};
use oscar_kernels::backend::{Batch, SequenceRows};
use oscar_server::ServerOptions;
use serde_json::{Value, json};

use crate::support::{TestServer, eventually, mock, mock_with, tiny};

fn ids(length: u32, seed: u32) -> Vec<u32> {
    (0..length).map(|index| 3 + (seed + index * index) % 101).collect()
}

type Tiny = TestServer<oscar_engine::Engine<oscar_kernels::cpu::CpuBackend>>;

/// The hidden states of a prompt after the final norm, one row per token.
fn hidden(server: &Tiny, tokens: &[u32]) -> Vec<Vec<f32>> {
    let model = server.engine.model().model();
    let pages = tokens.len().div_ceil(PAGE_TOKENS);
    let slots = ExactSlot::table(1..=pages as u32);
    let mut cache = model.cache(pages + 1).unwrap();
    let mut activations = model.activations(tokens.len(), 1).unwrap();
    let rows = SequenceRows::exact(0, tokens.len(), &slots);
    model.forward(&Batch { tokens, sequences: &[rows] }, &[0], &mut cache, &mut activations).unwrap();
    let hidden = model.final_hidden(0..tokens.len(), &activations).unwrap();
    hidden.chunks(model.config().hidden_size).map(<[f32]>::to_vec).collect()
}

fn mean(rows: &[Vec<f32>]) -> Vec<f32> {
    (0..rows[0].len())
        .map(|column| rows.iter().map(|row| row[column]).sum::<f32>() / rows.len() as f32)
        .collect()
}

fn vector(entry: &Value) -> Vec<f32> {
    entry["embedding"].as_array().unwrap().iter().map(|value| value.as_f64().unwrap() as f32).collect()
}

/// The largest difference between a vector and another that is not normalised.
fn difference(ours: &[f32], theirs: &[f32]) -> f32 {
    assert_eq!(ours.len(), theirs.len());
    let length = theirs.iter().map(|value| value * value).sum::<f32>().sqrt();
    ours.iter().zip(theirs).map(|(a, b)| (a - b / length).abs()).fold(0.0, f32::max)
}

#[tokio::test]
async fn embeddings_are_the_last_hidden_states() {
    let server = tiny(1024, EngineOptions::default());
    // Shorter than a chunk, as long as one, and several of them.
    let prompts: Vec<Vec<u32>> = [1, 20, 64, 200].map(|length| ids(length, length)).into();
    for pooling in ["last", "mean"] {
        let request = json!({"input": prompts, "pooling": pooling});
        let answer = server.post("/v1/embeddings", request).await.ok();
        assert_eq!((&answer["object"], &answer["model"]), (&json!("list"), &json!("tiny")));
        assert_eq!(answer["usage"]["prompt_tokens"], 285);
        for (index, prompt) in prompts.iter().enumerate() {
            let entry = &answer["data"][index];
            assert_eq!((&entry["object"], &entry["index"]), (&json!("embedding"), &json!(index)));
            let rows = hidden(&server, prompt);
            let expected = if pooling == "mean" { mean(&rows) } else { rows.last().unwrap().clone() };
            let off = difference(&vector(entry), &expected);
            assert!(off < 1e-2, "{pooling} of {} tokens: {off}", prompt.len());
        }
        // The two ways differ, so that one cannot pass for the other.
        let rows = hidden(&server, &prompts[3]);
        let other = if pooling == "mean" { rows.last().unwrap().clone() } else { mean(&rows) };
        assert!(difference(&vector(&answer["data"][3]), &other) > 0.05);
    }
}

#[tokio::test]
async fn a_deterministic_server_embeds_alike_alone_in_a_batch_and_from_the_cache() {
    let server = tiny(1024, EngineOptions { deterministic: true, ..EngineOptions::default() });
    let prompts: Vec<Vec<u32>> = [10, 70, 5, 300].map(|length| ids(length, length)).into();
    for pooling in ["last", "mean"] {
        let together =
            server.post("/v1/embeddings", json!({"input": prompts, "pooling": pooling})).await.ok();
        for (index, prompt) in prompts.iter().enumerate() {
            let alone =
                server.post("/v1/embeddings", json!({"input": prompt, "pooling": pooling})).await.ok();
            assert_eq!(
                alone["data"][0]["embedding"], together["data"][index]["embedding"],
                "{pooling} {index}"
            );
        }
    }
    // The last token alone is computed of what is known, and everything for a mean.
    let cached = async |pooling: &str| {
        let answer =
            server.post("/v1/embeddings", json!({"input": prompts[3], "pooling": pooling})).await.ok();
        answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap()
    };
    assert!(cached("last").await >= 256);
    assert_eq!(cached("mean").await, 0);
}

#[tokio::test]
async fn embeddings_have_the_form_that_clients_expect() {
    let server = mock();
    let one = server.post("/v1/embeddings", json!({"model": "tiny", "input": "a b c"})).await.ok();
    let length: f32 = vector(&one["data"][0]).iter().map(|value| value * value).sum();
    assert!((length - 1.0).abs() < 1e-5);
    let request = json!({"input": ["a b c", "d"], "encoding_format": "base64", "dimensions": 16});
    let many = server.post("/v1/embeddings", request).await.ok();
    assert_eq!(many["data"].as_array().unwrap().len(), 2);
    let text = many["data"][0]["embedding"].as_str().unwrap();
    assert_eq!(decoded(text), vector(&one["data"][0]));
    for (request, param) in [
        (json!({}), "input"),
        (json!({"input": []}), "input"),
        (json!({"input": [[]]}), "input"),
        (json!({"input": "a", "dimensions": 8}), "dimensions"),
        (json!({"input": "a", "encoding_format": "hex"}), "encoding_format"),
        (json!({"input": "a", "pooling": "max"}), "pooling"),
    ] {
        let error = server.post("/v1/embeddings", request.clone()).await.refused(400);
        assert_eq!(error["param"], param, "{request}");
    }
    let options = MockOptions { max_queued: 4, ..MockOptions::default() };
    let small = mock_with(options, ServerOptions::default());
    let error = small.post("/v1/embeddings", json!({"input": vec!["a"; 5]})).await.refused(400);
    assert_eq!(error["param"], "input");
}

#[tokio::test]
async fn an_embedding_that_waits_can_be_aborted() {
    let options = MockOptions { tokens_per_s: Some(5.0), max_running: 1, ..MockOptions::default() };
    let server = mock_with(options, ServerOptions::default());
    let long = server
        .post("/generate", json!({"text": "a", "rid": "long", "sampling_params": {"ignore_eos": true}}));
    let short = async {
        eventually("the other one runs", || server.engine.stats().running == 1).await;
        server.post("/v1/embeddings", json!({"input": "a", "rid": "short"})).await
    };
    let aborts = async {
        // The first one waits for a moment too, so it must be running by now.
        let waits = |stats: EngineStats| (stats.running, stats.queued) == (1, 1);
        eventually("it waits", || waits(server.engine.stats())).await;
        server.post("/abort_request", json!({"rid": "short"})).await.ok();
        eventually("it waits no more", || server.engine.stats().queued == 0).await;
        server.post("/abort_request", json!({"rid": "long"})).await.ok();
    };
    let (_, short, ()) = tokio::join!(long, short, aborts);
    assert_eq!(short.refused(503)["code"], "aborted");
}

/// 32-bit floats from base64.
fn decoded(text: &str) -> Vec<f32> {
    let alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let (mut bits, mut count, mut bytes) = (0u32, 0, Vec::new());
    for digit in text.trim_end_matches('=').chars() {
        bits = bits << 6 | alphabet.find(digit).unwrap() as u32;
        count += 6;
        if count >= 8 {
            count -= 8;
            bytes.push((bits >> count) as u8);
        }
    }
    bytes.chunks_exact(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap())).collect()
}

#[tokio::test]
async fn a_score_is_the_probability_of_the_second_text() {
    let server = tiny(2048, EngineOptions { deterministic: true, ..EngineOptions::default() });
    let first = "the page of the cache and the model of the page ".repeat(8);
    let seconds = ["and so on", "the river", "a"];
    let answer = server.post("/v1/score", json!({"text_1": first, "text_2": seconds})).await.ok();
    assert_eq!(answer["object"], "list");
    let tokens = async |text: &str, special: bool| {
        let request = json!({"prompt": text, "add_special_tokens": special});
        server.post("/tokenize", request).await.ok()["tokens"].as_array().unwrap().clone()
    };
    for (index, second) in seconds.iter().enumerate() {
        let (before, after) = (tokens(&first, true).await, tokens(second, false).await);
        let prompt = [&before[..], &after].concat();
        let request = json!({"prompt": prompt, "echo": true, "logprobs": 0, "max_tokens": 0});
        let echoed = server.post("/v1/completions", request).await.ok();
        let listed = echoed["choices"][0]["logprobs"]["token_logprobs"].as_array().unwrap().clone();
        let sum: f64 = listed[before.len()..].iter().map(|value| value.as_f64().unwrap()).sum();
        let entry = &answer["data"][index];
        assert!((entry["score"].as_f64().unwrap() - sum).abs() < 1e-3, "{entry} {sum}");
        assert_eq!((&entry["index"], &entry["tokens"]), (&json!(index), &json!(after.len())));
    }
    // The first text is computed once.
    let cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
    let known = tokens(&first, true).await.len() as u64;
    assert!(cached >= 2 * (known - 64), "{cached} of {known}");
    let again = server.post("/v1/score", json!({"text_1": first, "text_2": seconds})).await.ok();
    assert_eq!(again["data"], answer["data"]);
}

#[tokio::test]
async fn texts_without_tokens_are_not_scored() {
    let server = mock();
    let pairs = json!({"text_1": ["a", "b"], "text_2": ["c", "d"]});
    assert_eq!(server.post("/v1/score", pairs).await.ok()["data"].as_array().unwrap().len(), 2);
    for (request, param) in [
        (json!({"text_1": "a", "text_2": ""}), "text_2"),
        (json!({"text_1": "", "text_2": "a"}), "text_1"),
        (json!({"text_1": "a"}), "text_2"),
        (json!({"text_1": ["a", "b"], "text_2": "c"}), "text_1"),
    ] {
        let error = server.post("/v1/score", request.clone()).await.refused(400);
        assert_eq!(error["param"], param, "{request}");
    }
}
