//! Sampling parameters and limits of an answer: the fields that all interfaces share, checked and handed to the engine.

use std::collections::HashMap;

use oscar_engine::{GenerateOptions, SamplingOptions};
use oscar_model::SamplingDefaults;
use serde::de::{DeserializeOwned, Error};
use serde::{Deserialize, Deserializer};
use serde_json::{Map, Number, Value};

use super::{ApiError, OneOrMany, at_most};

/// The most stop texts of a request, and the most bytes of one: each is looked for after every token.
const MAX_STOPS: usize = 32;
const MAX_STOP_BYTES: usize = 1024;

/// The most token ids that may end an answer: each is looked for after every token.
const MAX_STOP_TOKENS: usize = 1024;

/// The most entries of a `logit_bias`: each prompt of a batch has its own.
pub(super) const MAX_BIASES: usize = 4096;

/// The most bytes of a `cache_salt`.
const MAX_SALT_BYTES: usize = 1024;

/// A field that must be a JSON object: what serde derives would also take a list, as the fields in order.
#[derive(Clone, Debug)]
pub(crate) struct Object<T>(pub(crate) T);

impl<'de, T: DeserializeOwned> Deserialize<'de> for Object<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let fields = Map::<String, Value>::deserialize(deserializer)?;
        T::deserialize(Value::Object(fields)).map(Object).map_err(D::Error::custom)
    }
}

/// Sampling parameters and limits of a request, under whichever names the interface has for them.
#[derive(Clone, Debug, Default)]
pub(crate) struct SamplingFields {
    pub(crate) max_tokens: Option<u64>,
    pub(crate) min_tokens: Option<u64>,
    pub(crate) temperature: Option<f32>,
    pub(crate) top_p: Option<f32>,
    pub(crate) typical_p: Option<f32>,
    pub(crate) top_k: Option<i64>,
    pub(crate) min_p: Option<f32>,
    pub(crate) seed: Option<Number>,
    pub(crate) repetition_penalty: Option<f32>,
    pub(crate) presence_penalty: Option<f32>,
    pub(crate) frequency_penalty: Option<f32>,
    pub(crate) logit_bias: Option<HashMap<String, f32>>,
    pub(crate) stop: Option<OneOrMany<String>>,
    pub(crate) stop_token_ids: Option<Vec<u32>>,
    pub(crate) keep_stop: Option<bool>,
    pub(crate) ignore_eos: Option<bool>,
    pub(crate) skip_special_tokens: Option<bool>,
    pub(crate) n: Option<u32>,
    pub(crate) cache_salt: Option<String>,
}

impl SamplingFields {
    /// The options for the engine. `defaults` hold where the client gives nothing.
    pub(crate) fn options(self, defaults: &SamplingDefaults) -> Result<GenerateOptions, ApiError> {
        let stop = self.stop.map(OneOrMany::into_vec).unwrap_or_default();
        if stop.len() > MAX_STOPS || stop.iter().any(|text| text.len() > MAX_STOP_BYTES) {
            let message = format!("stop may have {MAX_STOPS} texts of {MAX_STOP_BYTES} bytes");
            return Err(ApiError::bad_field("stop", message));
        }
        let counts = [
            ("stop_token_ids", self.stop_token_ids.as_ref().map_or(0, Vec::len), MAX_STOP_TOKENS),
            ("logit_bias", self.logit_bias.as_ref().map_or(0, HashMap::len), MAX_BIASES),
        ];
        for (field, count, most) in counts {
            at_most(field, "entries", count, most)?;
        }
        if self.cache_salt.as_ref().is_some_and(|salt| salt.len() > MAX_SALT_BYTES) {
            let message = format!("cache_salt is longer than {MAX_SALT_BYTES} bytes");
            return Err(ApiError::bad_field("cache_salt", message));
        }
        let sampling = SamplingOptions {
            temperature: self.temperature.or(defaults.temperature).unwrap_or(1.0),
            top_p: self.top_p.or(defaults.top_p).unwrap_or(1.0),
            typical_p: self.typical_p.unwrap_or(1.0),
            top_k: self.top_k.map(top_k).transpose()?.or(defaults.top_k).unwrap_or(0),
            min_p: self.min_p.or(defaults.min_p).unwrap_or(0.0),
            seed: self.seed.map(|seed| whole_seed(&seed)).transpose()?,
            repetition_penalty: self.repetition_penalty.or(defaults.repetition_penalty).unwrap_or(1.0),
            presence_penalty: self.presence_penalty.unwrap_or(0.0),
            frequency_penalty: self.frequency_penalty.unwrap_or(0.0),
            logit_bias: self.logit_bias.map(bias).transpose()?.unwrap_or_default(),
        };
        // Clients send huge limits to say "no limit": the context ends such an answer.
        let count = |value: u64| usize::try_from(value).unwrap_or(usize::MAX);
        Ok(GenerateOptions {
            max_tokens: self.max_tokens.map(count),
            min_tokens: self.min_tokens.map_or(0, count),
            sampling,
            stop,
            stop_tokens: self.stop_token_ids.unwrap_or_default(),
            keep_stop: self.keep_stop.unwrap_or(false),
            ignore_end: self.ignore_eos.unwrap_or(false),
            keep_special: !self.skip_special_tokens.unwrap_or(true),
            n: self.n.map_or(1, |n| n as usize),
            // An empty salt is what clients send for none.
            cache_salt: self.cache_salt.filter(|salt| !salt.is_empty()),
            ..GenerateOptions::default()
        })
    }
}

/// Reads `top_k`, of which -1 and 0 keep all tokens.
fn top_k(value: i64) -> Result<usize, ApiError> {
    match value {
        -1 => Ok(0),
        value => usize::try_from(value)
            .map_err(|_| ApiError::bad_field("top_k", format!("top_k is {value}, expected -1, 0 or more"))),
    }
}

/// Reads a seed, which may be negative.
fn whole_seed(seed: &Number) -> Result<u64, ApiError> {
    let whole = seed.as_u64().or_else(|| seed.as_i64().map(i64::cast_unsigned));
    whole.ok_or_else(|| ApiError::bad_field("seed", format!("seed is {seed}, expected a whole number")))
}

fn bias(map: HashMap<String, f32>) -> Result<Vec<(u32, f32)>, ApiError> {
    let mut list = Vec::with_capacity(map.len());
    for (token, value) in map {
        let id = token.parse().map_err(|_| {
            let token: String = token.chars().take(40).collect();
            ApiError::bad_field("logit_bias", format!("logit_bias has {token:?} for a token id"))
        })?;
        list.push((id, value));
    }
    // A map has no order, and the same request should always be the same.
    list.sort_unstable_by_key(|&(id, _)| id);
    Ok(list)
}

/// A parameter for JSON: 0.6, not the nearest f32 written out in f64.
pub(crate) fn short(value: f32) -> Value {
    value.to_string().parse::<f64>().unwrap_or(f64::from(value)).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    impl SamplingFields {
        fn plain(self) -> Result<GenerateOptions, ApiError> {
            self.options(&SamplingDefaults::default())
        }
    }

    fn param(sampling_fields: SamplingFields) -> Value {
        sampling_fields.plain().unwrap_err().body()["error"]["param"].clone()
    }

    #[test]
    fn the_client_wins_over_the_model_and_the_model_over_nothing() {
        let defaults = SamplingDefaults {
            temperature: Some(0.6),
            top_p: Some(0.95),
            top_k: Some(20),
            min_p: Some(0.1),
            repetition_penalty: Some(1.05),
        };
        let sampling = SamplingFields::default().options(&defaults).unwrap().sampling;
        let expected = SamplingOptions {
            temperature: 0.6,
            top_p: 0.95,
            top_k: 20,
            min_p: 0.1,
            repetition_penalty: 1.05,
            ..SamplingOptions::default()
        };
        assert_eq!(sampling, expected);
        let said = SamplingFields {
            temperature: Some(0.0),
            top_p: Some(1.0),
            top_k: Some(-1),
            min_p: Some(0.0),
            repetition_penalty: Some(1.0),
            ..SamplingFields::default()
        };
        assert_eq!(said.options(&defaults).unwrap().sampling, SamplingOptions::default());
    }

    #[test]
    fn nothing_said_is_plain_sampling() {
        let options = SamplingFields::default().plain().unwrap();
        let sampling = SamplingOptions { temperature: 1.0, ..SamplingOptions::default() };
        assert_eq!(options, GenerateOptions { sampling, ..GenerateOptions::default() });
    }

    #[test]
    fn numbers_in_disguise_are_understood() {
        let seed = |text: &str| SamplingFields {
            seed: serde_json::from_str(text).unwrap(),
            ..SamplingFields::default()
        };
        assert_eq!(seed("-1").plain().unwrap().sampling.seed, Some(u64::MAX));
        assert_eq!(seed("18446744073709551615").plain().unwrap().sampling.seed, Some(u64::MAX));
        assert_eq!(param(seed("0.5")), "seed");
        let top_k = |k| SamplingFields { top_k: Some(k), ..SamplingFields::default() };
        assert_eq!(top_k(-1).plain().unwrap().sampling.top_k, 0);
        assert_eq!(top_k(7).plain().unwrap().sampling.top_k, 7);
        assert_eq!(param(top_k(-2)), "top_k");
        let huge = SamplingFields { max_tokens: Some(u64::MAX), ..SamplingFields::default() };
        assert_eq!(huge.plain().unwrap().max_tokens, Some(usize::MAX));
    }

    #[test]
    fn lists_are_bounded_and_bias_is_ordered() {
        let stop = OneOrMany::Many(vec!["x".to_owned(); MAX_STOPS + 1]);
        assert_eq!(param(SamplingFields { stop: Some(stop), ..SamplingFields::default() }), "stop");
        let stop_token_ids = Some(vec![1; MAX_STOP_TOKENS + 1]);
        assert_eq!(param(SamplingFields { stop_token_ids, ..SamplingFields::default() }), "stop_token_ids");
        let logit_bias = Some((0..=MAX_BIASES).map(|id| (id.to_string(), 1.0)).collect());
        assert_eq!(param(SamplingFields { logit_bias, ..SamplingFields::default() }), "logit_bias");
        let bias = |pairs: &[(&str, f32)]| SamplingFields {
            logit_bias: Some(pairs.iter().map(|&(token, value)| (token.to_owned(), value)).collect()),
            ..SamplingFields::default()
        };
        let options = bias(&[("9", 1.0), ("3", -100.0)]).plain().unwrap();
        assert_eq!(options.sampling.logit_bias, [(3, -100.0), (9, 1.0)]);
        assert_eq!(param(bias(&[("hello", 1.0)])), "logit_bias");
    }
}
