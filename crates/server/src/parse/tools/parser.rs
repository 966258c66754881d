//! The parser of calls: tells content from blocks of calls and hands those to a reader of their layout.

use std::sync::Arc;

use super::super::Piece;
use super::super::marker::{Start, find_first, held_back, start_of};
use super::json_call::JsonCall;
use super::xml_call::XmlCall;
use super::{Calls, Progress, Tool, ToolKind};

/// White space beside a call is layout and not part of the content. This much is held back at most.
const LAYOUT: usize = 16;

/// The buffer is shifted with each thing found in it, so a long text is not put there at once.
const CHUNK: usize = 4096;

/// Finds calls in content.
///
/// A call whose layout is broken comes out as content, markers included. The exception is a JSON call that breaks
/// inside its arguments, which by then are on their way: the rest of what the model wrote there follows as arguments,
/// so that the client sees all of it.
#[derive(Debug)]
pub struct ToolParser {
    kind: ToolKind,
    tools: Arc<[Tool]>,
    state: State,
    buffer: String,
    /// White space that ends the content so far, to be dropped if a call follows.
    layout: String,
    calls: Calls,
}

#[derive(Debug)]
enum State {
    /// Nothing but white space so far.
    Start,
    Content,
    Json(Box<JsonCall>),
    Xml(Box<XmlCall>),
    /// Behind a call, nothing but white space since.
    AfterCall,
}

impl ToolParser {
    /// Calls get ids that begin with `call_` and the stem, which is to be unique to the answer.
    pub fn new(kind: ToolKind, tools: Arc<[Tool]>, id_stem: impl Into<String>) -> ToolParser {
        ToolParser {
            kind,
            tools,
            state: State::Start,
            buffer: String::new(),
            layout: String::new(),
            calls: Calls { out: Vec::new(), id_stem: id_stem.into(), begun: 0 },
        }
    }

    /// Calls begun so far.
    pub fn calls(&self) -> usize {
        self.calls.begun
    }

    /// Takes the next part of the content.
    pub fn push(&mut self, mut text: &str) -> Vec<Piece> {
        while !text.is_empty() {
            let (now, later) = text.split_at(text.floor_char_boundary(CHUNK));
            self.buffer.push_str(now);
            while !self.buffer.is_empty() && self.step() {}
            text = later;
        }
        std::mem::take(&mut self.calls.out)
    }

    /// The text has ended: gives what was held back.
    pub fn finish(&mut self) -> Vec<Piece> {
        let unfinished = match &mut self.state {
            State::Json(call) => call.finish(),
            State::Xml(call) => call.finish(),
            State::Start | State::Content | State::AfterCall => String::new(),
        };
        let rest = unfinished + &std::mem::take(&mut self.buffer);
        let only_layout = rest.bytes().all(|byte| self.is_layout(byte));
        let after_call = matches!(self.state, State::AfterCall | State::Json(_) | State::Xml(_));
        if !(after_call && only_layout) {
            self.content(&rest);
            let layout = std::mem::take(&mut self.layout);
            self.emit(&layout);
        }
        self.layout.clear();
        std::mem::take(&mut self.calls.out)
    }

    /// Does what the buffer allows; whether there may be more to do.
    fn step(&mut self) -> bool {
        match &mut self.state {
            State::Start => {
                // Llama writes calls without a marker, if nothing else is in the answer.
                if self.kind == ToolKind::Llama3 {
                    let blank = leading(&self.buffer, |byte| byte.is_ascii_whitespace());
                    match self.buffer.as_bytes().get(blank) {
                        None => return false,
                        Some(b'{') => {
                            self.take_content(blank);
                            self.state = State::Json(Box::new(JsonCall::unmarked(Arc::clone(&self.tools))));
                            return true;
                        }
                        Some(_) => {}
                    }
                }
                self.state = State::Content;
                true
            }
            State::Content => {
                let openers = self.kind.openers();
                if let Some((start, opener)) = find_first(&self.buffer, openers) {
                    self.take_content(start);
                    self.buffer.drain(..opener.len());
                    self.open(opener);
                    return true;
                }
                let sure = self.buffer.len() - held_back(&self.buffer, openers);
                self.take_content(sure);
                false
            }
            State::Json(call) => {
                let begun = self.calls.begun;
                let progress = call.read(&mut self.buffer, &mut self.calls);
                let text = if progress == Progress::Malformed { call.take_text() } else { String::new() };
                self.went(progress, begun, &text)
            }
            State::Xml(call) => {
                let begun = self.calls.begun;
                let progress = call.read(&mut self.buffer, &mut self.calls);
                if progress == Progress::Malformed && call.is_blank() && self.buffer.starts_with('{') {
                    // The markers of one layout around a call in the other: models mix them up.
                    let opener = call.take_text();
                    self.state = State::Json(Box::new(JsonCall::marked(&opener, self.kind.closers())));
                    return true;
                }
                let text = if progress == Progress::Malformed { call.take_text() } else { String::new() };
                self.went(progress, begun, &text)
            }
            State::AfterCall => self.after_call(),
        }
    }

    fn open(&mut self, opener: &str) {
        self.state = match self.kind.xml_layout() {
            Some(layout) => State::Xml(Box::new(XmlCall::new(layout, opener, Arc::clone(&self.tools)))),
            None => State::Json(Box::new(JsonCall::marked(opener, self.kind.closers()))),
        };
    }

    fn went(&mut self, progress: Progress, begun: usize, text: &str) -> bool {
        // White space before a call is dropped once it has turned out to be one.
        if self.calls.begun > begun {
            self.layout.clear();
        }
        match progress {
            Progress::More => return false,
            Progress::Done => self.state = State::AfterCall,
            Progress::Malformed => {
                self.state = State::Content;
                self.content(text);
            }
        }
        true
    }

    fn after_call(&mut self) -> bool {
        let blank = leading(&self.buffer, |byte| self.is_layout(byte));
        let rest = &self.buffer[blank..];
        match start_of(rest, self.kind.closers()) {
            Start::Marker(closer) => {
                self.buffer.drain(..blank + self.kind.closers()[closer].len());
                return true;
            }
            Start::Partial => return false,
            Start::Other if rest.is_empty() => return false,
            Start::Other => {}
        }
        // Several calls between one pair of markers, or in a row without any.
        if rest.starts_with('{') && self.kind.is_json() {
            let before: String = self.buffer.drain(..blank).collect();
            self.content(&before);
            self.state = State::Json(Box::new(JsonCall::unmarked(Arc::clone(&self.tools))));
        } else {
            self.state = State::Content;
        }
        true
    }

    /// Between calls; Llama's are separated by semicolons.
    fn is_layout(&self, byte: u8) -> bool {
        byte.is_ascii_whitespace() || (byte == b';' && self.kind == ToolKind::Llama3)
    }

    fn take_content(&mut self, length: usize) {
        let text: String = self.buffer.drain(..length).collect();
        self.content(&text);
    }

    /// Gives content, but for white space at its end.
    fn content(&mut self, text: &str) {
        if text.is_empty() {
            return;
        }
        let text = std::mem::take(&mut self.layout) + text;
        let blank = text.bytes().rev().take_while(|&byte| self.is_layout(byte)).count().min(LAYOUT);
        let (shown, layout) = text.split_at(text.len() - blank);
        self.emit(shown);
        self.layout = layout.to_owned();
    }

    fn emit(&mut self, text: &str) {
        if !text.is_empty() {
            self.calls.out.push(Piece::Content(text.to_owned()));
        }
    }
}

fn leading(text: &str, layout: impl Fn(u8) -> bool) -> usize {
    text.bytes().take_while(|&byte| layout(byte)).count()
}
