//! `/tokenize` and `/detokenize`.

use std::io;
use std::sync::Arc;

use axum::extract::State;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::chat::render;
use crate::http::JsonBody;
use crate::protocol::{
    ApiError, Ids, OneOrMany, OpenAiRequest, RequestKind, UnreadFields, at_most, check_forms, text_error,
};
use crate::state::AppState;
use crate::text::bytes_of;

/// The most bytes of text that are tokenized: more than a context holds, so that clients can find out by how much.
const MAX_TEXT_BYTES: usize = 4 << 20;

/// The most tokens that are listed with their texts, or turned into text where the context is smaller.
const MAX_PIECES: usize = 262_144;

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

/// The answer of `/tokenize`.
#[derive(Serialize)]
struct Tokenized<T, C> {
    tokens: T,
    count: C,
    max_model_len: usize,
}

/// A token and its text, or its bytes where they are only part of a character.
#[derive(Serialize)]
struct Piece<'t> {
    id: u32,
    piece: TextOrBytes<'t>,
}

#[derive(Serialize)]
#[serde(untagged)]
enum TextOrBytes<'t> {
    Text(&'t str),
    Bytes(&'t [u8]),
}

/// `/tokenize`: the token ids of texts or of a chat.
pub(crate) async fn tokenize(
    State(app): State<Arc<AppState>>,
    JsonBody(request, memory): JsonBody<TokenizeRequest>,
) -> Result<Response, ApiError> {
    let (answer, _memory) = app.encode_body(memory, |app| request.answer(app)).await?;
    Ok(([(header::CONTENT_TYPE, "application/json")], answer).into_response())
}

impl TokenizeRequest {
    /// The body of the answer. For texts of any length, this is work for [`AppState::encode_body`].
    fn answer(self, app: &AppState) -> Result<Bytes, ApiError> {
        let policy = app.field_policy();
        self.unread.check(RequestKind::Tokenize, &policy)?;
        check_forms(None, None, self.tools.as_deref(), &policy)?;
        app.model.check_name(self.model.as_deref())?;
        let max_model_len = app.engine.info().context;
        self.check_one_text()?;
        if self.messages.as_ref().is_some_and(|messages| !messages.is_empty() || !self.has_text()) {
            let mut chat = OpenAiRequest::of_chat(self.messages, self.tools, self.add_generation_prompt);
            let ids = render(app, &mut chat, None)?.ids;
            return written(app, "messages", &Tokenized { count: ids.len(), tokens: ids, max_model_len });
        }
        // llama.cpp's clients send `content`, and expect no begin token unless they ask for it.
        let add_special = self.add_special_tokens.or(self.add_special).unwrap_or(self.content.is_none());
        let sent =
            [("prompt", self.prompt), ("text", self.text), ("content", self.content.map(OneOrMany::One))];
        // An empty text beside another is what clients send for none.
        let empty = |text: &OneOrMany<String>| match text {
            OneOrMany::One(text) => text.is_empty(),
            OneOrMany::Many(texts) => texts.is_empty(),
        };
        let sent = sent.into_iter().filter_map(|(name, text)| Some((name, text?)));
        let Some((field, prompt)) = sent.min_by_key(|(_, text)| empty(text)) else {
            let message = "there is nothing to tokenize: send content, prompt, text or messages";
            return Err(ApiError::bad_field("prompt", message));
        };
        let many = matches!(prompt, OneOrMany::Many(_));
        let texts = prompt.into_vec();
        let bytes: usize = texts.iter().map(String::len).sum();
        if bytes > MAX_TEXT_BYTES {
            let message =
                format!("{field} has {bytes} bytes of text, at most {MAX_TEXT_BYTES} are tokenized");
            return Err(ApiError::bad_field(field, message));
        }
        let parse_special = self.parse_special.unwrap_or(true);
        let tokenizer = app.model.tokenizer();
        let encode = |text: &String| {
            if add_special && parse_special {
                return app.model.encode(text, field);
            }
            let encoded = match parse_special {
                true => tokenizer.encode_with_special_tokens_parsed(text, false),
                false => tokenizer.encode(text, add_special),
            };
            encoded.map_err(|error| text_error(field, &error))
        };
        let mut lists = texts.iter().map(encode).collect::<Result<Vec<_>, ApiError>>()?;
        let with_pieces = self.with_pieces.unwrap_or(false);
        if with_pieces && many {
            return Err(ApiError::bad_field("with_pieces", "with_pieces needs a single text"));
        }
        if many {
            let count: Vec<usize> = lists.iter().map(Vec::len).collect();
            return written(app, field, &Tokenized { tokens: lists, count, max_model_len });
        }
        let ids = lists.pop().unwrap_or_default();
        let count = ids.len();
        if !with_pieces {
            return written(app, field, &Tokenized { tokens: ids, count, max_model_len });
        }
        at_most(field, "tokens", count, MAX_PIECES)?;
        let tokens: Vec<Piece<'_>> = ids.iter().map(|&id| Piece::new(id, bytes_of(tokenizer, id))).collect();
        written(app, field, &Tokenized { tokens, count, max_model_len })
    }
}

impl TokenizeRequest {
    /// Whether there is a text, even an empty one.
    fn has_text(&self) -> bool {
        self.prompt.is_some() || self.text.is_some() || self.content.is_some()
    }

    /// Refuses two fields that say different things to tokenize.
    fn check_one_text(&self) -> Result<(), ApiError> {
        let filled = |text: &Option<OneOrMany<String>>| match text {
            None => false,
            Some(OneOrMany::One(text)) => !text.is_empty(),
            Some(OneOrMany::Many(texts)) => !texts.is_empty(),
        };
        let said = [
            ("prompt", filled(&self.prompt)),
            ("text", filled(&self.text)),
            ("content", self.content.as_ref().is_some_and(|text| !text.is_empty())),
            ("messages", self.messages.as_ref().is_some_and(|messages| !messages.is_empty())),
        ];
        let mut said = said.into_iter().filter(|(_, said)| *said).map(|(name, _)| name);
        match (said.next(), said.next()) {
            (Some(one), Some(other)) => {
                let message = format!("{one} and {other} exclude each other; send one of them");
                Err(ApiError::bad_field(other, message))
            }
            _ => Ok(()),
        }
    }
}

impl Piece<'_> {
    fn new(id: u32, bytes: &[u8]) -> Piece<'_> {
        let piece = str::from_utf8(bytes).map_or(TextOrBytes::Bytes(bytes), TextOrBytes::Text);
        Piece { id, piece }
    }
}

/// An answer as JSON, of at most as many bytes as a body may have; `field` is where it comes from. What lists as many
/// values as these is written without a [`serde_json::Value`] for each, and takes memory of that for bodies until it is sent.
fn written(app: &AppState, field: &str, answer: &impl Serialize) -> Result<Bytes, ApiError> {
    let mut out = Bounded { bytes: Vec::new(), most: app.options.body_bytes };
    serde_json::to_writer(&mut out, answer).map_err(|_| too_long(app, field))?;
    app.bodies.answer(out.bytes)
}

fn too_long(app: &AppState, field: &str) -> ApiError {
    let most = app.options.body_bytes;
    let message =
        format!("{field}: the answer would have more than {most} bytes (--max-body); send less at a time");
    ApiError::bad_field(field, message)
}

/// Takes no more than `most` bytes.
struct Bounded {
    bytes: Vec<u8>,
    most: usize,
}

impl io::Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if bytes.len() > self.most - self.bytes.len() {
            return Err(io::ErrorKind::StorageFull.into());
        }
        self.bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
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

/// The answer of `/detokenize`.
#[derive(Serialize)]
struct Detokenized<'t, T> {
    text: &'t T,
    prompt: &'t T,
    /// What llama.cpp's clients read: special tokens are shown.
    content: &'t T,
}

/// `/detokenize`: the texts of token ids.
pub(crate) async fn detokenize(
    State(app): State<Arc<AppState>>,
    JsonBody(request, memory): JsonBody<DetokenizeRequest>,
) -> Result<Response, ApiError> {
    let (answer, _memory) = app.encode_body(memory, |app| request.answer(app)).await?;
    Ok(([(header::CONTENT_TYPE, "application/json")], answer).into_response())
}

impl DetokenizeRequest {
    /// The body of the answer, as with [`TokenizeRequest::answer`].
    fn answer(self, app: &AppState) -> Result<Bytes, ApiError> {
        self.unread.check(RequestKind::Detokenize, &app.field_policy())?;
        app.model.check_name(self.model.as_deref())?;
        let lists = match &self.tokens {
            Ids::One(ids) => std::slice::from_ref(ids),
            Ids::Many(lists) => lists,
        };
        let count = lists.iter().map(Vec::len).sum();
        at_most("tokens", "token ids", count, MAX_PIECES.max(app.engine.info().context))?;
        let skip = self.skip_special_tokens.unwrap_or(true);
        // A token may stand for hundreds of bytes, so a text is measured before it is made.
        let tokenizer = app.model.tokenizer();
        let said = lists.iter().flatten().filter(|&&id| !(skip && tokenizer.is_special(id)));
        let bytes: usize = said.map(|&id| bytes_of(tokenizer, id).len()).sum();
        if bytes > app.options.body_bytes {
            return Err(too_long(app, "tokens"));
        }
        let decode = |ids: &[u32], skip| app.model.decode(ids, skip, "tokens");
        match &self.tokens {
            Ids::One(ids) => {
                let text = decode(ids, skip)?;
                let shown = self.skip_special_tokens.is_none().then(|| decode(ids, false)).transpose()?;
                let content = shown.as_ref().unwrap_or(&text);
                written(app, "tokens", &Detokenized { text: &text, prompt: &text, content })
            }
            Ids::Many(lists) => {
                let texts =
                    lists.iter().map(|ids| decode(ids, skip)).collect::<Result<Vec<_>, ApiError>>()?;
                written(app, "tokens", &Detokenized { text: &texts, prompt: &texts, content: &texts })
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn parts_of_characters_are_bytes() {
        let piece = |bytes| json!(Piece::new(3, bytes));
        assert_eq!(piece("é".as_bytes()), json!({"id": 3, "piece": "é"}));
        assert_eq!(piece(&[0xe2, 0x82]), json!({"id": 3, "piece": [0xe2, 0x82]}));
    }
}
