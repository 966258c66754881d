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
use super::chat::{PartsAnswer, Turn, prepare};
use super::fresh_id;
use crate::http::JsonBody;
use crate::http::sse::stream;
use crate::protocol::{ApiError, Door, MessagesRequest};
use crate::state::AppState;

/// `/v1/messages`: answers the last message of a conversation.
pub(crate) async fn messages(
    State(app): State<Arc<AppState>>,
    JsonBody(request, memory): JsonBody<MessagesRequest>,
) -> Result<Response, ApiError> {
    request.unread.check(Door::Messages, app.options.unknown_fields)?;
    let (mut request, names) = request.into_chat()?;
    let id = fresh_id("msg_");
    let begun = Turn::begin(&app, &mut request, &id).await;
    let (turn, mut answers) = begun.map_err(|error| names.restore(error))?;
    drop(memory);
    let mut answer = PartsAnswer::new(turn);
    if request.streams() {
        return Ok(stream(answers, MessageWriter::new(answer, id)));
    }
    let summary = answer.collect(&mut answers).await.map_err(|error| names.restore(error))?;
    Ok(Json(whole_message(&id, &answer, &summary)).into_response())
}

/// `/v1/messages/count_tokens`: counts the tokens of a conversation.
pub(crate) async fn count_tokens(
    State(app): State<Arc<AppState>>,
    JsonBody(request, _memory): JsonBody<MessagesRequest>,
) -> Result<Json<Value>, ApiError> {
    request.unread.check(Door::Messages, app.options.unknown_fields)?;
    let (mut request, names) = request.into_unlimited()?;
    app.model.check_name(request.model.as_deref())?;
    // What would be refused has no tokens either.
    request.answer_format().map_err(|error| names.restore(error))?;
    let rendered = prepare(&app, &mut request, None).await.map_err(|error| names.restore(error))?;
    Ok(Json(json!({"input_tokens": rendered.ids.len()})))
}
