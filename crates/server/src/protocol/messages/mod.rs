//! The request of Anthropic's `/v1/messages`, and its translation into a chat: all interfaces go one way to the engine.

mod conversation;

use serde::Deserialize;
use serde_json::{Map, Number, Value, json};

use self::conversation::{conversation, texts};
use super::sampling::Object;
use super::sent_names::{Place, SentNames};
use super::{
    FieldPolicy, OneOrMany, OpenAiRequest, RequestKind, UnreadFields, check_forms_of_messages,
    leave_tools_of_servers, says_nothing,
};
use crate::protocol::ApiError;

/// The body of a request to `/v1/messages` or `/v1/messages/count_tokens`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct MessagesRequest {
    model: Option<String>,
    messages: Option<Vec<Value>>,
    system: Option<Value>,
    max_tokens: Option<u64>,
    stop_sequences: Option<Vec<String>>,
    stream: Option<bool>,
    temperature: Option<f32>,
    top_p: Option<f32>,
    top_k: Option<i64>,
    typical_p: Option<f32>,
    tools: Option<Vec<Value>>,
    tool_choice: Option<Value>,
    thinking: Option<Object<Thinking>>,
    output_config: Option<Object<OutputConfig>>,
    mcp_servers: Option<Vec<Value>>,
    container: Option<Value>,

    // Extensions, under the names of the other interfaces.
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

/// The field `thinking`: whether the model is to reason before it answers. A budget for it is ignored.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct Thinking {
    #[serde(rename = "type")]
    kind: Option<String>,
    #[serde(flatten)]
    unread: UnreadFields,
}

/// The field `output_config`: what the answer must look like.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct OutputConfig {
    format: Option<Value>,
    effort: Option<String>,
    #[serde(flatten)]
    unread: UnreadFields,
}

impl MessagesRequest {
    /// Refuses fields that nobody reads, also within others. Where they are to be ignored, so are tools that the server
    /// would have to have itself.
    pub(crate) fn check_fields(&mut self, policy: &FieldPolicy) -> Result<(), ApiError> {
        self.tool_places = leave_tools_of_servers(self.tools.as_mut(), "custom", policy.unknown);
        self.unread.check(RequestKind::Messages, policy)?;
        if let Some(Object(thinking)) = &self.thinking {
            thinking.unread.check(RequestKind::Thinking, policy)?;
        }
        if let Some(Object(output)) = &self.output_config {
            output.unread.check(RequestKind::OutputConfig, policy)?;
        }
        let format = self.output_config.as_ref().and_then(|Object(output)| output.format.as_ref());
        check_forms_of_messages(format, self.tools.as_deref(), &self.tool_places, policy)
    }

    /// Translates the request into a chat, and says what the client called the fields of it.
    pub(crate) fn into_chat(self) -> Result<(OpenAiRequest, SentNames), ApiError> {
        if self.max_tokens.is_none() {
            return Err(ApiError::bad_field("max_tokens", "max_tokens: there must be a limit"));
        }
        self.into_unlimited()
    }

    /// Translates a request whose prompt is only counted, which needs no `max_tokens`.
    pub(crate) fn into_unlimited(self) -> Result<(OpenAiRequest, SentNames), ApiError> {
        if self.max_tokens == Some(0) {
            return Err(ApiError::bad_field("max_tokens", "max_tokens is 0, expected 1 or more"));
        }
        if self.mcp_servers.is_some_and(|servers| !servers.is_empty()) {
            return Err(ApiError::unsupported("mcp_servers", "mcp_servers: this server calls no others"));
        }
        if self.container.is_some_and(|container| !says_nothing(&container)) {
            return Err(ApiError::unsupported("container", "container: this server runs no code"));
        }
        let mut chat = conversation(self.messages.unwrap_or_default())?;
        if let Some(system) = self.system.filter(|system| !says_nothing(system)) {
            let content = texts("system", system)?;
            chat.messages.insert(0, json!({"role": "system", "content": content}));
            chat.places.insert(0, Place::new("system"));
        }
        let names = SentNames::of_messages(&chat.places, &self.tool_places);
        let mut variables = self.chat_template_kwargs.unwrap_or_default();
        let thinks = self.thinking.map(|Object(thinking)| thinking.wanted()).transpose()?;
        if let Some(thinks) = thinks.flatten() {
            variables.entry("enable_thinking").or_insert(thinks.into());
        }
        let output = self.output_config.map_or_else(OutputConfig::default, |Object(output)| output);
        let (tool_choice, parallel) = tool_choice(self.tool_choice)?;
        let request = OpenAiRequest {
            model: self.model,
            stream: self.stream,
            rid: self.rid,
            messages: Some(chat.messages),
            continue_final_message: chat.continues.then_some(true),
            tools: self.tools.map(|list| tools(list, &self.tool_places)).transpose()?,
            tool_choice,
            parallel_tool_calls: parallel,
            chat_template_kwargs: Some(variables),
            reasoning_effort: output.effort,
            response_format: output.format.filter(|format| !says_nothing(format)).map(format).transpose()?,
            max_tokens: self.max_tokens,
            temperature: self.temperature,
            top_p: self.top_p,
            top_k: self.top_k,
            typical_p: self.typical_p,
            seed: self.seed,
            stop: self.stop_sequences.map(OneOrMany::Many),
            cache_salt: self.cache_salt,
            kv_precision: self.kv_precision,
            kv_demote: self.kv_demote,
            ..OpenAiRequest::default()
        };
        Ok((request, names))
    }
}

impl Thinking {
    /// What is wanted, unless nothing is said about it.
    fn wanted(&self) -> Result<Option<bool>, ApiError> {
        match self.kind.as_deref().unwrap_or_default() {
            "" if self.unread.say_nothing() => Ok(None),
            "enabled" | "adaptive" | "between_tools" => Ok(Some(true)),
            "disabled" => Ok(Some(false)),
            other => {
                let other: String = other.chars().take(40).collect();
                let message = format!("thinking.type is {other:?}, expected enabled, adaptive or disabled");
                Err(ApiError::bad_field("thinking.type", message))
            }
        }
    }
}

/// Translates tools, which had these places in the request, into functions of OpenAI's interface.
fn tools(tools: Vec<Value>, places: &[usize]) -> Result<Vec<Value>, ApiError> {
    let convert = |(index, tool): (usize, Value)| {
        let index = places.get(index).unwrap_or(&index);
        let here = |field: &str| format!("tools[{index}]{field}");
        let wrong = |field: &str, problem: &str| {
            ApiError::bad_field(here(field), format!("{} {problem}", here(field)))
        };
        match tool.get("type").unwrap_or(&Value::Null) {
            Value::Null => {}
            Value::String(kind) if kind == "custom" => {}
            kind => {
                let message = format!(
                    "{} is {kind}: this server has no tools of its own, only yours (--unknown-fields ignore leaves out others)",
                    here(".type")
                );
                return Err(ApiError::unsupported(&here(".type"), message));
            }
        }
        let name = tool.get("name").and_then(Value::as_str);
        let name = name.ok_or_else(|| wrong(".name", "must be a text"))?;
        let mut function = json!({"name": name});
        for (from, to) in
            [("description", "description"), ("input_schema", "parameters"), ("strict", "strict")]
        {
            if let Some(value) = tool.get(from).filter(|value| !value.is_null()) {
                function[to] = value.clone();
            }
        }
        if !function["parameters"].is_object() {
            return Err(wrong(".input_schema", "must be a JSON schema, an object"));
        }
        Ok(json!({"type": "function", "function": function}))
    };
    tools.into_iter().enumerate().map(convert).collect()
}

/// Translates `tool_choice`, and says whether parallel calls are allowed.
fn tool_choice(choice: Option<Value>) -> Result<(Option<Value>, Option<bool>), ApiError> {
    let Some(choice) = choice.filter(|choice| !says_nothing(choice)) else { return Ok((None, None)) };
    let wanted = match choice.get("type").and_then(Value::as_str) {
        Some("auto") => "auto".into(),
        Some("any") => "required".into(),
        Some("none") => "none".into(),
        Some("tool") => match choice.get("name").and_then(Value::as_str) {
            Some(name) => json!({"type": "function", "function": {"name": name}}),
            None => return Err(ApiError::bad_field("tool_choice.name", "tool_choice.name must be a text")),
        },
        _ => {
            let message = "tool_choice.type must be auto, any, tool or none";
            return Err(ApiError::bad_field("tool_choice.type", message));
        }
    };
    let single = choice.get("disable_parallel_tool_use").and_then(Value::as_bool);
    Ok((Some(wanted), single.map(|single| !single)))
}

/// Translates the format of the answer.
fn format(format: Value) -> Result<Value, ApiError> {
    match (format.get("type").and_then(Value::as_str), format.get("schema")) {
        (Some("json_schema"), Some(schema)) => {
            Ok(json!({"type": "json_schema", "json_schema": {"schema": schema}}))
        }
        _ => {
            let message = "output_config.format must be {\"type\": \"json_schema\", \"schema\": …}";
            Err(ApiError::bad_field("output_config.format", message))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::parse;

    fn chat(extra: Value) -> Result<OpenAiRequest, ApiError> {
        let mut request =
            json!({"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]});
        for (name, value) in extra.as_object().unwrap() {
            request[name] = value.clone();
        }
        let mut request = parse::<MessagesRequest>(request.to_string().as_bytes())?;
        request.check_fields(&FieldPolicy::default())?;
        request.into_chat().map(|(request, _)| request)
    }

    #[test]
    fn fields_find_their_names() {
        let tool =
            json!({"name": "f", "description": "d", "input_schema": {"type": "object"}, "strict": true});
        let request = chat(json!({
            "system": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            "stop_sequences": ["x"], "temperature": 0.5, "top_k": 3, "metadata": {"user_id": "u"},
            "tools": [tool], "tool_choice": {"type": "any", "disable_parallel_tool_use": true},
            "thinking": {"type": "enabled", "budget_tokens": 2000}, "service_tier": "auto",
        }))
        .unwrap();
        let messages = request.messages.clone().unwrap();
        assert_eq!(messages[0], json!({"role": "system", "content": "a\nb"}));
        assert_eq!(messages[1]["role"], "user");
        let function =
            json!({"name": "f", "description": "d", "parameters": {"type": "object"}, "strict": true});
        assert_eq!(request.tools.clone().unwrap(), [json!({"type": "function", "function": function})]);
        assert_eq!(
            (&request.tool_choice, request.parallel_tool_calls),
            (&Some("required".into()), Some(false))
        );
        assert_eq!(request.chat_template_kwargs.as_ref().unwrap()["enable_thinking"], true);
        let sampling_fields = request.sampling_fields(None).unwrap();
        assert_eq!(
            (sampling_fields.max_tokens, sampling_fields.temperature, sampling_fields.top_k),
            (Some(9), Some(0.5), Some(3))
        );
        assert_eq!(sampling_fields.stop, Some(OneOrMany::Many(vec!["x".to_owned()])));
    }

    #[test]
    fn choices_are_translated() {
        let choice = |value: Value| chat(json!({"tool_choice": value})).unwrap().tool_choice;
        assert_eq!(choice(json!({"type": "auto"})), Some("auto".into()));
        assert_eq!(choice(json!({"type": "none"})), Some("none".into()));
        let named = json!({"type": "function", "function": {"name": "f"}});
        assert_eq!(choice(json!({"type": "tool", "name": "f"})), Some(named));
        assert_eq!(choice(Value::Null), None);
        let variables = |extra: Value| chat(extra).unwrap().chat_template_kwargs.unwrap();
        assert_eq!(variables(json!({"thinking": {"type": "disabled"}}))["enable_thinking"], false);
        assert!(variables(json!({})).is_empty(), "left to the template");
        let nulls = json!({"thinking": {"type": null, "budget_tokens": null}});
        assert!(variables(nulls).is_empty(), "nothing is said");
    }

    #[test]
    fn what_is_wrong_or_missing_is_named() {
        for (extra, param) in [
            (json!({"max_tokens": null}), "max_tokens"),
            (json!({"max_tokens": 0}), "max_tokens"),
            (json!({"max_tokens": -1}), "max_tokens"),
            (json!({"messages": []}), "messages"),
            (json!({"system": 3}), "system"),
            (json!({"system": [{"type": "image"}]}), "system[0]"),
            (json!({"tools": [{"type": "web_search_20250305", "name": "w"}]}), "tools[0].type"),
            (json!({"tools": [{"input_schema": {}}]}), "tools[0].name"),
            (json!({"tools": [{"name": "f"}]}), "tools[0].input_schema"),
            (json!({"tool_choice": {"type": "some"}}), "tool_choice.type"),
            (json!({"tool_choice": {"type": "tool"}}), "tool_choice.name"),
            (json!({"thinking": {"type": "deep"}}), "thinking.type"),
            (json!({"thinking": {"budget_tokens": 2000}}), "thinking.type"),
            (json!({"output_config": {"format": {"type": "xml"}}}), "output_config.format"),
            (json!({"mcp_servers": [{}]}), "mcp_servers"),
        ] {
            let error = chat(extra.clone()).unwrap_err();
            assert_eq!(error.body()["error"]["param"], param, "{extra}");
        }
    }
}
