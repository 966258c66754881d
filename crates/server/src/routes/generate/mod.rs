//! SGLang's own `/generate`: one prompt or a batch, as text or ids.

mod answer;
mod batch;
mod writer;

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use serde_json::Value;

use self::answer::Shape;
use self::batch::{Batch, BatchPrompt};
use self::writer::GenerateWriter;
use super::collect::collect;
use crate::http::JsonBody;
use crate::http::sse::stream;
use crate::protocol::{ApiError, GenerateRequest};
use crate::requests::{AnswerStream, PromptRequest};
use crate::routes::constrain::token_filter;
use crate::state::AppState;

/// `/generate`: continues one prompt or a batch of them.
pub(crate) async fn generate(
    State(app): State<Arc<AppState>>,
    JsonBody(request, memory): JsonBody<GenerateRequest>,
) -> Result<Response, ApiError> {
    let ((batch, names), memory) = app.encode_body(memory, move |app| Batch::read(app, request)).await?;
    let Batch { prompts, formats, is_list, streams } = batch;
    let mut filters = Vec::with_capacity(formats.len());
    for (index, format) in formats.into_iter().enumerate() {
        let asking = prompts.iter().filter(|prompt| prompt.format == index).count();
        let filter = token_filter(&app, format, asking, None).await;
        filters.push(filter.map_err(|error| names.restore(error))?);
    }
    let (count, choices) = (prompts.len(), prompts[0].options.n);
    let mut shapes = Vec::with_capacity(count);
    let mut asked = Vec::with_capacity(count);
    for BatchPrompt { id, ids, options, listing, format } in prompts {
        let filter = filters[format].as_ref().map(|filter| filter.fork());
        shapes.push(Shape { id: Arc::clone(&id), n: choices, listing });
        asked.push(PromptRequest { id, prompt: ids, options, filter });
    }
    drop(filters);
    let mut answers = AnswerStream::submit(&app, asked).map_err(|error| names.restore(error))?;
    drop(memory);
    let many = is_list || choices > 1;
    if streams {
        let begun = answers.begun();
        return Ok(stream(answers, GenerateWriter::new(app, shapes, names, many, begun)));
    }
    let begun = answers.begun();
    let keep_tokens = shapes.iter().any(|shape| shape.listing.is_some());
    let whole = collect(&mut answers, count, choices, keep_tokens).await;
    let whole = whole.map_err(|error| names.restore(error))?;
    let mut list: Vec<Value> = Vec::with_capacity(whole.len());
    for answer in &whole {
        let shape = &shapes[answer.prompt];
        list.push(shape.finished(&app, answer.choice, &answer.summary, &answer.tokens, begun.elapsed()));
    }
    let value = if many { Value::Array(list) } else { list.pop().unwrap_or_default() };
    Ok(Json(value).into_response())
}
