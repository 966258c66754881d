//! Request bodies: JSON of bounded size that arrives in bounded time, with errors that name the field.

use std::sync::Arc;

use axum::body::Bytes;
use axum::extract::{FromRequest, Request};
use axum::http::{StatusCode, header};
use serde::de::DeserializeOwned;

use crate::protocol::ApiError;
use crate::state::AppState;

/// Extracts a JSON body. Other content types are refused.
pub(crate) struct JsonBody<T>(pub(crate) T);

impl<T: DeserializeOwned> FromRequest<Arc<AppState>> for JsonBody<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, app: &Arc<AppState>) -> Result<Self, ApiError> {
        // Web pages of others can post forms and plain text without asking; JSON they cannot.
        let content_type = request.headers().get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
        if !content_type.is_some_and(is_json) {
            let found = content_type.unwrap_or("none").chars().take(80).collect::<String>();
            return Err(ApiError::new(
                StatusCode::UNSUPPORTED_MEDIA_TYPE,
                format!("the content type is {found}, expected application/json"),
            ));
        }
        parse(&read(request, app).await?).map(JsonBody)
    }
}

/// Extracts a JSON body that may be absent, in which case it is the default of its type.
pub(crate) struct OptionalJsonBody<T>(pub(crate) T);

impl<T: DeserializeOwned + Default> FromRequest<Arc<AppState>> for OptionalJsonBody<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, app: &Arc<AppState>) -> Result<Self, ApiError> {
        let bytes = read(request, app).await?;
        if bytes.iter().all(u8::is_ascii_whitespace) {
            return Ok(OptionalJsonBody(T::default()));
        }
        parse(&bytes).map(OptionalJsonBody)
    }
}

fn is_json(content_type: &str) -> bool {
    let kind = content_type.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
    kind == "application/json" || kind.starts_with("application/") && kind.ends_with("+json")
}

async fn read(request: Request, app: &AppState) -> Result<Bytes, ApiError> {
    let limit = app.options.body_bytes;
    let too_large = || {
        let message = format!("the body is larger than {limit} bytes, the limit of this server");
        ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, message)
    };
    let announced = request.headers().get(header::CONTENT_LENGTH).and_then(|value| value.to_str().ok());
    if announced.and_then(|length| length.parse::<u64>().ok()).is_some_and(|length| length > limit as u64) {
        return Err(too_large());
    }
    let read = axum::body::to_bytes(request.into_body(), limit);
    match tokio::time::timeout(app.options.body_timeout, read).await {
        Ok(Ok(bytes)) => Ok(bytes),
        Ok(Err(error)) => Err(match std::error::Error::source(&error) {
            Some(source) if source.to_string().contains("length limit") => too_large(),
            _ => ApiError::bad_request("the body could not be read to its end"),
        }),
        Err(_) => Err(ApiError::new(StatusCode::REQUEST_TIMEOUT, "the body did not arrive in time")),
    }
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
        // Values come from the client and may be long.
        let reason: String = source.to_string().chars().take(300).collect();
        if source.is_data() && path != "." {
            ApiError::bad_field(path.clone(), format!("{path}: {reason}"))
        } else {
            ApiError::bad_request(format!("the body is not valid JSON: {reason}"))
        }
    })?;
    reader.end().map_err(|_| ApiError::bad_request("the body goes on after the JSON object"))?;
    Ok(value)
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
        assert_eq!(parse::<serde_json::Value>(&deep).unwrap_err().status(), 400);
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
