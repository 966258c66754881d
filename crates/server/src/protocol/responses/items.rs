//! Items as the messages of a chat: thoughts, text and calls in a row are one message of the model.

use serde_json::{Value, json};

use crate::protocol::sent_names::Place;
use crate::protocol::{ApiError, MAX_MESSAGES, MAX_PARTS, at_most};

/// Translates the items of `input` into the messages of a chat, each with the items that it was made of.
pub(super) fn messages(input: Value) -> Result<(Vec<Value>, Vec<Place>), ApiError> {
    let items = match input {
        Value::String(text) => {
            return Ok((vec![json!({"role": "user", "content": text})], vec![Place::new("input")]));
        }
        Value::Array(items) if !items.is_empty() => items,
        _ => return Err(ApiError::bad_field("input", "input must be a text or a list of items")),
    };
    at_most("input", "items", items.len(), MAX_MESSAGES)?;
    let mut all = Messages::default();
    for (index, item) in items.iter().enumerate() {
        all.item(&format!("input[{index}]"), item)?;
    }
    all.flush();
    Ok((all.list, all.places))
}

/// The messages so far, and what the model said that has not become one yet.
#[derive(Default)]
struct Messages {
    list: Vec<Value>,
    places: Vec<Place>,
    thoughts: Option<String>,
    text: Option<String>,
    calls: Vec<Value>,
    /// Where text and calls were.
    place: Place,
}

impl Messages {
    fn item(&mut self, place: &str, item: &Value) -> Result<(), ApiError> {
        match item.get("type").and_then(Value::as_str) {
            Some("message") | None => self.message(place, item),
            Some("function_call") => {
                let arguments = field(place, item, "arguments")?;
                let function = json!({"name": field(place, item, "name")?, "arguments": arguments});
                let id = field(place, item, "call_id")?;
                self.calls.push(json!({"id": id, "type": "function", "function": function}));
                self.begin(place);
                self.place.calls.push(place.to_owned());
                Ok(())
            }
            Some("function_call_output") => {
                let content = texts(&format!("{place}.output"), item.get("output"))?;
                let id = field(place, item, "call_id")?;
                self.flush();
                self.push(place, json!({"role": "tool", "tool_call_id": id, "content": content}));
                Ok(())
            }
            Some("reasoning") => {
                if self.text.is_some() || !self.calls.is_empty() {
                    self.flush();
                }
                let place = format!("{place}.content");
                let text = match item.get("content").filter(|content| !content.is_null()) {
                    Some(content) => texts(&place, Some(content))?,
                    // Nobody can read what is encrypted; summaries are not what was thought.
                    None => return Ok(()),
                };
                self.thoughts = Some(text);
                Ok(())
            }
            Some("item_reference") => {
                let message =
                    format!("{place} refers to an item, and nothing is kept between requests; send the item");
                Err(ApiError::unsupported(place, message))
            }
            Some(other) => {
                let other: String = other.chars().take(40).collect();
                let message = format!("{place} is an item of type {other:?}, which cannot be read here");
                Err(ApiError::unsupported(place, message))
            }
        }
    }

    fn message(&mut self, place: &str, item: &Value) -> Result<(), ApiError> {
        let role = match item.get("role").and_then(Value::as_str) {
            Some(role @ ("user" | "assistant" | "system" | "developer")) => role,
            _ => {
                let field = format!("{place}.role");
                let message = format!("{field} must be user, assistant, system or developer");
                return Err(ApiError::bad_field(field, message));
            }
        };
        let content = texts(&format!("{place}.content"), item.get("content"))?;
        if role == "assistant" {
            if self.text.is_some() || !self.calls.is_empty() {
                self.flush();
            }
            self.text = Some(content);
            self.begin(place);
        } else {
            self.flush();
            self.push(place, json!({"role": role, "content": content}));
        }
        Ok(())
    }

    /// Adds a message that was made of one item.
    fn push(&mut self, place: &str, message: Value) {
        self.list.push(message);
        self.places.push(Place::new(place));
    }

    /// Names the message of the assistant after its first item.
    fn begin(&mut self, place: &str) {
        if self.place.message.is_empty() {
            place.clone_into(&mut self.place.message);
        }
    }

    /// Ends the message of the assistant that earlier items began, if they began one.
    fn flush(&mut self) {
        let (thoughts, text) = (self.thoughts.take(), self.text.take());
        let calls = std::mem::take(&mut self.calls);
        // Thoughts that led to nothing are no message.
        if text.is_none() && calls.is_empty() {
            return;
        }
        let mut message = json!({"role": "assistant", "content": text.unwrap_or_default()});
        if let Some(thoughts) = thoughts {
            message["reasoning_content"] = thoughts.into();
        }
        if !calls.is_empty() {
            message["tool_calls"] = calls.into();
        }
        self.list.push(message);
        self.places.push(std::mem::take(&mut self.place));
    }
}

/// The text of content that is a text or a list of text parts.
fn texts(place: &str, content: Option<&Value>) -> Result<String, ApiError> {
    match content {
        Some(Value::String(text)) => Ok(text.clone()),
        Some(Value::Array(parts)) => {
            at_most(place, "parts", parts.len(), MAX_PARTS)?;
            let mut all = Vec::with_capacity(parts.len());
            for (index, part) in parts.iter().enumerate() {
                let place = format!("{place}[{index}]");
                match part.get("type").and_then(Value::as_str) {
                    Some("input_text" | "output_text" | "reasoning_text" | "text") => {
                        all.push(field(&place, part, "text")?);
                    }
                    Some("refusal") => all.push(field(&place, part, "refusal")?),
                    _ => {
                        let message = format!("{place} is not text, and this model reads nothing else");
                        return Err(ApiError::unsupported(&place, message));
                    }
                }
            }
            Ok(all.join("\n"))
        }
        _ => Err(ApiError::bad_field(place, format!("{place} must be a text or a list of parts"))),
    }
}

fn field<'v>(place: &str, item: &'v Value, name: &str) -> Result<&'v str, ApiError> {
    item.get(name).and_then(Value::as_str).ok_or_else(|| {
        let field = format!("{place}.{name}");
        ApiError::bad_field(field.clone(), format!("{field} must be a text"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn items_become_messages() {
        let input = json!([
            {"role": "developer", "content": "Be brief."},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Rome?"}]},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
             "content": [{"type": "output_text", "text": "I ask.", "annotations": []}]},
            {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": "{\"place\": \"Rome\"}"},
            {"type": "function_call", "call_id": "call_2", "name": "weather", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "call_1", "output": "Sun"},
            {"type": "function_call_output", "call_id": "call_2", "output": [{"type": "input_text", "text": "Rain"}]},
            {"type": "reasoning", "summary": [], "encrypted_content": "x"},
            {"role": "assistant", "content": "It is both."},
            {"role": "assistant", "content": "Really."},
            {"role": "user", "content": "Hm."},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "lost"}]}]);
        let call = |id: &str, arguments: &str| json!({"id": id, "type": "function", "function": {"name": "weather", "arguments": arguments}});
        let calls = [call("call_1", "{\"place\": \"Rome\"}"), call("call_2", "{}")];
        let expected = [
            json!({"role": "developer", "content": "Be brief."}),
            json!({"role": "user", "content": "Rome?"}),
            json!({"role": "assistant", "content": "I ask.", "reasoning_content": "hm", "tool_calls": calls}),
            json!({"role": "tool", "tool_call_id": "call_1", "content": "Sun"}),
            json!({"role": "tool", "tool_call_id": "call_2", "content": "Rain"}),
            json!({"role": "assistant", "content": "It is both."}),
            json!({"role": "assistant", "content": "Really."}),
            json!({"role": "user", "content": "Hm."}),
        ];
        let (list, places) = messages(input).unwrap();
        assert_eq!(list, expected);
        let place = |index: usize| Place::new(format!("input[{index}]"));
        let called = Place { calls: vec!["input[4]".into(), "input[5]".into()], ..place(3) };
        let expected = [place(0), place(1), called, place(6), place(7), place(9), place(10), place(11)];
        assert_eq!(places, expected);
    }

    #[test]
    fn what_cannot_be_read_is_named() {
        for (input, param) in [
            (json!([]), "input"),
            (json!({}), "input"),
            (json!([3]), "input[0].role"),
            (json!([{"role": "tool", "content": "x"}]), "input[0].role"),
            (json!([{"role": "user"}]), "input[0].content"),
            (json!([{"role": "user", "content": [{"type": "input_image"}]}]), "input[0].content[0]"),
            (json!([{"role": "user", "content": [{"type": "input_text"}]}]), "input[0].content[0].text"),
            (json!([{"type": "function_call", "name": "f", "arguments": ""}]), "input[0].call_id"),
            (json!([{"type": "function_call_output", "call_id": "c"}]), "input[0].output"),
            (json!([{"type": "item_reference", "id": "x"}]), "input[0]"),
            (json!([{"type": "computer_call"}]), "input[0]"),
        ] {
            let error = messages(input.clone()).unwrap_err();
            assert_eq!(error.body()["error"]["param"], param, "{input}");
        }
    }
}
