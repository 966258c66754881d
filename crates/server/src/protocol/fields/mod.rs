//! Fields that the type of a request does not have. Some are known to change nothing, some ask for what is not there;
//! nobody knows what the others ask for, so they are refused by name rather than passed over.

mod aliases;
mod forms;
mod known;

use oscar_model::SamplingDefaults;
use serde::Deserialize;
use serde_json::{Map, Value};

pub(crate) use self::aliases::{either, penalties};
pub(crate) use self::forms::{check_forms, check_forms_of_messages, check_forms_of_responses};
use self::known::{Known, known, neutral_elsewhere};
use super::ApiError;
use crate::options::UnknownFields;

/// The longest name of a field in bytes that an error repeats.
const MAX_NAME: usize = 80;

/// The kinds of requests, and of objects within them, each with fields of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RequestKind {
    Chat,
    Completions,
    Responses,
    Messages,
    Generate,
    /// The `sampling_params` of `/generate`.
    SamplingParams,
    /// llama.cpp's `/completion`.
    Completion,
    Tokenize,
    Detokenize,
    Embeddings,
    Score,
    /// `POST /oscar/cache`.
    Cache,
    Abort,
    /// The `stream_options` of chats and completions.
    StreamOptions,
    /// The `text` of `/v1/responses`.
    TextSettings,
    /// The `reasoning` of `/v1/responses`.
    ReasoningSettings,
    /// The `thinking` of `/v1/messages`.
    Thinking,
    /// The `output_config` of `/v1/messages`.
    OutputConfig,
}

impl RequestKind {
    /// What errors call it: a route, or the field of a body in which the fields are.
    fn name(self) -> &'static str {
        match self {
            RequestKind::Chat => "/v1/chat/completions",
            RequestKind::Completions => "/v1/completions",
            RequestKind::Responses => "/v1/responses",
            RequestKind::Messages => "/v1/messages",
            RequestKind::Generate => "/generate",
            RequestKind::SamplingParams => "sampling_params",
            RequestKind::Completion => "/completion",
            RequestKind::Tokenize => "/tokenize",
            RequestKind::Detokenize => "/detokenize",
            RequestKind::Embeddings => "/v1/embeddings",
            RequestKind::Score => "/v1/score",
            RequestKind::Cache => "/oscar/cache",
            RequestKind::Abort => "/abort_request",
            RequestKind::StreamOptions => "stream_options",
            RequestKind::TextSettings => "text",
            RequestKind::ReasoningSettings => "reasoning",
            RequestKind::Thinking => "thinking",
            RequestKind::OutputConfig => "output_config",
        }
    }

    /// Whether its fields are within a field of a body.
    fn is_within_another(self) -> bool {
        !self.name().starts_with('/') && self != RequestKind::SamplingParams
    }

    /// Whether tokens are drawn for such requests.
    fn draws(self) -> bool {
        matches!(
            self,
            RequestKind::Chat
                | RequestKind::Completions
                | RequestKind::Responses
                | RequestKind::Messages
                | RequestKind::Generate
                | RequestKind::SamplingParams
                | RequestKind::Completion
        )
    }

    /// The path of a field in the body.
    fn path(self, field: &str) -> String {
        let name = self.name();
        if name.starts_with('/') { field.to_owned() } else { format!("{name}.{field}") }
    }
}

/// How fields are checked that nobody reads.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct FieldPolicy {
    /// What happens to those that may change an answer.
    pub(crate) unknown: UnknownFields,
    /// How an answer is drawn where a request says nothing that is read.
    pub(crate) drawn: SamplingDefaults,
}

impl FieldPolicy {
    /// The policy for a request that has a repetition penalty by a name that is read, if `sent`.
    pub(crate) fn with_penalty(&self, sent: bool) -> FieldPolicy {
        let repetition_penalty = self.drawn.repetition_penalty.filter(|_| !sent);
        FieldPolicy { drawn: SamplingDefaults { repetition_penalty, ..self.drawn }, ..*self }
    }

    /// Whether a field that switches a sampler off is about one that is on, because the model has a setting of its own.
    fn contradicts(&self, name: &str, value: &Value) -> bool {
        let differs = |own: Option<f32>, off: f32| own.is_some_and(|own| own != off);
        match name {
            "temperature" => differs(self.drawn.temperature, 1.0),
            "top_p" => differs(self.drawn.top_p, 1.0),
            "top_k" => self.drawn.top_k.is_some_and(|count| count > 0),
            "min_p" => differs(self.drawn.min_p, 0.0),
            // A penalty over the last tokens is off where these are none.
            "repeat_last_n" => is_one_of(value, "[0]") && differs(self.drawn.repetition_penalty, 1.0),
            "repetition_penalty" | "repeat_penalty" | "rep_pen" => {
                differs(self.drawn.repetition_penalty, 1.0)
            }
            _ => false,
        }
    }
}

/// The fields of a body that its type does not have, to be checked before the request is answered.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(transparent)]
pub(crate) struct UnreadFields(Map<String, Value>);

impl UnreadFields {
    /// Adds a field that the type has for another kind of request.
    pub(crate) fn add(&mut self, name: &str, value: Option<impl Into<Value>>) {
        if let Some(value) = value {
            self.0.insert(name.to_owned(), value.into());
        }
    }

    /// Whether they ask for nothing.
    pub(crate) fn say_nothing(&self) -> bool {
        self.0.values().all(says_nothing)
    }

    /// Refuses the first field that may change the answer, unless such fields are to be ignored.
    pub(crate) fn check(&self, kind: RequestKind, policy: &FieldPolicy) -> Result<(), ApiError> {
        for (name, value) in &self.0 {
            let known = known(kind, name);
            let neutral = neutral_elsewhere(kind, name).is_some_and(|neutral| is_one_of(value, neutral));
            let fine = neutral || known.is_some_and(|known| known.is_fine(value));
            if says_nothing(value) || fine && !(kind.draws() && policy.contradicts(name, value)) {
                continue;
            }
            let shown = &name[..name.floor_char_boundary(MAX_NAME)];
            let path = kind.path(shown);
            match (policy.unknown, known) {
                (UnknownFields::Ignore, _) => tracing::debug!(kind = kind.name(), field = shown, "ignored"),
                (UnknownFields::Refuse, Some(known)) => {
                    return Err(ApiError::unsupported(&path, format!("{path}: {}", known.reason)));
                }
                (UnknownFields::Refuse, None) => return Err(stranger(kind.name(), shown, path)),
            }
        }
        Ok(())
    }
}

/// The error of a field at `path` that nobody knows.
fn stranger(place: &str, name: &str, path: String) -> ApiError {
    let message = format!("{place} has no field {name:?} (--unknown-fields ignore accepts any)");
    ApiError::bad_field(path, message).with_code("unknown_parameter")
}

/// Whether a value is what clients send for nothing: null, an empty text, list or object, or a list of such.
pub(crate) fn says_nothing(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::String(text) => text.is_empty(),
        Value::Array(list) => list.iter().all(says_nothing),
        Value::Object(fields) => fields.is_empty(),
        Value::Bool(_) | Value::Number(_) => false,
    }
}

/// Takes out the tools whose type is another than that of a tool of the client, if what is unknown is to be ignored. Returns
/// the index in the request of each tool that is left.
pub(crate) fn leave_tools_of_servers(
    tools: Option<&mut Vec<Value>>,
    own: &str,
    policy: UnknownFields,
) -> Vec<usize> {
    let Some(tools) = tools else { return Vec::new() };
    let (mut left, mut index) = (Vec::with_capacity(tools.len()), 0);
    tools.retain(|tool| {
        let kind = tool.get("type").and_then(Value::as_str).unwrap_or(own);
        let stays = kind == own || policy == UnknownFields::Refuse;
        if stays {
            left.push(index);
        } else {
            tracing::debug!(kind = &kind[..kind.floor_char_boundary(MAX_NAME)], "a tool is ignored");
        }
        index += 1;
        stays
    });
    left
}

impl Known {
    /// Whether the field may have this value.
    fn is_fine(&self, value: &Value) -> bool {
        self.neutral.is_none_or(|neutral| is_one_of(value, neutral))
    }
}

/// Whether a value is among those of a JSON list.
fn is_one_of(value: &Value, list: &str) -> bool {
    let list: Vec<Value> = serde_json::from_str(list).unwrap_or_default();
    // 0 is 0.0, and a batch has the same value for each prompt.
    let same = |one: &Value, other: &Value| match (one.as_f64(), other.as_f64()) {
        (Some(one), Some(other)) => one == other,
        _ => one == other,
    };
    list.iter().any(|known| {
        same(known, value) || value.as_array().is_some_and(|list| list.iter().all(|value| same(known, value)))
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn check(kind: RequestKind, fields: &Value) -> Result<(), ApiError> {
        let unread: UnreadFields = serde_json::from_value(fields.clone()).unwrap();
        unread.check(kind, &FieldPolicy::default())
    }

    #[test]
    fn what_says_nothing_is_fine() {
        let nothing = json!({"a": null, "b": "", "c": [], "d": {}, "e": [null, []]});
        assert_eq!(check(RequestKind::Chat, &nothing), Ok(()));
    }

    #[test]
    fn neutral_values_are_fine_and_others_are_named() {
        for (field, neutral, other) in [
            ("mirostat", json!(0), json!(2)),
            ("dry_multiplier", json!(0.0), json!(0.8)),
            ("use_beam_search", json!(false), json!(true)),
            ("modalities", json!(["text"]), json!(["text", "audio"])),
            ("lora_path", json!([null, ""]), json!("adapter")),
        ] {
            assert_eq!(check(RequestKind::Chat, &json!({field: neutral})), Ok(()), "{field}");
            let error = check(RequestKind::Chat, &json!({field: other})).unwrap_err();
            assert_eq!(error.body()["error"]["param"], field);
            assert_eq!(error.code(), Some("unsupported_parameter"));
        }
    }

    #[test]
    fn fields_within_a_field_are_named_with_it() {
        for (kind, good, bad, path) in [
            (
                RequestKind::StreamOptions,
                json!({"include_obfuscation": false}),
                json!({"usage": true}),
                "stream_options.usage",
            ),
            (RequestKind::TextSettings, json!({"verbosity": "low"}), json!({"fromat": 1}), "text.fromat"),
            (
                RequestKind::ReasoningSettings,
                json!({"summary": "auto"}),
                json!({"max_tokens": 9}),
                "reasoning.max_tokens",
            ),
            (RequestKind::Thinking, json!({"budget_tokens": 2000}), json!({"budget": 2}), "thinking.budget"),
            (RequestKind::OutputConfig, json!({"task": null}), json!({"user": "u"}), "output_config.user"),
        ] {
            assert_eq!(check(kind, &good), Ok(()), "{path}");
            assert_eq!(check(kind, &bad).unwrap_err().body()["error"]["param"], path);
        }
    }

    #[test]
    fn strangers_are_refused_unless_they_are_to_be_ignored() {
        let error = check(RequestKind::SamplingParams, &json!({"temprature": 0})).unwrap_err();
        assert_eq!(error.body()["error"]["param"], "sampling_params.temprature");
        assert_eq!(error.code(), Some("unknown_parameter"));
        let unread: UnreadFields = serde_json::from_value(json!({"temprature": 0, "mirostat": 2})).unwrap();
        let policy = FieldPolicy { unknown: UnknownFields::Ignore, ..FieldPolicy::default() };
        assert_eq!(unread.check(RequestKind::Chat, &policy), Ok(()));
        let long = check(RequestKind::Chat, &json!({"é".repeat(5000): 1})).unwrap_err();
        assert!(long.to_string().len() < 300, "{long}");
    }
}
