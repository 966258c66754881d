//! The events of a streamed response: output items start, grow and end, and every event has a sequence number.

use std::fmt::Write;

use bytes::BytesMut;
use oscar_engine::{EngineError, Event, Summary};
use serde_json::{Value, json};

use super::object::{ResponseObject, content, item_status, status};
use crate::http::sse::{EventWriter, write_named_event};
use crate::parse::{Change, Part};
use crate::protocol::ApiError;
use crate::requests::PromptEvent;
use crate::routes::chat::PartsAnswer;

/// Writes the events of a streamed response.
pub(super) struct ResponseWriter {
    answer: PartsAnswer,
    object: ResponseObject,
    /// The sequence number of the next event.
    next: u64,
    ended: bool,
}

impl ResponseWriter {
    pub(super) fn new(answer: PartsAnswer, object: ResponseObject) -> ResponseWriter {
        ResponseWriter { answer, object, next: 0, ended: false }
    }

    /// Writes an event with its sequence number, under the name of its type.
    fn write(&mut self, kind: &str, mut event: Value, out: &mut BytesMut) {
        event["type"] = kind.into();
        event["sequence_number"] = self.next.into();
        self.next += 1;
        write_named_event(out, kind, &event);
    }

    /// The same for an event that has a response object.
    fn write_response(&mut self, kind: &str, response: &str, out: &mut BytesMut) {
        let number = self.next;
        self.next += 1;
        let _ = write!(out, "event: {kind}\ndata: {{\"response\":{response},");
        let _ = write!(out, "\"type\":\"{kind}\",\"sequence_number\":{number}}}\n\n");
    }

    fn begin(&mut self, out: &mut BytesMut) {
        if self.next == 0 {
            let response = self.object.begun();
            for kind in ["response.created", "response.in_progress"] {
                self.write_response(kind, &response, out);
            }
        }
    }

    /// Writes the events for changes of the answer. `last` is the status of an item that ends now.
    fn changes(&mut self, changes: Vec<Change>, last: &str, out: &mut BytesMut) {
        for change in changes {
            match change {
                Change::Begin(index) => self.item_begins(index, out),
                Change::Grow(index, text) => self.item_grows(index, text, out),
                Change::End(index) => {
                    // Only the end of the answer can cut an item off.
                    let cut = index + 1 == self.answer.parts().list().len();
                    self.item_ends(index, if cut { last } else { "completed" }, out);
                }
            }
        }
    }

    fn item_begins(&mut self, index: usize, out: &mut BytesMut) {
        let part = self.answer.parts().list()[index].clone();
        let item = self.object.empty_item(index, &part);
        self.write("response.output_item.added", json!({"output_index": index, "item": item}), out);
        if !matches!(part, Part::Call(_)) {
            let mut event = self.place(index, &part);
            event["part"] = content(&part, "");
            self.write("response.content_part.added", event, out);
        }
    }

    fn item_grows(&mut self, index: usize, text: String, out: &mut BytesMut) {
        let part = &self.answer.parts().list()[index];
        let mut event = self.place(index, part);
        event["delta"] = text.into();
        let kind = match part {
            Part::Reasoning(_) => "response.reasoning_text.delta",
            Part::Text(_) => {
                event["logprobs"] = json!([]);
                "response.output_text.delta"
            }
            Part::Call(_) => "response.function_call_arguments.delta",
        };
        self.write(kind, event, out);
    }

    fn item_ends(&mut self, index: usize, status: &str, out: &mut BytesMut) {
        let part = self.answer.parts().list()[index].clone();
        let mut event = self.place(index, &part);
        match &part {
            Part::Reasoning(text) => {
                event["text"] = text.as_str().into();
                self.write("response.reasoning_text.done", event, out);
            }
            Part::Text(text) => {
                event["text"] = text.as_str().into();
                event["logprobs"] = json!([]);
                self.write("response.output_text.done", event, out);
            }
            Part::Call(call) => {
                event["name"] = call.name.as_str().into();
                event["arguments"] = call.arguments.as_str().into();
                self.write("response.function_call_arguments.done", event, out);
            }
        }
        if let Part::Reasoning(text) | Part::Text(text) = &part {
            let mut event = self.place(index, &part);
            event["part"] = content(&part, text);
            self.write("response.content_part.done", event, out);
        }
        let item = self.object.item(index, &part, status);
        self.write("response.output_item.done", json!({"output_index": index, "item": item}), out);
    }

    /// The fields that say which output item an event is about.
    fn place(&self, index: usize, part: &Part) -> Value {
        let id = self.object.item_id(index, part);
        match part {
            Part::Call(_) => json!({"item_id": id, "output_index": index}),
            _ => json!({"item_id": id, "output_index": index, "content_index": 0}),
        }
    }

    fn finished(&mut self, summary: &Summary, out: &mut BytesMut) {
        self.begin(out);
        let changes = self.answer.finish(summary);
        self.changes(changes, item_status(summary), out);
        let response = self.object.finished(&self.answer, summary);
        let kind = match status(summary).0 {
            "completed" => "response.completed",
            _ => "response.incomplete",
        };
        self.write_response(kind, &response, out);
        self.ended = true;
    }

    fn failed(&mut self, error: &ApiError, out: &mut BytesMut) {
        self.begin(out);
        let response = self.object.failed(error);
        self.write_response("response.failed", &response, out);
        self.ended = true;
    }
}

impl EventWriter for ResponseWriter {
    fn event(&mut self, delivered: PromptEvent, out: &mut BytesMut) {
        match delivered.event {
            Event::Prefill { .. } => self.begin(out),
            Event::Scored { .. } => {}
            Event::Token { token, .. } => {
                self.begin(out);
                let changes = self.answer.token(&token);
                self.changes(changes, "completed", out);
            }
            Event::Finished { summary, .. } => self.finished(&summary, out),
            Event::Failed { error, .. } => self.failed(&self.answer.error(&error), out),
        }
    }

    fn end(&mut self, out: &mut BytesMut) {
        if !self.ended {
            self.failed(&ApiError::from(EngineError::Stopped), out);
        }
    }
}
