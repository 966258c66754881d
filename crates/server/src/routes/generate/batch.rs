//! A request of `/generate` as it is read: the prompts of a batch, each with its settings.

use std::sync::Arc;

use oscar_engine::GenerateOptions;
use serde_json::{Map, Value};

use super::answer::Listing;
use crate::http::parse_fields;
use crate::protocol::{
    AnswerFormat, ApiError, GenerateRequest, Ids, OneOrMany, PrecisionFields, RequestKind, SamplingParams,
    SentNames, either,
};
use crate::requests::request_id;
use crate::routes::constrain::asked_form;
use crate::routes::fresh_id;
use crate::state::AppState;

/// What is left of a request when it has been read.
pub(super) struct Batch {
    pub(super) prompts: Vec<BatchPrompt>,
    /// What the answers must look like, each once for all prompts in a row that ask for the same.
    pub(super) formats: Vec<Option<AnswerFormat>>,
    /// Whether the prompts came as a list.
    pub(super) is_list: bool,
    pub(super) streams: bool,
}

/// One prompt of a batch.
pub(super) struct BatchPrompt {
    pub(super) id: Arc<str>,
    pub(super) ids: Vec<u32>,
    pub(super) options: GenerateOptions,
    pub(super) listing: Option<Listing>,
    /// The index of what its answer must look like.
    pub(super) format: usize,
}

impl Batch {
    /// Reads a request, and says what the client called the fields of it. For bodies of any size, this is work for
    /// [`AppState::encode_body`].
    pub(super) fn read(app: &AppState, mut request: GenerateRequest) -> Result<(Batch, SentNames), ApiError> {
        request.leave_empty_prompt();
        request.unread.check(RequestKind::Generate, &app.field_policy())?;
        let names = SentNames::of_generate(request.aliases());
        let (count, field) = request.count();
        app.check_batch(count, field)?;
        let params = sampling_params(app, request.sampling_params.take(), count)?;
        match Batch::prepare(app, request, params) {
            Ok(batch) => Ok((batch, names)),
            Err(error) => Err(names.restore(error)),
        }
    }

    /// Reads a request whose names have been checked, with the sampling parameters of each prompt.
    fn prepare(
        app: &AppState,
        mut request: GenerateRequest,
        params: Vec<Arc<SamplingParams>>,
    ) -> Result<Batch, ApiError> {
        let kv_precision = request.kv_precision.take();
        let precision = PrecisionFields { kv_precision, kv_demote: request.kv_demote };
        let (prompts, is_list) = prompts(app, &mut request)?;
        let count = prompts.len();
        let ids = request_ids(request.rid.take(), count)?;
        let wanted = for_all(request.return_logprob.take(), false, count, "return_logprob")?;
        let starts = for_all(request.logprob_start_len.take(), -1, count, "logprob_start_len")?;
        let tops = for_all(request.top_logprobs_num.take(), 0, count, "top_logprobs_num")?;
        let salt = either(
            ("cache_salt", request.cache_salt.take()),
            ("extra_key", request.extra_key.take()),
            String::is_empty,
        )?;
        let with_text = request.return_text_in_logprobs.unwrap_or(false);
        let mut read = Vec::with_capacity(count);
        let mut formats = Vec::new();
        let mut settings: Option<Settings> = None;
        for (index, ((params, ids), id)) in params.into_iter().zip(prompts).zip(ids).enumerate() {
            let settings = match settings.take() {
                Some(known) if Arc::ptr_eq(&known.params, &params) => settings.insert(known),
                _ => settings.insert(Settings::read(app, params, &salt, &precision, &mut formats)?),
            };
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
            read.push(BatchPrompt { id, ids, options, listing, format: settings.format });
        }
        let choices = read[0].options.n;
        if read.iter().any(|prompt| prompt.options.n != choices) {
            let message = "n must be the same for all prompts of a batch";
            return Err(ApiError::bad_field("sampling_params.n", message));
        }
        Ok(Batch { prompts: read, formats, is_list, streams: request.stream.unwrap_or(false) })
    }
}

/// What prompts with the same sampling parameters share.
struct Settings {
    params: Arc<SamplingParams>,
    options: GenerateOptions,
    format: usize,
}

impl Settings {
    /// Reads sampling parameters. A form of answer is added to `formats`, unless it is the last one of them.
    fn read(
        app: &AppState,
        params: Arc<SamplingParams>,
        salt: &Option<String>,
        precision: &PrecisionFields,
        formats: &mut Vec<Option<AnswerFormat>>,
    ) -> Result<Settings, ApiError> {
        let format = asked_form(app, params.answer_format()?)?;
        if formats.last() != Some(&format) {
            formats.push(format);
        }
        let options = params.sampling_fields(salt.clone())?.options(&app.model.sampling)?;
        let options = precision.apply(app.engine.info(), options)?;
        Ok(Settings { params, options, format: formats.len() - 1 })
    }
}

/// The sampling parameters of each prompt. They are parsed when they have been counted: as values they take much less.
fn sampling_params(
    app: &AppState,
    params: Option<OneOrMany<Map<String, Value>>>,
    count: usize,
) -> Result<Vec<Arc<SamplingParams>>, ApiError> {
    let name = "sampling_params";
    let read = |place: &str, fields| {
        let params: SamplingParams = parse_fields(place, fields)?;
        params.check_fields(&app.field_policy())?;
        Ok(Arc::new(params))
    };
    match params {
        None => Ok(vec![Arc::default(); count]),
        Some(OneOrMany::One(fields)) => Ok(vec![read(name, fields)?; count]),
        Some(OneOrMany::Many(list)) => {
            let list = of_each(list, count, name)?.into_iter().enumerate();
            list.map(|(index, fields)| read(&format!("{name}[{index}]"), fields)).collect()
        }
    }
}

/// The token ids of the prompts, and whether they came as a list.
fn prompts(app: &AppState, request: &mut GenerateRequest) -> Result<(Vec<Vec<u32>>, bool), ApiError> {
    let (prompts, is_list) = match (request.text.take(), request.input_ids.take()) {
        (Some(_), Some(_)) => {
            return Err(ApiError::bad_field("text", "text and input_ids exclude each other"));
        }
        (None, None) => return Err(ApiError::bad_field("text", "there is neither text nor input_ids")),
        (None, Some(Ids::One(ids))) => (vec![ids], false),
        (None, Some(Ids::Many(lists))) => (lists, true),
        (Some(text), None) => {
            let is_list = matches!(text, OneOrMany::Many(_));
            let texts = text.into_vec();
            let context = app.engine.info().context;
            let encode = |text: &String| {
                app.model.check_length(text, context, "text")?;
                app.model.encode(text, "text")
            };
            (texts.iter().map(encode).collect::<Result<_, ApiError>>()?, is_list)
        }
    };
    if prompts.is_empty() {
        return Err(ApiError::bad_field("text", "the batch is empty"));
    }
    Ok((prompts, is_list))
}

/// The ids of the requests to the engine, one for each prompt.
fn request_ids(given: Option<OneOrMany<String>>, count: usize) -> Result<Vec<Arc<str>>, ApiError> {
    let fresh = || fresh_id("gen-");
    match given {
        Some(OneOrMany::One(id)) if count == 1 => Ok(vec![request_id(Some(&id), &fresh())?]),
        Some(OneOrMany::One(id)) => {
            let id = request_id(Some(&id), &fresh())?;
            Ok((0..count).map(|index| format!("{id}_{index}").into()).collect())
        }
        Some(OneOrMany::Many(list)) => {
            let ids = of_each(list, count, "rid")?;
            ids.iter().map(|id| request_id(Some(id), &fresh())).collect()
        }
        None => Ok((0..count).map(|_| fresh().into()).collect()),
    }
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
