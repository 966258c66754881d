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
use crate::protocol::{ApiError, Door, ScoreRequest, Usage, text_error};
use crate::state::{AppState, unix_seconds};

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
    request.unread.check(Door::Score, app.options.unknown_fields)?;
    app.model.check_name(request.model.as_deref())?;
    app.check_batch(request.count(), "text_2")?;
    let texts = request.take_pairs()?;
    let bytes = texts.iter().map(|(first, second)| first.len() + second.len()).sum();
    let encode =
        move |app: &AppState| texts.iter().map(|(first, second)| Pair::new(app, first, second)).collect();
    let pairs: Vec<Pair> = app.encode(bytes, encode).await?;
    let options = Computation::options(request.cache_salt.take())?;
    let prompts = pairs.into_iter().map(|Pair { prompt, second }| {
        (prompt, GenerateOptions { prompt_logprobs: Some(0), score_from: second, ..options.clone() })
    });
    let id = fresh_id("score-");
    let rid = request.rid.take().unwrap_or_else(|| id.clone());
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

impl Pair {
    /// The tokens of the first text as of a prompt, and behind them those of the second by itself.
    fn new(app: &AppState, first: &str, second: &str) -> Result<Pair, ApiError> {
        let context = app.engine.info().context;
        app.model.check_length(first, context, "text_1")?;
        app.model.check_length(second, context, "text_2")?;
        let mut prompt = app.model.encode(first, "text_1")?;
        let following = app.model.tokenizer().encode_with_special_tokens_parsed(second, false);
        let following = following.map_err(|error| text_error("text_2", &error))?;
        for (field, tokens) in [("text_1", &prompt), ("text_2", &following)] {
            if tokens.is_empty() {
                return Err(ApiError::bad_field(field, format!("{field} has no tokens")));
            }
        }
        let second = prompt.len();
        prompt.extend(following);
        Ok(Pair { prompt, second })
    }
}
