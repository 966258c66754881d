//! Errors in the form Anthropic's clients expect. All error responses of these routes are converted here, also those
//! about keys, bodies and methods.

use axum::body::Body;
use axum::http::{HeaderName, HeaderValue, StatusCode, header};
use axum::response::Response;
use serde_json::{Value, json};

use crate::protocol::ApiError;

/// The header in which Anthropic's clients look for the id of a request.
const REQUEST_ID: HeaderName = HeaderName::from_static("request-id");

/// Whether a path is one of Anthropic's interface.
pub(crate) fn is_path(path: &str) -> bool {
    path == "/v1/messages" || path.starts_with("/v1/messages/")
}

/// Adds the request id to a response of this interface, and converts an error.
pub(crate) fn reshape(response: Response, id: &HeaderValue) -> Response {
    let (mut parts, mut body) = response.into_parts();
    if let Some(error) = parts.extensions.get::<ApiError>() {
        let mut shaped = error_body(error);
        shaped["request_id"] = id.to_str().unwrap_or_default().into();
        body = Body::from(shaped.to_string());
        parts.headers.remove(header::CONTENT_LENGTH);
    }
    parts.headers.insert(REQUEST_ID, id.clone());
    Response::from_parts(parts, body)
}

/// The body of an error: `{"type": "error", "error": {"type", "message"}}`.
pub(super) fn error_body(error: &ApiError) -> Value {
    let kind = match error.status() {
        StatusCode::UNAUTHORIZED => "authentication_error",
        StatusCode::NOT_FOUND => "not_found_error",
        StatusCode::PAYLOAD_TOO_LARGE => "request_too_large",
        StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
        StatusCode::SERVICE_UNAVAILABLE => "overloaded_error",
        status if status.is_server_error() => "api_error",
        _ => "invalid_request_error",
    };
    json!({"type": "error", "error": {"type": kind, "message": error.to_string()}})
}
