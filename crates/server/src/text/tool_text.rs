//! Tools and calls as plain text in messages, for chat templates that know neither. They may not simply vanish from the
//! prompt: the model would answer as if it had no tools and had never called one.

use serde_json::{Value, json};

use crate::parse::ToolCallFormat;

/// Describes tools in the system message, with an example of how the model is to call one.
pub(super) fn describe_tools(messages: &mut Vec<Value>, tools: &[Value], format: &ToolCallFormat) {
    let mut text = "You can call functions. Each of these lines describes one:\n".to_owned();
    for tool in tools {
        text += &format!("{}\n", tool.get("function").unwrap_or(tool));
    }
    let example = format.written(&[("NAME", &json!({"ARGUMENT": "VALUE"}))]);
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
pub(super) fn write_calls(message: &mut Value, format: &ToolCallFormat) {
    let Some(calls) = message.as_object_mut().and_then(|fields| fields.remove("tool_calls")) else { return };
    let calls = calls.as_array().map(Vec::as_slice).unwrap_or_default();
    let function = |call: &Value, field: &str| call["function"][field].clone();
    let calls: Vec<(Value, Value)> =
        calls.iter().map(|call| (function(call, "name"), function(call, "arguments"))).collect();
    let calls: Vec<(&str, &Value)> =
        calls.iter().map(|(name, arguments)| (name.as_str().unwrap_or_default(), arguments)).collect();
    let said = message["content"].as_str().unwrap_or_default();
    let between = if said.is_empty() { "" } else { "\n" };
    message["content"] = format!("{said}{between}{}", format.written(&calls)).into();
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hermes() -> &'static ToolCallFormat {
        ToolCallFormat::choose("hermes", None).unwrap().unwrap()
    }

    #[test]
    fn tools_are_in_the_system_message() {
        let tools = [json!({"type": "function", "function": {"name": "weather", "parameters": {}}})];
        let mut alone = vec![json!({"role": "user", "content": "hi"})];
        describe_tools(&mut alone, &tools, hermes());
        assert_eq!((alone.len(), &alone[0]["role"]), (2, &json!("system")));
        let text = alone[0]["content"].as_str().unwrap();
        assert!(text.contains("{\"name\":\"weather\",\"parameters\":{}}"), "{text}");
        assert!(text.ends_with(
            "<tool_call>\n{\"name\": \"NAME\", \"arguments\": {\"ARGUMENT\":\"VALUE\"}}\n</tool_call>"
        ));
        let mut told = vec![json!({"role": "system", "content": "Be brief."})];
        describe_tools(&mut told, &tools, hermes());
        assert_eq!(told[0]["content"], format!("Be brief.\n\n{text}"));
    }

    #[test]
    fn calls_follow_what_was_said() {
        let call = json!({"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}});
        let mut message = json!({"role": "assistant", "content": "I ask.", "tool_calls": [call]});
        write_calls(&mut message, hermes());
        let expected = "I ask.\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"x\":1}}\n</tool_call>";
        assert_eq!(message, json!({"role": "assistant", "content": expected}));
    }
}
