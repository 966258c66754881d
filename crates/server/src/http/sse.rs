//! Server-sent events: one event per piece of an answer, with all that are ready in one write.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};

use axum::body::Body;
use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse, Response};
use bytes::{BufMut, Bytes, BytesMut};
use futures_util::Stream;
use serde::Serialize;

use crate::requests::{AnswerStream, PromptEvent};

/// A write is not made longer than this while more is ready.
const WRITE_BYTES: usize = 16 << 10;

/// Turns the engine's events for a request into the server-sent events of one interface.
pub(crate) trait EventWriter: Send + Unpin {
    /// Writes the server-sent events for one event of the engine, if it has any.
    fn event(&mut self, delivered: PromptEvent, out: &mut BytesMut);

    /// Writes what was put off until no more events are ready.
    fn flush(&mut self, _out: &mut BytesMut) {}

    /// Writes what comes after the engine's last event.
    fn end(&mut self, out: &mut BytesMut);
}

/// The body of a streamed response. Dropping it, as happens when the client goes away, aborts the request.
struct SseBody<W> {
    answers: AnswerStream,
    writer: W,
    buffer: BytesMut,
    ended: bool,
}

impl<W: EventWriter> Stream for SseBody<W> {
    type Item = Result<Bytes, Infallible>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = &mut *self;
        if this.ended {
            return Poll::Ready(None);
        }
        while this.buffer.len() < WRITE_BYTES {
            match this.answers.poll_next(context) {
                Poll::Ready(Some(delivered)) => this.writer.event(delivered, &mut this.buffer),
                Poll::Ready(None) => {
                    this.writer.end(&mut this.buffer);
                    this.ended = true;
                    break;
                }
                Poll::Pending => {
                    this.writer.flush(&mut this.buffer);
                    if this.buffer.is_empty() {
                        return Poll::Pending;
                    }
                    break;
                }
            }
        }
        Poll::Ready(Some(Ok(this.buffer.split().freeze())))
    }
}

/// The response that streams the answers to a request.
pub(crate) fn stream(answers: AnswerStream, writer: impl EventWriter + 'static) -> Response {
    let frames = SseBody { answers, writer, buffer: BytesMut::with_capacity(4 << 10), ended: false };
    let mut response = Body::from_stream(frames).into_response();
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream; charset=utf-8"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    // Proxies that buffer would turn a stream into one late lump.
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}

/// Writes a value as the data of one event.
pub(crate) fn write_event(out: &mut BytesMut, value: &impl Serialize) {
    out.put_slice(b"data: ");
    write_json(out, value);
    out.put_slice(b"\n\n");
}

/// Writes a value as the data of one event with a name.
pub(crate) fn write_named_event(out: &mut BytesMut, name: &str, value: &impl Serialize) {
    out.put_slice(b"event: ");
    out.put_slice(name.as_bytes());
    out.put_slice(b"\n");
    write_event(out, value);
}

/// Writes `[DONE]`, with which OpenAI's streams end.
pub(crate) fn write_done(out: &mut BytesMut) {
    out.put_slice(b"data: [DONE]\n\n");
}

/// Writes JSON. Serializing our own types cannot fail, so an error is only logged.
pub(crate) fn write_json(out: &mut BytesMut, value: &(impl Serialize + ?Sized)) {
    if let Err(error) = serde_json::to_writer(out.writer(), value) {
        tracing::error!("cannot write an event: {error}");
    }
}
