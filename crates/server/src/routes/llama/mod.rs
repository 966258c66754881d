//! llama.cpp's own routes, which editors and scripts speak: `/completion`, `/props`, `/slots` and `/apply-template`.

mod answer;
mod info;
mod writer;

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use oscar_engine::GenerateOptions;
use serde_json::Value;

use self::answer::Shape;
pub(crate) use self::info::{apply_template, props, slots};
use self::writer::LlamaWriter;
use super::collect::collect;
use super::completions::{Prepared, prepare};
use super::fresh_id;
use crate::http::JsonBody;
use crate::http::sse::stream;
use crate::protocol::{ApiError, LlamaRequest, Prompt, RequestKind, SamplingFields, SentNames};
use crate::requests::{AnswerStream, PromptRequest, request_id};
use crate::routes::constrain::token_filter;
use crate::state::AppState;

/// `/completion`: continues one prompt or several.
pub(crate) async fn completion(
    State(app): State<Arc<AppState>>,
    body: JsonBody<LlamaRequest>,
) -> Result<Response, ApiError> {
    complete(app, body).await.map_err(|error| SentNames::of_completion().restore(error))
}

async fn complete(
    app: Arc<AppState>,
    JsonBody(request, memory): JsonBody<LlamaRequest>,
) -> Result<Response, ApiError> {
    request.unread.check(RequestKind::Completion, app.options.unknown_fields)?;
    let many = matches!(request.prompt, Some(Prompt::Texts(_) | Prompt::IdLists(_)));
    app.check_batch(request.prompt.as_ref().map_or(1, Prompt::count), "prompt")?;
    let rid = request_id(request.rid.as_deref(), &fresh_id("cmpl-"))?;
    let filter = token_filter(&app, request.answer_format()?, None).await?;
    let logprobs = request.logprobs();
    let (mut request, sampling_fields) = sampling_fields(&app, request).await?;
    let options = GenerateOptions { logprobs, ..sampling_fields.options(&app.model.sampling)? };
    let options = request.precision().apply(app.engine.info(), options)?;
    // The answer repeats the prompt.
    let prepared = prepare(&app, request.prompt.take(), true).await?;
    let (streams, return_tokens) = (request.stream.unwrap_or(false), request.return_tokens.unwrap_or(false));
    drop(request);
    let mut prompts = Vec::with_capacity(prepared.len());
    let mut asked = Vec::with_capacity(prepared.len());
    for Prepared { ids, echo } in prepared {
        let filter = filter.as_ref().map(|filter| filter.fork());
        prompts.push(echo.unwrap_or_default());
        asked.push(PromptRequest { id: Arc::clone(&rid), prompt: ids, options: options.clone(), filter });
    }
    let count = asked.len();
    let mut answers = AnswerStream::submit(&app, asked)?;
    drop(memory);
    let shape = Shape::new(&app, options, prompts, return_tokens);
    if streams {
        return Ok(stream(answers, LlamaWriter::new(shape)));
    }
    let whole = collect(&mut answers, count, 1, logprobs.is_some()).await?;
    let mut list: Vec<Value> = whole
        .iter()
        .map(|answer| shape.finished(answer.prompt, &answer.summary, &answer.tokens, true))
        .collect();
    let body = if many { Value::Array(list) } else { list.pop().unwrap_or_default() };
    Ok(Json(body).into_response())
}

/// The sampling parameters of a request. Texts in its `logit_bias` are tokenized for it.
async fn sampling_fields(
    app: &Arc<AppState>,
    mut request: LlamaRequest,
) -> Result<(LlamaRequest, SamplingFields), ApiError> {
    let bytes = if request.logit_bias.is_some() { usize::MAX } else { 0 };
    let read = move |app: &AppState| {
        let fields = request.sampling_fields(app.model.tokenizer())?;
        Ok((request, fields))
    };
    app.encode(bytes, read).await
}
