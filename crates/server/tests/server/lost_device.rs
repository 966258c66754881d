//! A device that fails for good: in-flight responses get the reason, later requests 503, and the server ends.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::http::Request;
use http_body_util::BodyExt;
use oscar_engine::{Engine, EngineOptions, MockOptions, Serve};
use oscar_kernels::KernelError;
use oscar_server::{Server, ServerOptions};
use oscar_testing::{HashBackend, tiny_model};
use serde_json::{Value, json};
use tower::ServiceExt;

use crate::support::{TEMPLATE, TestServer, mock, mock_with, served};

const REASON: &str = "the device failed: the device is lost: injected fault: Device; the engine has stopped and has to be \
                      started again";

fn assert_device_failed(error: &Value) {
    let expected = json!({"message": REASON, "type": "service_unavailable_error", "param": null,
        "code": "device_failed"});
    assert_eq!(*error, expected);
}

fn question(stream: bool) -> Value {
    json!({"prompt": [3, 4, 5], "max_tokens": 5000, "ignore_eos": true, "stream": stream})
}

/// A real engine on a device that can be lost.
fn fragile() -> (Arc<HashBackend>, TestServer<Engine<HashBackend>>) {
    let backend = Arc::new(HashBackend::default());
    let options = EngineOptions { max_running: 4, ..EngineOptions::default() };
    let engine = Arc::new(Engine::new(tiny_model(8192, Arc::clone(&backend)), &options).unwrap());
    let server =
        Server::new(Arc::clone(&engine) as Arc<dyn Serve>, served(TEMPLATE), ServerOptions::default());
    (backend, TestServer { engine, server: Arc::new(server) })
}

#[tokio::test(flavor = "multi_thread")]
async fn every_route_says_that_the_device_has_failed() {
    let (backend, server) = fragile();
    server.get("/health").await.ok();
    server.get("/health_generate").await.ok();
    let gauge = "oscar_device_failed{model_name=\"tiny\"} ";
    assert!(server.get("/metrics").await.text.contains(&format!("{gauge}0.0")));

    backend.lose_after(Some(500));
    // What has begun to stream ends with an event, and what has not with a status.
    let (streamed, whole) = tokio::join!(
        server.post("/v1/completions", question(true)),
        server.post("/v1/completions", question(false))
    );
    assert_device_failed(&whole.refused(503));
    let events = streamed.events();
    assert!(events.len() > 1, "{events:?}");
    assert_device_failed(&events.last().unwrap()["error"]);

    for path in ["/health", "/health_generate"] {
        assert_device_failed(&server.get(path).await.refused(503));
    }
    assert_device_failed(&server.post("/v1/completions", question(false)).await.refused(503));
    let chat = json!({"messages": [{"role": "user", "content": "a"}]});
    assert_device_failed(&server.post("/v1/chat/completions", chat.clone()).await.refused(503));
    assert_device_failed(&server.post("/v1/embeddings", json!({"input": "a"})).await.refused(503));
    let mut message = chat;
    message["max_tokens"] = json!(5);
    let refused = server.post("/v1/messages", message).await;
    assert_eq!((refused.status, refused.json()["error"]["message"].as_str()), (503, Some(REASON)));
    assert!(server.get("/metrics").await.text.contains(&format!("{gauge}1.0")));
    assert_eq!(server.get("/server_info").await.ok()["status"], "failed");
    assert_eq!(server.server.requests_in_progress(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_whose_device_fails_answers_those_in_progress_and_ends() {
    let (backend, server) = fragile();
    let listening = server.listen().await;
    let request = Request::post("/v1/completions").header("content-type", "application/json");
    let request = request.body(Body::from(question(true).to_string())).unwrap();
    let response = server.router().oneshot(request).await.unwrap();
    backend.lose_after(Some(300));
    // The server does not end before the client has read why.
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert!(!listening.task.is_finished());
    let text = String::from_utf8(response.into_body().collect().await.unwrap().to_bytes().to_vec()).unwrap();
    assert!(text.contains(REASON), "{text}");
    let ended = listening.task.await.unwrap();
    assert_eq!(ended.broken_off, 0);
    assert_eq!(ended.failure.unwrap().to_string(), REASON);
}

#[tokio::test]
async fn those_that_wait_are_told_too() {
    let server = mock_with(
        MockOptions { tokens_per_s: Some(0.01), max_running: 1, ..MockOptions::default() },
        ServerOptions::default(),
    );
    let listening = server.listen().await;
    let fail = async {
        // One is in progress, another waits.
        while server.server.requests_in_progress() < 2 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        server.engine.fail_device(KernelError::DeviceLost("injected fault: Device".to_owned()));
    };
    let (first, second, ()) = tokio::join!(
        server.post("/v1/completions", question(false)),
        server.post("/v1/completions", question(false)),
        fail
    );
    for answer in [first, second] {
        assert_device_failed(&answer.refused(503));
    }
    assert!(listening.task.await.unwrap().failure.is_some());
}

#[tokio::test]
async fn a_server_that_is_stopped_has_not_failed() {
    let server = mock();
    let mut listening = server.listen().await;
    drop(listening.stop.take());
    assert!(listening.task.await.unwrap().failure.is_none());
}
