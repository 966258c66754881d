//! What requests take of the server's memory, and on which thread: batches whose fields would be multiplied, fields that
//! nobody reads, and bodies that are much work.

#![allow(clippy::unwrap_used)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use axum::body::Body;
use axum::http::Request;
use oscar_engine::{EngineOptions, MockEngine, MockOptions, Serve};
use oscar_server::ServerOptions;
use serde_json::{Value, json};
use tokio::sync::{Mutex, MutexGuard};
use tower::ServiceExt;

#[allow(dead_code)]
#[path = "../server/support.rs"]
mod support;

use support::{TestServer, eventually, mock_with, tiny};

const MIB: usize = 1 << 20;

/// Notes how much memory is held, and how often each thread has asked for some or given some back.
struct NotingAllocator;

static HELD: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);
static ALL_CALLS: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    static CALLS: Cell<usize> = const { Cell::new(0) };
}

fn note(grown: usize, freed: usize) {
    HELD.fetch_sub(freed, Ordering::Relaxed);
    let held = HELD.fetch_add(grown, Ordering::Relaxed) + grown;
    PEAK.fetch_max(held, Ordering::Relaxed);
    ALL_CALLS.fetch_add(1, Ordering::Relaxed);
    // A thread that ends has nothing to count with any more.
    let _ = CALLS.try_with(|calls| calls.set(calls.get() + 1));
}

// SAFETY: every call is passed on unchanged to the system's allocator; the counters hold no memory of their own.
#[allow(unsafe_code)]
unsafe impl GlobalAlloc for NotingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        note(layout.size(), 0);
        // SAFETY: the caller keeps the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        note(0, layout.size());
        // SAFETY: the pointer came from `System` through this allocator.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        note(size, layout.size());
        // SAFETY: the pointer came from `System` through this allocator.
        unsafe { System.realloc(pointer, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: NotingAllocator = NotingAllocator;

/// Tests that measure run one after another.
async fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::const_new(());
    ALONE.lock().await
}

/// A small context, in which nothing long is answered, and a queue for large batches.
fn server() -> TestServer<MockEngine> {
    let options = MockOptions { context: 1000, max_queued: 1024, ..MockOptions::default() };
    mock_with(options, ServerOptions::default())
}

/// A request that holds its body once, until the server has read it.
fn request(path: &str, body: &Value) -> Request<Body> {
    let request = Request::post(path).header("content-type", "application/json");
    request.body(Body::from(body.to_string())).unwrap()
}

/// How much more memory was held at a time than before, while a request was answered.
async fn peak<E>(server: &TestServer<E>, path: &str, body: Value, status: u16) -> usize {
    let before = HELD.load(Ordering::Relaxed);
    PEAK.store(before, Ordering::Relaxed);
    let answer = server.send(request(path, &body)).await;
    assert_eq!(answer.status, status, "{path}: {:.300}", answer.text);
    PEAK.load(Ordering::Relaxed) - before
}

#[tokio::test]
async fn fields_of_a_batch_are_not_multiplied() {
    let _alone = alone().await;
    let server = server();
    let long = || "w ".repeat(MIB / 2);
    let texts = || vec!["a"; 1000];
    for (path, body) in [
        ("/v1/score", json!({"text_1": long(), "text_2": texts()})),
        ("/generate", json!({"text": texts(), "sampling_params": {"regex": long()}})),
        ("/generate", json!({"text": texts(), "sampling_params": {"stop": [long()]}})),
        ("/generate", json!({"text": texts(), "rid": long()})),
        ("/v1/completions", json!({"prompt": texts(), "rid": long()})),
        ("/completion", json!({"prompt": texts(), "rid": long()})),
        ("/v1/embeddings", json!({"input": texts(), "rid": long()})),
        ("/v1/score", json!({"text_1": "a", "text_2": texts(), "rid": long()})),
        ("/v1/completions", json!({"prompt": texts(), "stop_token_ids": vec![1; MIB / 2]})),
    ] {
        let grown = peak(&server, path, body, 400).await;
        assert!(grown < 100 * MIB, "{path}: {} MiB", grown / MIB);
    }
    // What is answered does not have a copy for each prompt either.
    let params = json!({"max_new_tokens": 1, "log_metrics": long()});
    let grown = peak(&server, "/generate", json!({"text": texts(), "sampling_params": params}), 200).await;
    assert!(grown < 100 * MIB, "{} MiB", grown / MIB);
}

/// Prompts of a batch that ask for the same form of answer have one compiled grammar.
#[tokio::test]
async fn a_grammar_is_compiled_once_for_a_batch() {
    let _alone = alone().await;
    let server = tiny(256, EngineOptions::default());
    let texts: Vec<String> = (0..1000).map(|number| format!("text {number}")).collect();
    let params = json!({"max_new_tokens": 1, "json_schema": {"enum": texts}});
    let ask = async |prompts: usize| {
        let body = json!({"text": vec!["a"; prompts], "sampling_params": params});
        let before = ALL_CALLS.load(Ordering::Relaxed);
        server.send(request("/generate", &body)).await.ok();
        ALL_CALLS.load(Ordering::Relaxed) - before
    };
    // The first grammar builds what all share.
    ask(1).await;
    let (one, many) = (ask(1).await, ask(40).await);
    assert!(many < 4 * one, "{one} calls for one prompt, {many} for forty");
}

#[tokio::test]
async fn a_request_holds_no_more_than_its_answer_needs() {
    let _alone = alone().await;
    let options = MockOptions { tokens_per_s: Some(20.0), ..MockOptions::default() };
    let server = mock_with(options, ServerOptions::default());
    let messages = json!([{"role": "user", "content": "a"}]);
    let (user, metadata) = ("x".repeat(8 * MIB), json!({"a": "x".repeat(8 * MIB)}));
    for (path, body) in [
        ("/v1/chat/completions", json!({"messages": messages, "user": user})),
        ("/v1/completions", json!({"prompt": "a", "max_tokens": 2000, "ignore_eos": true, "user": user})),
        ("/v1/responses", json!({"input": "a", "user": user})),
        ("/v1/messages", json!({"messages": messages, "max_tokens": 2000, "metadata": metadata})),
        ("/generate", json!({"text": "a", "log_metrics": user})),
        ("/completion", json!({"prompt": "a", "n_predict": 2000, "ignore_eos": true, "user": user})),
    ] {
        let before = HELD.load(Ordering::Relaxed);
        {
            let asked = server.send(request(path, &body));
            let looked = async {
                eventually("it runs", || server.engine.stats().running == 1).await;
                // The thread that read the body may still be at its last line.
                eventually("the body is gone", || HELD.load(Ordering::Relaxed) < before + 2 * MIB).await;
            };
            // Leaving ends the request.
            tokio::select! {
                biased;
                () = looked => {}
                answer = asked => panic!("{path}: {:.300}", answer.text),
            }
        }
        eventually("it is given up", || server.engine.stats().running == 0).await;
    }
}

/// Requests that wait may keep much: what they keep is bounded for all of them, and goes when they do.
#[tokio::test]
async fn what_waiting_requests_keep_is_bounded() {
    let _alone = alone().await;
    let engine = || MockOptions { max_running: 1, tokens_per_s: Some(5.0), ..MockOptions::default() };
    let bodies = ServerOptions { body_bytes: MIB, all_bodies_bytes: 4 * MIB, ..ServerOptions::default() };
    let parts: serde_json::Map<String, Value> = (0..4)
        .map(|part| {
            let names =
                (0..400).map(|name| (format!("a_property_of_{part}_{name}"), json!({"type": "integer"})));
            let properties = names.collect::<serde_json::Map<_, _>>();
            (format!("part{part}"), json!({"type": "object", "properties": properties}))
        })
        .collect();
    let wide = json!({"type": "object", "properties": parts});
    let long: Vec<String> = (0..12_000).map(|number| format!("value {number}")).collect();
    let messages = json!([{"role": "user", "content": "a"}]);
    let form =
        |schema: &Value| json!({"type": "json_schema", "json_schema": {"name": "n", "schema": schema}});
    let text = json!({"format": {"type": "json_schema", "name": "n", "schema": wide}});
    let properties = json!({"a": {"enum": vec!["a"; 1000]}});
    let tools: Vec<Value> = (0..100)
        .map(|n| json!({"type": "function", "name": format!("f{n}"), "parameters": {"properties": properties}}))
        .collect();
    for (path, body) in [
        ("/v1/chat/completions", json!({"messages": messages, "response_format": form(&wide)})),
        (
            "/v1/chat/completions",
            json!({"messages": messages, "response_format": form(&json!({"enum": long}))}),
        ),
        ("/v1/responses", json!({"input": "a", "text": text})),
        ("/generate", json!({"text": ["a"], "sampling_params": {"json_schema": wide}})),
        ("/v1/responses", json!({"input": "a", "tools": tools, "tool_choice": "none"})),
    ] {
        let server = Arc::new(mock_with(engine(), bodies.clone()));
        // What all requests share is made by the first one. The mock says what no grammar allows.
        let simple = json!({"messages": messages, "response_format": {"type": "json_object"}});
        server.post("/v1/chat/completions", simple).await.refused(500);
        let asks = Arc::clone(&server);
        let runs =
            request("/v1/completions", &json!({"prompt": "a", "max_tokens": 2000, "ignore_eos": true}));
        let mut asked = vec![tokio::spawn(async move { asks.send(runs).await })];
        eventually("one runs", || server.engine.stats().running == 1).await;
        let before = HELD.load(Ordering::Relaxed);
        let mut refused = 0;
        for _ in 0..30 {
            let (asks, request) = (Arc::clone(&server), request(path, &body));
            let mut waiting = tokio::spawn(async move { asks.send(request).await });
            let waits = || server.engine.stats().queued == asked.len();
            eventually("it waits or is refused", || waiting.is_finished() || waits()).await;
            if waiting.is_finished() {
                let error = (&mut waiting).await.unwrap().refused(503);
                assert_eq!(error["code"], "request_memory");
                refused += 1;
            } else {
                asked.push(waiting);
            }
        }
        assert!(asked.len() > 1 && (refused > 0 || !body["tools"].is_null()), "{path}: {refused} refused");
        eventually("bodies are gone", || HELD.load(Ordering::Relaxed) < before + 20 * MIB).await;
        asked.iter().for_each(|waiting| waiting.abort());
        let stats = || server.engine.stats();
        eventually("all are given up", || stats().running == 0 && stats().queued == 0).await;
        eventually("nothing is left", || HELD.load(Ordering::Relaxed) < before + MIB).await;
    }
}

/// Each prompt of a batch has a copy of their grammar, and small parts of many are much.
#[tokio::test]
async fn grammars_of_a_batch_are_counted_with_their_copies() {
    let _alone = alone().await;
    let limits = ServerOptions { body_bytes: MIB, all_bodies_bytes: 4 * MIB, ..ServerOptions::default() };
    let server = mock_with(MockOptions::default(), limits);
    let names = (0..400).map(|name| (format!("p{name}"), json!({"type": "integer"})));
    let schema = json!({"type": "object", "properties": names.collect::<serde_json::Map<_, _>>()});
    let batch = |prompts: usize| json!({"text": vec!["a"; prompts], "sampling_params": {"max_new_tokens": 1, "json_schema": schema}});
    // The mock says what no grammar allows.
    server.post("/generate", batch(10)).await.refused(500);
    let error = server.post("/generate", batch(1000)).await.refused(400);
    assert_eq!(error["code"], "request_memory");
    assert!(error["message"].as_str().unwrap().contains("16 MiB"), "{error}");
}

/// The thread that serves connections reads a body, and neither makes nor drops what is in it.
#[tokio::test]
async fn large_bodies_are_work_for_other_threads() {
    let _alone = alone().await;
    let server = server();
    let many = || vec!["a"; 2000];
    let schema = || json!({"type": "object", "properties": {"a": {"enum": many()}}});
    let chat_tools: Vec<Value> = (0..100)
        .map(|n| json!({"type": "function", "function": {"name": n.to_string(), "parameters": schema()}}))
        .collect();
    let flat_tools: Vec<Value> = (0..100)
        .map(|n| json!({"type": "function", "name": n.to_string(), "parameters": schema()}))
        .collect();
    let claude_tools: Vec<Value> =
        (0..100).map(|n| json!({"name": n.to_string(), "input_schema": schema()})).collect();
    let long_schema = || json!({"enum": vec!["a".repeat(20); 20_000]});
    let biases = || (0..4000).map(|id| (id.to_string(), json!(1))).collect::<serde_json::Map<_, _>>();
    let messages = json!([{"role": "user", "content": "a"}]);
    let parts = |kind: &str| {
        let parts = vec![json!({"type": kind, "text": "a"}); 4000];
        vec![json!({"role": "user", "content": parts}); 10]
    };
    for (path, body, status) in [
        ("/v1/chat/completions", json!({"messages": messages, "tools": chat_tools}), 400),
        (
            "/v1/chat/completions",
            json!({"messages": messages, "tools": chat_tools, "tool_choice": "none"}),
            200,
        ),
        ("/v1/chat/completions", json!({"messages": parts("text")}), 400),
        ("/v1/responses", json!({"input": "a", "tools": flat_tools}), 400),
        ("/v1/responses", json!({"input": parts("input_text")}), 400),
        ("/v1/messages", json!({"max_tokens": 9, "messages": messages, "tools": claude_tools}), 400),
        ("/v1/messages", json!({"max_tokens": 9, "messages": parts("text")}), 400),
        ("/v1/messages/count_tokens", json!({"messages": messages, "tools": claude_tools}), 400),
        ("/tokenize", json!({"messages": messages, "tools": chat_tools}), 400),
        ("/tokenize", json!({"prompt": "1".repeat(200_000), "with_pieces": true}), 200),
        ("/detokenize", json!({"tokens": vec![5; 200_000]}), 200),
        ("/apply-template", json!({"messages": messages, "tools": chat_tools}), 200),
        ("/oscar/cache", json!({"messages": messages, "tools": chat_tools}), 400),
        ("/v1/completions", json!({"prompt": "a", "json_schema": long_schema()}), 400),
        ("/v1/completions", json!({"prompt": "a", "max_tokens": 1, "logit_bias": biases()}), 200),
        ("/generate", json!({"text": "a", "sampling_params": {"json_schema": long_schema()}}), 400),
        ("/completion", json!({"prompt": "a", "json_schema": long_schema()}), 400),
    ] {
        let (router, request) = (server.router(), request(path, &body));
        let before = CALLS.get();
        let answer = router.oneshot(request).await.unwrap();
        let calls = CALLS.get() - before;
        assert_eq!(answer.status(), status, "{path}");
        assert!(calls < 4000, "{path}: {calls} calls");
    }
}

/// What a response repeats of its request is written as it is kept, not made into values again.
#[tokio::test]
async fn responses_repeat_requests_without_reading_them_again() {
    let _alone = alone().await;
    let server = server();
    let parameters = json!({"type": "object", "properties": {"a": {"enum": vec!["a"; 1000]}}});
    let tools: Vec<Value> = (0..50)
        .map(|n| json!({"type": "function", "name": n.to_string(), "parameters": parameters}))
        .collect();
    for (streams, times) in [(false, 1), (true, 3)] {
        let body = json!({"input": "a", "tools": tools, "tool_choice": "none", "max_output_tokens": 2, "stream": streams});
        let request = request("/v1/responses", &body);
        let before = CALLS.get();
        let answer = server.send(request).await;
        let calls = CALLS.get() - before;
        assert_eq!((answer.status, answer.text.matches("\"tools\":[{").count()), (200, times));
        assert!(calls < 10_000, "{calls} calls");
    }
}

/// A body of some KiB is parsed where it arrives, and what is longer work than that is done elsewhere.
#[tokio::test]
async fn small_bodies_are_tokenized_on_other_threads_too() {
    let _alone = alone().await;
    let server = server();
    let words = "the end and ".repeat(1000);
    let messages = json!([{"role": "user", "content": words}]);
    let biases: Vec<Value> = (0..300).map(|n| json!([format!("the end {n}"), 1])).collect();
    for (path, body, status) in [
        ("/tokenize", json!({"prompt": words}), 200),
        ("/tokenize", json!({"messages": messages}), 200),
        ("/v1/messages/count_tokens", json!({"messages": messages}), 200),
        ("/v1/chat/completions", json!({"messages": messages}), 400),
        ("/v1/completions", json!({"prompt": words}), 400),
        ("/v1/embeddings", json!({"input": words}), 400),
        ("/generate", json!({"text": words}), 400),
        ("/completion", json!({"prompt": "a", "n_predict": 0, "logit_bias": biases}), 200),
    ] {
        let (router, request) = (server.router(), request(path, &body));
        let before = CALLS.get();
        let answer = router.oneshot(request).await.unwrap();
        let calls = CALLS.get() - before;
        assert_eq!(answer.status(), status, "{path}");
        assert!(calls < 2500, "{path}: {calls} calls");
    }
}

#[tokio::test]
async fn lists_of_tokens_are_written_as_they_are() {
    let _alone = alone().await;
    let server = server();
    let digits = json!({"prompt": "1".repeat(200_000), "with_pieces": true});
    let grown = peak(&server, "/tokenize", digits, 200).await;
    assert!(grown < 50 * MIB, "{} MiB", grown / MIB);
    let grown = peak(&server, "/tokenize", json!({"prompt": "1".repeat(2 * MIB)}), 200).await;
    assert!(grown < 300 * MIB, "{} MiB", grown / MIB);
}

/// The thread of the engine looks at every byte of an answer that a regular expression may end, between two tokens of
/// everybody.
#[tokio::test]
async fn looking_for_the_end_of_an_answer_takes_no_memory_for_each_byte() {
    let _alone = alone().await;
    let server = server();
    // What is asked for and its bytes, less what a single token needs: that includes compiling the expression.
    let calls = async |stop: Value| {
        let mut counted = Vec::new();
        for tokens in [1, 1, 30] {
            let body = json!({"prompt": "a", "max_tokens": tokens, "seed": 3, "bad_words": ["qqq"], "stop_regex": stop});
            let before = ALL_CALLS.load(Ordering::Relaxed);
            let answer = server.send(request("/v1/completions", &body)).await.ok();
            assert_eq!(answer["usage"]["completion_tokens"], tokens, "{answer}");
            let bytes = answer["choices"][0]["text"].as_str().unwrap().len();
            counted.push((ALL_CALLS.load(Ordering::Relaxed) - before, bytes));
        }
        (counted[2].0 - counted[1].0, counted[2].1 - counted[1].1)
    };
    let ((without, bytes), (with, _)) =
        (calls(Value::Null).await, calls(json!("(?s)[^\u{1}]{0,9}\u{1}")).await);
    assert!(bytes > 100 && with < without + bytes / 4, "{with} and {without} calls for {bytes} bytes");
}
