//! `/v1/responses`: OpenAI's newer interface, the part of it that keeps nothing between requests.

mod object;
mod writer;

use std::sync::Arc;

use axum::extract::State;
use axum::http::header;
use axum::response::{IntoResponse, Response};

use self::object::ResponseObject;
use self::writer::ResponseWriter;
use super::chat::{PartsAnswer, Turn};
use super::fresh_id;
use crate::http::JsonBody;
use crate::http::sse::stream;
use crate::protocol::{ApiError, ResponsesRequest};
use crate::state::AppState;

/// `/v1/responses`: answers the input of a request.
pub(crate) async fn responses(
    State(app): State<Arc<AppState>>,
    JsonBody(mut request, memory): JsonBody<ResponsesRequest>,
) -> Result<Response, ApiError> {
    let id = fresh_id("resp_");
    let name = id.clone();
    let read = move |app: &AppState| {
        request.check_fields(&app.field_policy())?;
        let object = ResponseObject::new(app, &name, &request)?;
        let (request, names) = request.into_chat()?;
        Ok((request, names, object))
    };
    let (turn, mut answers, object) = Turn::begin(&app, memory, &id, read).await?;
    let mut answer = PartsAnswer::new(turn);
    if answer.turn().streams {
        return Ok(stream(answers, ResponseWriter::new(answer, object)));
    }
    let summary = answer.collect(&mut answers).await?;
    Ok(([(header::CONTENT_TYPE, "application/json")], object.finished(&answer, &summary)).into_response())
}
