//! Messages made of blocks, as the messages of a chat: results of tools become messages of their own, calls and thoughts
//! go beside the text.

use serde_json::{Value, json};

use crate::protocol::sent_names::Place;
use crate::protocol::{ApiError, MAX_MESSAGES, MAX_PARTS, at_most};

/// The messages in the form of a chat of OpenAI's interface.
#[derive(Default)]
pub(super) struct Conversation {
    pub(super) messages: Vec<Value>,
    /// Where each of them was in the request.
    pub(super) places: Vec<Place>,
    /// Whether the last message is the beginning of the answer, which the model continues.
    pub(super) continues: bool,
}

/// Messages of the same role in a row are one turn.
struct Turn {
    role: &'static str,
    blocks: Vec<Block>,
}

/// The path of a block in the request, such as `messages[0].content[1]`, and the block.
type Block = (String, Value);

/// Translates all messages of a request.
pub(super) fn conversation(messages: Vec<Value>) -> Result<Conversation, ApiError> {
    if messages.is_empty() {
        return Err(ApiError::bad_field("messages", "messages must have at least one message"));
    }
    at_most("messages", "messages", messages.len(), MAX_MESSAGES)?;
    let mut turns: Vec<Turn> = Vec::new();
    for (index, message) in messages.into_iter().enumerate() {
        let turn = turn(&format!("messages[{index}]"), message)?;
        match turns.last_mut() {
            Some(last) if last.role == turn.role => last.blocks.extend(turn.blocks),
            _ => turns.push(turn),
        }
    }
    let mut all = Conversation::default();
    let count = turns.len();
    for (index, turn) in turns.into_iter().enumerate() {
        match turn.role {
            "assistant" => {
                let (message, place) = said(turn.blocks)?;
                let last = index + 1 == count;
                if last && message.get("tool_calls").is_some() {
                    let problem = "messages: the last one calls tools; their results must follow";
                    return Err(ApiError::bad_field("messages", problem));
                }
                // An empty beginning is no beginning.
                all.continues =
                    last && message["content"].as_str().is_some_and(|text| !text.trim().is_empty());
                if all.continues || !last {
                    all.push(message, place);
                }
            }
            role => heard(role, turn.blocks, &mut all)?,
        }
    }
    if all.messages.is_empty() {
        return Err(ApiError::bad_field("messages", "messages must have at least one message of the user"));
    }
    Ok(all)
}

impl Conversation {
    fn push(&mut self, message: Value, place: Place) {
        self.messages.push(message);
        self.places.push(place);
    }
}

/// Reads the role and the blocks of a message.
fn turn(place: &str, mut message: Value) -> Result<Turn, ApiError> {
    let role = match message.get("role").and_then(Value::as_str) {
        Some("user") => "user",
        Some("assistant") => "assistant",
        Some("system") => "system",
        _ => {
            let role = format!("{place}.role");
            let problem = format!("{role} must be user, assistant or system");
            return Err(ApiError::bad_field(role, problem));
        }
    };
    let place = format!("{place}.content");
    let blocks = match message.get_mut("content").map(Value::take) {
        Some(Value::String(text)) => vec![(place, json!({"type": "text", "text": text}))],
        Some(Value::Array(blocks)) => {
            at_most(&place, "blocks", blocks.len(), MAX_PARTS)?;
            let place = |index: usize| format!("{place}[{index}]");
            blocks.into_iter().enumerate().map(|(index, block)| (place(index), block)).collect()
        }
        _ => {
            let problem = format!("{place} must be a text or a list of blocks");
            return Err(ApiError::bad_field(place, problem));
        }
    };
    Ok(Turn { role, blocks })
}

/// A message of the assistant, with its text, reasoning and tool calls in one, and where it was.
fn said(blocks: Vec<Block>) -> Result<(Value, Place), ApiError> {
    let (mut texts, mut thoughts, mut calls) = (Vec::new(), Vec::new(), Vec::new());
    let mut whole = Place::new(blocks.first().map_or("messages", |(place, _)| place));
    for (place, mut block) in blocks {
        match kind(&block) {
            "text" => texts.push(text(&place, &block, "text")?),
            "thinking" => thoughts.push(text(&place, &block, "thinking")?),
            // Nobody can read these, and models here write none.
            "redacted_thinking" => {}
            "tool_use" => {
                let (id, name) = (text(&place, &block, "id")?, text(&place, &block, "name")?);
                let arguments = block["input"].take();
                if !arguments.is_object() {
                    let field = format!("{place}.input");
                    return Err(ApiError::bad_field(field.clone(), format!("{field} must be an object")));
                }
                let function = json!({"name": name, "arguments": arguments});
                calls.push(json!({"id": id, "type": "function", "function": function}));
                whole.calls.push(place);
            }
            other => return Err(stranger(&place, other)),
        }
    }
    let mut message = json!({"role": "assistant", "content": texts.concat()});
    if !thoughts.is_empty() {
        message["reasoning_content"] = thoughts.join("\n").into();
    }
    if !calls.is_empty() {
        message["tool_calls"] = calls.into();
    }
    Ok((message, whole))
}

/// Messages of the user: text, and results of tools as messages of their own.
fn heard(role: &str, blocks: Vec<Block>, all: &mut Conversation) -> Result<(), ApiError> {
    // Texts in a row, and where the first of them was.
    let (mut run, mut begin) = (Vec::new(), String::new());
    let tell = |run: &mut Vec<String>, begin: &str, all: &mut Conversation| {
        if !run.is_empty() {
            let content = std::mem::take(run).join("\n");
            all.push(json!({"role": role, "content": content}), Place::new(begin));
        }
    };
    for (place, mut block) in blocks {
        match kind(&block) {
            "text" => {
                run.push(text(&place, &block, "text")?);
                if run.len() == 1 {
                    begin = place;
                }
            }
            "tool_result" if role == "user" => {
                tell(&mut run, &begin, all);
                let id = text(&place, &block, "tool_use_id")?;
                let content = match block.get_mut("content").map(Value::take) {
                    None | Some(Value::Null) => String::new(),
                    Some(content) => texts(&format!("{place}.content"), content)?,
                };
                let message = json!({"role": "tool", "tool_call_id": id, "content": content});
                all.push(message, Place::new(place));
            }
            other => return Err(stranger(&place, other)),
        }
    }
    tell(&mut run, &begin, all);
    Ok(())
}

/// The text of content that is a text or a list of text blocks.
pub(super) fn texts(place: &str, content: Value) -> Result<String, ApiError> {
    match content {
        Value::String(text) => Ok(text),
        Value::Array(blocks) => {
            at_most(place, "blocks", blocks.len(), MAX_PARTS)?;
            let mut all = Vec::with_capacity(blocks.len());
            for (index, block) in blocks.iter().enumerate() {
                let place = format!("{place}[{index}]");
                match kind(block) {
                    "text" => all.push(text(&place, block, "text")?),
                    other => return Err(stranger(&place, other)),
                }
            }
            Ok(all.join("\n"))
        }
        _ => Err(ApiError::bad_field(place, format!("{place} must be a text or a list of text blocks"))),
    }
}

fn kind(block: &Value) -> &str {
    block.get("type").and_then(Value::as_str).unwrap_or_default()
}

fn text(place: &str, block: &Value, name: &str) -> Result<String, ApiError> {
    let value = block.get(name).and_then(Value::as_str).map(str::to_owned);
    value.ok_or_else(|| {
        let field = format!("{place}.{name}");
        ApiError::bad_field(field.clone(), format!("{field} must be a text"))
    })
}

/// The error for a block whose type has no place where it stands.
fn stranger(place: &str, kind: &str) -> ApiError {
    let kind: String = kind.chars().take(40).collect();
    let message = format!("{place} is a block of type {kind:?}, which cannot be read here");
    ApiError::unsupported(place, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(messages: Value) -> Conversation {
        conversation(serde_json::from_value(messages).unwrap()).unwrap_or_else(|error| panic!("{error}"))
    }

    #[test]
    fn blocks_become_messages() {
        let chat = read(json!([
            {"role": "user", "content": [{"type": "text", "text": "Rome?", "cache_control": {}}]},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "I ask."},
                {"type": "tool_use", "id": "call_1", "name": "weather", "input": {"place": "Rome"}}]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "call_1", "content": [{"type": "text", "text": "Sun"}]},
                {"type": "tool_result", "tool_use_id": "call_2", "is_error": true},
                {"type": "text", "text": "And?"}]},
            {"role": "user", "content": "Well?"}]));
        let call = json!({"id": "call_1", "type": "function",
            "function": {"name": "weather", "arguments": {"place": "Rome"}}});
        let expected = [
            json!({"role": "user", "content": "Rome?"}),
            json!({"role": "assistant", "content": "I ask.", "reasoning_content": "hm", "tool_calls": [call]}),
            json!({"role": "tool", "tool_call_id": "call_1", "content": "Sun"}),
            json!({"role": "tool", "tool_call_id": "call_2", "content": ""}),
            json!({"role": "user", "content": "And?\nWell?"}),
        ];
        assert_eq!(chat.messages, expected);
        let place = |path: &str| Place::new(format!("messages{path}"));
        let called = Place { calls: vec!["messages[1].content[3]".to_owned()], ..place("[1].content[0]") };
        let results = [place("[2].content[0]"), place("[2].content[1]")];
        let expected =
            [&[place("[0].content[0]"), called][..], &results, &[place("[2].content[2]")]].concat();
        assert_eq!(chat.places, expected);
        assert!(!chat.continues);
    }

    #[test]
    fn an_answer_that_was_begun_is_continued() {
        let user = json!({"role": "user", "content": "Sun?"});
        let begun = read(json!([user, {"role": "assistant", "content": "It is ("}]));
        assert!(begun.continues && begun.messages.len() == 2);
        let empty = read(json!([user, {"role": "assistant", "content": []}]));
        assert!(!empty.continues && empty.messages.len() == 1);
    }

    #[test]
    fn what_cannot_be_read_is_named() {
        let user = |block: Value| json!([{"role": "user", "content": [block]}]);
        let image = json!({"type": "image", "source": {"type": "url", "url": "x"}});
        for (messages, param) in [
            (json!([{"role": "tool", "content": "x"}]), "messages[0].role"),
            (json!(["hi"]), "messages[0].role"),
            (json!([{"role": "user"}]), "messages[0].content"),
            (user(image.clone()), "messages[0].content[0]"),
            (user(json!("hi")), "messages[0].content[0]"),
            (user(json!({"type": "text"})), "messages[0].content[0].text"),
            (user(json!({"type": "tool_result"})), "messages[0].content[0].tool_use_id"),
            (
                user(json!({"type": "tool_result", "tool_use_id": "c", "content": [image]})),
                "messages[0].content[0].content[0]",
            ),
            (
                json!([{"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f"}]}]),
                "messages[0].content[0].input",
            ),
            (
                json!([{"role": "assistant", "content": [
                    {"type": "tool_use", "id": "c", "name": "f", "input": {}}]}]),
                "messages",
            ),
            (json!([{"role": "assistant", "content": ""}]), "messages"),
        ] {
            let error = conversation(serde_json::from_value(messages.clone()).unwrap()).err();
            assert_eq!(error.expect("refused").body()["error"]["param"], param, "{messages}");
        }
    }
}
