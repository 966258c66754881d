//! The request of llama.cpp's own `/completion`.

use std::collections::HashMap;

use oscar_model::text::Tokenizer;
use serde::Deserialize;
use serde_json::{Number, Value, json};

use super::sampling::{MAX_BIASES, SamplingFields};
use super::{
    AnswerFormat, ApiError, FieldPolicy, OneOrMany, PrecisionFields, Prompt, RequestKind, UnreadFields,
    at_most, penalties, text_error,
};

/// What `false` in a `logit_bias` adds to a logit: enough that the token is never drawn.
const NEVER: f32 = -1e9;

/// The most bytes of all texts in a `logit_bias`, each of which is tokenized.
const MAX_BIASED_BYTES: usize = 64 << 10;

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
    unread: UnreadFields,
}

impl LlamaRequest {
    /// Refuses fields that nobody reads.
    pub(crate) fn check_fields(&self, policy: &FieldPolicy) -> Result<(), ApiError> {
        let policy = policy.with_penalty(self.repeat_penalty.is_some());
        self.unread.check(RequestKind::Completion, &policy)
    }

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
        let given = [self.repeat_penalty, self.presence_penalty, self.frequency_penalty];
        let [repetition_penalty, presence_penalty, frequency_penalty] = penalties(given, self.repeat_last_n)?;
        Ok(SamplingFields {
            // Less than 0 is no limit.
            max_tokens: self.n_predict.and_then(|count| u64::try_from(count).ok()),
            // Less than 0 is the likeliest token, as 0 is.
            temperature: self.temperature.map(|temperature| temperature.max(0.0)),
            top_k: self.top_k.map(|count| count.max(0)),
            top_p: self.top_p,
            min_p: self.min_p,
            typical_p: self.typical_p,
            // -1 is any seed.
            seed: self.seed.take().filter(|seed| seed.as_i64() != Some(-1)),
            repetition_penalty,
            presence_penalty,
            frequency_penalty,
            logit_bias: bias,
            stop: self.stop.take(),
            ignore_eos: self.ignore_eos,
            cache_salt: self.cache_salt.take(),
            ..SamplingFields::default()
        })
    }
}

/// Reads `logit_bias`: pairs of a token id or a text and what is added to the logit of its tokens, or `false`; or an object
/// of the same.
fn logit_bias(value: &Value, tokenizer: &Tokenizer) -> Result<HashMap<String, f32>, ApiError> {
    let wrong =
        || ApiError::bad_field("logit_bias", "logit_bias must be a list of pairs of a token and a number");
    let pairs: Vec<(Biased<'_>, &Value)> = match value {
        Value::Array(list) => list.iter().map(pair).collect::<Option<_>>().ok_or_else(wrong)?,
        // The names of fields are texts, also where they are ids.
        Value::Object(fields) => {
            let tokens = fields.keys().map(|name| name.parse().map_or(Biased::Text(name), Biased::Id));
            tokens.zip(fields.values()).collect()
        }
        _ => return Err(wrong()),
    };
    // Before any text is turned into tokens, and again for the tokens that texts stand for.
    let count = |entries| at_most("logit_bias", "entries", entries, MAX_BIASES);
    count(pairs.len())?;
    let bytes = pairs.iter().map(|(token, _)| match token {
        Biased::Text(text) => text.len(),
        Biased::Id(_) => 0,
    });
    at_most("logit_bias", "bytes of text", bytes.sum(), MAX_BIASED_BYTES)?;
    let mut biases = HashMap::new();
    for (token, bias) in pairs {
        let bias = match bias {
            Value::Bool(false) => NEVER,
            other => other.as_f64().ok_or_else(wrong)? as f32,
        };
        let ids = match token {
            Biased::Text(text) => {
                tokenizer.encode(text, false).map_err(|error| text_error("logit_bias", &error))?
            }
            Biased::Id(id) => vec![u32::try_from(id).map_err(|_| wrong())?],
        };
        biases.extend(ids.into_iter().map(|id| (id.to_string(), bias)));
        count(biases.len())?;
    }
    Ok(biases)
}

/// A token of a `logit_bias`, or a text whose tokens are meant.
enum Biased<'v> {
    Id(u64),
    Text(&'v str),
}

fn pair(entry: &Value) -> Option<(Biased<'_>, &Value)> {
    match entry.as_array()?.as_slice() {
        [Value::String(text), bias] => Some((Biased::Text(text), bias)),
        [id, bias] => Some((Biased::Id(id.as_u64()?), bias)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::grammar::testing::tokenizer;

    #[test]
    fn a_temperature_below_zero_is_zero() {
        let mut request: LlamaRequest = serde_json::from_str("{\"temperature\": -1}").unwrap();
        let fields = request.sampling_fields(&tokenizer("default")).unwrap();
        assert_eq!(fields.temperature, Some(0.0));
    }

    #[test]
    fn biases_are_bounded_before_texts_become_tokens() {
        let tokenizer = tokenizer("default");
        let read = |value: Value| logit_bias(&value, &tokenizer);
        assert_eq!(read(json!([["a", 1], [3, false]])).unwrap()["3"], NEVER);
        assert_eq!(read(json!({"3": 2.0})).unwrap()["3"], 2.0);
        // The first text could be refused for its tokens only after all of them had been made.
        for (value, limit) in [
            (json!([["a".repeat(MAX_BIASED_BYTES), 1], ["b", 1]]), "65536 are read"),
            (json!({"a".repeat(MAX_BIASED_BYTES + 1): 1}), "65536 are read"),
            (json!(vec![json!(["a", 1]); MAX_BIASES + 1]), "4096 are read"),
        ] {
            let error = read(value).unwrap_err();
            assert_eq!(error.param(), Some("logit_bias"));
            assert!(error.to_string().contains(limit), "{error}");
        }
        assert!(read(json!([["a".repeat(MAX_BIASED_BYTES), 1]])).is_ok());
    }
}
