//! The `message` of a choice, for answers that are not streamed.

use serde_json::{Map, Value, json};

use crate::parse::{Message, MessageCall};

/// The `message` of a choice, with `reasoning_content` and `tool_calls` if there are any.
pub(super) fn message_json(message: &Message) -> Value {
    let mut fields = Map::new();
    fields.insert("role".to_owned(), "assistant".into());
    // Where there is nothing but calls, clients expect no content at all.
    let silent = message.content.is_empty() && !message.tool_calls.is_empty();
    let content = if silent { Value::Null } else { message.content.as_str().into() };
    fields.insert("content".to_owned(), content);
    if !message.reasoning.is_empty() {
        fields.insert("reasoning_content".to_owned(), message.reasoning.as_str().into());
    }
    if !message.tool_calls.is_empty() {
        fields.insert("tool_calls".to_owned(), message.tool_calls.iter().map(call_json).collect());
    }
    fields.insert("refusal".to_owned(), Value::Null);
    fields.into()
}

fn call_json(call: &MessageCall) -> Value {
    let function = json!({"name": call.name, "arguments": call.arguments});
    json!({"id": call.id, "type": "function", "function": function})
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parse::Piece;

    #[test]
    fn parts_end_up_in_their_fields() {
        let mut message = Message::default();
        message.push(Piece::Content("Hello".into()));
        assert_eq!(message_json(&message), json!({"role": "assistant", "content": "Hello", "refusal": null}));
        let mut message = Message::default();
        message.push(Piece::Reasoning("hm".into()));
        message.push(Piece::ToolCallStart { index: 0, id: "call_1".into(), name: "f".into() });
        message.push(Piece::ToolCallArguments { index: 0, text: "{\"x\": 1}".into() });
        let expected = json!({"role": "assistant", "content": null, "reasoning_content": "hm", "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{\"x\": 1}"}}],
            "refusal": null});
        assert_eq!(message_json(&message), expected);
    }
}
