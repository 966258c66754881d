//! A client of OpenAI-compatible servers that notes when each piece of an answer arrives.
//!
//! Plain HTTP over kept connections, one answer at a time on each, as browsers and client libraries do it.

use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use http_body_util::{BodyExt, Full};
use hyper::body::{Bytes, Incoming};
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper::{Request, Response, Uri, header};
use hyper_util::rt::TokioIo;
use serde::Deserialize;
use serde_json::Value;
use tokio::net::TcpStream;

use super::ServeBenchError;

/// A client of one server, with the idle connections to it.
pub(super) struct BenchClient {
    host: String,
    port: u16,
    path: String,
    api_key: Option<String>,
    idle: Mutex<Vec<SendRequest<Full<Bytes>>>>,
}

/// The answer to a request, with the times at which it arrived.
pub(super) struct TimedAnswer {
    /// When the request was sent.
    pub(super) sent: Instant,
    /// When each piece of text arrived.
    pub(super) pieces: Vec<Instant>,
    /// When the stream ended.
    pub(super) ended: Instant,
    /// Tokens as the server counted them, if it did.
    pub(super) usage: Option<TokenUsage>,
}

/// Token counts of a request, as a server reports them.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
pub(super) struct TokenUsage {
    #[serde(default)]
    pub(super) prompt_tokens: u64,
    #[serde(default)]
    pub(super) completion_tokens: u64,
    prompt_tokens_details: Option<PromptDetails>,
}

#[derive(Clone, Copy, Debug, Default, Deserialize)]
struct PromptDetails {
    cached_tokens: Option<u64>,
}

impl TokenUsage {
    /// Prompt tokens that came from a cache; servers that have none do not say.
    pub(super) fn cached_tokens(&self) -> u64 {
        self.prompt_tokens_details.and_then(|details| details.cached_tokens).unwrap_or(0)
    }
}

/// The fields of a streamed event that are read.
#[derive(Deserialize)]
struct StreamChunk {
    #[serde(default)]
    choices: Vec<StreamChoice>,
    usage: Option<TokenUsage>,
    error: Option<Value>,
}

#[derive(Deserialize)]
struct StreamChoice {
    text: Option<String>,
    delta: Option<ChoiceDelta>,
}

#[derive(Deserialize)]
struct ChoiceDelta {
    content: Option<String>,
    reasoning_content: Option<String>,
}

impl StreamChoice {
    fn has_text(&self) -> bool {
        let said = |text: &Option<String>| text.as_ref().is_some_and(|text| !text.is_empty());
        let delta = self.delta.as_ref();
        said(&self.text) || delta.is_some_and(|delta| said(&delta.content) || said(&delta.reasoning_content))
    }
}

impl BenchClient {
    /// A client of the server at `url`, such as `http://127.0.0.1:30000`; `/v1` at its end may be left out.
    pub(super) fn new(url: &str, api_key: Option<String>) -> Result<BenchClient, ServeBenchError> {
        let bad = |reason: &str| ServeBenchError::Url { url: url.to_owned(), reason: reason.to_owned() };
        let uri: Uri = url.parse().map_err(|_| bad("it cannot be read"))?;
        match uri.scheme_str() {
            Some("http") => {}
            Some("https") => return Err(bad("only http is spoken here; measure behind the proxy")),
            _ => return Err(bad("it does not begin with http://")),
        }
        let host = uri.host().ok_or_else(|| bad("it names no host"))?;
        let path = uri.path().trim_end_matches('/');
        Ok(BenchClient {
            host: host.trim_matches(['[', ']']).to_owned(),
            port: uri.port_u16().unwrap_or(80),
            path: path.strip_suffix("/v1").unwrap_or(path).to_owned(),
            api_key,
            idle: Mutex::default(),
        })
    }

    /// Sends a body and waits for the head of the answer; the connection comes along, to be given back.
    async fn post(
        &self,
        path: &str,
        body: Bytes,
    ) -> Result<(SendRequest<Full<Bytes>>, Response<Incoming>), ServeBenchError> {
        let mut connection = self.connection().await?;
        let mut request = Request::post(format!("{}{path}", self.path))
            .header(header::HOST, format!("{}:{}", self.host, self.port))
            .header(header::CONTENT_TYPE, "application/json");
        if let Some(key) = &self.api_key {
            request = request.header(header::AUTHORIZATION, format!("Bearer {key}"));
        }
        let request =
            request.body(Full::new(body)).map_err(|error| ServeBenchError::Request(error.to_string()))?;
        let response = connection.send_request(request).await?;
        let status = response.status().as_u16();
        if status != 200 {
            let body = response.into_body().collect().await?.to_bytes();
            let text = String::from_utf8_lossy(&body);
            return Err(ServeBenchError::Status { status, answer: text.chars().take(300).collect() });
        }
        Ok((connection, response))
    }

    /// A connection of before that is still open, or a new one.
    async fn connection(&self) -> Result<SendRequest<Full<Bytes>>, ServeBenchError> {
        loop {
            let kept = self.idle().pop();
            let Some(mut kept) = kept else { break };
            if kept.ready().await.is_ok() {
                return Ok(kept);
            }
        }
        let refused = |error| ServeBenchError::Connect { host: self.host.clone(), port: self.port, error };
        let stream = TcpStream::connect((self.host.as_str(), self.port)).await.map_err(refused)?;
        stream.set_nodelay(true).map_err(refused)?;
        let (sender, connection) = handshake(TokioIo::new(stream)).await?;
        // How it ends is told to whoever uses it.
        tokio::spawn(async move { drop(connection.await) });
        Ok(sender)
    }

    fn idle(&self) -> std::sync::MutexGuard<'_, Vec<SendRequest<Full<Bytes>>>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends a request for a stream and reads it to its end.
    pub(super) async fn stream_answer(
        &self,
        path: &str,
        body: &Value,
    ) -> Result<TimedAnswer, ServeBenchError> {
        let body = Bytes::from(body.to_string());
        let sent = Instant::now();
        let (connection, response) = self.post(path, body).await?;
        let (mut events, mut pieces, mut usage, mut done) = (SseParser::default(), Vec::new(), None, false);
        let mut body = response.into_body();
        while let Some(frame) = body.frame().await {
            let arrived = Instant::now();
            let Ok(data) = frame?.into_data() else { continue };
            events.push(&data);
            while let Some(event) = events.next_event() {
                if event == b"[DONE]" {
                    done = true;
                    continue;
                }
                let chunk: StreamChunk = serde_json::from_slice(&event)
                    .map_err(|error| ServeBenchError::Stream(format!("an event cannot be read: {error}")))?;
                if let Some(error) = chunk.error {
                    return Err(ServeBenchError::Stream(error.to_string()));
                }
                usage = chunk.usage.or(usage);
                pieces.extend(chunk.choices.iter().any(StreamChoice::has_text).then_some(arrived));
            }
        }
        if !done {
            return Err(ServeBenchError::Stream("it broke off".to_owned()));
        }
        self.idle().push(connection);
        Ok(TimedAnswer { sent, pieces, ended: Instant::now(), usage })
    }

    /// Sends a request for a stream and tells how many events each read brought, without looking into them.
    pub(super) async fn count_events(
        &self,
        path: &str,
        body: &Value,
        mut on_events: impl FnMut(u64),
    ) -> Result<(), ServeBenchError> {
        let (_connection, response) = self.post(path, Bytes::from(body.to_string())).await?;
        let mut body = response.into_body();
        while let Some(frame) = body.frame().await {
            let Ok(data) = frame?.into_data() else { continue };
            on_events(data.windows(2).filter(|pair| pair == b"\n\n").count() as u64);
        }
        Ok(())
    }
}

/// Parses server-sent events out of pieces of any size.
#[derive(Default)]
struct SseParser {
    buffer: Vec<u8>,
    read: usize,
}

impl SseParser {
    fn push(&mut self, data: &[u8]) {
        self.buffer.drain(..self.read);
        self.read = 0;
        self.buffer.extend_from_slice(data);
    }

    /// The data of the next event that is there as a whole. Comments and other fields are passed over.
    fn next_event(&mut self) -> Option<Vec<u8>> {
        loop {
            let rest = &self.buffer[self.read..];
            let end = rest.iter().position(|&byte| byte == b'\n')?;
            let line = rest[..end].strip_suffix(b"\r").unwrap_or(&rest[..end]);
            let data = line.strip_prefix(b"data:").map(|data| data.trim_ascii().to_vec());
            self.read += end + 1;
            if data.is_some() {
                return data;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_survive_any_cut() {
        let stream = b": hello\r\ndata: {\"a\": 1}\r\n\r\nevent: x\ndata:two\n\ndata: [DONE]\n\n";
        for size in 1..stream.len() {
            let (mut events, mut found) = (SseParser::default(), Vec::new());
            for part in stream.chunks(size) {
                events.push(part);
                found.extend(std::iter::from_fn(|| events.next_event()));
            }
            assert_eq!(found, [&b"{\"a\": 1}"[..], b"two", b"[DONE]"], "{size}");
        }
    }

    #[test]
    fn addresses_are_checked() {
        let client = BenchClient::new("http://[::1]:8000/base/v1/", None).unwrap();
        assert_eq!((client.host.as_str(), client.port, client.path.as_str()), ("::1", 8000, "/base"));
        assert_eq!(BenchClient::new("http://example", None).unwrap().port, 80);
        for url in ["https://example", "example:80", "", "http://"] {
            assert!(BenchClient::new(url, None).is_err(), "{url}");
        }
    }
}
