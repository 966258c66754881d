//! Accepts connections, with limits on their number and slowness, and shuts the server down.

use std::convert::Infallible;
use std::future::Future;
use std::io;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use oscar_engine::{EngineError, Serve};
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};
use tokio::time::Sleep;

use crate::Server;
use crate::state::AppState;

/// The most bytes of a request's head, all headers together.
pub(crate) const HEAD_BYTES: usize = 64 << 10;

/// The most headers of a request.
const HEADERS: usize = 100;

/// How long aborted requests have to send what is left to send.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// The response to a connection beyond the limit.
const FULL: &[u8] = b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\n\
    connection: close\r\ncontent-length: 142\r\n\r\n{\"error\":{\"message\":\"the server has as many \
    connections as it may have\",\"type\":\"service_unavailable_error\",\"param\":null,\"code\":\"connections\"}}";

/// How often the engine is asked whether its device has failed.
const LOOK_AT_DEVICE: Duration = Duration::from_millis(100);

/// What [`Server::serve`] returns when the server has shut down.
#[derive(Debug)]
pub struct Ended {
    /// The number of requests that were aborted because the time for shutting down was up.
    pub broken_off: usize,
    /// Why no request can be answered any more: the device has failed, and a new process has to take over.
    pub failure: Option<EngineError>,
}

impl Server {
    /// Serves connections until `stop` is done. Then it drains: new requests are refused, and it returns when those in
    /// flight have finished or [`ServerOptions::shutdown`](crate::ServerOptions::shutdown) is over. `hurry` ends the
    /// draining at once. An engine whose device fails ([`Serve::failure`]) ends the server in the same way.
    pub async fn serve(
        &self,
        listener: TcpListener,
        stop: impl Future<Output = ()>,
        hurry: impl Future<Output = ()>,
    ) -> Ended {
        let app = Arc::clone(&self.app);
        let router = self.router();
        let connections = Arc::new(Semaphore::new(app.options.connections));
        let (draining, watch) = watch::channel(false);
        let accepting = {
            let (app, connections) = (Arc::clone(&app), Arc::clone(&connections));
            accept(listener, app, router, connections, watch)
        };
        let mut accepting = pin!(accepting);
        tokio::select! {
            never = &mut accepting => match never {},
            () = stop => {}
            () = device_failure(&*app.engine) => {}
        }
        app.drain();
        // Nobody listens when there is no connection.
        let _ = draining.send(true);
        let deadline = tokio::time::sleep(app.options.shutdown);
        let quiet = async {
            while app.in_flight.len() > 0 {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        tokio::select! {
            never = &mut accepting => match never {},
            () = quiet => {}
            () = deadline => {}
            () = hurry => {}
        }
        let broken_off = app.in_flight.abort(None);
        // Connections hold what they have left to write.
        let all = u32::try_from(app.options.connections).unwrap_or(u32::MAX);
        let _ = tokio::time::timeout(LAST_WORDS, connections.acquire_many(all)).await;
        Ended { broken_off, failure: app.engine.failure() }
    }
}

/// Done when the device of an engine has failed.
async fn device_failure(engine: &dyn Serve) {
    while engine.failure().is_none() {
        tokio::time::sleep(LOOK_AT_DEVICE).await;
    }
}

async fn accept(
    listener: TcpListener,
    app: Arc<AppState>,
    router: Router,
    connections: Arc<Semaphore>,
    draining: watch::Receiver<bool>,
) -> Infallible {
    loop {
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                // Out of file descriptors, most likely: connections that end will make room.
                tracing::warn!("cannot accept a connection: {error}");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let Ok(place) = Arc::clone(&connections).try_acquire_owned() else {
            tokio::spawn(refuse(stream));
            continue;
        };
        let (app, router, draining) = (Arc::clone(&app), router.clone(), draining.clone());
        tokio::spawn(async move {
            connection(stream, &app, router, draining).await;
            drop(place);
        });
    }
}

async fn refuse(mut stream: TcpStream) {
    let write = async {
        stream.write_all(FULL).await?;
        stream.shutdown().await
    };
    let _ = tokio::time::timeout(Duration::from_secs(1), write).await;
}

async fn connection(stream: TcpStream, app: &AppState, router: Router, mut draining: watch::Receiver<bool>) {
    // Tokens are small and must not wait for each other.
    let _ = stream.set_nodelay(true);
    let io = TokioIo::new(WriteTimeout::new(stream, app.options.write_timeout));
    // Whoever comes while the server goes down is still told so, once.
    let late = *draining.borrow();
    let mut builder = http1::Builder::new();
    builder
        .timer(TokioTimer::new())
        .header_read_timeout(app.options.header_timeout)
        .max_headers(HEADERS)
        .max_buf_size(HEAD_BYTES)
        .keep_alive(!late);
    let mut connection = pin!(builder.serve_connection(io, TowerToHyperService::new(router)));
    let begun = Instant::now();
    let ended = tokio::select! {
        ended = &mut connection => ended,
        () = told(&mut draining), if !late => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = ended {
        tracing::debug!(seconds = begun.elapsed().as_secs_f64(), "a connection ended: {error}");
    }
}

/// Waits until the server drains.
async fn told(draining: &mut watch::Receiver<bool>) {
    let _ = draining.wait_for(|draining| *draining).await;
}

/// A connection that fails when the client has not read for too long.
struct WriteTimeout {
    stream: TcpStream,
    patience: Duration,
    waiting: Option<Pin<Box<Sleep>>>,
}

impl WriteTimeout {
    fn new(stream: TcpStream, patience: Duration) -> WriteTimeout {
        WriteTimeout { stream, patience, waiting: None }
    }

    /// Passes the result of a write on, or times out when writes have been pending for too long.
    fn watched<T>(&mut self, context: &mut Context<'_>, written: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if written.is_ready() {
            self.waiting = None;
            return written;
        }
        let patience = self.patience;
        let waiting = self.waiting.get_or_insert_with(|| Box::pin(tokio::time::sleep(patience)));
        match waiting.as_mut().poll(context) {
            Poll::Ready(()) => Poll::Ready(Err(io::ErrorKind::TimedOut.into())),
            Poll::Pending => Poll::Pending,
        }
    }
}

impl AsyncRead for WriteTimeout {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl AsyncWrite for WriteTimeout {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.watched(context, written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(context, parts);
        self.watched(context, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_answer_to_a_connection_too_many_is_well_formed() {
        let text = std::str::from_utf8(FULL).unwrap();
        let (head, body) = text.split_once("\r\n\r\n").unwrap();
        assert!(head.contains(&format!("content-length: {}", body.len())), "{} {head}", body.len());
        let value: serde_json::Value = serde_json::from_str(body).unwrap();
        assert_eq!(value["error"]["code"], "connections");
    }
}
