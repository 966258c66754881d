//! The request of llama.cpp's own `/completion`.

use std::collections::HashMap;

use oscar_model::text::Tokenizer;
use serde::Deserialize;
use serde_json::{Number, Value, json};

use super::sampling::{MAX_BIASES, SamplingFields};
use super::{AnswerFormat, ApiError, OneOrMany, PrecisionFields, Prompt, UnreadFields, at_most, text_error};

/// What `false` in a `logit_bias` adds to a logit: enough that the token is never drawn.
const NEVER: f32 = -1e9;

/// The body of a request to `/completion`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct LlamaRequest {
    pub(crate) prompt: Option<Prompt>,
    pub(crate) stream: Option<bool>,
    pub(crate) n_predict: Option<i64>,
    temperature: Option<f32>,
    top_k: Option<i64>,
    top_p: Option<f32>,
    min_p: Option<f32>,
    typical_p: Option<f32>,
    seed: Option<Number>,
    repeat_penalty: Option<f32>,
    repeat_last_n: Option<i64>,
    presence_penalty: Option<f32>,
    frequency_penalty: Option<f32>,
    pub(crate) logit_bias: Option<Value>,
    stop: Option<OneOrMany<String>>,
    ignore_eos: Option<bool>,
    n_probs: Option<u32>,
    pub(crate) return_tokens: Option<bool>,
    grammar: Option<String>,
    json_schema: Option<Value>,

    // Extensions, under the names of the other interfaces.
    pub(crate) rid: Option<String>,
    cache_salt: Option<String>,
    kv_precision: Option<Value>,
    kv_demote: Option<bool>,

    #[serde(flatten)]
    pub(crate) unread: UnreadFields,
}

impl LlamaRequest {
    /// What the request says about the format of its answer.
    pub(crate) fn answer_format(&self) -> Result<AnswerFormat, ApiError> {
        Ok(AnswerFormat::from_body(&json!({"grammar": self.grammar, "json_schema": self.json_schema}))?)
    }

    /// The number of alternatives to each token, if their probabilities are asked for.
    pub(crate) fn logprobs(&self) -> Option<usize> {
        self.n_probs.filter(|&count| count > 0).map(|count| count as usize)
    }

    /// What the request says about the precision of its history.
    pub(crate) fn precision(&self) -> PrecisionFields {
        PrecisionFields { kv_precision: self.kv_precision.clone(), kv_demote: self.kv_demote }
    }

    /// The sampling parameters under the names that all interfaces share.
    pub(crate) fn sampling_fields(&mut self, tokenizer: &Tokenizer) -> Result<SamplingFields, ApiError> {
        let bias = self.logit_bias.take().map(|bias| logit_bias(&bias, tokenizer)).transpose()?;
        Ok(SamplingFields {
            // Less than 0 is no limit.
            max_tokens: self.n_predict.and_then(|count| u64::try_from(count).ok()),
            temperature: self.temperature,
            top_k: self.top_k.map(|count| count.max(0)),
            top_p: self.top_p,
            min_p: self.min_p,
            typical_p: self.typical_p,
            // -1 is any seed.
            seed: self.seed.take().filter(|seed| seed.as_i64() != Some(-1)),
            repetition_penalty: repetition_penalty(self.repeat_penalty, self.repeat_last_n)?,
            presence_penalty: self.presence_penalty,
            frequency_penalty: self.frequency_penalty,
            logit_bias: bias,
            stop: self.stop.take(),
            ignore_eos: self.ignore_eos,
            cache_salt: self.cache_salt.take(),
            ..SamplingFields::default()
        })
    }
}

/// The penalty of tokens under llama.cpp's name, which counts in the last tokens only, or in none of them where that is 0.
pub(super) fn repetition_penalty(penalty: Option<f32>, last: Option<i64>) -> Result<Option<f32>, ApiError> {
    if penalty.is_some_and(|penalty| penalty != 1.0) && last.is_some_and(|count| count > 0) {
        let message = "repeat_last_n: repeat_penalty is on the whole text; send -1 or nothing";
        return Err(ApiError::unsupported("repeat_last_n", message));
    }
    Ok(penalty.filter(|_| last != Some(0)))
}

/// Reads `logit_bias`: pairs of a token id or a text and what is added to the logit of its tokens, or `false`; or an object
/// of the same.
fn logit_bias(value: &Value, tokenizer: &Tokenizer) -> Result<HashMap<String, f32>, ApiError> {
    let wrong =
        || ApiError::bad_field("logit_bias", "logit_bias must be a list of pairs of a token and a number");
    let pairs: Vec<(Value, &Value)> = match value {
        Value::Array(list) => {
            let pair = |entry: &'_ Value| match entry.as_array().map(Vec::as_slice) {
                Some([token, _]) => Some(token.clone()),
                _ => None,
            };
            let tokens = list.iter().map(pair).collect::<Option<Vec<Value>>>().ok_or_else(wrong)?;
            tokens.into_iter().zip(list.iter().map(|entry| &entry[1])).collect()
        }
        // The names of fields are texts, also where they are ids.
        Value::Object(fields) => {
            let token =
                |name: &String| name.parse::<u64>().map_or_else(|_| name.as_str().into(), Value::from);
            fields.iter().map(|(name, bias)| (token(name), bias)).collect()
        }
        _ => return Err(wrong()),
    };
    at_most("logit_bias", "entries", pairs.len(), MAX_BIASES)?;
    let mut biases = HashMap::new();
    for (token, bias) in pairs {
        let bias = match bias {
            Value::Bool(false) => NEVER,
            other => other.as_f64().ok_or_else(wrong)? as f32,
        };
        let ids = match &token {
            Value::String(text) => {
                tokenizer.encode(text, false).map_err(|error| text_error("logit_bias", &error))?
            }
            id => vec![id.as_u64().and_then(|id| u32::try_from(id).ok()).ok_or_else(wrong)?],
        };
        biases.extend(ids.into_iter().map(|id| (id.to_string(), bias)));
    }
    Ok(biases)
}
