//! SGLang's own interface in front of a mock.

use std::time::Duration;

use oscar_engine::{MockOptions, Serve};
use oscar_server::ServerOptions;
use serde_json::{Value, json};

use crate::support::{eventually, mock, mock_with};

#[tokio::test]
async fn one_prompt_gives_one_object() {
    let server = mock();
    let request = json!({"text": "one two", "sampling_params": {"max_new_tokens": 5, "ignore_eos": true,
        "temperature": 0}, "rid": "mine", "model": null, "log_metrics": true, "stream": null});
    let body = server.post("/generate", request).await.ok();
    let meta = &body["meta_info"];
    assert_eq!((&meta["id"], &meta["completion_tokens"]), (&json!("mine"), &json!(5)));
    assert_eq!(meta["finish_reason"], json!({"type": "length", "length": 5}));
    assert_eq!(body["output_ids"].as_array().unwrap().len(), 5);
    assert!(meta["prompt_tokens"].as_u64().unwrap() > 0 && meta["cached_tokens"] == 0);
    assert!(meta["e2e_latency"].as_f64().unwrap() > 0.0);
    assert!(meta.get("output_token_logprobs").is_none());
    let ids = server.post("/tokenize", json!({"prompt": "one two"})).await.ok()["tokens"].clone();
    let params = json!({"max_new_tokens": 5, "ignore_eos": true, "temperature": 0});
    let same = server.post("/generate", json!({"input_ids": ids, "sampling_params": params})).await.ok();
    assert_eq!((&same["text"], &same["output_ids"]), (&body["text"], &body["output_ids"]));
}

#[tokio::test]
async fn a_batch_gives_a_list() {
    let server = mock();
    let params =
        json!([{"max_new_tokens": 2, "ignore_eos": true}, {"max_new_tokens": 3, "ignore_eos": true}]);
    let body = server
        .post("/generate", json!({"text": ["a", "b"], "sampling_params": params, "rid": "r"}))
        .await
        .ok();
    let list = body.as_array().unwrap();
    assert_eq!(
        list.iter().map(|answer| &answer["meta_info"]["completion_tokens"]).collect::<Vec<_>>(),
        [2, 3]
    );
    assert_eq!(list[1]["meta_info"]["id"], "r_1");
    let single =
        server.post("/generate", json!({"input_ids": [[5, 6]], "sampling_params": {"n": 2}})).await.ok();
    assert_eq!(single.as_array().unwrap().len(), 2);
    let error =
        server.post("/generate", json!({"text": ["a", "b"], "sampling_params": [{}]})).await.refused(400);
    assert_eq!(error["param"], "sampling_params");
}

#[tokio::test]
async fn streams_hold_all_of_the_text_every_time() {
    let options = MockOptions { tokens_per_s: Some(200.0), ..MockOptions::default() };
    let server = mock_with(options, ServerOptions::default());
    let params = json!({"max_new_tokens": 8, "ignore_eos": true, "temperature": 0});
    let mut request =
        json!({"text": "one", "sampling_params": params, "return_logprob": true, "top_logprobs_num": 2});
    let whole = server.post("/generate", request.clone()).await.ok();
    request["stream"] = true.into();
    let events = server.post("/generate", request).await.events();
    assert!(events.len() > 2, "{}", events.len());
    for pair in events.windows(2) {
        let text = |event: &Value| event["text"].as_str().unwrap().to_owned();
        assert!(text(&pair[1]).starts_with(&text(&pair[0])));
        assert!(pair[0]["meta_info"]["finish_reason"].is_null());
    }
    let last = events.last().unwrap();
    assert_eq!((&last["text"], &last["output_ids"]), (&whole["text"], &whole["output_ids"]));
    assert_eq!(last["meta_info"]["finish_reason"], whole["meta_info"]["finish_reason"]);
    for field in ["output_token_logprobs", "output_top_logprobs", "input_token_logprobs"] {
        assert_eq!(last["meta_info"][field], whole["meta_info"][field], "{field}");
    }
    let entries = last["meta_info"]["output_token_logprobs"].as_array().unwrap();
    assert_eq!(entries.len(), 8);
    assert_eq!(entries[0][1], last["output_ids"][0]);
    assert!(last.get("index").is_none());
}

#[tokio::test]
async fn batches_stream_with_an_index() {
    let server = mock();
    let request = json!({"text": ["a", "b"], "stream": true, "sampling_params": {"max_new_tokens": 4}});
    let events = server.post("/generate", request).await.events();
    for index in 0..2 {
        let last = events.iter().rfind(|event| event["index"] == index).unwrap();
        assert!(last["meta_info"]["finish_reason"].is_object());
    }
}

#[tokio::test]
async fn a_request_can_be_broken_off_by_its_id() {
    let options = MockOptions { tokens_per_s: Some(50.0), ..MockOptions::default() };
    let server = mock_with(options, ServerOptions::default());
    let params = json!({"max_new_tokens": 100_000, "ignore_eos": true});
    let asked = server.post("/generate", json!({"text": "a", "rid": "long", "sampling_params": params}));
    let abort = async {
        eventually("the request runs", || server.engine.stats().running == 1).await;
        let nobody = server.post("/abort_request", json!({"rid": "other"})).await.ok();
        assert_eq!(nobody["aborted"], 0);
        let done = server.post("/abort_request", json!({"rid": "long"})).await.ok();
        assert_eq!(done["aborted"], 1);
    };
    let (answer, ()) = tokio::join!(asked, abort);
    assert_eq!(answer.ok()["meta_info"]["finish_reason"]["type"], "abort");
    eventually("nothing runs", || server.engine.stats().running == 0).await;
    server.post("/abort_request", json!({})).await.refused(400);
}

#[tokio::test]
async fn routers_find_what_they_ask_for() {
    let server = mock();
    for path in ["/health", "/health_generate", "/version", "/get_load", "/v1/loads?include=core,queues"] {
        server.get(path).await.ok();
    }
    for path in ["/model_info", "/get_model_info"] {
        let info = server.get(path).await.ok();
        assert_eq!((&info["model_path"], &info["is_generation"]), (&json!("models/tiny"), &json!(true)));
        assert_eq!(
            (&info["model_type"], &info["architectures"][0]),
            (&json!("qwen3"), &json!("Qwen3ForCausalLM"))
        );
    }
    for path in ["/server_info", "/get_server_info"] {
        let info = server.get(path).await.ok();
        for field in [
            "model_path",
            "served_model_name",
            "tp_size",
            "dp_size",
            "load_balance_method",
            "disaggregation_mode",
            "version",
            "max_total_tokens",
            "max_prefill_tokens",
            "max_running_requests",
            "max_num_reqs",
        ] {
            assert!(!info[field].is_null(), "{field}");
        }
    }
    let loads = server.get("/v1/loads").await.ok();
    assert_eq!((&loads["dp_rank_count"], &loads["loads"][0]["num_running_reqs"]), (&json!(1), &json!(0)));
    assert!(server.get("/get_load").await.ok()[0]["num_tokens"].is_u64());
    server.post("/flush_cache", json!({})).await.ok();
    server.get("/flush_cache").await.refused(415);
}

#[tokio::test]
async fn text_and_tokens_are_converted() {
    let server = mock();
    let one = server.post("/tokenize", json!({"prompt": "Hello"})).await.ok();
    assert_eq!(one["count"], one["tokens"].as_array().unwrap().len());
    let many = server.post("/tokenize", json!({"prompt": ["Hello", "a"], "model": "tiny"})).await.ok();
    assert_eq!((&many["tokens"][0], &many["count"][0]), (&one["tokens"], &one["count"]));
    assert_eq!(server.post("/detokenize", json!({"tokens": one["tokens"]})).await.ok()["text"], "Hello");
    assert_eq!(server.post("/detokenize", json!({"tokens": [1, 2]})).await.ok()["text"], "");
    let error = server.post("/detokenize", json!({"tokens": [4_000_000]})).await.refused(400);
    assert_eq!(error["param"], "tokens");
}

#[tokio::test]
async fn a_stuck_engine_is_not_well_but_a_busy_one_is() {
    // Somebody else's long answer: one place, taken.
    let options =
        MockOptions { tokens_per_s: Some(100.0), max_running: 1, max_queued: 1, ..MockOptions::default() };
    let server = mock_with(options, ServerOptions::default());
    let params = json!({"max_new_tokens": 100_000, "ignore_eos": true});
    let asked = server.post("/generate", json!({"text": "a", "rid": "long", "sampling_params": params}));
    let probe = async {
        eventually("the request runs", || server.engine.stats().running == 1).await;
        tokio::time::timeout(Duration::from_secs(5), server.get("/health_generate")).await.unwrap().ok();
        server.post("/abort_request", json!({"abort_all": true})).await.ok();
    };
    tokio::join!(asked, probe);
}

#[tokio::test]
async fn lists_are_not_objects() {
    let server = mock();
    for params in [json!([[null, null]]), json!([5]), json!([])] {
        let error =
            server.post("/generate", json!({"text": "a", "sampling_params": params})).await.refused(400);
        assert!(error["param"].as_str().unwrap().starts_with("sampling_params"), "{params}");
    }
    server.post("/v1/completions", json!(["tiny", false, null, null, null, "hello"])).await.refused(400);
    server.post("/abort_request", json!([null, true])).await.refused(400);
}
