//! The connection of one subscriber, or of one that asks for a replay.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::io::{AsyncWrite, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio::time::timeout;

use super::hub::{Hub, Subscriber};
use super::zmtp::{self, Incoming};

/// How long the handshake may take.
const HANDSHAKE: Duration = Duration::from_secs(10);

/// How long a peer may take to read one message.
const WRITE: Duration = Duration::from_secs(60);

/// The sequence number that ends a replay: -1.
const END: [u8; 8] = [0xff; 8];

fn late(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::TimedOut, what.to_owned())
}

async fn greet(stream: &mut TcpStream, own: &str, peers: &[&str]) -> io::Result<()> {
    let hands = timeout(HANDSHAKE, zmtp::shake_hands(stream, own, peers)).await;
    hands.unwrap_or_else(|_| Err(late("it does not greet")))
}

async fn write(stream: &mut (impl AsyncWrite + Unpin), bytes: &[u8]) -> io::Result<()> {
    timeout(WRITE, stream.write_all(bytes)).await.unwrap_or_else(|_| Err(late("it does not read")))
}

/// Sends a subscriber the batches of its topics until it is gone.
pub(super) async fn subscriber(mut stream: TcpStream, hub: Arc<Hub>) -> io::Result<()> {
    greet(&mut stream, "PUB", &["SUB", "XSUB"]).await?;
    let (subscriber, messages) = hub.subscribe();
    let (reader, writer) = stream.split();
    let ended = tokio::select! {
        ended = read_frames(BufReader::new(reader), &subscriber) => ended,
        ended = send(writer, &subscriber, messages) => ended,
    };
    hub.unsubscribe(&subscriber);
    match ended {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(()),
        ended => ended,
    }
}

async fn read_frames(
    mut reader: impl tokio::io::AsyncRead + Unpin,
    subscriber: &Subscriber,
) -> io::Result<()> {
    loop {
        match zmtp::read(&mut reader).await? {
            Incoming::Message(frames) => {
                if !frames.first().is_none_or(|frame| subscriber.change_topics(frame)) {
                    return Err(io::Error::other("it has too many topics"));
                }
            }
            Incoming::Command(name, rest) if name == b"PING" => {
                // Two bytes say how long it waits; the rest comes back.
                let mut pong = Vec::new();
                zmtp::put_command(&mut pong, "PONG", rest.get(2..).unwrap_or_default());
                subscriber.tell(&Bytes::from(pong));
            }
            Incoming::Command(..) => {}
        }
    }
}

async fn send(
    mut writer: impl AsyncWrite + Unpin,
    subscriber: &Subscriber,
    mut messages: mpsc::Receiver<Bytes>,
) -> io::Result<()> {
    while let Some(message) = messages.recv().await {
        let written = write(&mut writer, &message).await;
        subscriber.sent(&message);
        written?;
    }
    Ok(())
}

/// Answers requests for a replay: sends the kept batches from a sequence number on.
pub(super) async fn replay(mut stream: TcpStream, hub: Arc<Hub>) -> io::Result<()> {
    greet(&mut stream, "ROUTER", &["REQ", "DEALER", "ROUTER"]).await?;
    let (reader, mut writer) = stream.split();
    let mut reader = BufReader::new(reader);
    loop {
        let frames = match zmtp::read(&mut reader).await {
            Ok(Incoming::Message(frames)) => frames,
            Ok(Incoming::Command(..)) => continue,
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(()),
            Err(error) => return Err(error),
        };
        let Some(mut next) = asked_for(&frames) else {
            tracing::warn!("a replay is asked for by {} frames without a number", frames.len());
            continue;
        };
        let mut answer = Vec::new();
        while let Some((number, payload)) = hub.kept_from(next) {
            put_answer(&mut answer, &number.to_be_bytes(), &payload);
            write(&mut writer, &answer).await?;
            next = number + 1;
        }
        put_answer(&mut answer, &END, &[]);
        write(&mut writer, &answer).await?;
    }
}

/// The sequence number of a request: an empty frame, then eight bytes.
fn asked_for(frames: &[Vec<u8>]) -> Option<u64> {
    match frames {
        [empty, number] if empty.is_empty() => Some(u64::from_be_bytes(number.as_slice().try_into().ok()?)),
        _ => None,
    }
}

fn put_answer(answer: &mut Vec<u8>, number: &[u8], payload: &[u8]) {
    answer.clear();
    zmtp::put_frame(answer, &[], true);
    zmtp::put_frame(answer, number, true);
    zmtp::put_frame(answer, payload, false);
}
