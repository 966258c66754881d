//! Numbers and pictures.

use oscar_engine::{EngineOptions, MockOptions, Serve};
use oscar_server::ServerOptions;
use serde_json::json;

use crate::support::{eventually, mock, mock_with, tiny};

#[tokio::test]
async fn metrics_count_what_was_done() {
    let server = mock();
    for _ in 0..3 {
        let request = json!({"prompt": "a", "max_tokens": 5, "ignore_eos": true});
        server.post("/v1/completions", request).await.ok();
    }
    server.post("/v1/completions", json!({})).await.refused(400);
    let answer = server.get("/metrics").await;
    assert_eq!(answer.status, 200);
    let value = |name: &str| {
        let line = answer.text.lines().find(|line| line.starts_with(name));
        let line = line.unwrap_or_else(|| panic!("{name} is not in {}", answer.text));
        line.rsplit(' ').next().unwrap().parse::<f64>().unwrap()
    };
    assert_eq!(value("sglang:num_requests_total{"), 3.0);
    assert_eq!(value("sglang:generation_tokens_total{"), 15.0);
    assert_eq!(value("sglang:time_to_first_token_seconds_count{"), 3.0);
    assert_eq!(value("sglang:inter_token_latency_seconds_count{"), 12.0);
    assert_eq!(value("sglang:e2e_request_latency_seconds_count{"), 3.0);
    assert_eq!(value("sglang:num_running_reqs{"), 0.0);
    assert_eq!(value("oscar_http_responses_total{model_name=\"tiny\",status=\"400\"}"), 1.0);
}

#[tokio::test]
async fn a_client_that_goes_away_is_counted() {
    let options = MockOptions { tokens_per_s: Some(10.0), ..MockOptions::default() };
    let server = mock_with(options, ServerOptions::default());
    let request = json!({"prompt": "a", "max_tokens": 5000, "ignore_eos": true});
    let mut asked = Box::pin(server.post("/v1/completions", request));
    tokio::select! {
        _ = &mut asked => panic!("too quick"),
        () = eventually("it runs", || server.engine.stats().running == 1) => {}
    }
    drop(asked);
    eventually("it is given up", || server.engine.stats().running == 0).await;
    let text = server.get("/metrics").await.text;
    assert!(text.contains("sglang:num_aborted_requests_total{model_name=\"tiny\"} 1"), "{text}");
}

#[tokio::test]
async fn a_chat_is_kept_until_it_is_flushed() {
    let server = tiny(2048, EngineOptions::default());
    let question = json!({"role": "user", "content": "Which page is this? ".repeat(20)});
    let request = json!({"messages": [question], "max_tokens": 70, "ignore_eos": true, "temperature": 0});
    let answer = server.post("/v1/chat/completions", request).await.ok();
    let said = json!({"role": "assistant", "content": answer["choices"][0]["message"]["content"]});
    let pages = async || {
        let kept = server.post("/oscar/cache", json!({"messages": [question, said]})).await.ok();
        assert!(kept["tokens"].as_u64().unwrap() > 200, "{kept}");
        let runs = kept["runs"].as_array().unwrap().clone();
        runs.iter()
            .map(|run| (run[0].as_str().unwrap().to_owned(), run[1].as_u64().unwrap()))
            .collect::<Vec<_>>()
    };
    // The tree takes an answer's pages after its last token was sent.
    eventually("it is at rest", || server.engine.stats().cache.tree_pages > 3).await;
    // What is at rest is nobody's, so nothing is said of who shares it.
    let body = json!({"messages": [{"role": "user", "content": "a"}]});
    assert_eq!(server.post("/oscar/cache", body).await.ok().get("shared_pages"), None);
    let kept = pages().await;
    assert!(kept[0].0 == "recent" && kept[0].1 > 3, "{kept:?}");
    assert!(kept.iter().all(|(state, _)| state != "evicted"), "{kept:?}");
    server.post("/flush_cache", json!({})).await.ok();
    eventually("it is flushed", || server.engine.stats().cache.tree_pages == 0).await;
    let gone = pages().await;
    assert_eq!(gone, [("evicted".to_owned(), kept.iter().map(|(_, count)| count).sum())]);
    server.post("/oscar/cache", json!({"messages": []})).await.refused(400);
    server.post("/oscar/cache", json!({"messages": [question], "model": "other"})).await.refused(404);
}

#[tokio::test]
async fn the_cache_is_drawn_page_by_page() {
    let server = tiny(2048, EngineOptions::default());
    let prompt: Vec<u32> = (0..200).map(|index| 3 + index * 7 % 100).collect();
    let request =
        json!({"prompt": prompt, "max_tokens": 1800, "ignore_eos": true, "temperature": 0, "rid": "mine"});
    let mut asked = Box::pin(server.post("/v1/completions", request));
    tokio::select! {
        _ = &mut asked => panic!("too quick"),
        () = eventually("it runs", || server.engine.stats().sequences.iter().any(|view| view.tokens > 200)) => {}
    }
    let picture = server.get("/oscar/cache").await.ok();
    let view = &picture["requests"][0];
    assert_eq!(view["rid"], "mine");
    let tokens = view["tokens"].as_u64().unwrap();
    let pages: u64 = view["runs"].as_array().unwrap().iter().map(|run| run[1].as_u64().unwrap()).sum();
    assert_eq!(pages, tokens.div_ceil(64));
    assert_eq!((&picture["kv"], &picture["page_tokens"]), (&json!("bf16"), &json!(64)));
    let exact = &picture["pools"]["exact"];
    let sum =
        ["free", "tree", "shared", "request"].iter().map(|name| exact[name].as_u64().unwrap()).sum::<u64>();
    assert_eq!(exact["pages"], sum);
    drop(asked);
    eventually("it is given up", || server.engine.stats().sequences.is_empty()).await;
}
