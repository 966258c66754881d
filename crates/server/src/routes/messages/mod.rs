//! `/v1/messages` and `/v1/messages/count_tokens`, for Anthropic's clients.

mod error;
mod message;
mod writer;

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

pub(crate) use self::error::{is_path, reshape};
use self::message::whole_message;
use self::writer::MessageWriter;
use super::chat::{PartsAnswer, Turn, check_tools, render};
use super::fresh_id;
use crate::http::JsonBody;
use crate::http::sse::stream;
use crate::protocol::{ApiError, MessagesRequest};
use crate::state::AppState;

/// `/v1/messages`: answers the last message of a conversation.
pub(crate) async fn messages(
    State(app): State<Arc<AppState>>,
    JsonBody(mut request, memory): JsonBody<MessagesRequest>,
) -> Result<Response, ApiError> {
    let id = fresh_id("msg_");
    let read = |app: &AppState| {
        request.check_fields(&app.field_policy())?;
        let (request, names) = request.into_chat()?;
        Ok((request, names, ()))
    };
    let (turn, mut answers, ()) = Turn::begin(&app, memory, &id, read).await?;
    let mut answer = PartsAnswer::new(turn);
    if answer.turn().streams {
        return Ok(stream(answers, MessageWriter::new(answer, id)));
    }
    let summary = answer.collect(&mut answers).await?;
    Ok(Json(whole_message(&id, &answer, &summary)).into_response())
}

/// `/v1/messages/count_tokens`: counts the tokens of a conversation.
pub(crate) async fn count_tokens(
    State(app): State<Arc<AppState>>,
    JsonBody(mut request, memory): JsonBody<MessagesRequest>,
) -> Result<Json<Value>, ApiError> {
    let count = |app: &AppState| {
        request.check_fields(&app.field_policy())?;
        let (mut request, names) = request.into_unlimited()?;
        app.model.check_name(request.model.as_deref())?;
        // What would be refused has no tokens either.
        let refused = check_tools(&request).and_then(|()| request.answer_format());
        let rendered = refused.and_then(|_| render(app, &mut request, None));
        rendered.map(|rendered| rendered.ids.len()).map_err(|error| names.restore(error))
    };
    let (tokens, _memory) = app.encode_body(memory, count).await?;
    Ok(Json(json!({"input_tokens": tokens})))
}
