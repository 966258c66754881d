//! Histories in bf16 on a server that seals others: `kv_precision` and `kv_demote`.

use std::sync::Arc;

use oscar_codec::{CodeLayout, HeadEncoder, HeadTransform, KvGeometry, PageCodec, Rule};
use oscar_engine::{Engine, EngineOptions, KvOptions, Serve};
use oscar_kernels::cpu::CpuBackend;
use oscar_server::ServerOptions;
use serde_json::{Value, json};

use crate::support::{Answer, TEMPLATE, TestServer, eventually, mock, tiny_chatting};

const GEOMETRY: KvGeometry = KvGeometry { layers: 2, kv_heads: 2, head_dim: 32 };

/// A server that seals in 4 bits and offers bf16 beside it, with room for so many bf16 pages.
fn server_of(pages: usize, deterministic: bool) -> TestServer<Engine<CpuBackend>> {
    let kv = KvOptions {
        codec: Some(Arc::new(PageCodec::int4(GEOMETRY, None).unwrap())),
        bf16_tier: true,
        memory: Some(pages * GEOMETRY.page_bytes(GEOMETRY.bf16())),
        ..KvOptions::default()
    };
    let options = EngineOptions { context: Some(2048), kv, deterministic, ..EngineOptions::default() };
    tiny_chatting(2048, options, ServerOptions::default(), TEMPLATE)
}

/// A server that seals in 2 bits and offers 4 bits and bf16 beside it.
fn server_of_three() -> TestServer<Engine<CpuBackend>> {
    let KvGeometry { layers, kv_heads, head_dim } = GEOMETRY;
    let layout = CodeLayout::new(2, head_dim, 1).unwrap();
    let encoder = HeadEncoder::codes(HeadTransform::identity(head_dim), layout, Rule::Search, false);
    let encoders = vec![encoder; layers * kv_heads];
    let codec = PageCodec::new("int2", GEOMETRY, encoders.clone(), encoders).unwrap();
    let kv = KvOptions {
        codec: Some(Arc::new(codec)),
        bf16_tier: true,
        high_tier: true,
        memory: Some(120 * GEOMETRY.page_bytes(GEOMETRY.bf16())),
        ..KvOptions::default()
    };
    let options = EngineOptions { context: Some(2048), kv, ..EngineOptions::default() };
    tiny_chatting(2048, options, ServerOptions::default(), TEMPLATE)
}

/// A short request at every door that answers.
fn doors() -> [(&'static str, Value); 6] {
    let messages = json!([{"role": "user", "content": "a"}]);
    [
        ("/v1/completions", json!({"prompt": "a", "max_tokens": 2})),
        ("/v1/chat/completions", json!({"messages": messages, "max_tokens": 2})),
        ("/v1/responses", json!({"input": "a", "max_output_tokens": 2})),
        ("/v1/messages", json!({"messages": messages, "max_tokens": 2})),
        ("/generate", json!({"text": "a", "sampling_params": {"max_new_tokens": 2}})),
        ("/completion", json!({"prompt": "a", "n_predict": 2})),
    ]
}

fn with(mut request: Value, fields: &Value) -> Value {
    for (name, value) in fields.as_object().unwrap() {
        request[name] = value.clone();
    }
    request
}

/// What is said to a bad request, in the form of any interface.
fn refusal(answer: &Answer) -> String {
    assert_eq!(answer.status, 400, "{}", answer.text);
    answer.json()["error"]["message"].as_str().unwrap().to_owned()
}

#[tokio::test]
async fn every_door_takes_the_precisions_that_are_offered() {
    let server = server_of(120, false);
    for (path, request) in doors() {
        for fields in [
            json!({"kv_precision": "bf16"}),
            json!({"kv_precision": "int4", "kv_demote": false}),
            json!({"kv_precision": "bf16", "kv_demote": true}),
            json!({"kv_precision": null, "kv_demote": null}),
        ] {
            server.post(path, with(request.clone(), &fields)).await.ok();
        }
        for (fields, expected) in [
            (json!({"kv_precision": "int2"}), "\"int4\" or \"bf16\""),
            (json!({"kv_precision": "high"}), "beside --kv-cache-dtype int2 only"),
            (json!({"kv_demote": true}), "kv_demote is true"),
            (json!({"kv_precision": "int4", "kv_demote": true}), "kv_demote is true"),
        ] {
            let message = refusal(&server.post(path, with(request.clone(), &fields)).await);
            assert!(message.contains(expected), "{path} {fields} {message}");
        }
    }
}

#[tokio::test]
async fn the_high_tier_is_one_of_three() {
    let server = server_of_three();
    for (path, request) in doors() {
        for precision in ["int2", "high", "bf16"] {
            server.post(path, with(request.clone(), &json!({"kv_precision": precision}))).await.ok();
        }
        let fields = json!({"kv_precision": "high", "kv_demote": true});
        let message = refusal(&server.post(path, with(request, &fields)).await);
        assert!(message.contains("kv_demote is true"), "{path} {message}");
    }
    let prompt: Vec<u32> = (0..700).map(|index| 3 + index * index % 101).collect();
    let ask = |precision: &str| {
        server.post("/v1/completions", json!({"prompt": prompt, "max_tokens": 4, "kv_precision": precision}))
    };
    for precision in ["high", "int2"] {
        for cached in [false, true] {
            let usage = &ask(precision).await.ok()["usage"];
            let found = usage["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
            assert_eq!(found > 0, cached, "{precision}: {usage}");
        }
    }
    assert_eq!(server.get("/server_info").await.ok()["kv_precisions"], json!(["int2", "high", "bf16"]));
    let cache = server.get("/oscar/cache").await.ok();
    let names: Vec<&Value> = cache["tiers"].as_array().unwrap().iter().map(|tier| &tier["name"]).collect();
    assert_eq!(names, ["int2", "high", "bf16"]);
    let tree = |pool: &str| cache["pools"][pool]["tree"].as_u64().unwrap();
    assert!(tree("high") > 0 && tree("high") == tree("sealed"), "{}", cache["pools"]);
    let metrics = server.get("/metrics").await.text;
    assert!(metrics.contains("pool=\"high\",owner=\"tree\""), "{metrics}");
    assert!(metrics.contains("oscar_tier_sequences{model_name="), "{metrics}");
}

#[tokio::test]
async fn a_tier_that_is_not_offered_names_the_option() {
    let server = mock();
    for (path, request) in doors() {
        let message = refusal(&server.post(path, with(request, &json!({"kv_precision": "bf16"}))).await);
        assert!(message.contains("--kv-tiers mock,bf16"), "{path} {message}");
    }
    let server = server_of(120, true);
    let request = json!({"prompt": "a", "max_tokens": 2, "kv_precision": "bf16"});
    server.post("/v1/completions", request.clone()).await.ok();
    let error = server.post("/v1/completions", with(request, &json!({"kv_demote": true}))).await.refused(400);
    assert_eq!(error["param"], "kv_demote");
    assert!(error["message"].as_str().unwrap().contains("--deterministic"), "{error}");
}

#[tokio::test]
async fn what_is_demoted_is_counted() {
    let server = server_of(64, false);
    let prompt: Vec<u32> = (0..500).map(|index| 3 + index * index % 101).collect();
    let fields = json!({"kv_precision": "bf16", "kv_demote": true, "ignore_eos": true});
    let ask = |fields: &Value| {
        let request = json!({"prompt": prompt, "max_tokens": 1000});
        server.post("/v1/completions", with(request, fields))
    };
    let answer = ask(&fields).await.ok();
    assert_eq!(answer["usage"]["completion_tokens"], 1000);
    let demoted = answer["usage"]["kv_demoted_tokens"].as_u64().unwrap();
    assert!(demoted > 0 && demoted.is_multiple_of(64), "{answer}");
    // Without leave it ends where the bf16 pages do.
    let kept = ask(&json!({"kv_precision": "bf16", "ignore_eos": true})).await.ok();
    assert!(kept["usage"]["completion_tokens"].as_u64() < Some(1000), "{}", kept["usage"]);
    assert_eq!(kept["choices"][0]["finish_reason"], "length");
    assert_eq!(kept["usage"]["kv_demoted_tokens"], Value::Null);
    let request = json!({"input_ids": prompt, "kv_precision": "bf16", "kv_demote": true,
        "sampling_params": {"max_new_tokens": 1000, "ignore_eos": true}});
    let answer = server.post("/generate", request).await.ok();
    assert_eq!(answer["meta_info"]["kv_demoted_tokens"], demoted);
    let pages = 2 * demoted / 64;
    // Counts are published after the turn in which the answer ended.
    eventually("all demotions are counted", || server.engine.stats().demoted_pages >= pages).await;
    let cache = server.get("/oscar/cache").await.ok();
    assert_eq!(cache["demoted_pages"], pages);
    let tiers: Vec<&str> =
        cache["tiers"].as_array().unwrap().iter().map(|tier| tier["name"].as_str().unwrap()).collect();
    assert_eq!(tiers, ["int4", "bf16"]);
    assert_eq!(server.get("/server_info").await.ok()["kv_precisions"], json!(["int4", "bf16"]));
    let long = json!({"prompt": vec![5; 1800], "max_tokens": 1, "kv_precision": "bf16"});
    let error = server.post("/v1/completions", long).await.refused(400);
    assert_eq!(error["code"], "context_length_exceeded");
}
