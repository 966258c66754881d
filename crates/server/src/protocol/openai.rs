//! The request of `/v1/completions` and `/v1/chat/completions`, with the extensions SGLang's and vLLM's clients send.
//!
//! Both share nearly all fields, so they are one type; each route reads what concerns it.

use std::collections::HashMap;

use oscar_engine::MAX_TOP_LOGPROBS;
use serde::Deserialize;
use serde_json::{Map, Number, Value};

use super::lists::tokens_or_all;
use super::sampling::SamplingFields;
use super::sent_names::Aliases;
use super::{
    AnswerFormat, ApiError, FieldPolicy, OneOrMany, PrecisionFields, Prompt, RequestKind, UnreadFields,
    check_forms, either, penalties,
};

/// The body of a request to `/v1/completions` or `/v1/chat/completions`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct OpenAiRequest {
    pub(crate) model: Option<String>,
    pub(crate) stream: Option<bool>,
    pub(crate) stream_options: Option<StreamOptions>,
    /// The id by which the client may abort the request with `/abort_request`.
    pub(crate) rid: Option<String>,

    // What is asked.
    pub(crate) messages: Option<Vec<Value>>,
    pub(crate) prompt: Option<Prompt>,
    pub(crate) tools: Option<Vec<Value>>,
    pub(crate) tool_choice: Option<Value>,
    pub(crate) parallel_tool_calls: Option<bool>,
    pub(crate) chat_template_kwargs: Option<Map<String, Value>>,
    pub(crate) reasoning_effort: Option<String>,
    pub(crate) add_generation_prompt: Option<bool>,
    pub(crate) continue_final_message: Option<bool>,
    pub(super) separate_reasoning: Option<bool>,
    /// llama.cpp's name; "none" leaves reasoning in the content.
    pub(super) reasoning_format: Option<String>,

    // What comes back.
    pub(crate) logprobs: Option<Logprobs>,
    pub(crate) top_logprobs: Option<u32>,
    pub(super) n_probs: Option<u32>,
    pub(super) prompt_logprobs: Option<i64>,
    pub(crate) echo: Option<bool>,
    pub(super) suffix: Option<String>,
    pub(super) best_of: Option<u32>,
    pub(super) include_stop_str_in_output: Option<bool>,
    pub(super) no_stop_trim: Option<bool>,

    // How it is drawn and when it ends.
    #[serde(default, deserialize_with = "tokens_or_all")]
    pub(super) max_tokens: Option<u64>,
    #[serde(default, deserialize_with = "tokens_or_all")]
    pub(super) max_completion_tokens: Option<u64>,
    /// llama.cpp's name of `max_tokens`.
    #[serde(default, deserialize_with = "tokens_or_all")]
    pub(super) n_predict: Option<u64>,
    pub(super) min_tokens: Option<u64>,
    pub(super) temperature: Option<f32>,
    pub(super) top_p: Option<f32>,
    pub(super) typical_p: Option<f32>,
    pub(super) typ_p: Option<f32>,
    pub(super) top_k: Option<i64>,
    pub(super) min_p: Option<f32>,
    pub(super) seed: Option<Number>,
    pub(super) repetition_penalty: Option<f32>,
    pub(super) repeat_penalty: Option<f32>,
    pub(super) repeat_last_n: Option<i64>,
    pub(super) presence_penalty: Option<f32>,
    pub(super) frequency_penalty: Option<f32>,
    pub(super) logit_bias: Option<HashMap<String, f32>>,
    pub(super) stop: Option<OneOrMany<String>>,
    pub(super) stop_token_ids: Option<Vec<u32>>,
    pub(super) stop_regex: Option<Value>,
    pub(super) ignore_eos: Option<bool>,
    pub(super) skip_special_tokens: Option<bool>,
    pub(super) n: Option<u32>,

    // What it must look like.
    pub(crate) response_format: Option<Value>,
    pub(crate) regex: Option<String>,
    pub(crate) ebnf: Option<String>,
    pub(crate) guided_json: Option<Value>,
    pub(crate) guided_regex: Option<String>,
    pub(crate) guided_grammar: Option<String>,
    pub(crate) guided_choice: Option<Value>,
    pub(crate) structured_outputs: Option<Value>,
    pub(crate) structural_tag: Option<Value>,
    pub(crate) grammar: Option<String>,
    pub(crate) json_schema: Option<Value>,
    pub(crate) allowed_token_ids: Option<Value>,
    pub(crate) bad_words: Option<Value>,

    // The cache.
    pub(super) cache_salt: Option<String>,
    pub(super) extra_key: Option<String>,
    pub(super) kv_precision: Option<Value>,
    pub(super) kv_demote: Option<bool>,

    #[serde(flatten)]
    pub(crate) unread: UnreadFields,
}

/// The `stream_options` of a request: what a stream carries besides the answer.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct StreamOptions {
    include_usage: Option<bool>,
    #[serde(flatten)]
    unread: UnreadFields,
}

/// The field `logprobs`: whether they are wanted (chats), or how many alternatives (completions).
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(untagged, expecting = "expected true, false or a number")]
pub(crate) enum Logprobs {
    Flag(bool),
    Count(u32),
}

impl OpenAiRequest {
    /// A request with a chat and no other fields.
    pub(crate) fn of_chat(
        messages: Option<Vec<Value>>,
        tools: Option<Vec<Value>>,
        add_generation_prompt: Option<bool>,
    ) -> OpenAiRequest {
        OpenAiRequest { messages, tools, add_generation_prompt, ..OpenAiRequest::default() }
    }

    /// Takes the fields that only completions have out of a chat, to be checked with those that it does not have.
    pub(crate) fn leave_fields_of_completions(&mut self) {
        let prompt = self.prompt.take().filter(|prompt| !prompt.is_empty());
        self.unread.add("prompt", prompt.map(|_| true));
        self.unread.add("echo", self.echo.take());
        // Other forms of reasoning than in the content are known or not.
        self.unread.add("reasoning_format", self.reasoning_format.take_if(|format| format != "none"));
    }

    /// Takes the fields that only chats have out of a completion.
    pub(crate) fn leave_fields_of_chats(&mut self) {
        let unread = &mut self.unread;
        unread.add("messages", self.messages.take());
        unread.add("tools", self.tools.take());
        unread.add("tool_choice", self.tool_choice.take());
        unread.add("parallel_tool_calls", self.parallel_tool_calls.take());
        unread.add("chat_template_kwargs", self.chat_template_kwargs.take());
        unread.add("reasoning_effort", self.reasoning_effort.take());
        unread.add("add_generation_prompt", self.add_generation_prompt.take());
        unread.add("continue_final_message", self.continue_final_message.take());
        unread.add("separate_reasoning", self.separate_reasoning.take());
        unread.add("reasoning_format", self.reasoning_format.take());
    }

    /// Refuses fields that nobody reads, also within others.
    pub(crate) fn check_fields(&self, kind: RequestKind, policy: &FieldPolicy) -> Result<(), ApiError> {
        let penalty = self.repetition_penalty.or(self.repeat_penalty);
        self.unread.check(kind, &policy.with_penalty(penalty.is_some()))?;
        if let Some(options) = &self.stream_options {
            options.unread.check(RequestKind::StreamOptions, policy)?;
        }
        let (format, outputs) = (self.response_format.as_ref(), self.structured_outputs.as_ref());
        check_forms(format, outputs, self.tools.as_deref(), policy)
    }

    /// Whether reasoning is told apart from the content.
    pub(crate) fn separates_reasoning(&self) -> bool {
        self.separate_reasoning.unwrap_or(self.reasoning_format.is_none())
    }

    /// The sampling parameters under the names that all interfaces share. `default_max_tokens` holds when the client
    /// gives no limit.
    pub(crate) fn sampling_fields(
        &self,
        default_max_tokens: Option<u64>,
    ) -> Result<SamplingFields, ApiError> {
        if let Some(best_of) = self.best_of.filter(|&best_of| best_of != self.n.unwrap_or(1)) {
            let message = format!("best_of is {best_of}; only n answers are made, ask for n of them");
            return Err(ApiError::unsupported("best_of", message));
        }
        if self.suffix.as_ref().is_some_and(|suffix| !suffix.is_empty()) {
            return Err(ApiError::unsupported("suffix", "text cannot be inserted before a suffix"));
        }
        let limit = match self.max_completion_tokens {
            Some(limit) => ("max_completion_tokens", Some(limit)),
            None => ("max_tokens", self.max_tokens),
        };
        let max_tokens = either(limit, ("n_predict", self.n_predict), |&count| count == u64::MAX)?;
        let names = ("repetition_penalty", "repeat_penalty");
        let repetition_penalty =
            either((names.0, self.repetition_penalty), (names.1, self.repeat_penalty), |&penalty| {
                penalty == 1.0
            })?;
        let given = [repetition_penalty, self.presence_penalty, self.frequency_penalty];
        let [repetition_penalty, presence_penalty, frequency_penalty] = penalties(given, self.repeat_last_n)?;
        let typical_p =
            either(("typical_p", self.typical_p), ("typ_p", self.typ_p), |&typical| typical == 1.0)?;
        Ok(SamplingFields {
            max_tokens: max_tokens.or(default_max_tokens),
            min_tokens: self.min_tokens,
            temperature: self.temperature,
            top_p: self.top_p,
            typical_p,
            top_k: self.top_k,
            min_p: self.min_p,
            seed: self.seed.clone(),
            repetition_penalty,
            presence_penalty,
            frequency_penalty,
            logit_bias: self.logit_bias.clone(),
            stop: self.stop.clone(),
            stop_token_ids: self.stop_token_ids.clone(),
            keep_stop: self.no_stop_trim.filter(|&keep| keep).or(self.include_stop_str_in_output),
            ignore_eos: self.ignore_eos,
            skip_special_tokens: self.skip_special_tokens,
            n: self.n,
            cache_salt: either(
                ("cache_salt", self.cache_salt.clone()),
                ("extra_key", self.extra_key.clone()),
                String::is_empty,
            )?,
        })
    }

    /// The fields that the client sent by another of their names than errors have.
    pub(crate) fn aliases(&self) -> Aliases {
        [
            ("typical_p", "typ_p", self.typical_p.is_none() && self.typ_p.is_some()),
            (
                "repetition_penalty",
                "repeat_penalty",
                self.repetition_penalty.is_none() && self.repeat_penalty.is_some(),
            ),
            ("cache_salt", "extra_key", self.cache_salt.is_none() && self.extra_key.is_some()),
        ]
        .into_iter()
        .filter_map(|(name, sent, differs)| differs.then_some((name, sent)))
        .collect()
    }

    /// What the request says about the precision of its history.
    pub(crate) fn precision(&self) -> PrecisionFields {
        PrecisionFields { kv_precision: self.kv_precision.clone(), kv_demote: self.kv_demote }
    }

    /// What the request says about the format of its answer. The names that vLLM and llama.cpp have for it are understood, too.
    pub(crate) fn answer_format(&self) -> Result<AnswerFormat, ApiError> {
        let mut fields = Map::new();
        let mut put = |name: &str, value: Option<Value>| {
            fields.insert(name.to_owned(), value.unwrap_or_default());
        };
        put("tools", self.tools.clone().map(Value::from));
        put("tool_choice", self.tool_choice.clone());
        put("parallel_tool_calls", self.parallel_tool_calls.map(Value::from));
        put("response_format", self.response_format.clone());
        put("guided_json", self.guided_json.clone());
        put("guided_choice", self.guided_choice.clone());
        put("structured_outputs", self.structured_outputs.clone());
        put("structural_tag", self.structural_tag.clone());
        put("json_schema", self.json_schema.clone());
        put("allowed_token_ids", self.allowed_token_ids.clone());
        put("bad_words", self.bad_words.clone());
        put("stop_regex", self.stop_regex.clone());
        put("min_tokens", self.min_tokens.map(Value::from));
        put("ignore_eos", self.ignore_eos.map(Value::from));
        for (name, text) in [
            ("regex", &self.regex),
            ("ebnf", &self.ebnf),
            ("grammar", &self.grammar),
            ("guided_regex", &self.guided_regex),
            ("guided_grammar", &self.guided_grammar),
        ] {
            put(name, text.clone().map(Value::from));
        }
        Ok(AnswerFormat::from_body(&fields.into())?)
    }

    pub(crate) fn streams(&self) -> bool {
        self.stream.unwrap_or(false)
    }

    pub(crate) fn includes_usage(&self) -> bool {
        self.stream_options.as_ref().and_then(|options| options.include_usage).unwrap_or(false)
    }

    /// The number of alternatives per token that a chat asks for, if it asks for logprobs.
    pub(crate) fn chat_logprobs(&self) -> Result<Option<usize>, ApiError> {
        let by_other_name = self.probabilities()?;
        match self.logprobs {
            Some(Logprobs::Count(1..)) => {
                Err(ApiError::bad_field("logprobs", "logprobs of a chat is true or false"))
            }
            _ if by_other_name.is_some() => Ok(by_other_name),
            Some(Logprobs::Flag(true)) => bounded("top_logprobs", self.top_logprobs.unwrap_or(0)).map(Some),
            _ if self.top_logprobs.is_some_and(|count| count > 0) => {
                Err(ApiError::bad_field("top_logprobs", "top_logprobs needs logprobs: true"))
            }
            _ => Ok(None),
        }
    }

    /// The same by llama.cpp's name, of which 0 is none. OpenAI's names beside it must not ask for something else.
    fn probabilities(&self) -> Result<Option<usize>, ApiError> {
        let Some(count) = self.n_probs.filter(|&count| count > 0) else { return Ok(None) };
        let differs = |other: u32| other > 0 && other != count;
        let other = match (self.logprobs, self.top_logprobs) {
            (Some(Logprobs::Flag(false)), _) => Some(("logprobs", "false".to_owned())),
            (Some(Logprobs::Count(other)), _) if differs(other) => Some(("logprobs", other.to_string())),
            (_, Some(other)) if differs(other) => Some(("top_logprobs", other.to_string())),
            _ => None,
        };
        if let Some((name, value)) = other {
            let message = format!("n_probs is {count} and {name} is {value}; send one of them");
            return Err(ApiError::bad_field("n_probs", message));
        }
        bounded("n_probs", count).map(Some)
    }

    /// The number of alternatives per token of the prompt, if their logprobs are asked for by vLLM's name.
    pub(crate) fn prompt_logprobs(&self) -> Result<Option<usize>, ApiError> {
        let Some(count) = self.prompt_logprobs else { return Ok(None) };
        if self.streams() {
            let message =
                "prompt_logprobs: not in streams; /v1/completions streams them with echo and logprobs";
            return Err(ApiError::unsupported("prompt_logprobs", message));
        }
        let Ok(count) = u32::try_from(count) else {
            let message = format!("prompt_logprobs is {count}, expected 0 to {MAX_TOP_LOGPROBS}");
            return Err(ApiError::bad_field("prompt_logprobs", message));
        };
        bounded("prompt_logprobs", count).map(Some)
    }

    /// The number of alternatives per token that a completion asks for, if it asks for logprobs.
    pub(crate) fn completion_logprobs(&self) -> Result<Option<usize>, ApiError> {
        let by_other_name = self.probabilities()?;
        match self.logprobs {
            _ if by_other_name.is_some() => Ok(by_other_name),
            None | Some(Logprobs::Flag(false)) => Ok(None),
            // Some clients know only the form of chats.
            Some(Logprobs::Flag(true)) => bounded("top_logprobs", self.top_logprobs.unwrap_or(1)).map(Some),
            Some(Logprobs::Count(count)) => bounded("logprobs", count).map(Some),
        }
    }
}

fn bounded(name: &str, count: u32) -> Result<usize, ApiError> {
    let count = count as usize;
    if count > MAX_TOP_LOGPROBS {
        let message = format!("{name} is {count}, expected at most {MAX_TOP_LOGPROBS}");
        return Err(ApiError::bad_field(name, message));
    }
    Ok(count)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::parse;

    fn request(text: &str) -> OpenAiRequest {
        parse(text.as_bytes()).unwrap()
    }

    #[test]
    fn prompts_come_in_four_forms() {
        let prompt = |text: &str| request(&format!("{{\"prompt\": {text}}}")).prompt.unwrap();
        assert_eq!(prompt("\"a\""), Prompt::Text("a".into()));
        assert_eq!(prompt("[\"a\", \"b\"]"), Prompt::Texts(vec!["a".into(), "b".into()]));
        assert_eq!(prompt("[1, 2]"), Prompt::Ids(vec![1, 2]));
        assert_eq!(prompt("[[1], [2, 3]]"), Prompt::IdLists(vec![vec![1], vec![2, 3]]));
        for bad in ["{}", "[1, \"a\"]", "3", "[-1]", "[[1], \"a\"]"] {
            let error = parse::<OpenAiRequest>(format!("{{\"prompt\": {bad}}}").as_bytes()).unwrap_err();
            let param = error.body()["error"]["param"].to_string();
            assert!(param.starts_with("\"prompt"), "{bad}: {param}");
        }
    }

    #[test]
    fn every_field_may_be_null() {
        let nulls = "{\"model\": null, \"stream\": null, \"stream_options\": null, \"n\": null, \"stop\": null,
            \"logprobs\": null, \"prompt\": null, \"seed\": null, \"tools\": null, \"user\": null, \"x\": {}}";
        assert!(request(nulls).sampling_fields(None).is_ok());
    }

    #[test]
    fn the_newer_limit_wins() {
        let sampling_fields =
            request("{\"max_tokens\": 5, \"max_completion_tokens\": 7}").sampling_fields(Some(16)).unwrap();
        assert_eq!(sampling_fields.max_tokens, Some(7));
        let page = request("{\"n_predict\": 0}").sampling_fields(Some(16)).unwrap();
        assert_eq!(page.max_tokens, Some(0));
        let all = request("{\"max_tokens\": -1, \"max_completion_tokens\": null}");
        assert_eq!(all.sampling_fields(Some(16)).unwrap().max_tokens, Some(u64::MAX));
        assert_eq!(request("{}").sampling_fields(Some(16)).unwrap().max_tokens, Some(16));
    }

    #[test]
    fn probabilities_are_asked_for_in_two_ways() {
        let chat = |text: &str| request(text).chat_logprobs();
        assert_eq!(chat("{\"logprobs\": true}"), Ok(Some(0)));
        assert_eq!(chat("{\"logprobs\": true, \"top_logprobs\": 3}"), Ok(Some(3)));
        assert_eq!(chat("{}"), Ok(None));
        assert!(chat("{\"top_logprobs\": 3}").is_err() && chat("{\"logprobs\": 3}").is_err());
        assert!(chat("{\"logprobs\": true, \"top_logprobs\": 101}").is_err());
        assert_eq!(chat("{\"logprobs\": 0, \"n_probs\": 0}"), Ok(None));
        assert_eq!(chat("{\"n_probs\": 3}"), Ok(Some(3)));
        assert_eq!(chat("{\"logprobs\": true, \"n_probs\": 3}"), Ok(Some(3)));
        assert_eq!(chat("{\"logprobs\": true, \"top_logprobs\": 0, \"n_probs\": 3}"), Ok(Some(3)));
        assert_eq!(chat("{\"logprobs\": null, \"top_logprobs\": 3, \"n_probs\": 3}"), Ok(Some(3)));
        assert!(chat("{\"n_probs\": 101}").is_err());
        assert_eq!(request("{\"n_probs\": 3}").completion_logprobs(), Ok(Some(3)));
        assert_eq!(request("{\"n_probs\": 0}").completion_logprobs(), Ok(None));
        assert_eq!(request("{\"logprobs\": 0}").completion_logprobs(), Ok(Some(0)));
        assert_eq!(request("{\"logprobs\": 5}").completion_logprobs(), Ok(Some(5)));
        assert_eq!(request("{\"logprobs\": 5, \"n_probs\": 5}").completion_logprobs(), Ok(Some(5)));
        assert_eq!(request("{\"logprobs\": 0, \"n_probs\": 5}").completion_logprobs(), Ok(Some(5)));
        assert_eq!(request("{\"logprobs\": 5, \"n_probs\": 0}").completion_logprobs(), Ok(Some(5)));
    }

    #[test]
    fn two_names_must_not_ask_for_different_probabilities() {
        for (text, other) in [
            ("{\"n_probs\": 3, \"logprobs\": false}", "logprobs is false"),
            ("{\"n_probs\": 3, \"logprobs\": false, \"top_logprobs\": 3}", "logprobs is false"),
            ("{\"n_probs\": 3, \"logprobs\": true, \"top_logprobs\": 2}", "top_logprobs is 2"),
            ("{\"n_probs\": 3, \"top_logprobs\": 2}", "top_logprobs is 2"),
            ("{\"n_probs\": 3, \"logprobs\": 2}", "logprobs is 2"),
        ] {
            let request = request(text);
            for error in [request.chat_logprobs().unwrap_err(), request.completion_logprobs().unwrap_err()] {
                assert_eq!(error.param(), Some("n_probs"), "{text}");
                let message = error.to_string();
                assert!(message.contains("n_probs is 3") && message.contains(other), "{message}");
            }
        }
    }

    #[test]
    fn names_of_llama_cpp_are_understood() {
        let fields = |text: &str| request(text).sampling_fields(None);
        let sampling = fields("{\"typ_p\": 0.5, \"repeat_penalty\": 1.5, \"repeat_last_n\": -1}").unwrap();
        assert_eq!((sampling.typical_p, sampling.repetition_penalty), (Some(0.5), Some(1.5)));
        for penalty in ["repeat_penalty", "repetition_penalty"] {
            let off = fields(&format!("{{\"{penalty}\": 1.5, \"repeat_last_n\": 0}}")).unwrap();
            assert_eq!(off.repetition_penalty, Some(1.0));
        }
        for penalty in ["repetition_penalty", "repeat_penalty", "presence_penalty", "frequency_penalty"] {
            let error = fields(&format!("{{\"{penalty}\": 1.5, \"repeat_last_n\": 64}}")).unwrap_err();
            assert_eq!(error.body()["error"]["param"], "repeat_last_n");
        }
        let separates = |text: &str| {
            let mut request = request(text);
            request.leave_fields_of_completions();
            (
                request.separates_reasoning(),
                request.check_fields(RequestKind::Chat, &FieldPolicy::default()).is_ok(),
            )
        };
        assert_eq!(separates("{\"reasoning_format\": \"none\"}"), (false, true));
        assert_eq!(separates("{\"reasoning_format\": \"deepseek\"}"), (true, true));
        assert_eq!(separates("{\"reasoning_format\": \"\"}"), (true, true));
        assert_eq!(separates("{\"reasoning_format\": \"none\", \"separate_reasoning\": true}"), (true, true));
        assert!(!separates("{\"reasoning_format\": \"deepseek-legacy\"}").1);
    }

    #[test]
    fn two_names_of_a_field_must_agree() {
        for (name, other, one, two) in [
            ("typical_p", "typ_p", "0.5", "0.25"),
            ("repetition_penalty", "repeat_penalty", "1.5", "1.25"),
            ("cache_salt", "extra_key", "\"a\"", "\"b\""),
            ("max_tokens", "n_predict", "3", "4"),
            ("max_completion_tokens", "n_predict", "3", "4"),
        ] {
            let read = |one: &str, two: &str| {
                request(&format!("{{\"{name}\": {one}, \"{other}\": {two}}}")).sampling_fields(None)
            };
            let error = read(one, two).unwrap_err().to_string();
            assert!(error.contains(name) && error.contains(other), "{error}");
            assert!(read(one, one).is_ok() && read(one, "null").is_ok() && read("null", two).is_ok());
        }
        let all = request("{\"max_tokens\": 3, \"n_predict\": -1}").sampling_fields(None).unwrap();
        assert_eq!(all.max_tokens, Some(3));
    }

    #[test]
    fn what_is_not_there_is_refused_by_name() {
        for (text, name) in [("{\"best_of\": 3}", "best_of"), ("{\"suffix\": \"end\"}", "suffix")] {
            let error = request(text).sampling_fields(None).unwrap_err();
            assert_eq!(error.body()["error"]["param"], name);
        }
        assert!(request("{\"best_of\": 2, \"n\": 2, \"suffix\": \"\"}").sampling_fields(None).is_ok());
    }
}
