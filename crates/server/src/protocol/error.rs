//! What a client is told when a request cannot be served: a status and an OpenAI-shaped body.
//!
//! Messages name the field and the fix. What went wrong inside is logged and not sent, but for the
//! cause of a device that has failed for good.

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use oscar_engine::EngineError;
use oscar_model::text::TextError;
use serde_json::{Value, json};

use super::FieldError;
use crate::grammar::GrammarError;

/// The seconds after which a client may try again when the queue was full (`Retry-After`).
const RETRY_AFTER_S: u64 = 1;

/// The error of a request, with its HTTP status and the fields of OpenAI's error bodies.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub(crate) struct ApiError {
    status: StatusCode,
    message: String,
    param: Option<String>,
    code: Option<&'static str>,
    retry_after: Option<u64>,
}

impl ApiError {
    /// An error with this status, and neither field nor code.
    pub(crate) fn new(status: StatusCode, message: impl Into<String>) -> ApiError {
        ApiError { status, message: message.into(), param: None, code: None, retry_after: None }
    }

    /// A request that is not valid: 400.
    pub(crate) fn bad_request(message: impl Into<String>) -> ApiError {
        ApiError::new(StatusCode::BAD_REQUEST, message)
    }

    /// A field that is not valid: 400.
    pub(crate) fn bad_field(param: impl Into<String>, message: impl Into<String>) -> ApiError {
        ApiError::bad_request(message).with_param(param)
    }

    /// A field that asks for something this server does not support: 400.
    pub(crate) fn unsupported(param: &str, message: impl Into<String>) -> ApiError {
        ApiError::bad_field(param, message).with_code("unsupported_parameter")
    }

    /// A request that came while the server shuts down: 503.
    pub(crate) fn shutting_down() -> ApiError {
        let error = ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "the server is shutting down");
        ApiError { code: Some("shutting_down"), retry_after: Some(RETRY_AFTER_S), ..error }
    }

    /// A body for which there was no memory while its client could wait: 503.
    pub(crate) fn no_body_memory() -> ApiError {
        let message =
            "other bodies have the memory for bodies (--max-body-memory); send this one again later";
        let error = ApiError::new(StatusCode::SERVICE_UNAVAILABLE, message);
        ApiError { code: Some("body_memory"), retry_after: Some(RETRY_AFTER_S), ..error }
    }

    /// A request for whose grammar or tools there is no memory, because requests that wait or run have it: 503.
    pub(crate) fn no_request_memory() -> ApiError {
        let message = "other requests have the memory for grammars, schemas and tools (four times --max-body-memory, or \
            --max-body); send this one again later";
        let error = ApiError::new(StatusCode::SERVICE_UNAVAILABLE, message);
        ApiError { code: Some("request_memory"), retry_after: Some(RETRY_AFTER_S), ..error }
    }

    /// A request whose grammars and tools would take more memory than there is for all: 400.
    pub(crate) fn too_much_kept(bytes: usize, most: usize) -> ApiError {
        let message = format!(
            "the grammars, schemas and tools of this request would take about {} MiB, at most {} MiB are there for all \
             requests (four times --max-body-memory, or --max-body)",
            bytes.div_ceil(1 << 20),
            most >> 20
        );
        ApiError::bad_request(message).with_code("request_memory")
    }

    /// A request of which nothing can be returned because it was aborted: 503.
    pub(crate) fn aborted() -> ApiError {
        ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "the request was aborted").with_code("aborted")
    }

    /// A failure of the server: 500. The reason goes to the log, not to the client.
    pub(crate) fn internal(reason: &dyn std::fmt::Display) -> ApiError {
        tracing::error!("request failed: {reason}");
        let message = "the server failed to answer this request; its log says why";
        ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, message).with_code("internal_error")
    }

    /// Names the field that the error is about.
    #[must_use]
    pub(crate) fn with_param(mut self, param: impl Into<String>) -> ApiError {
        self.param = Some(param.into());
        self
    }

    /// Names the field `sent` where the error names it `param`, also at the beginning of the message.
    #[must_use]
    pub(crate) fn renamed(mut self, param: &str, sent: String) -> ApiError {
        let quote = if self.message.starts_with('`') { "`" } else { "" };
        let rest = self.message.strip_prefix(quote).and_then(|message| message.strip_prefix(param));
        if let Some(rest) = rest {
            self.message = format!("{quote}{sent}{rest}");
        }
        self.with_param(sent)
    }

    /// Adds a code that programs can test for.
    #[must_use]
    pub(crate) fn with_code(mut self, code: &'static str) -> ApiError {
        self.code = Some(code);
        self
    }

    /// The HTTP status of the response.
    pub(crate) fn status(&self) -> StatusCode {
        self.status
    }

    /// The field that the error is about.
    pub(crate) fn param(&self) -> Option<&str> {
        self.param.as_deref()
    }

    /// The code that programs can test for.
    pub(crate) fn code(&self) -> Option<&'static str> {
        self.code
    }

    /// The body of the response: `{"error": {"message", "type", "param", "code"}}`.
    pub(crate) fn body(&self) -> Value {
        let kind = match self.status {
            StatusCode::UNAUTHORIZED => "authentication_error",
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
            StatusCode::SERVICE_UNAVAILABLE => "service_unavailable_error",
            status if status.is_server_error() => "server_error",
            _ => "invalid_request_error",
        };
        json!({"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}})
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = (self.status, axum::Json(self.body())).into_response();
        if let Some(seconds) = self.retry_after {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        // Some routes tell it in a shape of their own.
        response.extensions_mut().insert(self);
        response
    }
}

impl From<&EngineError> for ApiError {
    fn from(error: &EngineError) -> ApiError {
        match error {
            EngineError::EmptyPrompt => ApiError::bad_field("prompt", error.to_string()),
            EngineError::PromptTooLong { .. }
            | EngineError::HistoryTooLong { .. }
            | EngineError::Shortage(_) => {
                ApiError::bad_field("prompt", error.to_string()).with_code("context_length_exceeded")
            }
            EngineError::TokenOutOfRange { .. } => ApiError::bad_field("prompt", error.to_string()),
            EngineError::BadOption { name, .. } => ApiError::bad_field(*name, error.to_string()),
            EngineError::QueueFull { .. } => {
                let error = ApiError::new(StatusCode::TOO_MANY_REQUESTS, error.to_string());
                ApiError { code: Some("queue_full"), retry_after: Some(RETRY_AFTER_S), ..error }
            }
            EngineError::Stopped => {
                let error = ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "the engine has stopped");
                error.with_code("engine_stopped")
            }
            // Said once in the log, by the engine.
            EngineError::DeviceFailed(_) => {
                ApiError::new(StatusCode::SERVICE_UNAVAILABLE, error.to_string()).with_code("device_failed")
            }
            EngineError::Shared(error) => ApiError::from(&**error),
            error => ApiError::internal(error),
        }
    }
}

impl From<EngineError> for ApiError {
    fn from(error: EngineError) -> ApiError {
        ApiError::from(&error)
    }
}

impl From<FieldError> for ApiError {
    fn from(error: FieldError) -> ApiError {
        let message = error.to_string();
        ApiError::bad_field(error.field, message)
    }
}

impl From<GrammarError> for ApiError {
    fn from(error: GrammarError) -> ApiError {
        let param = match &error {
            GrammarError::Vocabulary(reason) => return ApiError::internal(reason),
            GrammarError::UnknownTool { .. } | GrammarError::NoTools => "tool_choice",
            GrammarError::Tool { .. } => "tools",
            GrammarError::TooLarge { .. } | GrammarError::TooDeep { .. } | GrammarError::Invalid { .. } => {
                "response_format"
            }
        };
        ApiError::bad_field(param, error.to_string())
    }
}

/// Errors of templates and tokenizers that a request can cause are the client's; the rest is ours.
pub(crate) fn text_error(param: &str, error: &TextError) -> ApiError {
    match error {
        TextError::TemplateRefused { .. } | TextError::UnknownId { .. } | TextError::TemplateLimit { .. } => {
            ApiError::bad_field(param, error.to_string())
        }
        TextError::NoChatTemplate => ApiError::bad_field(
            param,
            "this model has no chat template; use /v1/completions, which continues plain text",
        ),
        // Where a template trips over a message, its line tells the client nothing.
        TextError::Template { .. } => {
            tracing::info!("{error}");
            ApiError::bad_field(param, "the chat template of this model cannot render these messages")
        }
        error => ApiError::internal(error),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use oscar_engine::Tier;

    use super::*;

    #[test]
    fn bodies_have_the_shape_clients_expect() {
        let error = ApiError::bad_field("n", "n is 0, expected 1 to 4");
        let body = json!({"error": {"message": "n is 0, expected 1 to 4", "type": "invalid_request_error",
            "param": "n", "code": null}});
        assert_eq!(error.body(), body);
        assert_eq!(error.into_response().status(), 400);
    }

    #[test]
    fn errors_of_the_engine_get_their_status() {
        let status = |error: EngineError| ApiError::from(error).status().as_u16();
        assert_eq!(status(EngineError::EmptyPrompt), 400);
        assert_eq!(status(EngineError::PromptTooLong { tokens: 9, context: 8 }), 400);
        assert_eq!(
            status(EngineError::HistoryTooLong { tier: Tier::Exact, tokens: 9, most: 8, context: 10 }),
            400
        );
        assert_eq!(status(EngineError::QueueFull { queued: 3 }), 429);
        assert_eq!(status(EngineError::Stopped), 503);
        assert_eq!(status(EngineError::DeviceFailed(Arc::new(EngineError::NotFinite))), 503);
        assert_eq!(status(EngineError::NotFinite), 500);
        assert_eq!(status(EngineError::Shared(Arc::new(EngineError::QueueFull { queued: 3 }))), 429);
        let response = ApiError::from(EngineError::QueueFull { queued: 3 }).into_response();
        assert_eq!(response.headers()["retry-after"], "1");
    }

    #[test]
    fn nothing_internal_is_told() {
        let error = ApiError::from(EngineError::Filter("/etc/secret line 3".to_owned()));
        assert!(!error.body().to_string().contains("secret"), "{}", error.body());
        let template = TextError::Template { line: 7, reason: "secret_variable is undefined".to_owned() };
        assert!(!text_error("messages", &template).body().to_string().contains("secret"));
    }
}
