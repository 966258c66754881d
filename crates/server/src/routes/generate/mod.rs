//! SGLang's own `/generate`: one prompt or a batch, as text or ids.

mod answer;
mod writer;

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use oscar_engine::{GenerateOptions, TokenFilter};
use serde_json::Value;

use self::answer::{Listing, Shape};
use self::writer::GenerateWriter;
use super::collect::collect;
use super::fresh_id;
use crate::http::JsonBody;
use crate::http::sse::stream;
use crate::protocol::{
    AnswerFormat, ApiError, GenerateRequest, Ids, Object, OneOrMany, PrecisionFields, RequestKind,
    SamplingParams, SentNames,
};
use crate::requests::{AnswerStream, PromptRequest, request_id};
use crate::routes::constrain::token_filter;
use crate::state::AppState;

/// `/generate`: continues one prompt or a batch of them.
pub(crate) async fn generate(
    State(app): State<Arc<AppState>>,
    JsonBody(mut request, memory): JsonBody<GenerateRequest>,
) -> Result<Response, ApiError> {
    let kv_precision = request.kv_precision.take();
    let precision = PrecisionFields { kv_precision, kv_demote: request.kv_demote };
    check_fields(&app, &request)?;
    request.leave_empty_prompt();
    let names = SentNames::of_generate(request.input_ids.is_some());
    let (prompts, batch) = prompts(&app, &mut request).await?;
    let count = prompts.len();
    let params: Vec<Arc<SamplingParams>> = match request.sampling_params.take() {
        None => vec![Arc::default(); count],
        Some(OneOrMany::One(params)) => {
            let params = Arc::new(params.0);
            vec![params; count]
        }
        Some(OneOrMany::Many(list)) => {
            of_each(list.into_iter().map(|params| Arc::new(params.0)).collect(), count, "sampling_params")?
        }
    };
    let ids: Vec<Arc<str>> = match request.rid.take() {
        Some(OneOrMany::One(id)) if count == 1 => vec![request_id(Some(&id), &fresh_id("gen-"))?],
        Some(OneOrMany::One(id)) => {
            let id = request_id(Some(&id), &fresh_id("gen-"))?;
            (0..count).map(|index| format!("{id}_{index}").into()).collect()
        }
        Some(OneOrMany::Many(list)) => {
            let ids = of_each(list, count, "rid")?;
            ids.iter().map(|id| request_id(Some(id), &fresh_id("gen-"))).collect::<Result<_, ApiError>>()?
        }
        None => (0..count).map(|_| fresh_id("gen-").into()).collect(),
    };
    let wanted = for_all(request.return_logprob.take(), false, count, "return_logprob")?;
    let starts = for_all(request.logprob_start_len.take(), -1, count, "logprob_start_len")?;
    let tops = for_all(request.top_logprobs_num.take(), 0, count, "top_logprobs_num")?;
    let salt = request.cache_salt.take().or(request.extra_key.take());
    let with_text = request.return_text_in_logprobs.unwrap_or(false);
    let streams = request.stream.unwrap_or(false);
    drop(request);
    let mut shapes = Vec::with_capacity(count);
    let mut asked = Vec::with_capacity(count);
    let mut settings: Option<Settings> = None;
    let per_prompt = params.into_iter().zip(prompts).zip(ids);
    for (index, ((params, prompt), id)) in per_prompt.enumerate() {
        let settings = match settings.take() {
            Some(known) if Arc::ptr_eq(&known.params, &params) => settings.insert(known),
            known => settings.insert(Settings::new(&app, params, &salt, &precision, known).await?),
        };
        let filter = settings.filter.as_ref().map(|filter| filter.fork());
        let top = tops[index] as usize;
        let start = usize::try_from(starts[index]).ok().filter(|_| wanted[index]);
        let listing = wanted[index].then_some(Listing { top, with_text });
        // What comes before the first token that is listed may be read from the cache.
        let options = GenerateOptions {
            logprobs: listing.map(|_| top),
            prompt_logprobs: start.map(|_| top),
            score_from: start.unwrap_or(0),
            ..settings.options.clone()
        };
        shapes.push(Shape { id: Arc::clone(&id), n: options.n, listing });
        asked.push(PromptRequest { id, prompt, options, filter });
    }
    drop(settings);
    let choices = shapes[0].n;
    if shapes.iter().any(|shape| shape.n != choices) {
        return Err(ApiError::bad_field(
            "sampling_params.n",
            "n must be the same for all prompts of a batch",
        ));
    }
    let mut answers = AnswerStream::submit(&app, asked).map_err(|error| names.restore(error))?;
    drop(memory);
    let many = batch || choices > 1;
    if streams {
        let begun = answers.begun();
        return Ok(stream(answers, GenerateWriter::new(app, shapes, many, begun)));
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

/// What prompts with the same sampling parameters share.
struct Settings {
    params: Arc<SamplingParams>,
    options: GenerateOptions,
    format: AnswerFormat,
    filter: Option<Box<dyn TokenFilter>>,
}

impl Settings {
    /// Reads sampling parameters. The grammar of `known` ones is not compiled again.
    async fn new(
        app: &Arc<AppState>,
        params: Arc<SamplingParams>,
        salt: &Option<String>,
        precision: &PrecisionFields,
        known: Option<Settings>,
    ) -> Result<Settings, ApiError> {
        let format = params.answer_format()?;
        let filter = match known {
            Some(known) if known.format == format => known.filter,
            _ => token_filter(app, format.clone(), None).await?,
        };
        let options = params.sampling_fields(salt.clone()).options(&app.model.sampling)?;
        let options = precision.apply(app.engine.info(), options)?;
        Ok(Settings { params, options, format, filter })
    }
}

/// Refuses fields that nobody reads, also among the sampling parameters.
fn check_fields(app: &AppState, request: &GenerateRequest) -> Result<(), ApiError> {
    let policy = app.options.unknown_fields;
    request.unread.check(RequestKind::Generate, policy)?;
    let params = match &request.sampling_params {
        None => &[][..],
        Some(OneOrMany::One(params)) => std::slice::from_ref(params),
        Some(OneOrMany::Many(list)) => list,
    };
    params.iter().try_for_each(|Object(params)| params.unread.check(RequestKind::SamplingParams, policy))
}

/// The token ids of the prompts, and whether they came as a list.
async fn prompts(
    app: &Arc<AppState>,
    request: &mut GenerateRequest,
) -> Result<(Vec<Vec<u32>>, bool), ApiError> {
    let (prompts, batch) = match (request.text.take(), request.input_ids.take()) {
        (Some(_), Some(_)) => {
            return Err(ApiError::bad_field("text", "text and input_ids exclude each other"));
        }
        (None, None) => return Err(ApiError::bad_field("text", "there is neither text nor input_ids")),
        (None, Some(Ids::One(ids))) => (vec![ids], false),
        (None, Some(Ids::Many(lists))) => {
            app.check_batch(lists.len(), "input_ids")?;
            (lists, true)
        }
        (Some(text), None) => {
            let batch = matches!(text, OneOrMany::Many(_));
            let texts = text.into_vec();
            app.check_batch(texts.len(), "text")?;
            let bytes = texts.iter().map(String::len).sum();
            let encoded = app.encode(bytes, move |app| {
                let context = app.engine.info().context;
                let encode = |text: &String| {
                    app.model.check_length(text, context, "text")?;
                    app.model.encode(text, "text")
                };
                texts.iter().map(encode).collect::<Result<Vec<_>, ApiError>>()
            });
            (encoded.await?, batch)
        }
    };
    if prompts.is_empty() {
        return Err(ApiError::bad_field("text", "the batch is empty"));
    }
    Ok((prompts, batch))
}

/// Checks that a list has an entry for each prompt.
fn of_each<T>(list: Vec<T>, count: usize, name: &str) -> Result<Vec<T>, ApiError> {
    if list.len() != count {
        let message = format!("{name} has {} entries for {count} prompts", list.len());
        return Err(ApiError::bad_field(name, message));
    }
    Ok(list)
}

/// The values of a field that has one for all prompts or one for each.
fn for_all<T: Clone>(
    value: Option<OneOrMany<T>>,
    default: T,
    count: usize,
    name: &str,
) -> Result<Vec<T>, ApiError> {
    match value {
        None => Ok(vec![default; count]),
        Some(OneOrMany::One(value)) => Ok(vec![value; count]),
        Some(OneOrMany::Many(list)) => of_each(list, count, name),
    }
}
