//! Applies the chat template: from the messages of a request to the text the model reads.

use oscar_model::text::{ChatTemplate, RenderOptions, RenderedText, random_mark};
use serde_json::{Map, Value, json};

use super::ServedModel;
use super::call_forms::check_written;
use super::roles::{check_results, check_roles, rename_function_results};
use super::tool_text::{CallWriter, describe_tools, give_to_system_message, shorten_ids, write_calls};
use crate::options::ServerOptions;
use crate::protocol::{ApiError, MAX_MESSAGES, MAX_PARTS, OpenAiRequest, at_most, says_nothing, text_error};

/// What templates are given besides `chat_template_kwargs`, which cannot replace it.
const RESERVED_VARIABLES: [&str; 8] = [
    "messages",
    "tools",
    "add_generation_prompt",
    "bos_token",
    "eos_token",
    "strftime_now",
    "raise_exception",
    "namespace",
];

/// The messages and tools of a chat, checked and in the form chat templates expect.
#[derive(Debug)]
pub(crate) struct Chat {
    messages: Vec<Value>,
    tools: Option<Vec<Value>>,
    variables: Map<String, Value>,
    generation_prompt: bool,
    continues: bool,
}

impl Chat {
    /// Takes the messages and tools of a request.
    pub(crate) fn new(request: &mut OpenAiRequest) -> Result<Chat, ApiError> {
        let messages = request.messages.take().unwrap_or_default();
        if messages.is_empty() {
            return Err(ApiError::bad_field("messages", "messages must have at least one message"));
        }
        at_most("messages", "messages", messages.len(), MAX_MESSAGES)?;
        let messages = messages.into_iter().enumerate();
        let messages = messages.map(|(index, message)| checked(index, message)).collect::<Result<_, _>>()?;
        let tools = request.tools.take().filter(|tools| !tools.is_empty());
        let mut variables = request.chat_template_kwargs.take().unwrap_or_default();
        if let Some(name) = RESERVED_VARIABLES.iter().find(|name| variables.contains_key(**name)) {
            let field = format!("chat_template_kwargs.{name}");
            let message = format!("{field}: templates get {name} from the request itself");
            return Err(ApiError::bad_field(field, message));
        }
        if let Some(effort) = request.reasoning_effort.take().filter(|effort| !effort.is_empty()) {
            variables.entry("reasoning_effort").or_insert(effort.into());
        }
        let continues = request.continue_final_message.unwrap_or(false);
        if continues && request.add_generation_prompt == Some(true) {
            return Err(ApiError::bad_field(
                "continue_final_message",
                "continue_final_message and add_generation_prompt exclude each other",
            ));
        }
        let generation_prompt = request.add_generation_prompt.unwrap_or(!continues);
        // A model that must not call tools had better not see them.
        let tools = tools.filter(|_| request.tool_choice.as_ref().and_then(Value::as_str) != Some("none"));
        Ok(Chat { messages, tools, variables, generation_prompt, continues })
    }

    /// Renders the chat with the template of the model. Control tokens in messages and tools are text unless the options of
    /// the server say otherwise.
    pub(crate) fn render(
        &mut self,
        model: &ServedModel,
        options: &ServerOptions,
    ) -> Result<RenderedText, ApiError> {
        let template = model.template()?;
        rename_function_results(&mut self.messages, template);
        check_roles(&self.messages, template)?;
        check_results(&self.messages)?;
        if !template.source().contains("developer") {
            for message in &mut self.messages {
                if message["role"] == "developer" {
                    message["role"] = "system".into();
                }
            }
        }
        name_thoughts(&mut self.messages, template.source());
        let writer = options.tool_call_parser.map(CallWriter::new);
        let origins = self.write_calls(model, writer.as_ref())?;
        self.write_tools(template, writer.as_ref())?;
        if wants_short_ids(template.source()) {
            shorten_ids(&mut self.messages);
        }
        let parse_special = options.parse_special_in_messages;
        let options = RenderOptions {
            tools: self.tools.as_deref(),
            add_generation_prompt: self.generation_prompt,
            bos_token: model.bos(),
            eos_token: model.eos(),
            extra: Some(&self.variables),
            now: None,
        };
        // A message that is continued ends with a mark: its text may also be part of what the template writes after it.
        let mark = self.continues.then(random_mark);
        if let (Some(mark), Some(last)) = (&mark, self.messages.last_mut()) {
            if !says_nothing(&last["tool_calls"]) {
                let message = "the last message cannot be continued: it ends in calls of tools";
                return Err(ApiError::bad_field("continue_final_message", message));
            }
            let content = last["content"].as_str().unwrap_or_default().trim_end();
            last["content"] = format!("{content}{mark}").into();
        }
        let rendered = match parse_special {
            true => template.render(&self.messages, &options).map(RenderedText::from),
            false => template.render_literally(&self.messages, &options, model.tokenizer().control_tokens()),
        };
        let mut text = rendered.map_err(|error| text_error("messages", &error))?;
        if let Some(mark) = &mark {
            let Some(end) = text.as_str().find(mark.as_str()) else {
                let message = "the last message cannot be continued: the template changes its text";
                return Err(ApiError::bad_field("continue_final_message", message));
            };
            text.truncate(end);
        }
        check_written(text.as_str(), &self.messages, &origins)?;
        writer.iter().for_each(|writer| writer.put_markers(&mut text));
        Ok(text)
    }

    /// Gives calls the form in which the template writes them, or writes them into the messages where it writes none in
    /// any form, or refuses them. Returns the index that each message had in the request.
    fn write_calls(
        &mut self,
        model: &ServedModel,
        writer: Option<&CallWriter>,
    ) -> Result<Vec<usize>, ApiError> {
        let calls = |message: &Value| {
            message.get("tool_calls").and_then(Value::as_array).is_some_and(|calls| !calls.is_empty())
        };
        let as_they_are = (0..self.messages.len()).collect();
        let Some(first) = self.messages.iter().position(calls) else { return Ok(as_they_are) };
        let with_tools = self.tools.is_some() && tools_of(model.template()?, true) == ToolsOf::Variable;
        if let Some(form) = model.call_form(with_tools)? {
            let (messages, origins) = form.arrange(std::mem::take(&mut self.messages));
            self.messages = messages;
            return Ok(origins);
        }
        let field = || format!("messages[{first}].tool_calls");
        let writer = writer.ok_or_else(|| unknown(field(), "tool calls"))?;
        let called = self.messages.iter_mut().filter(|message| calls(message));
        called.for_each(|message| write_calls(message, writer));
        Ok(as_they_are)
    }

    /// Writes tools into the messages where the template knows none, or refuses them.
    fn write_tools(&mut self, template: &ChatTemplate, writer: Option<&CallWriter>) -> Result<(), ApiError> {
        let place = tools_of(template, self.tools.is_some());
        let Some(tools) = self.tools.take_if(|_| place != ToolsOf::Variable) else { return Ok(()) };
        if place == ToolsOf::SystemMessage {
            give_to_system_message(&mut self.messages, &tools);
            return Ok(());
        }
        let writer = writer.ok_or_else(|| unknown("tools".to_owned(), "tools"))?;
        describe_tools(&mut self.messages, &tools, writer);
        Ok(())
    }
}

/// The place from which a template takes its tools.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ToolsOf {
    Variable,
    SystemMessage,
    Nowhere,
}

fn tools_of(template: &ChatTemplate, with_tools: bool) -> ToolsOf {
    if template.mentions("message['tools']", with_tools) {
        ToolsOf::SystemMessage
    } else if template.mentions("tools", with_tools) {
        ToolsOf::Variable
    } else {
        ToolsOf::Nowhere
    }
}

/// The error for what a template does not know.
fn unknown(field: String, what: &str) -> ApiError {
    let fix = "start the server with --tool-call-parser NAME to have them written for the model";
    let message = format!("{field}: the chat template of this model knows no {what}; {fix}");
    ApiError::unsupported(&field, message)
}

/// A message as templates expect it: text content, arguments of calls as objects.
fn checked(index: usize, mut message: Value) -> Result<Value, ApiError> {
    let here = |field: &str| format!("messages[{index}]{field}");
    let Some(fields) = message.as_object_mut() else {
        return Err(ApiError::bad_field(here(""), format!("{} must be an object", here(""))));
    };
    if fields.get("role").and_then(Value::as_str).is_none_or(str::is_empty) {
        return Err(ApiError::bad_field(here(".role"), format!("{} must be a text", here(".role"))));
    }
    let content = match fields.remove("content") {
        None | Some(Value::Null) => String::new(),
        Some(Value::String(text)) => text,
        Some(Value::Array(parts)) => joined(&parts, &here(".content"))?,
        Some(_) => {
            let message = format!("{} must be a text, a list of parts or null", here(".content"));
            return Err(ApiError::bad_field(here(".content"), message));
        }
    };
    fields.insert("content".to_owned(), content.into());
    // The old name of a single call.
    let mut old = false;
    match fields.remove("function_call") {
        Some(call @ Value::Object(_)) if !fields.contains_key("tool_calls") => {
            fields.insert("tool_calls".to_owned(), json!([{"type": "function", "function": call}]));
            old = true;
        }
        _ => {}
    }
    match fields.get_mut("tool_calls") {
        None => {}
        Some(Value::Null) => drop(fields.remove("tool_calls")),
        Some(Value::Array(calls)) => {
            for (number, call) in calls.iter_mut().enumerate() {
                let name = call.get("function").and_then(|function| function.get("name"));
                if name.and_then(Value::as_str).is_none_or(str::is_empty) {
                    let call =
                        if old { ".function_call" } else { &format!(".tool_calls[{number}].function") };
                    let field = here(&format!("{call}.name"));
                    return Err(ApiError::bad_field(field.clone(), format!("{field} must be a text")));
                }
                read_arguments(call);
            }
        }
        Some(_) => {
            let message = format!("{} must be a list", here(".tool_calls"));
            return Err(ApiError::bad_field(here(".tool_calls"), message));
        }
    }
    Ok(message)
}

/// Gives thoughts that clients send back (`reasoning_content`) the name that the template of GPT-OSS has for them.
fn name_thoughts(messages: &mut [Value], template: &str) {
    if !template.contains("message.thinking") {
        return;
    }
    for fields in messages.iter_mut().filter_map(Value::as_object_mut) {
        if let Some(thoughts) = fields.get("reasoning_content").cloned() {
            fields.entry("thinking").or_insert(thoughts);
        }
    }
}

/// Whether a template refuses ids of calls that do not have nine letters and digits, as Mistral's do.
fn wants_short_ids(template: &str) -> bool {
    template.contains("id|length != 9") || template.contains("id|length < 9")
}

/// Joins the texts of content parts.
fn joined(parts: &[Value], place: &str) -> Result<String, ApiError> {
    at_most(place, "parts", parts.len(), MAX_PARTS)?;
    let mut texts = Vec::with_capacity(parts.len());
    for (index, part) in parts.iter().enumerate() {
        let place = format!("{place}[{index}]");
        match (part.get("type").and_then(Value::as_str), part.get("text").and_then(Value::as_str)) {
            (Some("text" | "input_text" | "output_text"), Some(text)) => texts.push(text),
            (Some("text"), None) => {
                return Err(ApiError::bad_field(place.clone(), format!("{place} has no text")));
            }
            _ => {
                let message = format!("{place} is not text, and this model reads nothing else");
                return Err(ApiError::unsupported(&place, message));
            }
        }
    }
    Ok(texts.join("\n"))
}

/// Clients send the arguments of a call as JSON in a string; templates write out an object.
fn read_arguments(call: &mut Value) {
    let arguments = call.get_mut("function").and_then(|function| function.get_mut("arguments"));
    if let Some(arguments) = arguments
        && let Some(text) = arguments.as_str()
        && let Ok(object @ Value::Object(_)) = serde_json::from_str(text)
    {
        *arguments = object;
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn chat(request: Value) -> Result<Chat, ApiError> {
        Chat::new(&mut serde_json::from_value(request).unwrap())
    }

    #[test]
    fn messages_take_the_form_templates_expect() {
        let chat = chat(json!({"messages": [
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": null, "tool_calls": [
                {"type": "function", "function": {"name": "f", "arguments": "{\"x\": 1}"}},
                {"type": "function", "function": {"name": "g", "arguments": "not json"}}]},
            {"role": "tool"}]}))
        .unwrap();
        assert_eq!(chat.messages[0]["content"], "a\nb");
        assert_eq!(chat.messages[1]["content"], "");
        assert_eq!(chat.messages[1]["tool_calls"][0]["function"]["arguments"], json!({"x": 1}));
        assert_eq!(chat.messages[1]["tool_calls"][1]["function"]["arguments"], "not json");
        assert_eq!(chat.messages[2]["content"], "");
    }

    #[test]
    fn bad_messages_are_named() {
        let user = json!({"role": "user", "content": "hi"});
        for (request, param) in [
            (json!({}), "messages"),
            (json!({"messages": []}), "messages"),
            (json!({"messages": [user, 3]}), "messages[1]"),
            (json!({"messages": [{"content": "hi"}]}), "messages[0].role"),
            (json!({"messages": [{"role": "user", "content": 3}]}), "messages[0].content"),
            (
                json!({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}),
                "messages[0].content[0]",
            ),
            (
                json!({"messages": [user, {"role": "assistant", "function_call": {"arguments": "{}"}}]}),
                "messages[1].function_call.name",
            ),
        ] {
            let error = chat(request.clone()).unwrap_err();
            assert_eq!(error.body()["error"]["param"], param, "{request}");
        }
    }

    #[test]
    fn tools_are_hidden_from_a_model_that_must_not_call_them() {
        let tool = json!({"type": "function", "function": {"name": "f"}});
        let request = |choice: Value| json!({"messages": [{"role": "user", "content": "hi"}], "tools": [tool], "tool_choice": choice});
        assert!(chat(request("auto".into())).unwrap().tools.is_some());
        assert!(chat(request(Value::Null)).unwrap().tools.is_some());
        assert!(chat(request("none".into())).unwrap().tools.is_none());
    }
}
