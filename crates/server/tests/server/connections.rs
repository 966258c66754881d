//! Over real sockets: clients that leave, dawdle or come in crowds, keys, and the end of the server.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use axum::body::Body;
use axum::http::Request;
use oscar_engine::{MockOptions, Serve};
use oscar_server::ServerOptions;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::support::{eventually, mock, mock_with};

fn slow() -> MockOptions {
    MockOptions { tokens_per_s: Some(50.0), ..MockOptions::default() }
}

fn long_answer(stream: bool) -> Value {
    json!({"prompt": "a", "max_tokens": 20_000, "ignore_eos": true, "stream": stream})
}

/// A request as it is on the wire.
fn wire(path: &str, body: &Value) -> String {
    let body = body.to_string();
    let length = body.len();
    format!(
        "POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n{body}"
    )
}

async fn connect(address: SocketAddr, text: &str) -> TcpStream {
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.write_all(text.as_bytes()).await.unwrap();
    stream
}

/// All that comes until the other side closes.
async fn read_all(stream: &mut TcpStream) -> String {
    let mut bytes = Vec::new();
    let read = tokio::time::timeout(Duration::from_secs(20), stream.read_to_end(&mut bytes)).await;
    read.expect("the connection is closed").unwrap();
    String::from_utf8_lossy(&bytes).into_owned()
}

#[tokio::test]
async fn closing_the_connection_gives_the_request_up() {
    for streamed in [true, false] {
        let server = mock_with(slow(), ServerOptions::default());
        let listening = server.listen().await;
        let mut client = connect(listening.address, &wire("/v1/completions", &long_answer(streamed))).await;
        eventually("it runs", || server.engine.stats().running == 1).await;
        if streamed {
            let mut some = [0; 64];
            client.read_exact(&mut some).await.unwrap();
        }
        drop(client);
        eventually("it is given up", || server.engine.stats().running == 0).await;
        assert_eq!(server.engine.stats().cancelled, 1);
    }
}

#[tokio::test]
async fn tokens_arrive_as_they_are_said() {
    let options = MockOptions { tokens_per_s: Some(5.0), ..MockOptions::default() };
    let server = mock_with(options, ServerOptions::default());
    let listening = server.listen().await;
    let mut client = connect(listening.address, &wire("/v1/completions", &long_answer(true))).await;
    let mut seen = String::new();
    while !seen.contains("\"text\":") {
        let mut some = [0; 1024];
        let count = client.read(&mut some).await.unwrap();
        seen.push_str(&String::from_utf8_lossy(&some[..count]));
    }
    assert!(server.engine.stats().running == 1, "the first token came before the last was said");
}

#[tokio::test]
async fn slow_heads_and_slow_bodies_are_cut_off() {
    let short = Duration::from_millis(200);
    let options = ServerOptions { header_timeout: short, body_timeout: short, ..ServerOptions::default() };
    let server = mock_with(MockOptions::default(), options);
    let listening = server.listen().await;
    let mut silent = connect(listening.address, "").await;
    let mut half = connect(listening.address, "POST /v1/completions HTTP/1.1\r\nhost: loc").await;
    let head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 50\r\n\r\n{";
    let mut no_body = connect(listening.address, head).await;
    assert!(!read_all(&mut silent).await.contains("200"));
    assert!(!read_all(&mut half).await.contains("200"));
    assert!(read_all(&mut no_body).await.starts_with("HTTP/1.1 408"));
    let mut good =
        connect(listening.address, "GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
            .await;
    assert!(read_all(&mut good).await.starts_with("HTTP/1.1 200"), "the server lives");
}

/// The head of a request whose body will have `length` bytes, and its beginning.
fn beginning(length: usize, begun: usize) -> String {
    let head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n";
    format!("{head}content-length: {length}\r\n\r\n{{\"user\": \"{}", "x".repeat(begun))
}

async fn status(stream: &mut TcpStream) -> String {
    let mut line = [0; 12];
    let read = tokio::time::timeout(Duration::from_secs(20), stream.read_exact(&mut line)).await;
    read.expect("an answer").unwrap();
    String::from_utf8_lossy(&line[9..]).into_owned()
}

#[tokio::test]
async fn bodies_that_are_announced_and_do_not_come_hold_nobody_up() {
    let server = mock();
    let listening = server.listen().await;
    let mut silent = Vec::new();
    // Together they announce many times the memory that there is for bodies.
    for begun in [0, 1, 1000, 200 << 10] {
        for _ in 0..20 {
            silent.push(connect(listening.address, &beginning(32 << 20, begun)).await);
        }
    }
    let chunked = beginning(0, 0).replace("content-length: 0", "transfer-encoding: chunked");
    for _ in 0..20 {
        silent.push(connect(listening.address, &chunked.replace("{\"user\": \"", "1\r\n{\r\n")).await);
    }
    tokio::time::sleep(Duration::from_millis(100)).await;
    for user in [0, 2 << 20] {
        let body = json!({"prompt": "a", "max_tokens": 1, "user": "x".repeat(user)});
        let mut asked = connect(listening.address, &wire("/v1/completions", &body)).await;
        assert_eq!(status(&mut asked).await, "200", "{user} bytes beside the prompt");
    }
}

#[tokio::test]
async fn large_bodies_wait_for_memory_and_small_ones_do_not() {
    let options =
        ServerOptions { body_bytes: 1 << 20, all_bodies_bytes: 1 << 20, ..ServerOptions::default() };
    let server = mock_with(MockOptions::default(), options);
    let listening = server.listen().await;
    let body = json!({"prompt": "a", "max_tokens": 1, "user": "x".repeat(900 << 10)});
    let whole = wire("/v1/completions", &body);
    let (begun, rest) = whole.split_at(500 << 10);
    let mut first = connect(listening.address, begun).await;
    tokio::time::sleep(Duration::from_millis(100)).await;
    let address = listening.address;
    let others: Vec<_> = (0..4)
        .map(|_| {
            let whole = whole.clone();
            tokio::spawn(async move { status(&mut connect(address, &whole).await).await })
        })
        .collect();
    for _ in 0..3 {
        let body = json!({"prompt": "a", "max_tokens": 1});
        let mut small = connect(listening.address, &wire("/v1/completions", &body)).await;
        assert_eq!(status(&mut small).await, "200");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    assert!(others.iter().all(|other| !other.is_finished()), "there is memory for one");
    first.write_all(rest.as_bytes()).await.unwrap();
    assert_eq!(status(&mut first).await, "200");
    for other in others {
        assert_eq!(other.await.unwrap(), "200");
    }
}

#[tokio::test]
async fn strange_requests_do_not_hurt() {
    let server = mock();
    let listening = server.listen().await;
    let many = (0..500).map(|number| format!("x-{number}: y\r\n")).collect::<String>();
    let long = format!("x-long: {}\r\n", "y".repeat(200 << 10));
    for text in [
        "\u{0}\u{1}\u{2}\r\n\r\n".to_owned(),
        "GET / HTTP/9.9\r\n\r\n".to_owned(),
        "GET /health HTTP/1.1\r\ncontent-length: -5\r\n\r\n".to_owned(),
        format!("GET /health HTTP/1.1\r\n{many}\r\n"),
        format!("GET /health HTTP/1.1\r\n{long}\r\n"),
        "POST /v1/completions HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n".to_owned(),
    ] {
        let mut client = TcpStream::connect(listening.address).await.unwrap();
        // The server may close before it has read all of it.
        let _ = client.write_all(text.as_bytes()).await;
        let _ = client.shutdown().await;
        let mut bytes = Vec::new();
        let read = client.read_to_end(&mut bytes);
        let _ = tokio::time::timeout(Duration::from_secs(20), read).await.expect("the connection is closed");
        let status = String::from_utf8_lossy(&bytes).chars().skip(9).take(3).collect::<String>();
        assert!(status.is_empty() || status.starts_with('4'), "{status} {text:.60}");
    }
    let mut good =
        connect(listening.address, "GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
            .await;
    assert!(read_all(&mut good).await.starts_with("HTTP/1.1 200"), "the server lives");
}

#[tokio::test]
async fn a_connection_too_many_is_told() {
    let server =
        mock_with(MockOptions::default(), ServerOptions { connections: 2, ..ServerOptions::default() });
    let listening = server.listen().await;
    let health = "GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n";
    let mut first = connect(listening.address, health).await;
    let mut second = connect(listening.address, health).await;
    let mut some = [0; 16];
    first.read_exact(&mut some).await.unwrap();
    second.read_exact(&mut some).await.unwrap();
    let mut third = connect(listening.address, "").await;
    assert!(read_all(&mut third).await.starts_with("HTTP/1.1 503"));
    drop(first);
    let begun = Instant::now();
    loop {
        let mut again = connect(listening.address, "GET /health HTTP/1.1\r\nconnection: close\r\n\r\n").await;
        if read_all(&mut again).await.starts_with("HTTP/1.1 200") {
            break;
        }
        assert!(begun.elapsed() < Duration::from_secs(20), "there is room again");
    }
}

#[tokio::test]
async fn a_client_that_does_not_read_is_given_up() {
    let options = ServerOptions { write_timeout: Duration::from_millis(300), ..ServerOptions::default() };
    let endless = MockOptions { context: 1 << 20, ..MockOptions::default() };
    let server = mock_with(endless, options);
    let listening = server.listen().await;
    // As fast as the mock can: sockets and buffers are full in no time.
    let mut request = long_answer(true);
    request["max_tokens"] = json!(1 << 19);
    let client = connect(listening.address, &wire("/v1/completions", &request)).await;
    eventually("it has run", || server.engine.stats().generated_tokens > 100).await;
    eventually("the connection is given up", || server.server.requests_in_progress() == 0).await;
    drop(client);
}

#[tokio::test]
async fn keys_are_asked_for() {
    let options = ServerOptions { api_key: Some("secret".to_owned()), ..ServerOptions::default() };
    let server = mock_with(MockOptions::default(), options);
    let error = server.post("/v1/completions", json!({"prompt": "a"})).await.refused(401);
    assert_eq!((&error["code"], &error["type"]), (&json!("invalid_api_key"), &json!("authentication_error")));
    server.get("/v1/models").await.refused(401);
    server.get("/nowhere").await.refused(401);
    server.get("/health").await.ok();
    assert_eq!(server.get("/metrics").await.status, 200);
    let request = Request::get("/v1/models").header("authorization", "Bearer secret");
    server.send(request.body(Body::empty()).unwrap()).await.ok();
}

#[tokio::test]
async fn request_ids_are_kept_or_made() {
    let server = mock();
    let request = Request::get("/health").header("x-request-id", "mine-7");
    assert_eq!(server.send(request.body(Body::empty()).unwrap()).await.headers["x-request-id"], "mine-7");
    let long = Request::get("/health").header("x-request-id", "x".repeat(5000));
    assert_eq!(server.send(long.body(Body::empty()).unwrap()).await.headers["x-request-id"].len(), 36);
}

#[tokio::test]
async fn pages_of_others_ask_only_where_they_may() {
    let with = |origins: &[&str]| {
        let allowed_origins = origins.iter().map(|&origin| origin.to_owned()).collect();
        mock_with(MockOptions::default(), ServerOptions { allowed_origins, ..ServerOptions::default() })
    };
    let ask =
        || Request::get("/v1/models").header("origin", "https://a.example").body(Body::empty()).unwrap();
    assert!(!with(&[]).send(ask()).await.headers.contains_key("access-control-allow-origin"));
    assert_eq!(with(&["*"]).send(ask()).await.headers["access-control-allow-origin"], "*");
    let listed = with(&["https://a.example"]).send(ask()).await;
    assert_eq!(listed.headers["access-control-allow-origin"], "https://a.example");
    let other = with(&["https://b.example"]).send(ask()).await;
    assert!(!other.headers.contains_key("access-control-allow-origin"));
}

#[tokio::test]
async fn the_end_waits_for_answers_and_refuses_new_ones() {
    let options = MockOptions { tokens_per_s: Some(40.0), ..MockOptions::default() };
    let server = mock_with(options, ServerOptions::default());
    let mut listening = server.listen().await;
    let request = json!({"prompt": "a", "max_tokens": 20, "ignore_eos": true, "stream": true});
    let mut client = connect(listening.address, &wire("/v1/completions", &request)).await;
    eventually("it runs", || server.engine.stats().running == 1).await;
    listening.stop.take().unwrap().send(()).unwrap();
    eventually("the server drains", || server.server.is_draining()).await;
    let mut late = connect(listening.address, &wire("/v1/completions", &request)).await;
    let refused = read_all(&mut late).await;
    assert!(refused.starts_with("HTTP/1.1 503") && refused.contains("shutting_down"), "{refused}");
    let mut probe = connect(listening.address, "GET /health HTTP/1.1\r\n\r\n").await;
    assert!(read_all(&mut probe).await.starts_with("HTTP/1.1 503"));
    let answer = read_all(&mut client).await;
    assert!(answer.contains("data: [DONE]") && answer.contains("\"length\""), "{answer}");
    assert_eq!(listening.task.await.unwrap().broken_off, 0);
}

#[tokio::test]
async fn the_end_does_not_wait_for_ever() {
    let options = ServerOptions { shutdown: Duration::from_millis(200), ..ServerOptions::default() };
    let server = mock_with(slow(), options);
    let mut listening = server.listen().await;
    let mut client = connect(listening.address, &wire("/v1/completions", &long_answer(true))).await;
    eventually("it runs", || server.engine.stats().running == 1).await;
    listening.stop.take().unwrap().send(()).unwrap();
    assert_eq!(listening.task.await.unwrap().broken_off, 1);
    let answer = read_all(&mut client).await;
    assert!(answer.contains("\"finish_reason\":\"abort\"") && answer.contains("[DONE]"), "{answer}");
    eventually("nothing runs", || server.engine.stats().running == 0).await;
}
