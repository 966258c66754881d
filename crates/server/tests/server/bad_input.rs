//! What clients get wrong, and what they are told.

use axum::body::Body;
use axum::http::Request;
use oscar_engine::{MockOptions, Serve};
use oscar_server::ServerOptions;
use serde_json::json;

use crate::support::{eventually, mock, mock_with};

const ROUTES: [&str; 4] = ["/v1/chat/completions", "/v1/completions", "/generate", "/tokenize"];

#[tokio::test]
async fn what_is_not_json_is_refused() {
    let server = mock();
    for route in ROUTES {
        for body in
            [&b"{"[..], b"", b"[1, 2", b"\xff\xfe\x00", b"{\"a\": 1} tail", b"null", b"[]", b"\"text\""]
        {
            let request = Request::post(route).header("content-type", "application/json");
            let answer = server.send(request.body(Body::from(body.to_vec())).unwrap()).await;
            answer.refused(400);
        }
        let request = Request::post(route).header("content-type", "text/plain");
        server.send(request.body(Body::from("{}")).unwrap()).await.refused(415);
        server.send(Request::post(route).body(Body::from("{}")).unwrap()).await.refused(415);
        server.get(route).await.refused(405);
    }
}

#[tokio::test]
async fn large_bodies_are_refused_announced_or_not() {
    let server =
        mock_with(MockOptions::default(), ServerOptions { body_bytes: 1000, ..ServerOptions::default() });
    let body = json!({"prompt": "x".repeat(2000)}).to_string();
    let request = || Request::post("/v1/completions").header("content-type", "application/json");
    server.send(request().body(Body::from(body.clone())).unwrap()).await.refused(413);
    let announced = request().header("content-length", "5000");
    server.send(announced.body(Body::from("{}")).unwrap()).await.refused(413);
    let pieces =
        futures_util::stream::iter(body.into_bytes().chunks(100).map(<[u8]>::to_vec).collect::<Vec<_>>());
    let pieces = futures_util::StreamExt::map(pieces, Ok::<_, std::io::Error>);
    server.send(request().body(Body::from_stream(pieces)).unwrap()).await.refused(413);
}

#[tokio::test]
async fn paths_that_lead_nowhere_say_so() {
    let server = mock();
    for path in
        ["/v1", "/v2/chat/completions", "/v1/../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "/v1/models/"]
    {
        let error = server.get(path).await.refused(404);
        assert!(!error.to_string().contains("passwd"), "{error}");
    }
}

#[tokio::test]
async fn fields_at_fault_are_named() {
    let server = mock();
    for (change, param) in [
        (json!({"temperature": -1}), "temperature"),
        (json!({"temperature": "hot"}), "temperature"),
        (json!({"top_p": 0}), "top_p"),
        (json!({"top_p": 1.5}), "top_p"),
        (json!({"min_p": 2}), "min_p"),
        (json!({"top_k": -5}), "top_k"),
        (json!({"n": 0}), "n"),
        (json!({"n": 100_000}), "n"),
        (json!({"n": -1}), "n"),
        (json!({"max_tokens": -2}), "max_tokens"),
        (json!({"max_tokens": 1.5}), "max_tokens"),
        (json!({"max_tokens": 3, "min_tokens": 4}), "min_tokens"),
        (json!({"seed": "x"}), "seed"),
        (json!({"stop": [1]}), "stop[0]"),
        (json!({"stop_token_ids": ["a"]}), "stop_token_ids[0]"),
        (json!({"logit_bias": {"a": 1}}), "logit_bias"),
        (json!({"logit_bias": {"99999999": 1}}), "logit_bias"),
        (json!({"repetition_penalty": 0}), "repetition_penalty"),
        (json!({"logprobs": 1000}), "logprobs"),
        (json!({"stream": "yes"}), "stream"),
        (json!({"prompt": 3}), "prompt"),
        (json!({"prompt": null}), "prompt"),
        (json!({"prompt": ""}), "prompt"),
        (json!({"prompt": []}), "prompt"),
        (json!({"prompt": [999_999_999]}), "prompt"),
        (json!({"best_of": 4}), "best_of"),
        (json!({"kv_precision": "fp8"}), "kv_precision"),
    ] {
        let mut request = json!({"prompt": "a", "max_tokens": 4});
        for (name, value) in change.as_object().unwrap() {
            request[name] = value.clone();
        }
        let error = server.post("/v1/completions", request.clone()).await.refused(400);
        assert_eq!(error["param"], param, "{request} {error}");
    }
    server
        .post("/v1/completions", json!({"prompt": "a", "kv_precision": "mock", "max_tokens": 1}))
        .await
        .ok();
    for (request, param) in [
        (json!({}), "messages"),
        (json!({"messages": "hi"}), "messages"),
        (json!({"messages": [{"role": "user", "content": "a"}], "logprobs": 3}), "logprobs"),
        (json!({"messages": [{"role": "user", "content": "a"}], "tool_choice": "must"}), "tool_choice"),
        (
            json!({"messages": [{"role": "user", "content": "a"}], "tools": [{"type": "web"}]}),
            "tools[0].type",
        ),
        (
            json!({"messages": [{"role": "user", "content": "a"}], "response_format": {"type": "xml"}}),
            "response_format.type",
        ),
        (json!({"messages": [{"role": "user", "content": "a"}], "top_logprobs": 3}), "top_logprobs"),
    ] {
        let error = server.post("/v1/chat/completions", request.clone()).await.refused(400);
        assert_eq!(error["param"], param, "{request}");
    }
    for (request, param) in [
        (json!({}), "text"),
        (json!({"text": "a", "input_ids": [1]}), "text"),
        (json!({"text": []}), "text"),
        (json!({"input_ids": []}), "input_ids"),
        (json!({"text": "a", "lora_path": "x"}), "lora_path"),
        (json!({"text": "a", "image_data": ["x"]}), "image_data"),
    ] {
        let error = server.post("/generate", request.clone()).await.refused(400);
        assert_eq!(error["param"], param, "{request}");
    }
}

#[tokio::test]
async fn huge_wishes_end_with_the_context() {
    let server = mock_with(MockOptions { context: 64, ..MockOptions::default() }, ServerOptions::default());
    let request = json!({"prompt": [5, 6, 7], "max_tokens": u64::MAX, "ignore_eos": true});
    let body = server.post("/v1/completions", request).await.ok();
    assert_eq!(body["choices"][0]["finish_reason"], "length");
    // The last token is said, but need not be stored.
    assert_eq!(body["usage"]["total_tokens"], 64, "a full context has no token more than it holds");
    // No room for an answer, unless none is asked for.
    let full = |most: u64| server.post("/v1/completions", json!({"prompt": vec![5; 64], "max_tokens": most}));
    let error = full(1).await.refused(400);
    assert_eq!(error["code"], "context_length_exceeded");
    full(0).await.ok();
}

#[tokio::test]
async fn prompts_that_do_not_fit_are_refused_quickly() {
    let server = mock_with(MockOptions { context: 1000, ..MockOptions::default() }, ServerOptions::default());
    for prompt in [json!("x ".repeat(2_000)), json!("long words ".repeat(1 << 20)), json!(vec![5; 1001])] {
        let error = server.post("/v1/completions", json!({"prompt": prompt})).await.refused(400);
        assert_eq!((&error["code"], &error["param"]), (&json!("context_length_exceeded"), &json!("prompt")));
        assert!(error["message"].as_str().unwrap().len() < 200);
    }
    let messages = json!([{"role": "user", "content": "long words ".repeat(1 << 20)}]);
    let error = server.post("/v1/chat/completions", json!({"messages": messages})).await.refused(400);
    assert_eq!(error["code"], "context_length_exceeded");
}

#[tokio::test]
async fn a_full_queue_asks_to_come_back() {
    let options =
        MockOptions { tokens_per_s: Some(1.0), max_running: 1, max_queued: 1, ..MockOptions::default() };
    let server = mock_with(options, ServerOptions::default());
    let request =
        || server.post("/v1/completions", json!({"prompt": "a", "max_tokens": 1000, "ignore_eos": true}));
    let mut first = Box::pin(request());
    let mut second = Box::pin(request());
    tokio::select! {
        _ = &mut first => panic!("too quick"),
        () = eventually("one runs", || server.engine.stats().running == 1) => {}
    }
    tokio::select! {
        _ = &mut first => panic!("too quick"),
        _ = &mut second => panic!("too quick"),
        () = eventually("one waits", || server.engine.stats().queued == 1) => {}
    }
    let answer = request().await;
    let error = answer.refused(429);
    assert_eq!((&error["code"], &error["type"]), (&json!("queue_full"), &json!("rate_limit_error")));
    assert_eq!(answer.headers["retry-after"], "1");
    drop((first, second));
    eventually("nothing is left", || {
        let stats = server.engine.stats();
        stats.running + stats.queued == 0
    })
    .await;
}

#[tokio::test]
async fn a_batch_larger_than_the_queue_leaves_nothing_behind() {
    let options =
        MockOptions { tokens_per_s: Some(1.0), max_running: 1, max_queued: 2, ..MockOptions::default() };
    let server = mock_with(options, ServerOptions::default());
    server.post("/v1/completions", json!({"prompt": vec!["a"; 50]})).await.refused(400);
    eventually("nothing is left", || {
        let stats = server.engine.stats();
        stats.running + stats.queued == 0
    })
    .await;
}

#[tokio::test]
async fn strange_roles_and_results_of_nothing_are_refused() {
    let server = mock();
    let user = json!({"role": "user", "content": "a"});
    for (messages, param) in [
        (json!([user, {"role": "wizard", "content": "b"}]), "messages[1].role"),
        (json!([user, {"role": "tool", "tool_call_id": "c", "content": "b"}]), "messages[1]"),
        (
            json!([user, {"role": "assistant", "tool_calls": [{"type": "function"}]}]),
            "messages[1].tool_calls[0].function.name",
        ),
    ] {
        let error = server.post("/v1/chat/completions", json!({"messages": messages})).await.refused(400);
        assert_eq!(error["param"], param);
    }
    let output = json!({"type": "function_call_output", "call_id": "c", "output": "b"});
    server.post("/v1/responses", json!({"input": [output]})).await.refused(400);
}

#[tokio::test]
async fn heads_beyond_the_limit_are_refused() {
    let server = mock();
    let listening = server.listen().await;
    for (bytes, status) in [(60 << 10, "200"), (70 << 10, "431"), (100 << 10, "431")] {
        let request = Request::get("/health").header("x-long", "y".repeat(bytes));
        let answer = server.send(request.body(Body::empty()).unwrap()).await;
        assert_eq!(answer.status.to_string(), status);
        let mut stream = tokio::net::TcpStream::connect(listening.address).await.unwrap();
        let long = "y".repeat(bytes);
        let text =
            format!("GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\nx-long: {long}\r\n\r\n");
        tokio::io::AsyncWriteExt::write_all(&mut stream, text.as_bytes()).await.unwrap();
        let mut bytes = Vec::new();
        let _ = tokio::io::AsyncReadExt::read_to_end(&mut stream, &mut bytes).await;
        let line = String::from_utf8_lossy(&bytes).chars().skip(9).take(3).collect::<String>();
        assert_eq!(line, status, "{} bytes", long.len());
    }
}

#[tokio::test]
async fn errors_do_not_name_types_of_the_program() {
    let server = mock();
    let messages = json!([{"role": "user", "content": "a"}]);
    for (path, request) in [
        ("/v1/chat/completions", json!({"messages": messages, "stream_options": "yes"})),
        ("/v1/chat/completions", json!({"messages": messages, "logprobs": {}})),
        ("/v1/chat/completions", json!({"messages": {}})),
        ("/v1/completions", json!({"prompt": {"a": 1}})),
        ("/v1/completions", json!({"prompt": "a", "temperature": "hot"})),
        ("/v1/completions", json!({"prompt": "a", "stop": {}})),
        ("/v1/completions", json!({"prompt": "a", "logit_bias": []})),
        ("/v1/responses", json!({"input": "a", "text": "x", "reasoning": 3})),
        ("/generate", json!({"text": 3})),
        ("/generate", json!({"text": "a", "sampling_params": "x"})),
        ("/generate", json!({"text": "a", "sampling_params": {"temperature": "hot"}})),
        ("/detokenize", json!({"tokens": {}})),
        ("/detokenize", json!({})),
        ("/abort_request", json!({"rid": {}})),
    ] {
        let error = server.post(path, request.clone()).await.refused(400);
        let message = error["message"].as_str().unwrap();
        for word in
            ["struct", "enum", "OneOrMany", "variant", "Object", "f32", "u32", "u64", "sequence", "a map"]
        {
            assert!(!message.contains(word), "{request}: {message}");
        }
    }
}
