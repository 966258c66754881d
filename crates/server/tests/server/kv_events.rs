//! Cache events as a router hears them: a subscriber that knows nothing but the bytes of the wire.

use std::collections::BTreeSet;
use std::time::Duration;

use oscar_engine::EngineOptions;
use oscar_kv::CacheEvent;
use oscar_server::{KvEventAddress, KvEventOptions, KvEventPublisher, ServerOptions};
use serde::Deserialize;
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::support::{TestServer, tiny_with};

type TinyEngine = oscar_engine::Engine<oscar_kernels::cpu::CpuBackend>;

/// A batch, read by its positions alone.
type Batch = (f64, Vec<Told>, u32);

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Told {
    Stored(String, Vec<i64>, Option<i64>, Vec<u32>, usize, Option<i64>),
    Removed(String, Vec<i64>),
    Cleared((String,)),
}

/// One end of a connection as ZeroMQ's protocol has it.
struct Peer(TcpStream);

impl Peer {
    async fn connect(port: u16, kind: &str) -> Peer {
        let mut stream = TcpStream::connect(("127.0.0.1", port)).await.unwrap();
        let mut greeting = [0; 64];
        greeting[..11].copy_from_slice(&[0xff, 0, 0, 0, 0, 0, 0, 0, 1, 0x7f, 3]);
        greeting[12..16].copy_from_slice(b"NULL");
        stream.write_all(&greeting).await.unwrap();
        let mut ready = vec![5];
        ready.extend(b"READY\x0bSocket-Type");
        ready.extend((kind.len() as u32).to_be_bytes());
        ready.extend(kind.as_bytes());
        stream.write_all(&[&[4, ready.len() as u8][..], &ready].concat()).await.unwrap();
        let mut peer = Peer(stream);
        let mut theirs = [0; 64];
        peer.0.read_exact(&mut theirs).await.unwrap();
        assert_eq!((theirs[0], theirs[9], theirs[10]), (0xff, 0x7f, 3));
        let (flags, ready) = peer.frame().await;
        assert!(flags == 4 && ready.starts_with(b"\x05READY"), "{ready:?}");
        peer
    }

    async fn subscribe(port: u16, topic: &[u8]) -> Peer {
        let mut peer = Peer::connect(port, "SUB").await;
        peer.send(&[[&[1], topic].concat()]).await;
        peer
    }

    async fn send(&mut self, frames: &[Vec<u8>]) {
        for (index, frame) in frames.iter().enumerate() {
            let more = u8::from(index + 1 < frames.len());
            self.0.write_all(&[&[more, frame.len() as u8][..], frame].concat()).await.unwrap();
        }
    }

    async fn frame(&mut self) -> (u8, Vec<u8>) {
        let flags = self.0.read_u8().await.unwrap();
        let length = if flags & 2 == 0 {
            u64::from(self.0.read_u8().await.unwrap())
        } else {
            self.0.read_u64().await.unwrap()
        };
        let mut body = vec![0; length as usize];
        self.0.read_exact(&mut body).await.unwrap();
        (flags, body)
    }

    /// The frames of the next message.
    async fn message(&mut self) -> Vec<Vec<u8>> {
        let mut frames = Vec::new();
        loop {
            let (flags, body) = tokio::time::timeout(Duration::from_secs(20), self.frame()).await.unwrap();
            frames.push(body);
            if flags & 1 == 0 {
                return frames;
            }
        }
    }
}

/// A router's view of one server.
#[derive(Default)]
struct View {
    blocks: BTreeSet<i64>,
    next: Option<u64>,
}

impl View {
    fn hear(&mut self, number: &[u8], payload: &[u8]) {
        let number = u64::from_be_bytes(number.try_into().unwrap());
        assert!(self.next.is_none_or(|next| next == number), "nothing is left out");
        self.next = Some(number + 1);
        let (time, events, rank): Batch = rmp_serde::from_slice(payload).unwrap();
        assert!(time > 1.6e9 && rank == 0);
        for event in events {
            match event {
                Told::Stored(name, blocks, parent, tokens, size, adapter) => {
                    assert_eq!((name.as_str(), size, adapter), ("BlockStored", 64, None));
                    assert_eq!(tokens.len(), 64 * blocks.len());
                    assert!(parent.is_none_or(|parent| self.blocks.contains(&parent)));
                    self.blocks.extend(blocks);
                }
                Told::Removed(name, blocks) => {
                    assert_eq!(name, "BlockRemoved");
                    blocks.iter().for_each(|block| assert!(self.blocks.remove(block)));
                }
                Told::Cleared((name,)) => {
                    assert_eq!(name, "AllBlocksCleared");
                    self.blocks.clear();
                }
            }
        }
    }
}

async fn server(topic: &str) -> (TestServer<TinyEngine>, KvEventAddress) {
    let endpoint: oscar_server::Endpoint = "tcp://127.0.0.1:0".parse().unwrap();
    let options = KvEventOptions { replay: Some(endpoint.clone()), endpoint, topic: topic.to_owned() };
    let publisher = KvEventPublisher::bind(&options).await.unwrap();
    let address = publisher.address().clone();
    let options = ServerOptions { kv_events: Some(address.clone()), ..ServerOptions::default() };
    let server = tiny_with(2048, EngineOptions::default(), options);
    publisher.start(server.engine.cache_events()).unwrap();
    (server, address)
}

async fn complete(server: &TestServer<TinyEngine>, text: u32, salt: Option<&str>) {
    let prompt: Vec<u32> = (0..200).map(|index| 3 + (index * index + text * 7) % 101).collect();
    let request = json!({"prompt": prompt, "max_tokens": 2, "ignore_eos": true, "cache_salt": salt});
    server.post("/v1/completions", request).await.ok();
}

#[tokio::test]
async fn a_subscriber_knows_the_tree() {
    let (server, address) = server("kv@tiny").await;
    let info = server.get("/server_info").await.ok();
    let expected = json!({"publisher": "zmq", "endpoint_host": "127.0.0.1", "endpoint_port_base": address.port,
        "replay_port_base": address.replay_port, "topic": "kv@tiny", "block_size": 64, "dp_size": 1});
    assert_eq!(info["kv_events"], expected);
    let mut subscriber = Peer::subscribe(address.port, b"kv").await;
    let mut other = Peer::subscribe(address.port, b"kv@other").await;
    let mut view = View::default();
    // The subscription is on its way: whoever listens hears of what comes after some point.
    let mut text = 0;
    let first = loop {
        complete(&server, text, None).await;
        text += 1;
        if let Ok(message) = tokio::time::timeout(Duration::from_millis(200), subscriber.message()).await {
            break message;
        }
    };
    // What was told before is to be had on the other port.
    let mut replay = Peer::connect(address.replay_port.unwrap(), "DEALER").await;
    replay.send(&[vec![], 0u64.to_be_bytes().to_vec()]).await;
    let first_number = u64::from_be_bytes(first[1].as_slice().try_into().unwrap());
    loop {
        let message = replay.message().await;
        assert_eq!((message.len(), message[0].len()), (3, 0));
        if message[1] == [0xff; 8] {
            assert!(message[2].is_empty());
            break;
        }
        if u64::from_be_bytes(message[1].as_slice().try_into().unwrap()) < first_number {
            view.hear(&message[1], &message[2]);
        }
    }
    assert_eq!(first[0], b"kv@tiny");
    view.hear(&first[1], &first[2]);
    complete(&server, 50, Some("tenant")).await;
    complete(&server, 50, Some("another")).await;
    let pages = server.engine.fresh_stats().cache.tree_pages;
    assert_eq!(pages, 3 * (text as usize + 2), "three full pages each");
    while view.blocks.len() < pages {
        let message = subscriber.message().await;
        view.hear(&message[1], &message[2]);
    }
    assert_eq!(view.blocks.len(), pages);
    server.post("/flush_cache", json!({})).await.ok();
    while !view.blocks.is_empty() {
        let message = subscriber.message().await;
        view.hear(&message[1], &message[2]);
    }
    assert_eq!(server.engine.fresh_stats().cache.tree_pages, 0);
    // Somebody with another topic has heard nothing, and somebody else is not listened to.
    let mut silence = [0; 1];
    assert!(tokio::time::timeout(Duration::from_millis(100), other.0.read(&mut silence)).await.is_err());
    let mut stranger = TcpStream::connect(("127.0.0.1", address.port)).await.unwrap();
    stranger.write_all(&b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n".repeat(4)).await.unwrap();
    let mut answer = Vec::new();
    let ended = tokio::time::timeout(Duration::from_secs(20), stranger.read_to_end(&mut answer)).await;
    assert!(ended.is_ok() && answer.len() <= 64, "{answer:?}");
    complete(&server, 60, None).await;
    let message = subscriber.message().await;
    view.hear(&message[1], &message[2]);
    assert_eq!(view.blocks.len(), 3);
}

#[tokio::test]
async fn a_ping_is_answered() {
    let (_server, address) = server("").await;
    let mut subscriber = Peer::subscribe(address.port, b"nothing").await;
    subscriber.0.write_all(b"\x04\x09\x04PING\x00\x0ahi").await.unwrap();
    let (flags, pong) = subscriber.frame().await;
    assert_eq!((flags, &pong[..]), (4, &b"\x04PONGhi"[..]));
}

/// A subscriber that does not read holds up neither the engine nor others. What waits for it is bounded, so it misses
/// batches, and can tell.
#[tokio::test(flavor = "multi_thread")]
async fn a_subscriber_that_does_not_read_is_left_behind() {
    const BATCHES: u64 = 100;
    let endpoint: oscar_server::Endpoint = "tcp://127.0.0.1:0".parse().unwrap();
    let options = KvEventOptions { replay: None, endpoint, topic: String::new() };
    let publisher = KvEventPublisher::bind(&options).await.unwrap();
    let port = publisher.address().port;
    let (sender, events) = std::sync::mpsc::sync_channel(2);
    publisher.start(events).unwrap();
    let mut sleeping = Peer::subscribe(port, b"").await;
    let mut awake = Peer::subscribe(port, b"").await;
    let number = |message: &[Vec<u8>]| u64::from_be_bytes(message[1].as_slice().try_into().unwrap());
    // A small one until both are there.
    let mut before = 0;
    for peer in [&mut sleeping, &mut awake] {
        before = loop {
            sender.send(vec![CacheEvent::Cleared]).unwrap();
            if let Ok(message) = tokio::time::timeout(Duration::from_millis(100), peer.message()).await {
                break number(&message);
            }
        };
    }
    // About a MiB each.
    let large = CacheEvent::Stored { parent: None, blocks: vec![], tokens: vec![u32::MAX; 200_000] };
    let told = tokio::task::spawn_blocking(move || {
        for _ in 0..BATCHES {
            sender.send(vec![large.clone()]).unwrap();
            // The other one must not be left behind because it is on the same few cores.
            std::thread::sleep(Duration::from_millis(10));
        }
        sender
    });
    let mut large = 0;
    while large < BATCHES {
        let message = awake.message().await;
        assert_eq!(number(&message), before + 1, "nothing is missing");
        before += 1;
        large += u64::from(message[2].len() > 1_000_000);
    }
    let sender = told.await.unwrap();
    let mut heard = 0;
    let mut last = None;
    while let Ok(message) = tokio::time::timeout(Duration::from_millis(500), sleeping.message()).await {
        assert!(last.is_none_or(|last| last < number(&message)));
        last = Some(number(&message));
        heard += u64::from(message[2].len() > 1_000_000);
    }
    assert!(heard > 10 && heard < BATCHES / 2, "{heard} of {BATCHES}: what waits is bounded");
    sender.send(vec![CacheEvent::Cleared]).unwrap();
    let after = number(&sleeping.message().await);
    assert_eq!(after, before + 1, "it hears again");
    assert!(last.is_some_and(|last| last + 1 < after), "and sees that something is missing");
}
