//! How many tokens a second the server can stream, and how long one is on its way: clients and a mock engine in one
//! process. `cargo run --release -p oscar-server --example stream_throughput -- CLIENTS TOKENS_PER_SECOND_EACH SECONDS`

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use oscar_engine::{MockEngine, MockOptions, Serve};
use oscar_model::text::{ChatTemplate, Tokenizer};
use oscar_server::{ServedModel, Server, ServerOptions};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

const TEMPLATE: &str = "{% for message in messages %}{{ message.content }}{% endfor %}";
const BODY: &str = r#"{"messages":[{"role":"user","content":"go"}],"stream":true,"ignore_eos":true,"max_tokens":1000000000}"#;

/// Counts events as they arrive until it is dropped.
async fn client(address: SocketAddr, events: Arc<AtomicU64>, bytes: Arc<AtomicU64>) -> std::io::Result<()> {
    let mut stream = TcpStream::connect(address).await?;
    let length = BODY.len();
    let head = "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n";
    stream.write_all(format!("{head}content-length: {length}\r\n\r\n{BODY}").as_bytes()).await?;
    let mut buffer = vec![0; 64 << 10];
    loop {
        let count = stream.read(&mut buffer).await?;
        if count == 0 {
            return Ok(());
        }
        // An event ends with an empty line; a line end that is split between two reads is not counted, which is rare.
        let ends = buffer[..count].windows(2).filter(|pair| pair == b"\n\n").count();
        events.fetch_add(ends as u64, Ordering::Relaxed);
        bytes.fetch_add(count as u64, Ordering::Relaxed);
    }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1).map(|argument| argument.parse::<f64>());
    let mut next = |default: f64| arguments.next().unwrap_or(Ok(default));
    let (clients, speed, seconds) = (next(256.0)? as usize, next(0.0)?, next(5.0)?);
    let tokens_per_s = Some(speed).filter(|&speed| speed > 0.0);
    let options = MockOptions { tokens_per_s, context: 1 << 30, ..MockOptions::default() };
    let engine = Arc::new(MockEngine::new(options));
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("../model/tests/fixtures/models/qwen3");
    let tokenizer = Arc::new(Tokenizer::from_folder(fixture)?);
    let template = ChatTemplate::from_source(TEMPLATE)?;
    let model = ServedModel::new("mock", "mock", "mock", tokenizer, Some(template));
    let server = Server::new(Arc::clone(&engine) as Arc<dyn Serve>, model, ServerOptions::default());
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let address = listener.local_addr()?;
    tokio::spawn(async move { server.serve(listener, std::future::pending(), std::future::pending()).await });
    let (events, bytes) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    for _ in 0..clients {
        tokio::spawn(client(address, Arc::clone(&events), Arc::clone(&bytes)));
    }
    tokio::time::sleep(Duration::from_secs(1)).await;
    let (begun, before, bytes_before) =
        (Instant::now(), events.load(Ordering::Relaxed), bytes.load(Ordering::Relaxed));
    let drawn = engine.stats().generated_tokens;
    tokio::time::sleep(Duration::from_secs_f64(seconds)).await;
    let elapsed = begun.elapsed().as_secs_f64();
    let arrived = (events.load(Ordering::Relaxed) - before) as f64 / elapsed;
    let megabytes = (bytes.load(Ordering::Relaxed) - bytes_before) as f64 / elapsed / 1e6;
    let drawn = (engine.stats().generated_tokens - drawn) as f64 / elapsed;
    println!(
        "{clients} clients: {arrived:.0} events/s arrived ({megabytes:.1} MB/s), {drawn:.0} tokens/s drawn"
    );
    Ok(())
}
