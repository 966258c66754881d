//! `/v1/embeddings`: a vector for each text, from the last hidden states of the model.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use oscar_engine::{FinishReason, GenerateOptions, Summary};
use oscar_model::SamplingDefaults;
use serde_json::{Value, json};

use super::collect::collect;
use super::fresh_id;
use crate::http::JsonBody;
use crate::protocol::{
    ApiError, EmbeddingEncoding, EmbeddingsRequest, Prompt, RequestKind, SamplingFields, SentNames, Usage,
};
use crate::requests::{AnswerStream, PromptRequest, request_id};
use crate::state::AppState;

/// What is left of a request when it has been read.
struct Asked {
    id: Arc<str>,
    prompts: Vec<(Vec<u32>, GenerateOptions)>,
    encoding: EmbeddingEncoding,
}

impl Asked {
    /// Reads a request. For bodies of any size, this is work for [`AppState::encode_body`].
    fn read(app: &AppState, mut request: EmbeddingsRequest) -> Result<Asked, ApiError> {
        request.unread.check(RequestKind::Embeddings, &app.field_policy())?;
        app.model.check_name(request.model.as_deref())?;
        let encoding = request.encoding()?;
        request.check_dimensions(app.engine.info().hidden_size)?;
        let embedding = Some(request.pooling()?);
        let options = GenerateOptions { embedding, ..Computation::options(request.cache_salt.take())? };
        let input = request.input.take().ok_or_else(|| ApiError::bad_field("input", "there is no input"))?;
        app.check_batch(input.count(), "input")?;
        let id = request_id(request.rid.as_deref(), &fresh_id("embd-"))?;
        let prompts = encode(app, input)?.into_iter().map(|prompt| (prompt, options.clone())).collect();
        Ok(Asked { id, prompts, encoding })
    }
}

/// `/v1/embeddings`: the embeddings of one text or of several.
pub(crate) async fn embeddings(
    State(app): State<Arc<AppState>>,
    JsonBody(request, memory): JsonBody<EmbeddingsRequest>,
) -> Result<Json<Value>, ApiError> {
    let (asked, memory) = app.encode_body(memory, move |app| Asked::read(app, request)).await?;
    let Asked { id, prompts, encoding } = asked;
    let computation = Computation::begin(&app, &id, prompts, "input")?;
    drop(memory);
    let mut usage = Usage::default();
    let mut data = Vec::new();
    for (index, summary) in computation.summaries().await?.iter().enumerate() {
        usage.add(0, summary);
        let vector = normalised(summary.embedding.as_deref().unwrap_or_default())?;
        data.push(json!({"object": "embedding", "index": index, "embedding": written(&vector, encoding)}));
    }
    Ok(Json(json!({"object": "list", "data": data, "model": app.model.name, "usage": usage})))
}

/// Prompts that the engine computes, and of which nothing is generated.
pub(super) struct Computation {
    answers: AnswerStream,
    count: usize,
    names: SentNames,
}

impl Computation {
    /// Options that generate nothing.
    pub(super) fn options(cache_salt: Option<String>) -> Result<GenerateOptions, ApiError> {
        let fields = SamplingFields { max_tokens: Some(0), cache_salt, ..SamplingFields::default() };
        fields.options(&SamplingDefaults::default())
    }

    /// Hands prompts to the engine. `field` is where they come from.
    pub(super) fn begin(
        app: &Arc<AppState>,
        id: &Arc<str>,
        prompts: Vec<(Vec<u32>, GenerateOptions)>,
        field: &'static str,
    ) -> Result<Computation, ApiError> {
        let context = app.engine.info().context;
        for (prompt, _) in &prompts {
            if prompt.is_empty() {
                return Err(ApiError::bad_field(field, format!("{field} has no tokens")));
            }
            if prompt.len() > context {
                let message = format!("{field} has {} tokens, the context has {context}", prompt.len());
                return Err(ApiError::bad_field(field, message).with_code("context_length_exceeded"));
            }
        }
        let asked = prompts.into_iter().map(|(prompt, options)| PromptRequest {
            id: Arc::clone(id),
            prompt,
            options,
            filter: None,
        });
        let asked: Vec<PromptRequest> = asked.collect();
        let count = asked.len();
        let names = SentNames::of_prompt(field);
        let answers = AnswerStream::submit(app, asked).map_err(|error| names.restore(error))?;
        Ok(Computation { answers, count, names })
    }

    /// Waits for all prompts, and gives what is known of them in order.
    pub(super) async fn summaries(mut self) -> Result<Vec<Summary>, ApiError> {
        let whole = collect(&mut self.answers, self.count, 1, false).await;
        let whole = whole.map_err(|error| self.names.restore(error))?;
        if whole.iter().any(|answer| answer.summary.finish == FinishReason::Cancelled) {
            return Err(ApiError::aborted());
        }
        Ok(whole.into_iter().map(|answer| answer.summary).collect())
    }
}

/// The token ids of each text.
fn encode(app: &AppState, input: Prompt) -> Result<Vec<Vec<u32>>, ApiError> {
    let texts = match input {
        Prompt::Text(text) => vec![text],
        Prompt::Texts(texts) if texts.is_empty() => {
            return Err(ApiError::bad_field("input", "the list of texts is empty"));
        }
        Prompt::Texts(texts) => texts,
        Prompt::Ids(ids) => return Ok(vec![ids]),
        Prompt::IdLists(lists) => return Ok(lists),
    };
    let encode = |text: &String| {
        app.model.check_length(text, app.engine.info().context, "input")?;
        app.model.encode(text, "input")
    };
    texts.iter().map(encode).collect()
}

/// The vector with length 1.
fn normalised(vector: &[f32]) -> Result<Vec<f32>, ApiError> {
    let length = vector.iter().map(|&value| f64::from(value).powi(2)).sum::<f64>().sqrt();
    if !length.is_normal() {
        return Err(ApiError::internal(&"the hidden states of a prompt are not finite, or all are zero"));
    }
    Ok(vector.iter().map(|&value| (f64::from(value) / length) as f32).collect())
}

fn written(vector: &[f32], encoding: EmbeddingEncoding) -> Value {
    match encoding {
        EmbeddingEncoding::Float => json!(vector),
        EmbeddingEncoding::Base64 => {
            let bytes: Vec<u8> = vector.iter().flat_map(|value| value.to_le_bytes()).collect();
            base64(&bytes).into()
        }
    }
}

fn base64(bytes: &[u8]) -> String {
    const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for group in bytes.chunks(3) {
        let bits =
            (0..3).fold(0u32, |bits, index| bits << 8 | u32::from(group.get(index).copied().unwrap_or(0)));
        for digit in 0..4 {
            let index = (bits >> (18 - 6 * digit)) as usize % 64;
            text.push(if digit <= group.len() { char::from(ALPHABET[index]) } else { '=' });
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base64_is_that_of_the_standard() {
        for (bytes, text) in [
            ("", ""),
            ("f", "Zg=="),
            ("fo", "Zm8="),
            ("foo", "Zm9v"),
            ("foob", "Zm9vYg=="),
            ("fooba", "Zm9vYmE="),
            ("foobar", "Zm9vYmFy"),
        ] {
            assert_eq!(base64(bytes.as_bytes()), text);
        }
        assert_eq!(base64(&[0xfb, 0xff, 0xbf]), "+/+/");
    }

    #[test]
    fn vectors_get_length_one() {
        assert_eq!(normalised(&[3.0, -4.0]).unwrap(), [0.6, -0.8]);
        for bad in [&[][..], &[0.0, 0.0], &[f32::NAN, 1.0], &[f32::INFINITY]] {
            assert!(normalised(bad).is_err());
        }
    }
}
