//! KV events: tells cache-aware routers what is in the prefix tree, in SGLang's format over ZeroMQ.
//!
//! | module | job |
//! |---|---|
//! | `batch` | changes of the tree as SGLang's subscribers read them |
//! | `zmtp` | the wire: greetings and frames of ZeroMQ's protocol 3.0 |
//! | `hub` | the subscribers, and the batches that are kept for replay |
//! | `connection` | the connection of a subscriber, or of one that asks for a replay |
//!
//! The protocol is spoken here and not by a library, because none for Rust bounds what waits for a subscriber that does
//! not read, or what a stranger may send. Only what a publisher needs of it is there.

mod batch;
mod connection;
mod hub;
mod zmtp;

use std::io;
use std::net::SocketAddr;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::time::Duration;

use oscar_kv::CacheEvent;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;

use self::hub::Hub;

/// The most connections at a time, of subscribers and of replays each.
const CONNECTIONS: usize = 64;

/// The most bytes of a topic.
const TOPIC_BYTES: usize = 255;

/// Why KV events cannot be published.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KvEventError {
    /// The text is not an endpoint.
    #[error(
        "{given} is not an endpoint: it must be tcp://HOST:PORT, such as tcp://127.0.0.1:5557 or tcp://*:5557"
    )]
    Endpoint {
        /// The text that was given.
        given: String,
    },
    /// The topic is too long.
    #[error("the topic has {bytes} bytes; at most {TOPIC_BYTES} are allowed")]
    Topic {
        /// The length of the topic in bytes.
        bytes: usize,
    },
    /// The publisher cannot listen on an endpoint.
    #[error("cannot listen on {endpoint}: {error}")]
    Listen {
        /// The endpoint that was given.
        endpoint: String,
        /// The reason that the system gives.
        error: io::Error,
    },
    /// The thread that encodes events cannot be started.
    #[error("cannot start the thread that tells events: {0}")]
    Thread(io::Error),
}

/// The endpoint at which a socket of ZeroMQ listens: `tcp://HOST:PORT`, with `*` for all addresses of the machine and port 0 for a free
/// one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint {
    host: String,
    port: u16,
}

impl FromStr for Endpoint {
    type Err = KvEventError;

    fn from_str(given: &str) -> Result<Endpoint, KvEventError> {
        let wrong = || KvEventError::Endpoint { given: given.to_owned() };
        let (host, port) =
            given.strip_prefix("tcp://").and_then(|rest| rest.rsplit_once(':')).ok_or_else(wrong)?;
        let inner = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
        if host.is_empty() || inner.is_none() && host.contains(':') || host.contains('/') {
            return Err(wrong());
        }
        let port = port.parse().map_err(|_| wrong())?;
        Ok(Endpoint { host: inner.unwrap_or(host).to_owned(), port })
    }
}

impl std::fmt::Display for Endpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (open, close) = if self.host.contains(':') { ("[", "]") } else { ("", "") };
        write!(f, "tcp://{open}{}{close}:{}", self.host, self.port)
    }
}

impl Endpoint {
    async fn listen(&self) -> Result<(TcpListener, Endpoint), KvEventError> {
        let host = if self.host == "*" { "0.0.0.0" } else { &self.host };
        let failed = |error| KvEventError::Listen { endpoint: self.to_string(), error };
        let listener = TcpListener::bind((host, self.port)).await.map_err(failed)?;
        let port = listener.local_addr().as_ref().map_or(self.port, SocketAddr::port);
        Ok((listener, Endpoint { port, ..self.clone() }))
    }
}

/// Where and under which topic events are published.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvEventOptions {
    /// The endpoint that subscribers connect to.
    pub endpoint: Endpoint,
    /// The endpoint at which subscribers ask for a replay of batches they missed.
    pub replay: Option<Endpoint>,
    /// The topic of all batches; usually empty, which every subscriber gets.
    pub topic: String,
}

/// Where events are published, as `/server_info` says it to routers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvEventAddress {
    /// The host of the endpoint; `*` is the host of the server itself.
    pub host: String,
    /// The port of the endpoint.
    pub port: u16,
    /// The port for replays, if there is one.
    pub replay_port: Option<u16>,
    /// The topic to subscribe to.
    pub topic: String,
}

/// A publisher that has bound its ports and not yet started.
#[derive(Debug)]
pub struct KvEventPublisher {
    subscribers: TcpListener,
    replays: Option<TcpListener>,
    address: KvEventAddress,
}

impl KvEventPublisher {
    /// Binds the ports.
    pub async fn bind(options: &KvEventOptions) -> Result<KvEventPublisher, KvEventError> {
        if options.topic.len() > TOPIC_BYTES {
            return Err(KvEventError::Topic { bytes: options.topic.len() });
        }
        let (subscribers, endpoint) = options.endpoint.listen().await?;
        let (replays, replay_port) = match &options.replay {
            Some(replay) => {
                let (listener, endpoint) = replay.listen().await?;
                (Some(listener), Some(endpoint.port))
            }
            None => (None, None),
        };
        let Endpoint { host, port } = endpoint;
        let address = KvEventAddress { host, port, replay_port, topic: options.topic.clone() };
        Ok(KvEventPublisher { subscribers, replays, address })
    }

    /// The address of the publisher, with the ports that were bound.
    pub fn address(&self) -> &KvEventAddress {
        &self.address
    }

    /// Publishes events until their sender is gone. It must be called within a tokio runtime, which serves the
    /// connections.
    pub fn start(self, events: Receiver<Vec<CacheEvent>>) -> Result<(), KvEventError> {
        let hub = Arc::new(Hub::new(&self.address.topic));
        let told = Arc::clone(&hub);
        // The engine's channel has no async side; this thread only encodes and never waits for a subscriber.
        std::thread::Builder::new()
            .name("oscar-kv-events".to_owned())
            .spawn(move || {
                while let Ok(events) = events.recv() {
                    told.publish(&events);
                }
            })
            .map_err(KvEventError::Thread)?;
        if let Some(replays) = self.replays {
            let hub = Arc::clone(&hub);
            tokio::spawn(accept(replays, move |stream| connection::replay(stream, Arc::clone(&hub))));
        }
        tokio::spawn(accept(self.subscribers, move |stream| {
            connection::subscriber(stream, Arc::clone(&hub))
        }));
        Ok(())
    }
}

/// Serves connections up to the limit; others are closed.
async fn accept<F>(listener: TcpListener, serve: impl Fn(TcpStream) -> F)
where
    F: Future<Output = io::Result<()>> + Send + 'static,
{
    let places = Arc::new(Semaphore::new(CONNECTIONS));
    loop {
        let (stream, from) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(error) => {
                tracing::warn!("cannot accept a subscriber: {error}");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let Ok(place) = Arc::clone(&places).try_acquire_owned() else {
            tracing::warn!(%from, "a subscriber is refused: there are {CONNECTIONS} already");
            continue;
        };
        let _ = stream.set_nodelay(true);
        let served = serve(stream);
        tokio::spawn(async move {
            if let Err(error) = served.await {
                tracing::info!(%from, "a subscriber of cache events is gone: {error}");
            }
            drop(place);
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoints_are_read_and_written() {
        for good in ["tcp://*:5557", "tcp://127.0.0.1:0", "tcp://localhost:65535", "tcp://[::1]:80"] {
            assert_eq!(good.parse::<Endpoint>().unwrap().to_string(), good);
        }
        for bad in [
            "",
            "5557",
            "127.0.0.1:5557",
            "tcp://:1",
            "tcp://a",
            "tcp://a:65536",
            "ipc:///a:1",
            "tcp://::1:5",
            "tcp://a/b:1",
        ] {
            let error = bad.parse::<Endpoint>().unwrap_err().to_string();
            assert!(error.contains("tcp://HOST:PORT"), "{bad}: {error}");
        }
    }
}
