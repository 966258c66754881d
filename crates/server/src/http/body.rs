//! Request bodies: JSON of bounded size that arrives in bounded time, with errors that name the field.

use std::sync::Arc;
use std::time::Instant;

use axum::body::Bytes;
use axum::extract::{FromRequest, Request};
use axum::http::{HeaderMap, StatusCode, header};
use bytes::BytesMut;
use futures_util::StreamExt;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use super::memory::BodyMemory;
use super::plain::plain;
use crate::protocol::ApiError;
use crate::state::AppState;

/// The most objects, lists and texts in a body: a megabyte of JSON can hold half a million of them.
const MAX_VALUES: usize = 262_144;

/// The most numbers, of which lists of token ids have many.
const MAX_NUMBERS: usize = 2_097_152;

/// Extracts a JSON body. Other content types are refused. The second field is the body's share of the memory for all
/// bodies, to be dropped when the contents have become a prompt.
pub(crate) struct JsonBody<T>(pub(crate) T, pub(crate) BodyMemory);

impl<T: DeserializeOwned + Send + 'static> FromRequest<Arc<AppState>> for JsonBody<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, app: &Arc<AppState>) -> Result<Self, ApiError> {
        check_content_type(request.headers())?;
        let (bytes, memory) = read(request, app).await?;
        let (value, memory) = app.parse_body(memory, move |_| parse(&bytes)).await?;
        Ok(JsonBody(value, memory))
    }
}

/// Refuses what is not announced as JSON. Web pages of others can post forms and plain text without asking; JSON they
/// cannot.
pub(crate) fn check_content_type(headers: &HeaderMap) -> Result<(), ApiError> {
    let content_type = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
    if content_type.is_some_and(is_json) {
        return Ok(());
    }
    let found = content_type.unwrap_or("none").chars().take(80).collect::<String>();
    let message = format!("the content type is {found}, expected application/json");
    Err(ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, message))
}

/// Extracts a JSON body that may be absent, in which case it is the default of its type.
pub(crate) struct OptionalJsonBody<T>(pub(crate) T);

impl<T: DeserializeOwned + Default + Send + 'static> FromRequest<Arc<AppState>> for OptionalJsonBody<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, app: &Arc<AppState>) -> Result<Self, ApiError> {
        let (bytes, memory) = read(request, app).await?;
        if bytes.iter().all(u8::is_ascii_whitespace) {
            return Ok(OptionalJsonBody(T::default()));
        }
        app.parse_body(memory, move |_| parse(&bytes)).await.map(|(value, _)| OptionalJsonBody(value))
    }
}

fn is_json(content_type: &str) -> bool {
    let kind = content_type.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
    kind == "application/json" || kind.starts_with("application/") && kind.ends_with("+json")
}

/// Reads a body, which waits for its share of the memory for all of them as it arrives, and for what it becomes.
async fn read(request: Request, app: &Arc<AppState>) -> Result<(Bytes, BodyMemory), ApiError> {
    let limit = app.options.body_bytes;
    let too_large = || {
        let message = format!("the body is larger than {limit} bytes, the limit of this server");
        ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, message)
    };
    let announced = request.headers().get(header::CONTENT_LENGTH).and_then(|value| value.to_str().ok());
    if announced.and_then(|length| length.parse::<u64>().ok()).is_some_and(|length| length > limit as u64) {
        return Err(too_large());
    }
    let mut memory = app.bodies.body(app.options.body_timeout);
    let mut bytes = BytesMut::new();
    let mut pieces = request.into_body().into_data_stream();
    // Only the client's own time counts: whoever waits for memory is not slow.
    let mut left = app.options.body_timeout;
    loop {
        let begun = Instant::now();
        let late = |_| ApiError::new(StatusCode::REQUEST_TIMEOUT, "the body did not arrive in time");
        let piece = tokio::time::timeout(left, pieces.next()).await.map_err(late)?;
        left = left.saturating_sub(begun.elapsed());
        let Some(piece) = piece else { break };
        let piece = piece.map_err(|_| ApiError::bad_request("the body could not be read to its end"))?;
        if bytes.len() + piece.len() > limit {
            return Err(too_large());
        }
        memory.grow(piece.len()).await?;
        bytes.extend_from_slice(&piece);
    }
    let bytes = bytes.freeze();
    let counted = bytes.clone();
    let (contents, mut memory) = app.parse_body(memory, move |_| checked_contents(&counted)).await?;
    memory.hold_contents(contents.values + contents.words, contents.text_len).await?;
    Ok((bytes, memory))
}

/// Deserializes a JSON body; an error names the field.
pub(crate) fn parse<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, ApiError> {
    // Types would also take a list, as their fields in order.
    if bytes.trim_ascii_start().first() == Some(&b'[') {
        return Err(ApiError::bad_request("the body is a JSON list, expected an object"));
    }
    let mut reader = serde_json::Deserializer::from_slice(bytes);
    let value = serde_path_to_error::deserialize(&mut reader).map_err(|error| {
        let path = error.path().to_string();
        let source = error.into_inner();
        if source.is_data() && path != "." {
            bad_value(path, &source)
        } else {
            ApiError::bad_request(format!("the body is not valid JSON: {}", reason(&source)))
        }
    })?;
    reader.end().map_err(|_| ApiError::bad_request("the body goes on after the JSON object"))?;
    Ok(value)
}

/// Deserializes an object at a place in a body, whose fields are there as values; an error names the field.
pub(crate) fn parse_fields<T: DeserializeOwned>(
    place: &str,
    fields: Map<String, Value>,
) -> Result<T, ApiError> {
    serde_path_to_error::deserialize(Value::Object(fields)).map_err(|error| {
        let path = error.path().to_string();
        let path = if path == "." { place.to_owned() } else { format!("{place}.{path}") };
        bad_value(path, &error.into_inner())
    })
}

fn bad_value(path: String, error: &serde_json::Error) -> ApiError {
    let message = format!("{path}: {}", reason(error));
    ApiError::bad_field(path, message)
}

/// What is wrong, in short: values come from the client and may be long.
fn reason(error: &serde_json::Error) -> String {
    plain(&error.to_string()).chars().take(300).collect()
}

/// What JSON consists of.
#[derive(Debug, Default, PartialEq, Eq)]
struct Contents {
    /// Objects, lists and texts.
    values: usize,
    /// Numbers and other words.
    words: usize,
    /// The bytes of texts, names included.
    text_len: usize,
}

/// The contents of JSON, if they are not too many.
fn checked_contents(bytes: &[u8]) -> Result<Contents, ApiError> {
    let contents = count(bytes);
    for (count, most, what) in
        [(contents.values, MAX_VALUES, "objects, lists and texts"), (contents.words, MAX_NUMBERS, "numbers")]
    {
        if count > most {
            let message = format!("the body has more than {most} {what}, the limit of this server");
            return Err(ApiError::bad_request(message));
        }
    }
    Ok(contents)
}

/// Counts the contents of JSON without parsing it. What is not JSON may count as anything.
fn count(bytes: &[u8]) -> Contents {
    let mut contents = Contents::default();
    let (mut inside, mut escaped, mut in_word) = (false, false, false);
    for &byte in bytes {
        if inside {
            inside = byte != b'"' || escaped;
            escaped = byte == b'\\' && !escaped;
            contents.text_len += usize::from(inside);
            continue;
        }
        let of_word = byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'+' | b'.');
        contents.words += usize::from(of_word && !in_word);
        in_word = of_word;
        if matches!(byte, b'{' | b'[' | b'"') {
            contents.values += 1;
            inside = byte == b'"';
            escaped = false;
        }
    }
    contents
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;

    use super::*;

    #[derive(Debug, Deserialize)]
    #[allow(dead_code)]
    struct Sample {
        n: Option<u32>,
        stop: Option<Vec<String>>,
    }

    #[test]
    fn wrong_types_name_the_field() {
        let error = parse::<Sample>(br#"{"n": "many"}"#).unwrap_err();
        assert_eq!(error.body()["error"]["param"], "n");
        let error = parse::<Sample>(br#"{"stop": ["a", 3]}"#).unwrap_err();
        assert_eq!(error.body()["error"]["param"], "stop[1]");
    }

    #[test]
    fn what_is_not_json_is_refused() {
        for bytes in [&b"{"[..], b"", b"{\"n\": 1} x", b"\xff\xfe", b"{\"n\": 1,}"] {
            assert_eq!(parse::<Sample>(bytes).unwrap_err().status(), 400);
        }
        let deep = [b"[".repeat(100_000), b"]".repeat(100_000)].concat();
        assert_eq!(parse::<Value>(&deep).unwrap_err().status(), 400);
    }

    #[test]
    fn values_are_counted_outside_texts() {
        let counted = |values, words, text_len| Contents { values, words, text_len };
        assert_eq!(count(br#"{"a": ["b", 1, 2, null], "c": {}}"#), counted(6, 3, 3));
        assert_eq!(count(br#""[{\"[{\\" [1]"#), counted(2, 1, 8));
        assert_eq!(count(b"[1, 2, 3]"), counted(1, 3, 0));
        assert_eq!(count(b"[-1.5e+3,true]"), counted(1, 2, 0));
        let many = format!("[{}\"a\"]", "\"a\",".repeat(MAX_VALUES));
        let error = checked_contents(many.as_bytes()).unwrap_err();
        assert!(error.to_string().contains("262144"), "{error}");
    }

    #[test]
    fn nulls_and_strangers_are_fine() {
        let sample = parse::<Sample>(br#"{"n": null, "log_metrics": true}"#).unwrap();
        assert_eq!(sample.n, None);
    }

    #[test]
    fn content_types_are_told_apart() {
        assert!(is_json("application/json") && is_json("Application/JSON; charset=utf-8"));
        assert!(is_json("application/vnd.api+json"));
        assert!(!is_json("text/plain") && !is_json("application/x-www-form-urlencoded") && !is_json(""));
    }
}
