//! The events of a streamed message: content blocks start, grow and stop.

use bytes::BytesMut;
use oscar_engine::{EngineError, Event, Summary};
use serde_json::{Value, json};

use super::error::error_body;
use super::message::{empty_block, empty_message, prompt_usage, stopped, usage};
use crate::http::sse::{EventWriter, write_named_event};
use crate::parse::{Change, Part};
use crate::protocol::ApiError;
use crate::requests::PromptEvent;
use crate::routes::chat::PartsAnswer;

/// Writes the events of a streamed message.
pub(super) struct MessageWriter {
    answer: PartsAnswer,
    id: String,
    begun: bool,
    ended: bool,
}

impl MessageWriter {
    pub(super) fn new(answer: PartsAnswer, id: String) -> MessageWriter {
        MessageWriter { answer, id, begun: false, ended: false }
    }

    /// Writes `message_start`, the first event.
    fn begin(&mut self, tokens: usize, cached: usize, out: &mut BytesMut) {
        if !std::mem::replace(&mut self.begun, true) {
            let mut message = empty_message(&self.id, &self.answer.turn().app.model.name);
            message["usage"] = prompt_usage(tokens, cached);
            write(out, json!({"type": "message_start", "message": message}));
        }
    }

    fn changes(&self, changes: Vec<Change>, out: &mut BytesMut) {
        for change in changes {
            let parts = self.answer.parts().list();
            write(
                out,
                match change {
                    Change::Begin(index) => {
                        let block = empty_block(&parts[index]);
                        json!({"type": "content_block_start", "index": index, "content_block": block})
                    }
                    Change::Grow(index, text) => {
                        let delta = delta(&parts[index], text);
                        json!({"type": "content_block_delta", "index": index, "delta": delta})
                    }
                    Change::End(index) => json!({"type": "content_block_stop", "index": index}),
                },
            );
        }
    }

    fn finished(&mut self, summary: &Summary, out: &mut BytesMut) {
        self.begin(summary.prompt_tokens, summary.cached_tokens, out);
        let changes = self.answer.finish(summary);
        self.changes(changes, out);
        let (reason, sequence) = stopped(summary, self.answer.parts().has_calls());
        let delta = json!({"stop_reason": reason, "stop_sequence": sequence});
        write(out, json!({"type": "message_delta", "delta": delta, "usage": usage(&self.answer, summary)}));
        write(out, json!({"type": "message_stop"}));
        self.ended = true;
    }

    fn failed(&mut self, error: &ApiError, out: &mut BytesMut) {
        write_named_event(out, "error", &error_body(error));
        self.ended = true;
    }
}

/// The `delta` of a content block that grows by a text.
fn delta(part: &Part, text: String) -> Value {
    match part {
        Part::Reasoning(_) => json!({"type": "thinking_delta", "thinking": text}),
        Part::Text(_) => json!({"type": "text_delta", "text": text}),
        Part::Call(_) => json!({"type": "input_json_delta", "partial_json": text}),
    }
}

/// Writes an event under the name of its type.
fn write(out: &mut BytesMut, event: Value) {
    write_named_event(out, event["type"].as_str().unwrap_or_default(), &event);
}

impl EventWriter for MessageWriter {
    fn event(&mut self, delivered: PromptEvent, out: &mut BytesMut) {
        match delivered.event {
            Event::Prefill { total, cached, .. } => {
                self.begin(total, cached, out);
                // A long prompt takes its time; clients see that somebody is there.
                write(out, json!({"type": "ping"}));
            }
            Event::Scored { .. } => {}
            Event::Token { token, .. } => {
                self.begin(0, 0, out);
                let changes = self.answer.token(&token);
                self.changes(changes, out);
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
