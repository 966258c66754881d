//! Requests that mean harm: from web pages of others, and bodies that grow in memory.

use std::cell::RefCell;

use axum::body::Body;
use axum::http::{Method, Request};
use oscar_engine::{MockOptions, Serve};
use oscar_server::ServerOptions;
use serde_json::json;
use tower::ServiceExt;

use crate::support::{mock, mock_with};

fn request(method: Method, path: &str, headers: &[(&str, &str)], body: &str) -> Request<Body> {
    let mut builder = Request::builder().method(method).uri(path);
    for (name, value) in headers {
        builder = builder.header(*name, *value);
    }
    builder.body(Body::from(body.to_owned())).unwrap()
}

const JSON: (&str, &str) = ("content-type", "application/json");
const ABORT: &str = "{\"abort_all\": true}";

#[tokio::test]
async fn a_page_of_another_site_cannot_change_anything() {
    let server = mock();
    let own = ("host", "localhost:30000");
    let foreign = ("origin", "http://evil.example");
    for (method, path) in
        [(Method::POST, "/abort_request"), (Method::POST, "/flush_cache"), (Method::GET, "/flush_cache")]
    {
        let send = |headers: &[(&str, &str)]| server.send(request(method.clone(), path, headers, ABORT));
        send(&[own, ("content-type", "text/plain")]).await.refused(415);
        send(&[own, foreign]).await.refused(403);
        send(&[own, JSON, foreign]).await.refused(403);
        send(&[own, JSON, ("sec-fetch-site", "cross-site")]).await.refused(403);
        send(&[own, JSON]).await.ok();
        send(&[own, JSON, ("origin", "http://localhost:30000"), ("sec-fetch-site", "same-origin")])
            .await
            .ok();
    }
    // Routers flush their workers so; an image in a page would be a GET.
    server.send(request(Method::POST, "/flush_cache", &[own], "")).await.ok();
    server.send(request(Method::POST, "/flush_cache", &[own], "a form has a body")).await.refused(415);
    server.send(request(Method::GET, "/flush_cache", &[own], "")).await.refused(415);
    assert_eq!(server.send(request(Method::HEAD, "/flush_cache", &[own], "")).await.status, 415);
    server.send(request(Method::POST, "/abort_request", &[own], ABORT)).await.refused(415);
    let question = json!({"prompt": "a", "max_tokens": 1}).to_string();
    let ask =
        |headers: &[(&str, &str)]| server.send(request(Method::POST, "/v1/completions", headers, &question));
    ask(&[own, JSON, foreign]).await.refused(403);
    ask(&[own, JSON]).await.ok();
}

#[tokio::test]
async fn pages_that_cors_allows_may_ask() {
    let options = ServerOptions {
        allowed_origins: vec!["https://chat.example".to_owned()],
        ..ServerOptions::default()
    };
    let server = mock_with(MockOptions::default(), options);
    let send = |origin: &'static str| {
        let headers = [("host", "10.0.0.7"), JSON, ("origin", origin), ("sec-fetch-site", "cross-site")];
        server.send(request(Method::POST, "/abort_request", &headers, ABORT))
    };
    send("https://chat.example").await.ok();
    send("https://evil.example").await.refused(403);
}

#[tokio::test]
async fn without_a_key_the_host_must_be_ours() {
    let names = |hosts: &[&str], key: Option<&str>| {
        let options = ServerOptions {
            allowed_hosts: hosts.iter().map(|&host| host.to_owned()).collect(),
            api_key: key.map(str::to_owned),
            ..ServerOptions::default()
        };
        mock_with(MockOptions::default(), options)
    };
    let get = |path: &str, host: &str| request(Method::GET, path, &[("host", host)], "");
    let server = names(&[], None);
    for host in ["localhost", "127.0.0.1:30000", "192.168.1.4", "[::1]:30000"] {
        server.send(get("/v1/models", host)).await.ok();
    }
    let error = server.send(get("/v1/models", "rebound.example:30000")).await.refused(403);
    assert!(error.to_string().contains("--allowed-hosts rebound.example"), "{error}");
    server.send(get("/", "rebound.example")).await.refused(403);
    // Probes and scrapers ask by service names.
    for path in ["/health", "/metrics"] {
        assert_eq!(server.send(get(path, "rebound.example")).await.status, 200);
    }
    names(&["oscar.internal"], None).send(get("/v1/models", "oscar.internal:80")).await.ok();
    names(&["*"], None).send(get("/v1/models", "anything.example")).await.ok();
    let keyed = names(&[], Some("secret"));
    let headers = [("host", "anything.example"), ("authorization", "Bearer secret")];
    keyed.send(request(Method::GET, "/v1/models", &headers, "")).await.ok();
    let headers =
        [("host", "anything.example"), ("authorization", "Bearer secret"), ("content-type", "text/plain")];
    keyed.send(request(Method::POST, "/flush_cache", &headers, "")).await.ok();
}

#[tokio::test]
async fn a_batch_is_counted_before_it_is_expanded() {
    let server = mock_with(MockOptions { max_queued: 8, ..MockOptions::default() }, ServerOptions::default());
    let most = server.engine.info().max_queued;
    let texts = vec!["a"; most + 1];
    for (path, body, field) in [
        ("/generate", json!({"text": texts}), "text"),
        ("/generate", json!({"input_ids": vec![[1]; most + 1]}), "input_ids"),
        ("/v1/completions", json!({"prompt": texts}), "prompt"),
        ("/v1/completions", json!({"prompt": vec![[1]; most + 1]}), "prompt"),
        ("/completion", json!({"prompt": texts}), "prompt"),
        ("/v1/embeddings", json!({"input": texts}), "input"),
        ("/v1/score", json!({"text_1": "a", "text_2": texts}), "text_2"),
    ] {
        let error = server.post(path, body).await.refused(400);
        assert_eq!(error["param"], field, "{error}");
        assert!(error["message"].as_str().unwrap().contains("at most 8"), "{error}");
    }
    // Settings are counted beside the prompts, before any of them is read.
    let params =
        |count: usize| json!({"text": "a", "sampling_params": vec![json!({"top_k": "many"}); count]});
    for count in [most + 1, 2] {
        let error = server.post("/generate", params(count)).await.refused(400);
        let message = format!("sampling_params has {count} entries for 1 prompts");
        assert_eq!((&error["param"], &error["message"]), (&json!("sampling_params"), &json!(message)));
    }
    let error = server.post("/generate", params(1)).await.refused(400);
    assert_eq!(error["param"], "sampling_params[0].top_k", "{error}");
    let body = json!({"prompt": vec!["a"; most], "max_tokens": 1});
    server.post("/v1/completions", body).await.ok();
    // A list that no engine takes is not even read to its end.
    let endless = format!("{{\"text\": [{}\"a\"]}}", "\"a\",".repeat(200_000));
    let error = server.send(request(Method::POST, "/generate", &[JSON], &endless)).await.refused(400);
    assert!(error.to_string().contains("65536"), "{error}");
}

#[tokio::test]
async fn bodies_of_many_small_values_are_refused() {
    let server = mock();
    let message = "{\"role\": \"user\", \"content\": \"a\"},";
    let chat = |count: usize| format!("{{\"messages\": [{}]}}", message.repeat(count).trim_end_matches(','));
    let send = |body: String| server.send(request(Method::POST, "/v1/chat/completions", &[JSON], &body));
    let error = send(chat(500_000)).await.refused(400);
    assert!(error.to_string().contains("objects, lists and texts"), "{error}");
    let error = send(chat(20_000)).await.refused(400);
    assert!(error.to_string().contains("at most 16384"), "{error}");
    let parts =
        json!({"messages": [{"role": "user", "content": vec![json!({"type": "text", "text": "a"}); 5000]}]});
    let error = send(parts.to_string()).await.refused(400);
    assert!(error.to_string().contains("at most 4096"), "{error}");
    let numbers = format!("{{\"prompt\": \"a\", \"allowed_token_ids\": [{}0]}}", "0,".repeat(3_000_000));
    let error = server.send(request(Method::POST, "/v1/completions", &[JSON], &numbers)).await.refused(400);
    assert!(error.to_string().contains("2097152 numbers"), "{error}");
    // The other routes count what they call messages and parts.
    let many = |kind: &str| vec![json!({"type": kind, "text": "a"}); 5000];
    let message = json!({"role": "user", "content": "a"});
    for (path, body, place) in [
        (
            "/v1/responses",
            json!({"input": [{"role": "user", "content": many("input_text")}]}),
            "input[0].content",
        ),
        ("/v1/responses", json!({"input": vec![message.clone(); 20_000]}), "input"),
        (
            "/v1/messages",
            json!({"max_tokens": 1, "messages": [{"role": "user", "content": many("text")}]}),
            "messages[0].content",
        ),
        ("/v1/messages", json!({"max_tokens": 1, "messages": vec![message.clone(); 20_000]}), "messages"),
        ("/v1/messages", json!({"max_tokens": 1, "system": many("text"), "messages": [message]}), "system"),
    ] {
        let answer = server.post(path, body).await;
        assert_eq!(answer.status, 400, "{path}: {}", answer.text);
        assert!(answer.text.contains("at most") && answer.text.contains(place), "{path}: {}", answer.text);
    }
}

/// Large bodies are parsed and rendered beside the threads that serve connections: whoever asks after them is answered
/// before them.
#[tokio::test]
async fn large_bodies_hold_nobody_up() {
    let server = mock_with(MockOptions { context: 1000, ..MockOptions::default() }, ServerOptions::default());
    let message = "{\"role\": \"user\", \"content\": \"a few words\"},";
    let chat = |count: usize| format!("{{\"messages\": [{}]}}", message.repeat(count).trim_end_matches(','));
    let words =
        "{\"messages\": [{\"role\": \"user\", \"content\": \"".to_owned() + &"w ".repeat(7 << 20) + "\"}]}";
    for body in [chat(500_000), chat(16_000), words] {
        let answered = RefCell::new(Vec::new());
        let large = async {
            server.send(request(Method::POST, "/v1/chat/completions", &[JSON], &body)).await.refused(400);
            answered.borrow_mut().push("large");
        };
        let small = async {
            assert_eq!(server.send(request(Method::GET, "/health", &[], "")).await.status, 200);
            let question = json!({"prompt": "a", "max_tokens": 1}).to_string();
            server.send(request(Method::POST, "/v1/completions", &[JSON], &question)).await.ok();
            answered.borrow_mut().push("small");
        };
        tokio::join!(biased; large, small);
        assert_eq!(*answered.borrow(), ["small", "large"], "a body of {} bytes", body.len());
    }
}

/// Values take more memory than there is for bodies, which are then parsed one after another.
#[tokio::test]
async fn bodies_of_numbers_are_parsed_one_by_one() {
    let options =
        ServerOptions { body_bytes: 1 << 20, all_bodies_bytes: 1 << 20, ..ServerOptions::default() };
    let server = mock_with(MockOptions::default(), options);
    let numbers = format!("{{\"prompt\": [{}1]}}", "1,".repeat(300_000));
    let answers = futures_util::future::join_all((0..8).map(|_| async {
        server.send(request(Method::POST, "/v1/completions", &[JSON], &numbers)).await.refused(400)
    }));
    for error in answers.await {
        assert_eq!(error["code"], "context_length_exceeded", "{error}");
    }
}

#[tokio::test]
async fn fields_that_are_kept_are_bounded() {
    let server = mock();
    let messages = json!([{"role": "user", "content": "a"}]);
    let rid = "r".repeat(257);
    let (tokens, biases) = (vec![1; 1025], (0..4097).map(|id| (id.to_string(), json!(1))));
    let biases: serde_json::Map<String, serde_json::Value> = biases.collect();
    let long_tools = json!([{"name": "f", "input_schema": {"x": "a".repeat(2 << 20)}}]);
    for (path, body, field, limit) in [
        ("/v1/chat/completions", json!({"messages": messages, "rid": rid}), "rid", "256"),
        ("/v1/completions", json!({"prompt": "a", "rid": rid}), "rid", "256"),
        ("/v1/responses", json!({"input": "a", "rid": rid}), "rid", "256"),
        ("/v1/messages", json!({"messages": messages, "max_tokens": 1, "rid": rid}), "rid", "256"),
        ("/generate", json!({"text": "a", "rid": rid}), "rid", "256"),
        ("/generate", json!({"text": ["a", "b"], "rid": rid}), "rid", "256"),
        ("/generate", json!({"text": ["a", "b"], "rid": ["r", rid]}), "rid", "256"),
        ("/completion", json!({"prompt": "a", "rid": rid}), "rid", "256"),
        ("/v1/embeddings", json!({"input": "a", "rid": rid}), "rid", "256"),
        ("/v1/score", json!({"text_1": "a", "text_2": "b", "rid": rid}), "rid", "256"),
        ("/v1/completions", json!({"prompt": "a", "stop_token_ids": tokens}), "stop_token_ids", "1024"),
        ("/v1/chat/completions", json!({"messages": messages, "logit_bias": biases}), "logit_bias", "4096"),
        (
            "/generate",
            json!({"text": "a", "sampling_params": {"stop_token_ids": tokens}}),
            "stop_token_ids",
            "1024",
        ),
        ("/completion", json!({"prompt": "a", "logit_bias": biases}), "logit_bias", "4096"),
        ("/v1/responses", json!({"input": "a", "metadata": {"a": "b".repeat(513)}}), "metadata", "512"),
        (
            "/v1/responses",
            json!({"input": "a", "reasoning": {"effort": "b".repeat(2 << 20)}}),
            "reasoning.effort",
            "1048576",
        ),
        (
            "/v1/chat/completions",
            json!({"messages": messages, "tool_choice": "none", "tools": [
                {"type": "function", "function": {"name": "f", "parameters": {"x": "a".repeat(2 << 20)}}}]}),
            "tools",
            "1048576",
        ),
        (
            "/v1/messages",
            json!({"messages": messages, "max_tokens": 1, "tools": long_tools}),
            "tools",
            "1048576",
        ),
        ("/v1/messages/count_tokens", json!({"messages": messages, "tools": long_tools}), "tools", "1048576"),
        (
            "/completion",
            json!({"prompt": "a", "logit_bias": [["a".repeat(1 << 20), 1]]}),
            "logit_bias",
            "65536",
        ),
    ] {
        let answer = server.post(path, body).await;
        assert_eq!(answer.status, 400, "{path} {field}: {}", answer.text);
        let message = answer.json()["error"]["message"].as_str().unwrap().to_owned();
        assert!(message.contains(field) && message.contains(limit), "{path}: {message}");
    }
    // Each pair has the first text, so that a batch of them can be too much where the body is not.
    let server =
        mock_with(MockOptions { max_queued: 4096, ..MockOptions::default() }, ServerOptions::default());
    let body = json!({"text_1": "word ".repeat(5000), "text_2": vec!["a"; 1000]});
    let error = server.post("/v1/score", body).await.refused(400);
    assert!(error["message"].as_str().unwrap().contains("4194304 tokens"), "{error}");
}

/// What requests keep until they end: there is always room for what a simple one keeps, and rules count as grammars do.
#[tokio::test]
async fn rules_are_counted_and_small_memory_is_no_fault_of_a_request() {
    let with = |body_bytes, all_bodies_bytes| {
        let limits = ServerOptions { body_bytes, all_bodies_bytes, ..ServerOptions::default() };
        mock_with(MockOptions::default(), limits)
    };
    let object = json!({"prompt": "a", "response_format": {"type": "json_object"}});
    // The mock says what no grammar allows.
    with(1 << 20, 64 << 10).post("/v1/completions", object).await.refused(500);
    let server = with(64 << 10, 16 << 10);
    let words: Vec<String> = (0..256).map(|number| format!("{number} {}", "word ".repeat(20))).collect();
    for rules in [json!({"stop_regex": "x"}), json!({"bad_words": words})] {
        let mut body = json!({"prompt": "a", "max_tokens": 1});
        body.as_object_mut().unwrap().extend(rules.as_object().unwrap().clone());
        let error = server.post("/v1/completions", body).await.refused(400);
        assert_eq!(error["code"], "request_memory", "{error}");
    }
    let few = json!({"prompt": "a", "max_tokens": 1, "bad_words": ["word"]});
    server.post("/v1/completions", few).await.ok();
}

#[tokio::test]
async fn texts_and_tokens_without_an_answer_are_bounded_too() {
    let server = mock_with(MockOptions { context: 1000, ..MockOptions::default() }, ServerOptions::default());
    let long = json!([{"role": "user", "content": "word ".repeat(200_000)}]);
    for (path, body, field, limit) in [
        ("/tokenize", json!({"prompt": "1".repeat((4 << 20) + 1)}), "prompt", "4194304"),
        ("/tokenize", json!({"prompt": vec!["1".repeat(1 << 20); 5]}), "prompt", "4194304"),
        ("/tokenize", json!({"prompt": "1".repeat(300_000), "with_pieces": true}), "prompt", "262144"),
        ("/tokenize", json!({"content": "1".repeat(300_000), "with_pieces": true}), "content", "262144"),
        ("/tokenize", json!({"text": "1".repeat((4 << 20) + 1)}), "text", "4194304"),
        ("/tokenize", json!({"messages": long}), "messages", "1000"),
        ("/oscar/cache", json!({"messages": long}), "messages", "1000"),
        ("/detokenize", json!({"tokens": vec![5; 262_145]}), "tokens", "262144"),
        ("/completion", json!({"prompt": vec![5; 1001]}), "prompt", "1000"),
        ("/v1/completions", json!({"prompt": vec![5; 1001], "echo": true}), "prompt", "1000"),
    ] {
        let error = server.post(path, body).await.refused(400);
        assert_eq!(error["param"], field, "{path}: {error}");
        assert!(error["message"].as_str().unwrap().contains(limit), "{path}: {error}");
    }
    // A text may be longer than the context, and is counted.
    let counted = server.post("/tokenize", json!({"prompt": "word ".repeat(5000)})).await.ok();
    assert!(counted["count"].as_u64().unwrap() >= 5000, "{}", counted["count"]);
}

/// What tokens stand for can be many times their ids, so answers are bounded, and count until they have been read.
#[tokio::test]
async fn answers_of_tokens_are_bounded_and_counted() {
    let options =
        ServerOptions { body_bytes: 64 << 10, all_bodies_bytes: 64 << 10, ..ServerOptions::default() };
    let server = mock_with(MockOptions::default(), options);
    let the = vec![105; 10_000];
    for (path, body, field) in [
        ("/detokenize", json!({"tokens": the}), "tokens"),
        ("/detokenize", json!({"tokens": [the, [5]]}), "tokens"),
        ("/detokenize", json!({"tokens": the, "skip_special_tokens": true}), "tokens"),
        ("/tokenize", json!({"prompt": "1".repeat(40_000)}), "prompt"),
        ("/tokenize", json!({"prompt": ["1".repeat(20_000), "1".repeat(20_000)]}), "prompt"),
        ("/tokenize", json!({"content": "1".repeat(4000), "with_pieces": true}), "content"),
    ] {
        let error = server.post(path, body).await.refused(400);
        assert_eq!(error["param"], field, "{path}: {error}");
        assert!(error["message"].as_str().unwrap().contains("65536 bytes (--max-body)"), "{error}");
    }

    let options =
        ServerOptions { body_bytes: 1 << 20, all_bodies_bytes: 1 << 20, ..ServerOptions::default() };
    let server = mock_with(MockOptions::default(), options);
    let body = json!({"tokens": vec![105; 60_000]}).to_string();
    let ask = || request(Method::POST, "/detokenize", &[JSON], &body);
    let unread = server.router().oneshot(ask()).await.unwrap();
    assert_eq!(unread.status(), 200);
    assert_eq!(server.send(ask()).await.refused(503)["code"], "body_memory");
    server.post("/detokenize", json!({"tokens": vec![105; 100]})).await.ok();
    drop(unread);
    server.send(ask()).await.ok();
}

#[tokio::test]
async fn what_templates_get_from_us_cannot_be_replaced() {
    let server = mock();
    let chat = |kwargs: serde_json::Value| json!({"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": kwargs});
    for name in ["messages", "tools", "add_generation_prompt", "bos_token", "raise_exception"] {
        let error = server.post("/v1/chat/completions", chat(json!({name: []}))).await.refused(400);
        assert_eq!(error["param"], format!("chat_template_kwargs.{name}"));
    }
    server.post("/v1/chat/completions", chat(json!({"enable_thinking": false}))).await.ok();
}
