//! A whole answer, its parts told apart.

use serde::ser::{Serialize, SerializeMap, Serializer};
use serde_json::{Value, json};

use crate::parse::Piece;

/// An answer in the form of a message.
#[derive(Debug, Default)]
pub(super) struct Message {
    content: String,
    reasoning: String,
    calls: Vec<Call>,
}

#[derive(Debug)]
struct Call {
    id: String,
    name: String,
    arguments: String,
}

impl Message {
    pub(super) fn add(&mut self, piece: Piece) {
        match piece {
            Piece::Content(text) => self.content.push_str(&text),
            Piece::Reasoning(text) => self.reasoning.push_str(&text),
            Piece::ToolCallStart { id, name, .. } => {
                self.calls.push(Call { id, name, arguments: String::new() });
            }
            Piece::ToolCallArguments { index, text } => {
                if let Some(call) = self.calls.get_mut(index) {
                    call.arguments.push_str(&text);
                }
            }
        }
    }

    pub(super) fn has_calls(&self) -> bool {
        !self.calls.is_empty()
    }
}

impl Serialize for Message {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry("role", "assistant")?;
        // Where there is nothing but calls, clients expect no content at all.
        let silent = self.content.is_empty() && self.has_calls();
        map.serialize_entry("content", &(!silent).then_some(&self.content))?;
        if !self.reasoning.is_empty() {
            map.serialize_entry("reasoning_content", &self.reasoning)?;
        }
        if self.has_calls() {
            let calls: Vec<Value> = self.calls.iter().map(call_json).collect();
            map.serialize_entry("tool_calls", &calls)?;
        }
        map.serialize_entry("refusal", &Value::Null)?;
        map.end()
    }
}

fn call_json(call: &Call) -> Value {
    let function = json!({"name": call.name, "arguments": call.arguments});
    json!({"id": call.id, "type": "function", "function": function})
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_end_up_in_their_fields() {
        let mut message = Message::default();
        message.add(Piece::Content("Hel".into()));
        message.add(Piece::Content("lo".into()));
        assert_eq!(json!(message), json!({"role": "assistant", "content": "Hello", "refusal": null}));
        let mut message = Message::default();
        message.add(Piece::Reasoning("hm".into()));
        message.add(Piece::ToolCallStart { index: 0, id: "call_1".into(), name: "f".into() });
        message.add(Piece::ToolCallArguments { index: 0, text: "{\"x\"".into() });
        message.add(Piece::ToolCallArguments { index: 0, text: ": 1}".into() });
        let expected = json!({"role": "assistant", "content": null, "reasoning_content": "hm", "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{\"x\": 1}"}}],
            "refusal": null});
        assert_eq!(json!(message), expected);
    }
}
