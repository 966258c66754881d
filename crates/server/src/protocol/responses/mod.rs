//! The request of OpenAI's `/v1/responses`, and its translation into a chat: all interfaces go one way to the engine.
//!
//! Nothing is kept between requests: whoever wants a conversation sends its items again, and finds them in the cache.

mod items;

use serde::Deserialize;
use serde_json::{Map, Number, Value, json};

use self::items::messages;
use super::sampling::Object;
use super::sent_names::{Place, SentNames};
use super::{
    FieldPolicy, OpenAiRequest, RequestKind, UnreadFields, check_forms_of_responses, leave_tools_of_servers,
    says_nothing,
};
use crate::protocol::ApiError;

/// The most pairs in `metadata`, and the most characters of a name and of a text there, as OpenAI has them.
const METADATA_PAIRS: usize = 16;
const METADATA_NAME: usize = 64;
const METADATA_TEXT: usize = 512;

/// The body of a request to `/v1/responses`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct ResponsesRequest {
    pub(crate) model: Option<String>,
    pub(crate) input: Option<Value>,
    pub(crate) instructions: Option<String>,
    pub(crate) max_output_tokens: Option<u64>,
    pub(crate) temperature: Option<f32>,
    pub(crate) top_p: Option<f32>,
    pub(crate) stream: Option<bool>,
    pub(crate) tools: Option<Vec<Value>>,
    pub(crate) tool_choice: Option<Value>,
    pub(crate) parallel_tool_calls: Option<bool>,
    pub(crate) text: Option<Object<TextSettings>>,
    pub(crate) reasoning: Option<Object<ReasoningSettings>>,
    pub(crate) metadata: Option<Map<String, Value>>,

    // What would need a memory of earlier requests, or what is not there.
    store: Option<bool>,
    previous_response_id: Option<String>,
    conversation: Option<Value>,
    prompt: Option<Value>,
    background: Option<bool>,
    truncation: Option<String>,
    top_logprobs: Option<u32>,

    // Extensions, under the names of the other interfaces.
    top_k: Option<i64>,
    typical_p: Option<f32>,
    seed: Option<Number>,
    rid: Option<String>,
    cache_salt: Option<String>,
    kv_precision: Option<Value>,
    kv_demote: Option<bool>,
    chat_template_kwargs: Option<Map<String, Value>>,

    #[serde(flatten)]
    pub(crate) unread: UnreadFields,

    /// The index that each of the tools had in the body, when the fields have been checked.
    #[serde(skip)]
    tool_places: Vec<usize>,
}

/// The field `text`: what the answer must look like.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct TextSettings {
    pub(crate) format: Option<Value>,
    #[serde(flatten)]
    unread: UnreadFields,
}

/// The field `reasoning`: how much the model is to reason.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct ReasoningSettings {
    pub(crate) effort: Option<String>,
    #[serde(flatten)]
    unread: UnreadFields,
}

impl ResponsesRequest {
    /// Refuses fields that nobody reads, also within others. Where they are to be ignored, so are tools that the server
    /// would have to have itself.
    pub(crate) fn check_fields(&mut self, policy: &FieldPolicy) -> Result<(), ApiError> {
        self.tool_places = leave_tools_of_servers(self.tools.as_mut(), "function", policy.unknown);
        self.unread.check(RequestKind::Responses, policy)?;
        if let Some(Object(text)) = &self.text {
            text.unread.check(RequestKind::TextSettings, policy)?;
        }
        if let Some(Object(reasoning)) = &self.reasoning {
            reasoning.unread.check(RequestKind::ReasoningSettings, policy)?;
        }
        let format = self.text.as_ref().and_then(|Object(text)| text.format.as_ref());
        check_forms_of_responses(format, self.tools.as_deref(), &self.tool_places, policy)
    }

    /// Translates the request into a chat, and says what the client called the fields of it.
    pub(crate) fn into_chat(self) -> Result<(OpenAiRequest, SentNames), ApiError> {
        self.check()?;
        let (mut messages, mut places) = messages(self.input.unwrap_or_default())?;
        if let Some(instructions) = self.instructions.filter(|text| !text.is_empty()) {
            messages.insert(0, json!({"role": "system", "content": instructions}));
            places.insert(0, Place::new("instructions"));
        }
        let names = SentNames::of_responses(&places, &self.tool_places);
        let mut variables = self.chat_template_kwargs.unwrap_or_default();
        let effort = self.reasoning.and_then(|Object(reasoning)| reasoning.effort);
        // Templates that let models think or not know this name.
        if effort.as_deref() == Some("none") {
            variables.entry("enable_thinking").or_insert(false.into());
        }
        let format = self.text.and_then(|Object(text)| text.format).filter(|format| !says_nothing(format));
        let request = OpenAiRequest {
            model: self.model,
            stream: self.stream,
            rid: self.rid,
            messages: Some(messages),
            tools: self.tools.map(|list| tools(list, &self.tool_places)).transpose()?,
            tool_choice: self
                .tool_choice
                .filter(|choice| !says_nothing(choice))
                .map(tool_choice)
                .transpose()?,
            parallel_tool_calls: self.parallel_tool_calls,
            chat_template_kwargs: Some(variables),
            reasoning_effort: effort,
            response_format: format.map(response_format).transpose()?,
            max_tokens: self.max_output_tokens,
            temperature: self.temperature,
            top_p: self.top_p,
            top_k: self.top_k,
            typical_p: self.typical_p,
            seed: self.seed,
            cache_salt: self.cache_salt,
            kv_precision: self.kv_precision,
            kv_demote: self.kv_demote,
            ..OpenAiRequest::default()
        };
        Ok((request, names))
    }

    /// Refuses fields that would change the answer and are not supported.
    fn check(&self) -> Result<(), ApiError> {
        let given = |value: &Option<Value>| value.as_ref().is_some_and(|value| !says_nothing(value));
        let filled = |text: &Option<String>| text.as_ref().is_some_and(|text| !text.is_empty());
        let (none, again) = ("nothing is kept between requests", "send the earlier items as input");
        for (there, name, problem) in [
            (filled(&self.previous_response_id), "previous_response_id", format!("{none}; {again}")),
            (given(&self.conversation), "conversation", format!("{none}; {again}")),
            (self.store == Some(true), "store", format!("{none}; leave store away or send false")),
            (given(&self.prompt), "prompt", format!("{none}, prompts included; send instructions and input")),
            (
                self.background == Some(true),
                "background",
                "answers are not made in the background; stream them".to_owned(),
            ),
            (
                self.truncation.as_deref().is_some_and(|how| !["", "disabled"].contains(&how)),
                "truncation",
                "input that does not fit is refused, never cut; only \"disabled\" is taken".to_owned(),
            ),
            (
                self.top_logprobs.is_some_and(|count| count > 0),
                "top_logprobs",
                "there are no probabilities here; /v1/chat/completions has them".to_owned(),
            ),
        ] {
            if there {
                return Err(ApiError::unsupported(name, format!("{name}: {problem}")));
            }
        }
        // A response repeats them, so they are kept while it is made.
        let long = |(name, value): (&String, &Value)| match value {
            Value::Array(_) | Value::Object(_) => true,
            value => {
                let text = value.as_str().unwrap_or_default();
                name.chars().count() > METADATA_NAME || text.chars().count() > METADATA_TEXT
            }
        };
        if self.metadata.as_ref().is_some_and(|pairs| pairs.len() > METADATA_PAIRS || pairs.iter().any(long))
        {
            let message = format!(
                "metadata may have {METADATA_PAIRS} names of {METADATA_NAME} characters with texts of {METADATA_TEXT}"
            );
            return Err(ApiError::bad_field("metadata", message));
        }
        if self.max_output_tokens == Some(0) {
            let message = "max_output_tokens is 0, expected 1 or more";
            return Err(ApiError::bad_field("max_output_tokens", message));
        }
        Ok(())
    }
}

/// Tools as chats have them: what describes a function goes into an object of its own. They had these places in the request.
fn tools(tools: Vec<Value>, places: &[usize]) -> Result<Vec<Value>, ApiError> {
    let convert = |(index, mut tool): (usize, Value)| {
        let index = places.get(index).unwrap_or(&index);
        let field = format!("tools[{index}].type");
        match tool.get("type").and_then(Value::as_str) {
            Some("function") => {}
            kind => {
                let kind: String = kind.unwrap_or("absent").chars().take(40).collect();
                let message = format!(
                    "{field} is {kind}; this server has no tools of its own, only functions of yours \
                     (--unknown-fields ignore leaves out others)"
                );
                return Err(ApiError::unsupported(&field, message));
            }
        }
        if let Some(fields) = tool.as_object_mut() {
            fields.remove("type");
        }
        Ok(json!({"type": "function", "function": tool}))
    };
    tools.into_iter().enumerate().map(convert).collect()
}

fn tool_choice(choice: Value) -> Result<Value, ApiError> {
    match choice {
        Value::String(_) => Ok(choice),
        choice if choice.get("type").and_then(Value::as_str) == Some("function") => {
            Ok(json!({"type": "function", "function": {"name": choice.get("name")}}))
        }
        _ => {
            let message = "tool_choice must be none, auto, required or {\"type\": \"function\", \"name\": …}";
            Err(ApiError::unsupported("tool_choice", message))
        }
    }
}

fn response_format(format: Value) -> Result<Value, ApiError> {
    match format.get("type").and_then(Value::as_str) {
        Some("text" | "json_object") => Ok(format),
        Some("json_schema") if format.get("schema").is_some_and(Value::is_object) => {
            let strict = format.get("strict");
            Ok(json!({"type": "json_schema", "json_schema": {"schema": format["schema"], "strict": strict}}))
        }
        Some("json_schema") => {
            Err(ApiError::bad_field("text.format.schema", "text.format.schema must be a JSON schema"))
        }
        _ => {
            let message = "text.format.type must be text, json_object or json_schema";
            Err(ApiError::bad_field("text.format.type", message))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::parse;

    fn chat(extra: Value) -> Result<OpenAiRequest, ApiError> {
        let mut request = json!({"model": "m", "input": "hi"});
        for (name, value) in extra.as_object().unwrap() {
            request[name] = value.clone();
        }
        let mut request = parse::<ResponsesRequest>(request.to_string().as_bytes())?;
        request.check_fields(&FieldPolicy::default())?;
        request.into_chat().map(|(request, _)| request)
    }

    #[test]
    fn fields_find_their_names() {
        let tool = json!({"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": true});
        let schema = json!({"type": "integer"});
        let request = chat(json!({
            "instructions": "Be brief.", "max_output_tokens": 9, "temperature": 0.5, "store": false,
            "tools": [tool], "tool_choice": {"type": "function", "name": "f"}, "parallel_tool_calls": false,
            "text": {"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": true}},
            "reasoning": {"effort": "low", "summary": "auto"}, "include": ["reasoning.encrypted_content"],
            "metadata": {"n".repeat(64): "é".repeat(512), "none": null},
            "truncation": "disabled", "user": "u", "service_tier": "auto", "previous_response_id": null,
        }))
        .unwrap();
        let messages = request.messages.clone().unwrap();
        assert_eq!(messages[0], json!({"role": "system", "content": "Be brief."}));
        assert_eq!(messages[1], json!({"role": "user", "content": "hi"}));
        let function = json!({"name": "f", "parameters": {"type": "object"}, "strict": true});
        assert_eq!(request.tools.clone().unwrap(), [json!({"type": "function", "function": function})]);
        assert_eq!(request.tool_choice, Some(json!({"type": "function", "function": {"name": "f"}})));
        assert_eq!(request.response_format.clone().unwrap()["json_schema"]["schema"], schema);
        assert_eq!(request.reasoning_effort.as_deref(), Some("low"));
        let sampling_fields = request.sampling_fields(None).unwrap();
        assert_eq!((sampling_fields.max_tokens, sampling_fields.temperature), (Some(9), Some(0.5)));
        let silent = chat(json!({"reasoning": {"effort": "none"}})).unwrap();
        assert_eq!(silent.chat_template_kwargs.unwrap()["enable_thinking"], false);
    }

    #[test]
    fn what_is_not_there_is_refused_by_name() {
        for (extra, param) in [
            (json!({"previous_response_id": "resp_1"}), "previous_response_id"),
            (json!({"conversation": "conv_1"}), "conversation"),
            (json!({"store": true}), "store"),
            (json!({"prompt": {"id": "p"}}), "prompt"),
            (json!({"background": true}), "background"),
            (json!({"truncation": "auto"}), "truncation"),
            (json!({"top_logprobs": 2}), "top_logprobs"),
            (json!({"max_output_tokens": 0}), "max_output_tokens"),
            (json!({"metadata": {"n".repeat(65): "v"}}), "metadata"),
            (json!({"metadata": {"n": "v".repeat(513)}}), "metadata"),
            (json!({"metadata": {"n": ["v"]}}), "metadata"),
            (
                json!({"metadata": (0..17).map(|n| (n.to_string(), "v".into())).collect::<Map<_, Value>>()}),
                "metadata",
            ),
            (json!({"tools": [{"type": "web_search"}]}), "tools[0].type"),
            (json!({"tools": [3]}), "tools[0].type"),
            (json!({"tool_choice": {"type": "web_search"}}), "tool_choice"),
            (json!({"text": {"format": {"type": "xml"}}}), "text.format.type"),
            (json!({"text": {"format": {"type": "json_schema"}}}), "text.format.schema"),
            (json!({"text": []}), "text"),
            (json!({"input": null}), "input"),
        ] {
            let error = chat(extra.clone()).unwrap_err();
            assert_eq!(error.body()["error"]["param"], param, "{extra}");
        }
    }
}
