//! The request of SGLang's own `/generate`: one prompt or a batch, with settings for all or for each.

use std::collections::HashMap;

use serde::Deserialize;
use serde_json::{Map, Number, Value, json};

use super::sampling::SamplingFields;
use super::sent_names::Aliases;
use super::{AnswerFormat, ApiError, FieldPolicy, Ids, OneOrMany, RequestKind, UnreadFields, either};

/// Tokens when the client gives no limit, as SGLang has it.
const DEFAULT_NEW_TOKENS: u64 = 128;

/// The body of a request to `/generate`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct GenerateRequest {
    pub(crate) text: Option<OneOrMany<String>>,
    pub(crate) input_ids: Option<Ids>,
    /// Parsed when they have been counted: a list may have more of them than there are prompts.
    pub(crate) sampling_params: Option<OneOrMany<Map<String, Value>>>,
    pub(crate) rid: Option<OneOrMany<String>>,
    pub(crate) return_logprob: Option<OneOrMany<bool>>,
    pub(crate) logprob_start_len: Option<OneOrMany<i64>>,
    pub(crate) top_logprobs_num: Option<OneOrMany<u32>>,
    pub(crate) return_text_in_logprobs: Option<bool>,
    pub(crate) stream: Option<bool>,
    pub(crate) cache_salt: Option<String>,
    pub(crate) extra_key: Option<String>,
    pub(crate) kv_precision: Option<Value>,
    pub(crate) kv_demote: Option<bool>,

    #[serde(flatten)]
    pub(crate) unread: UnreadFields,
}

/// The `sampling_params` of a request, under SGLang's names.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct SamplingParams {
    max_new_tokens: Option<u64>,
    min_new_tokens: Option<u64>,
    temperature: Option<f32>,
    top_p: Option<f32>,
    typical_p: Option<f32>,
    top_k: Option<i64>,
    min_p: Option<f32>,
    sampling_seed: Option<Number>,
    seed: Option<Number>,
    repetition_penalty: Option<f32>,
    presence_penalty: Option<f32>,
    frequency_penalty: Option<f32>,
    logit_bias: Option<HashMap<String, f32>>,
    stop: Option<OneOrMany<String>>,
    stop_token_ids: Option<Vec<u32>>,
    stop_regex: Option<Value>,
    ignore_eos: Option<bool>,
    skip_special_tokens: Option<bool>,
    no_stop_trim: Option<bool>,
    n: Option<u32>,
    json_schema: Option<Value>,
    regex: Option<String>,
    ebnf: Option<String>,
    structural_tag: Option<Value>,

    #[serde(flatten)]
    unread: UnreadFields,
}

impl GenerateRequest {
    /// The number of prompts, and the field that has them.
    pub(crate) fn count(&self) -> (usize, &'static str) {
        match (&self.text, &self.input_ids) {
            (Some(OneOrMany::Many(texts)), _) => (texts.len(), "text"),
            (None, Some(Ids::Many(lists))) => (lists.len(), "input_ids"),
            _ => (1, "text"),
        }
    }

    /// The fields that the client sent by another of their names than errors have.
    pub(crate) fn aliases(&self) -> Aliases {
        let params = match &self.sampling_params {
            None => &[][..],
            Some(OneOrMany::One(params)) => std::slice::from_ref(params),
            Some(OneOrMany::Many(list)) => list,
        };
        let has_seed = |params: &Map<_, _>| params.get("sampling_seed").is_some_and(|seed| !seed.is_null());
        let seeded = params.iter().any(has_seed);
        [
            ("prompt", "input_ids", self.input_ids.is_some()),
            ("seed", "sampling_params.sampling_seed", seeded),
            ("cache_salt", "extra_key", self.cache_salt.is_none() && self.extra_key.is_some()),
        ]
        .into_iter()
        .filter_map(|(name, sent, differs)| differs.then_some((name, sent)))
        .collect()
    }

    /// Leaves an empty prompt away where there are two: clients that send all fields send it for none.
    pub(crate) fn leave_empty_prompt(&mut self) {
        let Some((text, ids)) = self.text.as_ref().zip(self.input_ids.as_ref()) else { return };
        let no_ids = matches!(ids, Ids::One(ids) if ids.is_empty());
        let no_text = matches!(text, OneOrMany::One(text) if text.is_empty())
            || matches!(text, OneOrMany::Many(texts) if texts.is_empty());
        if no_ids {
            self.input_ids = None;
        } else if no_text {
            self.text = None;
        }
    }
}

impl SamplingParams {
    /// Refuses fields that nobody reads.
    pub(crate) fn check_fields(&self, policy: &FieldPolicy) -> Result<(), ApiError> {
        let policy = policy.with_penalty(self.repetition_penalty.is_some());
        self.unread.check(RequestKind::SamplingParams, &policy)
    }

    /// What the request says about the format of its answer.
    pub(crate) fn answer_format(&self) -> Result<AnswerFormat, ApiError> {
        let fields = json!({
            "json_schema": self.json_schema,
            "regex": self.regex,
            "ebnf": self.ebnf,
            "structural_tag": self.structural_tag,
            "stop_regex": self.stop_regex,
            "min_tokens": self.min_new_tokens,
            "ignore_eos": self.ignore_eos,
        });
        Ok(AnswerFormat::from_body(&fields)?)
    }

    /// The sampling parameters under the names that all interfaces share.
    pub(crate) fn sampling_fields(&self, cache_salt: Option<String>) -> Result<SamplingFields, ApiError> {
        let seed =
            either(("sampling_seed", self.sampling_seed.clone()), ("seed", self.seed.clone()), |_| false)
                .map_err(|error| error.with_param("seed"))?;
        Ok(SamplingFields {
            max_tokens: Some(self.max_new_tokens.unwrap_or(DEFAULT_NEW_TOKENS)),
            min_tokens: self.min_new_tokens,
            temperature: self.temperature,
            top_p: self.top_p,
            typical_p: self.typical_p,
            top_k: self.top_k,
            min_p: self.min_p,
            seed,
            repetition_penalty: self.repetition_penalty,
            presence_penalty: self.presence_penalty,
            frequency_penalty: self.frequency_penalty,
            logit_bias: self.logit_bias.clone(),
            stop: self.stop.clone(),
            stop_token_ids: self.stop_token_ids.clone(),
            keep_stop: self.no_stop_trim,
            ignore_eos: self.ignore_eos,
            skip_special_tokens: self.skip_special_tokens,
            n: self.n,
            cache_salt,
        })
    }
}
