//! Tools and calls as plain text in messages, for chat templates that know neither. They may not simply vanish from the
//! prompt: the model would answer as if it had no tools and had never called one.

use oscar_model::text::{RenderedText, random_mark};
use serde_json::{Map, Value, json};

use crate::parse::ToolCallFormat;

/// Writes calls as a family does, for templates that know none.
///
/// Markers of calls may be control tokens, and control tokens of a message are text. So a message gets marks in their
/// place, which nobody who wrote another part of it can have written too, and the rendered text gets the markers.
#[derive(Debug)]
pub(super) struct CallWriter {
    format: &'static ToolCallFormat,
    marks: (String, String),
}

impl CallWriter {
    /// A writer of calls in this format.
    pub(super) fn new(format: &'static ToolCallFormat) -> CallWriter {
        CallWriter { format, marks: (random_mark(), random_mark()) }
    }

    /// Puts the markers in the place of the marks.
    pub(super) fn put_markers(&self, text: &mut RenderedText) {
        let (open, close) = self.format.block;
        text.replace(&self.marks.0, open);
        text.replace(&self.marks.1, close);
    }

    fn written(&self, calls: &[(&str, &Value)]) -> String {
        self.format.written(calls, (&self.marks.0, &self.marks.1))
    }
}

/// Describes tools in the system message, with an example of how the model is to call one.
pub(super) fn describe_tools(messages: &mut Vec<Value>, tools: &[Value], writer: &CallWriter) {
    let mut text = "You can call functions. Each of these lines describes one:\n".to_owned();
    for tool in tools {
        text += &format!("{}\n", tool.get("function").unwrap_or(tool));
    }
    let example = writer.written(&[("NAME", &json!({"ARGUMENT": "VALUE"}))]);
    text += &format!("To call a function, write its name and arguments like this and then stop:\n{example}");
    match messages.first_mut().filter(|message| message["role"] == "system") {
        Some(system) => {
            let said = system["content"].as_str().unwrap_or_default();
            system["content"] = if said.is_empty() { text } else { format!("{said}\n\n{text}") }.into();
        }
        None => messages.insert(0, json!({"role": "system", "content": text})),
    }
}

/// Writes the calls of a message into its content.
pub(super) fn write_calls(message: &mut Value, writer: &CallWriter) {
    let Some(calls) = message.as_object_mut().and_then(|fields| fields.remove("tool_calls")) else { return };
    let calls = calls.as_array().map(Vec::as_slice).unwrap_or_default();
    let function = |call: &Value, field: &str| call["function"][field].clone();
    let calls: Vec<(Value, Value)> =
        calls.iter().map(|call| (function(call, "name"), function(call, "arguments"))).collect();
    let calls: Vec<(&str, &Value)> =
        calls.iter().map(|(name, arguments)| (name.as_str().unwrap_or_default(), arguments)).collect();
    let said = message["content"].as_str().unwrap_or_default();
    let between = if said.is_empty() { "" } else { "\n" };
    message["content"] = format!("{said}{between}{}", writer.written(&calls)).into();
}

/// Hands tools to a template that takes them from the system message, as JSON, rather than from a variable (Phi-4-mini).
pub(super) fn give_to_system_message(messages: &mut Vec<Value>, tools: &[Value]) {
    let functions: Vec<&Value> = tools.iter().map(|tool| tool.get("function").unwrap_or(tool)).collect();
    if messages.first().is_none_or(|message| message["role"] != "system") {
        messages
            .insert(0, json!({"role": "system", "content": "You are a helpful assistant with some tools."}));
    }
    messages[0]["tools"] = json!(functions).to_string().into();
}

/// Gives calls and results ids that the templates of Mistral take, which refuse all but nine letters and digits. A
/// conversation keeps its ids from turn to turn.
pub(super) fn shorten_ids(messages: &mut [Value]) {
    let shorten = |fields: &mut Map<String, Value>, name: &str| {
        let field = fields.entry(name).or_insert(Value::Null);
        let fits = |id: &&str| id.len() == 9 && id.bytes().all(|byte| byte.is_ascii_alphanumeric());
        if field.as_str().filter(fits).is_none() {
            *field = nine_digits(field.as_str().unwrap_or_default()).into();
        }
    };
    for message in messages {
        for call in message.get_mut("tool_calls").and_then(Value::as_array_mut).into_iter().flatten() {
            call.as_object_mut().into_iter().for_each(|call| shorten(call, "id"));
        }
        if message["role"] == "tool" {
            message.as_object_mut().into_iter().for_each(|message| shorten(message, "tool_call_id"));
        }
    }
}

/// Nine digits that are the same for the same id (FNV-1a).
fn nine_digits(id: &str) -> String {
    let hash = id.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    });
    format!("{:09}", hash % 1_000_000_000)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hermes() -> CallWriter {
        CallWriter::new(ToolCallFormat::choose("hermes", None).unwrap().unwrap())
    }

    /// The content of a message with markers in it.
    fn content(message: &Value, writer: &CallWriter) -> String {
        let mut text = RenderedText::from(message["content"].as_str().unwrap().to_owned());
        writer.put_markers(&mut text);
        text.as_str().to_owned()
    }

    #[test]
    fn tools_are_in_the_system_message() {
        let tools = [json!({"type": "function", "function": {"name": "weather", "parameters": {}}})];
        let writer = hermes();
        let mut alone = vec![json!({"role": "user", "content": "hi"})];
        describe_tools(&mut alone, &tools, &writer);
        assert_eq!((alone.len(), &alone[0]["role"]), (2, &json!("system")));
        let text = content(&alone[0], &writer);
        assert!(text.contains("{\"name\":\"weather\",\"parameters\":{}}"), "{text}");
        assert!(text.ends_with(
            "<tool_call>\n{\"name\": \"NAME\", \"arguments\": {\"ARGUMENT\":\"VALUE\"}}\n</tool_call>"
        ));
        let mut told = vec![json!({"role": "system", "content": "Be brief."})];
        describe_tools(&mut told, &tools, &writer);
        assert_eq!(content(&told[0], &writer), format!("Be brief.\n\n{text}"));
    }

    #[test]
    fn calls_follow_what_was_said() {
        let call = json!({"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}});
        let mut message = json!({"role": "assistant", "content": "I ask.", "tool_calls": [call]});
        let writer = hermes();
        write_calls(&mut message, &writer);
        let expected = "I ask.\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"x\":1}}\n</tool_call>";
        assert_eq!(content(&message, &writer), expected);
        assert_eq!(message.get("tool_calls"), None);
    }

    #[test]
    fn tools_in_the_system_message_are_functions() {
        let tools = [json!({"type": "function", "function": {"name": "weather", "parameters": {}}})];
        let functions = json!([{"name": "weather", "parameters": {}}]).to_string();
        let mut messages = vec![json!({"role": "user", "content": "hi"})];
        give_to_system_message(&mut messages, &tools);
        assert_eq!((messages.len(), &messages[0]["tools"]), (2, &json!(functions)));
        let mut messages = vec![json!({"role": "system", "content": "Be brief."})];
        give_to_system_message(&mut messages, &tools);
        assert_eq!(messages, [json!({"role": "system", "content": "Be brief.", "tools": functions})]);
    }

    #[test]
    fn ids_become_nine_letters_and_digits_and_agree() {
        let call = |id: Value| json!({"id": id, "function": {"name": "f"}});
        let result = |id: &str| json!({"role": "tool", "tool_call_id": id});
        let mut messages = [
            json!({"role": "assistant", "tool_calls": [call("call_7".into()), call("a1B2c3D4e".into()), call(Value::Null)]}),
            result("call_7"),
            result("a1B2c3D4e"),
            json!({"role": "tool"}),
        ];
        shorten_ids(&mut messages);
        let calls = &messages[0]["tool_calls"];
        assert_eq!(calls[1]["id"], "a1B2c3D4e");
        for (index, message) in messages[1..].iter().enumerate() {
            assert_eq!(message["tool_call_id"], calls[index]["id"]);
            assert_eq!(message["tool_call_id"].as_str().unwrap().len(), 9);
        }
        assert_ne!(calls[0]["id"], calls[2]["id"]);
    }
}
