//! `oscar bench serve` against a server that does exactly what the test says.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use oscar_bench::{
    Arrival, GoodputLimits, Pace, ServeBench, ServeBenchError, Workload, added_latency, serve, streamed,
};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};

/// How a request is answered.
#[derive(Clone, Copy)]
enum Answer {
    /// Four words, of a prompt of 40 tokens of which 30 were cached.
    Words,
    /// The same, but the stream has no end.
    Cut,
    /// The request is refused, because there are too many.
    Refusal,
    /// The answer never ends.
    Endless,
}

/// What has been asked, and how often somebody has connected.
#[derive(Default)]
struct Seen {
    requests: AtomicUsize,
    connections: AtomicUsize,
}

/// Starts a server that answers its requests in this order, and all after them as the last.
async fn start(answers: &'static [Answer]) -> (String, Arc<Seen>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("port");
    let url = format!("http://{}/v1", listener.local_addr().expect("address"));
    let seen = Arc::new(Seen::default());
    let counted = Arc::clone(&seen);
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            counted.connections.fetch_add(1, Ordering::SeqCst);
            tokio::spawn(connection(stream, answers, Arc::clone(&counted)));
        }
    });
    (url, seen)
}

async fn connection(stream: TcpStream, answers: &[Answer], seen: Arc<Seen>) -> std::io::Result<()> {
    let mut stream = BufReader::new(stream);
    loop {
        let (mut length, mut first) = (0, String::new());
        loop {
            let mut line = String::new();
            if stream.read_line(&mut line).await? == 0 {
                return Ok(());
            }
            if first.is_empty() {
                first.clone_from(&line);
            }
            if let Some(value) = line.to_ascii_lowercase().strip_prefix("content-length:") {
                length = value.trim().parse().expect("length");
            }
            if line == "\r\n" {
                break;
            }
        }
        let mut body = vec![0; length];
        stream.read_exact(&mut body).await?;
        let body: serde_json::Value = serde_json::from_slice(&body).expect("JSON");
        assert!(body["stream"] == true && body["stream_options"]["include_usage"] == true, "{body}");
        let expected = if body["messages"].is_array() { "/v1/chat/completions" } else { "/v1/completions" };
        assert_eq!(first.split(' ').nth(1), Some(expected));
        let number = seen.requests.fetch_add(1, Ordering::SeqCst);
        answer(stream.get_mut(), *answers.get(number).or(answers.last()).expect("an answer")).await?;
    }
}

async fn answer(stream: &mut TcpStream, answer: Answer) -> std::io::Result<()> {
    if let Answer::Refusal = answer {
        let head = "HTTP/1.1 429 Too Many Requests\r\ncontent-length: 9\r\n\r\n";
        return stream.write_all(format!("{head}too many!").as_bytes()).await;
    }
    let head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";
    stream.write_all(head.as_bytes()).await?;
    let mut words = 0;
    while words < 4 || matches!(answer, Answer::Endless) {
        chunk(stream, "data: {\"choices\": [{\"text\": \"word\"}], \"usage\": null}\n\n").await?;
        words += 1;
    }
    chunk(stream, "data: {\"choices\": [{\"text\": \"\", \"finish_reason\": \"length\"}]}\n\n").await?;
    let details = "\"prompt_tokens_details\": {\"cached_tokens\": 30}";
    let usage = format!("{{\"prompt_tokens\": 40, \"completion_tokens\": 4, {details}}}");
    chunk(stream, &format!("data: {{\"choices\": [], \"usage\": {usage}}}\n\n")).await?;
    if let Answer::Words = answer {
        chunk(stream, "data: [DONE]\n\n").await?;
    }
    stream.write_all(b"0\r\n\r\n").await
}

async fn chunk(stream: &mut TcpStream, data: &str) -> std::io::Result<()> {
    stream.write_all(format!("{:x}\r\n{data}\r\n", data.len()).as_bytes()).await
}

fn bench(url: String, arrival: Arrival) -> ServeBench {
    ServeBench {
        url,
        api_key: None,
        model: None,
        chat: false,
        workload: Workload {
            prefixes: 2,
            prefix_words: 9,
            own_words: 3,
            shared: 0.5,
            output_tokens: 4,
            seed: 1,
        },
        arrival,
        requests: 20,
        warmup: 2,
        limits: GoodputLimits { ttft: Duration::from_secs(60), tpot: Duration::from_secs(60) },
    }
}

#[tokio::test]
async fn what_a_server_says_is_counted() {
    let (url, seen) = start(&[Answer::Words]).await;
    let row = serve(&bench(url.clone(), Arrival::Closed { clients: 3 })).await.unwrap();
    assert_eq!((row.requests, row.failed, seen.requests.load(Ordering::SeqCst)), (20, 0, 22));
    assert_eq!((row.prompt_tokens, row.output_tokens, row.hit_rate, row.good), (40.0, 4.0, 0.75, 1.0));
    assert!((row.output_tokens_per_s * row.seconds - 80.0).abs() < 1e-6);
    assert!(row.ttft_ms_p50 > 0.0 && row.ttft_ms_p50 <= row.ttft_ms_p90 && row.ttft_ms_p90 <= row.e2e_ms_p99);
    // Clients keep their connections.
    assert!(seen.connections.load(Ordering::SeqCst) <= 4, "{}", seen.connections.load(Ordering::SeqCst));
    let strict = GoodputLimits { ttft: Duration::ZERO, tpot: Duration::from_secs(60) };
    let row =
        serve(&ServeBench { limits: strict, ..bench(url, Arrival::Closed { clients: 3 }) }).await.unwrap();
    assert_eq!((row.requests, row.goodput_per_s, row.good), (20, 0.0, 0.0));
}

#[tokio::test]
async fn refused_and_broken_answers_are_no_answers() {
    use Answer::{Cut, Refusal, Words};
    let (url, _) = start(&[Words, Words, Refusal, Words, Cut, Refusal, Words]).await;
    let row = serve(&bench(url, Arrival::Poisson { rate: 500.0 })).await.unwrap();
    assert_eq!((row.requests, row.failed, row.good), (17, 3, 17.0 / 20.0));
    let (url, _) = start(&[Words, Words, Refusal]).await;
    let error = serve(&bench(url, Arrival::Closed { clients: 2 })).await.unwrap_err();
    assert!(
        matches!(&error, ServeBenchError::Status { status: 429, answer } if answer == "too many!"),
        "{error}"
    );
    let nobody = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
    let error = serve(&bench(format!("http://{nobody}"), Arrival::Closed { clients: 1 })).await.unwrap_err();
    assert!(matches!(error, ServeBenchError::Connect { .. }), "{error}");
}

#[tokio::test]
async fn streams_are_counted_while_they_run() {
    let (url, seen) = start(&[Answer::Endless]).await;
    let row = streamed(&url, 5, 0.2).await.unwrap();
    assert_eq!((row.clients, seen.requests.load(Ordering::SeqCst)), (5, 5));
    assert!(row.events_per_s > 0.0);
    let (url, _) = start(&[Answer::Words]).await;
    assert!(streamed(&url, 5, 0.2).await.is_err(), "a stream that ends shows nothing");
}

#[tokio::test]
async fn lateness_is_what_is_beyond_the_pace() {
    let (url, _) = start(&[Answer::Words]).await;
    let pace = |milliseconds| Pace { latency: Duration::from_millis(milliseconds), interval: Duration::ZERO };
    // Words that are said an hour before they are due are not late, and there are four of them.
    let row = added_latency(&url, pace(3_600_000), 2, 3, 4).await.unwrap();
    assert_eq!((row.tokens, row.added_ms_max), (2 * 3 * 4, 0.0));
    let row = added_latency(&url, pace(0), 2, 3, 4).await.unwrap();
    assert!(row.added_ms_p50 > 0.0 && row.added_ms_p50 <= row.added_ms_max);
    assert!(added_latency(&url, pace(0), 2, 3, 5).await.is_err(), "a word is missing");
}
