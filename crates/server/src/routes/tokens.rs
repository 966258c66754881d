//! `/tokenize` and `/detokenize`.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::http::JsonBody;
use crate::protocol::{ApiError, Door, Ids, OneOrMany, OpenAiRequest, UnreadFields, text_error};
use crate::state::AppState;
use crate::text::Chat;

/// The body of `/tokenize`: a text, several, or a chat.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct TokenizeRequest {
    model: Option<String>,
    prompt: Option<OneOrMany<String>>,
    text: Option<OneOrMany<String>>,
    messages: Option<Vec<Value>>,
    tools: Option<Vec<Value>>,
    add_special_tokens: Option<bool>,
    add_generation_prompt: Option<bool>,

    #[serde(flatten)]
    unread: UnreadFields,
}

/// `/tokenize`: the token ids of texts or of a chat.
pub(crate) async fn tokenize(
    State(app): State<Arc<AppState>>,
    JsonBody(request, _memory): JsonBody<TokenizeRequest>,
) -> Result<Json<Value>, ApiError> {
    request.unread.check(Door::Tokenize, app.options.unknown_fields)?;
    app.model.check_name(request.model.as_deref())?;
    let context = app.engine.info().context;
    let answer =
        |lists: Value, count: Value| json!({"tokens": lists, "count": count, "max_model_len": context});
    if request.messages.is_some() {
        let mut request =
            OpenAiRequest::of_chat(request.messages, request.tools, request.add_generation_prompt);
        let mut chat = Chat::new(&mut request)?;
        let ids = app.encode(usize::MAX, move |app| {
            let text = chat.render(&app.model, app.options.tool_call_parser)?;
            app.model.encode_chat(&app.memory, None, text)
        });
        let ids = ids.await?.ids;
        return Ok(Json(answer(json!(ids), ids.len().into())));
    }
    let Some(prompt) = request.prompt.or(request.text) else {
        return Err(ApiError::bad_field("prompt", "there is neither a prompt nor messages"));
    };
    let many = matches!(prompt, OneOrMany::Many(_));
    let texts = prompt.into_vec();
    let add_special = request.add_special_tokens.unwrap_or(true);
    let lists = app.encode(texts.iter().map(String::len).sum(), move |app| {
        let encode = |text: &String| {
            if add_special {
                return app.model.encode(text, "prompt");
            }
            let encoded = app.model.tokenizer().encode_with_special_tokens_parsed(text, false);
            encoded.map_err(|error| text_error("prompt", &error))
        };
        texts.iter().map(encode).collect::<Result<Vec<_>, ApiError>>()
    });
    let mut lists = lists.await?;
    if many {
        let counts: Vec<usize> = lists.iter().map(Vec::len).collect();
        return Ok(Json(answer(json!(lists), json!(counts))));
    }
    let ids = lists.pop().unwrap_or_default();
    Ok(Json(answer(json!(ids), ids.len().into())))
}

/// The body of `/detokenize`: token ids of one text or of several.
#[derive(Debug, Deserialize)]
pub(crate) struct DetokenizeRequest {
    model: Option<String>,
    tokens: Ids,
    skip_special_tokens: Option<bool>,

    #[serde(flatten)]
    unread: UnreadFields,
}

/// `/detokenize`: the texts of token ids.
pub(crate) async fn detokenize(
    State(app): State<Arc<AppState>>,
    JsonBody(request, _memory): JsonBody<DetokenizeRequest>,
) -> Result<Json<Value>, ApiError> {
    request.unread.check(Door::Detokenize, app.options.unknown_fields)?;
    app.model.check_name(request.model.as_deref())?;
    let skip = request.skip_special_tokens.unwrap_or(true);
    let text = match &request.tokens {
        Ids::One(ids) => json!(app.model.decode(ids, skip, "tokens")?),
        Ids::Many(lists) => {
            let texts = lists.iter().map(|ids| app.model.decode(ids, skip, "tokens"));
            json!(texts.collect::<Result<Vec<String>, ApiError>>()?)
        }
    };
    Ok(Json(json!({"text": text, "prompt": text})))
}
