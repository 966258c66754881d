//! `/tokenize` and `/detokenize`.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::http::JsonBody;
use crate::protocol::{ApiError, Door, Ids, OneOrMany, OpenAiRequest, UnreadFields, text_error};
use crate::state::AppState;
use crate::text::{Chat, bytes_of};

/// The body of `/tokenize`: a text, several, or a chat.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct TokenizeRequest {
    model: Option<String>,
    prompt: Option<OneOrMany<String>>,
    text: Option<OneOrMany<String>>,
    content: Option<String>,
    messages: Option<Vec<Value>>,
    tools: Option<Vec<Value>>,
    add_special_tokens: Option<bool>,
    add_special: Option<bool>,
    parse_special: Option<bool>,
    with_pieces: Option<bool>,
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
            let text = chat.render(&app.model, &app.options)?;
            app.model.encode_chat(&app.memory, None, text)
        });
        let ids = ids.await?.ids;
        return Ok(Json(answer(json!(ids), ids.len().into())));
    }
    // llama.cpp's clients send `content`, and expect no begin token unless they ask for it.
    let add_special = request.add_special_tokens.or(request.add_special).unwrap_or(request.content.is_none());
    let prompt = request.prompt.or(request.text).or(request.content.map(OneOrMany::One));
    let Some(prompt) = prompt else {
        return Err(ApiError::bad_field("prompt", "there is neither a prompt nor messages"));
    };
    let many = matches!(prompt, OneOrMany::Many(_));
    let texts = prompt.into_vec();
    let parse_special = request.parse_special.unwrap_or(true);
    let lists = app.encode(texts.iter().map(String::len).sum(), move |app| {
        let encode = |text: &String| {
            if add_special && parse_special {
                return app.model.encode(text, "prompt");
            }
            let tokenizer = app.model.tokenizer();
            let encoded = match parse_special {
                true => tokenizer.encode_with_special_tokens_parsed(text, false),
                false => tokenizer.encode(text, add_special),
            };
            encoded.map_err(|error| text_error("prompt", &error))
        };
        texts.iter().map(encode).collect::<Result<Vec<_>, ApiError>>()
    });
    let mut lists = lists.await?;
    let with_pieces = request.with_pieces.unwrap_or(false);
    if with_pieces && !many {
        let ids = lists.pop().unwrap_or_default();
        let pieces: Vec<Value> =
            ids.iter().map(|&id| piece(id, bytes_of(app.model.tokenizer(), id))).collect();
        return Ok(Json(answer(json!(pieces), ids.len().into())));
    }
    if with_pieces {
        return Err(ApiError::bad_field("with_pieces", "with_pieces needs a single text"));
    }
    if many {
        let counts: Vec<usize> = lists.iter().map(Vec::len).collect();
        return Ok(Json(answer(json!(lists), json!(counts))));
    }
    let ids = lists.pop().unwrap_or_default();
    Ok(Json(answer(json!(ids), ids.len().into())))
}

/// A token and its text, or its bytes where they are only part of a character.
fn piece(id: u32, bytes: &[u8]) -> Value {
    match std::str::from_utf8(bytes) {
        Ok(text) => json!({"id": id, "piece": text}),
        Err(_) => json!({"id": id, "piece": bytes}),
    }
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
    // llama.cpp's clients read `content`, in which special tokens are shown.
    let content = match &request.tokens {
        Ids::One(ids) if request.skip_special_tokens.is_none() => {
            json!(app.model.decode(ids, false, "tokens")?)
        }
        _ => text.clone(),
    };
    Ok(Json(json!({"text": text, "prompt": text, "content": content})))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_characters_are_bytes() {
        assert_eq!(piece(3, "é".as_bytes()), json!({"id": 3, "piece": "é"}));
        assert_eq!(piece(3, &[0xe2, 0x82]), json!({"id": 3, "piece": [0xe2, 0x82]}));
    }
}
