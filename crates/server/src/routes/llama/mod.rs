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
use crate::http::sse::stream;
use crate::http::{BodyMemory, JsonBody};
use crate::protocol::{AnswerFormat, ApiError, LlamaRequest, Prompt, SentNames};
use crate::requests::{AnswerStream, PromptRequest, request_id};
use crate::routes::constrain::{asked_form, token_filter};
use crate::state::AppState;

/// `/completion`: continues one prompt or several.
pub(crate) async fn completion(
    State(app): State<Arc<AppState>>,
    JsonBody(request, memory): JsonBody<LlamaRequest>,
) -> Result<Response, ApiError> {
    let names = SentNames::of_completion();
    let read = move |app: &AppState| {
        request.check_fields(&app.field_policy())?;
        Asked::read(app, request).map_err(|error| SentNames::of_completion().restore(error))
    };
    let (asked, memory) = app.encode_body(memory, read).await?;
    complete(app, asked, memory).await.map_err(|error| names.restore(error))
}

/// What is left of a request when it has been read.
struct Asked {
    prompts: Vec<Prepared>,
    options: GenerateOptions,
    format: Option<AnswerFormat>,
    rid: Arc<str>,
    streams: bool,
    return_tokens: bool,
    /// Whether the prompts came as a list.
    many: bool,
}

impl Asked {
    /// Reads a request. For bodies of any size, this is work for [`AppState::encode_body`].
    fn read(app: &AppState, mut request: LlamaRequest) -> Result<Asked, ApiError> {
        let many = matches!(request.prompt, Some(Prompt::Texts(_) | Prompt::IdLists(_)));
        app.check_batch(request.prompt.as_ref().map_or(1, Prompt::count), "prompt")?;
        let rid = request_id(request.rid.as_deref(), &fresh_id("cmpl-"))?;
        let format = asked_form(app, request.answer_format()?)?;
        let logprobs = request.logprobs();
        let sampling_fields = request.sampling_fields(app.model.tokenizer())?;
        let options = GenerateOptions { logprobs, ..sampling_fields.options(&app.model.sampling)? };
        let options = request.precision().apply(app.engine.info(), options)?;
        Ok(Asked {
            // The answer repeats the prompt.
            prompts: prepare(app, request.prompt.take(), true)?,
            options,
            format,
            rid,
            streams: request.stream.unwrap_or(false),
            return_tokens: request.return_tokens.unwrap_or(false),
            many,
        })
    }
}

async fn complete(app: Arc<AppState>, asked: Asked, memory: BodyMemory) -> Result<Response, ApiError> {
    let Asked { prompts: prepared, options, format, rid, streams, return_tokens, many } = asked;
    let keeps_tokens = options.logprobs.is_some();
    let filter = token_filter(&app, format, prepared.len(), None).await?;
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
    let whole = collect(&mut answers, count, 1, keeps_tokens).await?;
    let mut list: Vec<Value> = whole
        .iter()
        .map(|answer| shape.finished(answer.prompt, &answer.summary, &answer.tokens, true))
        .collect();
    let body = if many { Value::Array(list) } else { list.pop().unwrap_or_default() };
    Ok(Json(body).into_response())
}
