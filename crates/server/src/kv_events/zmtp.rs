//! As much of ZeroMQ's wire protocol (ZMTP 3.0, no security) as a publisher needs: greeting, handshake, frames.

use std::io;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

/// The most bytes of a frame that is read. Subscribers send only topics and sequence numbers.
const FRAME_BYTES: usize = 4 << 10;

/// The most frames of a message that is read.
const FRAMES: usize = 8;

const MORE: u8 = 1;
const LONG: u8 = 2;
const COMMAND: u8 = 4;

/// Signature, version 3.0, mechanism `NULL`, not a server, filler.
const GREETING: [u8; 64] = {
    let mut greeting = [0; 64];
    (greeting[0], greeting[9], greeting[10]) = (0xff, 0x7f, 3);
    (greeting[12], greeting[13], greeting[14], greeting[15]) = (b'N', b'U', b'L', b'L');
    greeting
};

/// What a peer has sent.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Incoming {
    /// A message, as its frames.
    Message(Vec<Vec<u8>>),
    /// A command, as its name and the bytes behind it.
    Command(Vec<u8>, Vec<u8>),
}

struct Frame {
    flags: u8,
    body: Vec<u8>,
}

fn wrong(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what.to_owned())
}

/// Appends a frame of a message; `more` frames of it follow or not.
pub(super) fn put_frame(bytes: &mut Vec<u8>, body: &[u8], more: bool) {
    put(bytes, u8::from(more) * MORE, body);
}

/// Appends a command with this name.
pub(super) fn put_command(bytes: &mut Vec<u8>, name: &str, rest: &[u8]) {
    let mut body = vec![name.len() as u8];
    body.extend(name.as_bytes());
    body.extend(rest);
    put(bytes, COMMAND, &body);
}

fn put(bytes: &mut Vec<u8>, flags: u8, body: &[u8]) {
    match u8::try_from(body.len()) {
        Ok(length) => bytes.extend([flags, length]),
        Err(_) => {
            bytes.push(flags | LONG);
            bytes.extend((body.len() as u64).to_be_bytes());
        }
    }
    bytes.extend(body);
}

async fn read_frame(stream: &mut (impl AsyncRead + Unpin)) -> io::Result<Frame> {
    let flags = stream.read_u8().await?;
    if flags & !(MORE | LONG | COMMAND) != 0 {
        return Err(wrong("a frame with unknown flags"));
    }
    let length =
        if flags & LONG == 0 { u64::from(stream.read_u8().await?) } else { stream.read_u64().await? };
    let length = usize::try_from(length).ok().filter(|&length| length <= FRAME_BYTES);
    let mut body = vec![0; length.ok_or_else(|| wrong("a frame that is too long"))?];
    stream.read_exact(&mut body).await?;
    Ok(Frame { flags, body })
}

/// The next message or command. Not safe to be dropped halfway.
pub(super) async fn read(stream: &mut (impl AsyncRead + Unpin)) -> io::Result<Incoming> {
    let mut frames = Vec::new();
    loop {
        let Frame { flags, body } = read_frame(stream).await?;
        if flags & COMMAND != 0 {
            let (&length, rest) = body.split_first().ok_or_else(|| wrong("a command without a name"))?;
            let (name, rest) =
                rest.split_at_checked(length as usize).ok_or_else(|| wrong("a command cut short"))?;
            return Ok(Incoming::Command(name.to_vec(), rest.to_vec()));
        }
        frames.push(body);
        if flags & MORE == 0 {
            return Ok(Incoming::Message(frames));
        }
        if frames.len() == FRAMES {
            return Err(wrong("a message of too many frames"));
        }
    }
}

/// Greets a peer as a socket of type `own`; its type must be one of `peers`.
pub(super) async fn shake_hands(
    stream: &mut (impl AsyncRead + AsyncWrite + Unpin),
    own: &str,
    peers: &[&str],
) -> io::Result<()> {
    stream.write_all(&GREETING).await?;
    let mut greeting = [0; 64];
    stream.read_exact(&mut greeting).await?;
    if greeting[0] != 0xff || greeting[9] & 1 == 0 || greeting[10] < 3 {
        return Err(wrong("a peer that does not speak ZMTP 3"));
    }
    if greeting[12..32] != GREETING[12..32] {
        return Err(wrong("a peer that wants a security mechanism"));
    }
    let mut ready = Vec::new();
    put_command(&mut ready, "READY", &property("Socket-Type", own));
    stream.write_all(&ready).await?;
    match read(stream).await? {
        Incoming::Command(name, properties) if name == b"READY" => {
            let kind = socket_type(&properties).ok_or_else(|| wrong("a peer without a socket type"))?;
            if peers.iter().any(|peer| peer.as_bytes() == kind) {
                return Ok(());
            }
            Err(wrong("a socket of the wrong type"))
        }
        _ => Err(wrong("a peer that is not ready")),
    }
}

fn property(name: &str, value: &str) -> Vec<u8> {
    let mut bytes = vec![name.len() as u8];
    bytes.extend(name.as_bytes());
    bytes.extend((value.len() as u32).to_be_bytes());
    bytes.extend(value.as_bytes());
    bytes
}

/// The socket type among properties: a byte and a name, four bytes and a value, again and again.
fn socket_type(mut properties: &[u8]) -> Option<&[u8]> {
    while let Some((&length, rest)) = properties.split_first() {
        let (name, rest) = rest.split_at_checked(length as usize)?;
        let (length, rest) = rest.split_first_chunk()?;
        let (value, rest) = rest.split_at_checked(u32::from_be_bytes(*length) as usize)?;
        // Names of properties may be spelled in any case.
        if name.eq_ignore_ascii_case(b"socket-type") {
            return Some(value);
        }
        properties = rest;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn frames_come_back_as_they_were() {
        let long = vec![7; 300];
        let mut bytes = Vec::new();
        put_frame(&mut bytes, b"", true);
        put_frame(&mut bytes, &long, false);
        put_command(&mut bytes, "PING", &[0, 1]);
        assert_eq!(&bytes[..4], [1, 0, 2, 0]);
        let mut stream = &bytes[..];
        assert_eq!(read(&mut stream).await.unwrap(), Incoming::Message(vec![vec![], long]));
        assert_eq!(read(&mut stream).await.unwrap(), Incoming::Command(b"PING".to_vec(), vec![0, 1]));
        assert_eq!(read(&mut stream).await.unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    }

    #[tokio::test]
    async fn nobody_makes_us_reserve_memory() {
        let mut endless = [&[2][..], &u64::MAX.to_be_bytes()].concat();
        endless.extend([0; 64]);
        assert!(read(&mut &endless[..]).await.is_err());
        let many = [1, 0].repeat(1000);
        assert!(read(&mut &many[..]).await.is_err());
        for bad in [&[8, 0][..], &[4, 0], &[4, 2, 9, b'x']] {
            assert_eq!(read(&mut &bad[..]).await.unwrap_err().kind(), io::ErrorKind::InvalidData, "{bad:?}");
        }
    }

    #[tokio::test]
    async fn both_sides_say_who_they_are() {
        let meet = async |one: &'static str, other: &'static str| {
            let (mut here, mut there) = tokio::io::duplex(256);
            let peer = tokio::spawn(async move { shake_hands(&mut there, other, &["PUB"]).await });
            let result = shake_hands(&mut here, one, &["SUB", "XSUB"]).await;
            let _ = peer.await.unwrap();
            result
        };
        meet("PUB", "SUB").await.unwrap();
        assert!(meet("PUB", "REQ").await.is_err());
        let (mut here, mut there) = tokio::io::duplex(256);
        there
            .write_all(b"GET / HTTP/1.1\r\nhost: a\r\naccept: everything there is to be had\r\n\r\n")
            .await
            .unwrap();
        assert!(shake_hands(&mut here, "PUB", &["SUB"]).await.is_err());
    }
}
