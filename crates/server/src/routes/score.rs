//! `/v1/score`: how likely a text is after another, for rerankers.

use std::sync::Arc;
use std::time::SystemTime;

use axum::Json;
use axum::extract::State;
use oscar_engine::GenerateOptions;
use serde_json::{Value, json};

use super::embeddings::Computation;
use super::fresh_id;
use crate::http::JsonBody;
use crate::protocol::{ApiError, RequestKind, ScoreRequest, Usage, text_error};
use crate::requests::request_id;
use crate::state::{AppState, unix_seconds};

/// The most tokens of all pairs of a request. A first text counts in each pair: it is part of each prompt.
const MAX_TOKENS: usize = 4 << 20;

/// A pair of texts as one prompt, and where in it the second text begins.
struct Pair {
    prompt: Vec<u32>,
    second: usize,
}

/// `/v1/score`: the logarithm of the probability of `text_2` after `text_1`.
pub(crate) async fn score(
    State(app): State<Arc<AppState>>,
    JsonBody(mut request, memory): JsonBody<ScoreRequest>,
) -> Result<Json<Value>, ApiError> {
    request.unread.check(RequestKind::Score, &app.field_policy())?;
    app.model.check_name(request.model.as_deref())?;
    app.check_batch(request.count(), "text_2")?;
    let id = fresh_id("score-");
    let rid = request_id(request.rid.as_deref(), &id)?;
    let options = Computation::options(request.cache_salt.take())?;
    let texts = request.take_pairs()?;
    drop(request);
    let (pairs, memory) = app.encode_body(memory, move |app| encode(app, &texts)).await?;
    let prompts = pairs.into_iter().map(|Pair { prompt, second }| {
        (prompt, GenerateOptions { prompt_logprobs: Some(0), score_from: second, ..options.clone() })
    });
    let computation = Computation::begin(&app, &rid, prompts.collect(), "text_2")?;
    drop(memory);
    let mut usage = Usage::default();
    let mut data = Vec::new();
    for (index, summary) in computation.summaries().await?.iter().enumerate() {
        usage.add(0, summary);
        let scored = &summary.prompt_logprobs;
        let score: f64 = scored.iter().filter_map(|token| token.logprob).map(f64::from).sum();
        data.push(json!({"object": "score", "index": index, "score": score, "tokens": scored.len()}));
    }
    Ok(Json(json!({
        "id": id,
        "object": "list",
        "created": unix_seconds(SystemTime::now()),
        "model": app.model.name,
        "data": data,
        "usage": usage,
    })))
}

/// The tokens of all pairs. A first text that several pairs share is tokenized once.
fn encode(app: &AppState, texts: &[(Arc<str>, String)]) -> Result<Vec<Pair>, ApiError> {
    let context = app.engine.info().context;
    let mut known: Option<(&Arc<str>, Vec<u32>)> = None;
    let mut pairs = Vec::with_capacity(texts.len());
    let mut tokens = 0;
    for (first, second) in texts {
        let before = match known.take() {
            Some((text, ids)) if Arc::ptr_eq(text, first) => ids,
            _ => {
                app.model.check_length(first, context, "text_1")?;
                app.model.encode(first, "text_1")?
            }
        };
        app.model.check_length(second, context, "text_2")?;
        let after = app.model.tokenizer().encode_with_special_tokens_parsed(second, false);
        let after = after.map_err(|error| text_error("text_2", &error))?;
        for (field, tokens) in [("text_1", &before), ("text_2", &after)] {
            if tokens.is_empty() {
                return Err(ApiError::bad_field(field, format!("{field} has no tokens")));
            }
        }
        tokens += before.len() + after.len();
        if tokens > MAX_TOKENS {
            let message =
                format!("text_1 and text_2 have more than {MAX_TOKENS} tokens in all pairs together");
            return Err(ApiError::bad_field("text_2", message));
        }
        pairs.push(Pair { prompt: [before.as_slice(), &after].concat(), second: before.len() });
        known = Some((first, before));
    }
    Ok(pairs)
}
