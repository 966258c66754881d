//! The chunks of a streamed chat completion.

use std::collections::HashMap;
use std::fmt::Write;

use bytes::{BufMut, Bytes, BytesMut};
use oscar_engine::{Event, Summary, Token};
use serde_json::json;

use super::{Turn, chat_finish, is_cut_off};
use crate::http::sse::{EventWriter, write_done, write_event, write_json};
use crate::parse::{OutputParser, Piece};
use crate::protocol::Usage;
use crate::requests::PromptEvent;
use crate::routes::chunk_head;
use crate::routes::completions::matched;
use crate::routes::logprobs::ChatLogprob;

/// Writes the chunks of a streamed chat completion.
pub(super) struct ChatWriter {
    turn: Turn,
    head: Bytes,
    include_usage: bool,
    usage: Usage,
    choices: HashMap<usize, Choice>,
}

/// The state of one choice.
struct Choice {
    parser: OutputParser,
    called: bool,
}

impl ChatWriter {
    pub(super) fn new(turn: Turn, id: &str) -> ChatWriter {
        let include_usage = turn.includes_usage;
        let head = chunk_head(&turn.app, id, "chat.completion.chunk");
        ChatWriter { turn, head, include_usage, usage: Usage::default(), choices: HashMap::new() }
    }

    /// Writes the chunk with the role before the first piece of a choice.
    fn begin(&mut self, index: usize, out: &mut BytesMut) {
        if !self.choices.contains_key(&index) {
            self.choices.insert(index, Choice { parser: self.turn.parser(index), called: false });
            self.open(index, out);
            out.put_slice(b"\"role\":\"assistant\",\"content\":\"\"");
            self.close(None, None, out);
        }
    }

    fn token(&mut self, index: usize, token: &Token, out: &mut BytesMut) {
        self.begin(index, out);
        let Some(choice) = self.choices.get_mut(&index) else { return };
        let pieces = choice.parser.push(&token.text);
        let listed = self.turn.wants_logprobs && !self.turn.end_tokens.contains(token.id);
        let mut logprob = listed.then(|| ChatLogprob::new(self.turn.app.model.tokenizer(), token));
        if pieces.is_empty() && logprob.is_some() {
            // Text that is held back comes later; its probability is known now.
            self.open(index, out);
            out.put_slice(b"\"content\":\"\"");
            self.close(logprob.take().as_ref(), None, out);
        }
        for piece in pieces {
            self.piece(index, &piece, logprob.take().as_ref(), out);
        }
    }

    fn piece(&mut self, index: usize, piece: &Piece, logprob: Option<&ChatLogprob>, out: &mut BytesMut) {
        self.open(index, out);
        match piece {
            Piece::Content(text) => {
                out.put_slice(b"\"content\":");
                write_json(out, text);
            }
            Piece::Reasoning(text) => {
                out.put_slice(b"\"reasoning_content\":");
                write_json(out, text);
            }
            Piece::ToolCallStart { index: call, id, name } => {
                if let Some(choice) = self.choices.get_mut(&index) {
                    choice.called = true;
                }
                let function = json!({"name": name, "arguments": ""});
                let call = json!([{"index": call, "id": id, "type": "function", "function": function}]);
                out.put_slice(b"\"tool_calls\":");
                write_json(out, &call);
            }
            Piece::ToolCallArguments { index: call, text } => {
                let call = json!([{"index": call, "function": {"arguments": text}}]);
                out.put_slice(b"\"tool_calls\":");
                write_json(out, &call);
            }
        }
        self.close(logprob, None, out);
    }

    fn finished(&mut self, index: usize, summary: &Summary, out: &mut BytesMut) {
        self.begin(index, out);
        self.turn.remember(summary);
        self.usage.add(index, summary);
        let rest = self.choices.get_mut(&index).map(|choice| choice.parser.finish(is_cut_off(summary)));
        for piece in rest.into_iter().flatten() {
            self.piece(index, &piece, None, out);
        }
        let called = self.choices.get(&index).is_some_and(|choice| choice.called);
        self.open(index, out);
        self.close(None, Some((summary, called)), out);
    }

    /// Begins a chunk, up to what is in its delta.
    fn open(&self, index: usize, out: &mut BytesMut) {
        out.put_slice(&self.head);
        let _ = write!(out, "{{\"index\":{index},\"delta\":{{");
    }

    fn close(&self, logprob: Option<&ChatLogprob>, finished: Option<(&Summary, bool)>, out: &mut BytesMut) {
        match logprob {
            Some(logprob) => {
                out.put_slice(b"},\"logprobs\":{\"content\":[");
                write_json(out, logprob);
                out.put_slice(b"],\"refusal\":null}");
            }
            None => out.put_slice(b"},\"logprobs\":null"),
        }
        match finished {
            Some((summary, called)) => {
                let reason = chat_finish(summary.finish, called);
                let _ = write!(out, ",\"finish_reason\":\"{reason}\",\"matched_stop\":");
                write_json(out, &matched(summary));
            }
            None => out.put_slice(b",\"finish_reason\":null"),
        }
        out.put_slice(if self.include_usage { b"}],\"usage\":null}\n\n" } else { b"}]}\n\n" });
    }
}

impl EventWriter for ChatWriter {
    fn event(&mut self, delivered: PromptEvent, out: &mut BytesMut) {
        match delivered.event {
            Event::Token { choice, token } => self.token(choice, &token, out),
            Event::Finished { choice, summary } => self.finished(choice, &summary, out),
            Event::Failed { error, .. } => {
                write_event(out, &self.turn.names.restore((&*error).into()).body());
            }
            Event::Prefill { .. } | Event::Scored { .. } => {}
        }
    }

    fn end(&mut self, out: &mut BytesMut) {
        if self.include_usage {
            out.put_slice(&self.head);
            out.put_slice(b"],\"usage\":");
            write_json(out, &self.usage);
            out.put_slice(b"}\n\n");
        }
        write_done(out);
    }
}
