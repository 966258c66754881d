//! The parser of tool calls: splits content from blocks of calls, which it hands to the parser of their layout.

use std::sync::Arc;

use super::super::Piece;
use super::super::marker::{Start, find_first, held_back, start_of};
use super::json_call::{FENCE_END, FENCES, JsonCall};
use super::xml_call::XmlCall;
use super::{CallLayout, Calls, Progress, Tool, ToolCallFormat};

/// The most white space that is held back: what stands beside a call is layout and not part of the content.
const LAYOUT: usize = 16;

/// The buffer is shifted with each thing found in it, so a long text is not put there at once.
const CHUNK: usize = 4096;

/// Finds tool calls in content that arrives in chunks.
///
/// A call whose layout is broken comes out as content, markers included. The exception is a JSON call that breaks
/// inside its arguments, which by then are on their way: the rest of what the model wrote there follows as arguments,
/// so that the client sees all of it.
#[derive(Debug)]
pub(crate) struct ToolCallParser {
    format: &'static ToolCallFormat,
    tools: Arc<[Tool]>,
    state: State,
    buffer: String,
    /// Markers that may follow the end of a call and mean nothing more.
    closers: Vec<&'static str>,
    /// White space that ends the content so far, to be dropped if a call follows.
    layout: String,
    /// In a list of calls, the tools that its calls must name: none behind a marker, where any name does.
    list: Option<Option<Arc<[Tool]>>>,
    calls: Calls,
    /// Whether the answer consists of calls and nothing else.
    forced: bool,
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

impl ToolCallParser {
    /// Calls get ids that begin with `call_` and the stem, which is to be unique to the answer.
    pub(crate) fn new(
        format: &'static ToolCallFormat,
        tools: Arc<[Tool]>,
        id_stem: impl Into<String>,
    ) -> ToolCallParser {
        ToolCallParser {
            format,
            tools,
            state: State::Start,
            buffer: String::new(),
            closers: format.closer.as_slice().to_vec(),
            layout: String::new(),
            list: None,
            calls: Calls::new(id_stem.into()),
            forced: false,
        }
    }

    /// Says whether the answer must consist of calls, so that nothing in it can be content.
    pub(crate) fn forced(self, forced: bool) -> ToolCallParser {
        ToolCallParser { forced, ..self }
    }

    /// The number of calls so far.
    #[cfg(test)]
    pub(crate) fn calls(&self) -> usize {
        self.calls.begun
    }

    /// Takes the next chunk of the content and gives the pieces that are certain by now.
    pub(crate) fn push(&mut self, mut text: &str) -> Vec<Piece> {
        while !text.is_empty() {
            let (now, later) = text.split_at(text.floor_char_boundary(CHUNK));
            self.buffer.push_str(now);
            while !self.buffer.is_empty() && self.step() {}
            text = later;
        }
        std::mem::take(&mut self.calls.out)
    }

    /// Gives what was held back, because the text has ended.
    pub(crate) fn finish(&mut self) -> Vec<Piece> {
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

    /// Gives what was held back, because the answer was cut off. What was taken of a call is dropped: a part of a call is
    /// neither a call nor content. Arguments that were passed on as they came stay.
    pub(crate) fn cut_off(&mut self) -> Vec<Piece> {
        // Before any call a shorter beginning may as well be something else.
        let rest = self.buffer.trim_ascii_start();
        let expected = self.forced || self.calls.begun > 0;
        let in_marker =
            |marker: &&str| marker.starts_with(rest) && (expected || rest.len() * 2 > marker.len());
        let in_call = match &self.state {
            State::Json(call) => self.forced || call.is_certain(),
            State::Xml(_) => true,
            State::Start | State::Content => self.format.openers.iter().any(in_marker),
            State::AfterCall => self.closers.iter().chain(self.format.openers).any(in_marker),
        };
        if in_call {
            self.buffer.clear();
            self.state = State::AfterCall;
        }
        self.finish()
    }

    /// Does what the buffer allows, and says whether there may be more to do.
    fn step(&mut self) -> bool {
        match &mut self.state {
            State::Start => self.start(),
            State::Content => {
                let openers = self.format.openers;
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
                self.list = call.list().filter(|_| progress == Progress::Done);
                self.went(progress, begun, &text)
            }
            State::Xml(call) => {
                let begun = self.calls.begun;
                let progress = call.read(&mut self.buffer, &mut self.calls);
                if progress == Progress::Malformed && call.is_blank() && self.buffer.starts_with('{') {
                    // The markers of one layout around a call in the other: models mix them up.
                    let opener = call.take_text();
                    self.state =
                        State::Json(Box::new(JsonCall::marked(&opener, self.format.closer.as_slice())));
                    return true;
                }
                let text = if progress == Progress::Malformed { call.take_text() } else { String::new() };
                self.went(progress, begun, &text)
            }
            State::AfterCall => self.after_call(),
        }
    }

    /// Calls without a marker, if nothing else is in the answer: Llama's are written so, and small Qwen models forget
    /// the marker, or put a fence in its place.
    fn start(&mut self) -> bool {
        let blank = leading(&self.buffer, |byte| byte.is_ascii_whitespace());
        let rest = &self.buffer[blank..];
        if rest.is_empty() {
            return false;
        }
        let tools = Arc::clone(&self.tools);
        // A bracket may open a list as well as a marker.
        let list = self.format.has_lists() && rest.starts_with('[');
        let marker = if list { start_of(rest, self.format.openers) } else { Start::Other };
        self.state = if marker == Start::Partial {
            return false;
        } else if !self.format.is_json() || marker != Start::Other {
            State::Content
        } else if rest.starts_with('{') || list {
            self.take_content(blank);
            self.json(JsonCall::unmarked(tools))
        } else {
            match start_of(rest, &FENCES) {
                Start::Partial => return false,
                Start::Other => State::Content,
                Start::Marker(fence) => {
                    self.take_content(blank);
                    self.buffer.drain(..FENCES[fence].len());
                    self.closers.push(FENCE_END);
                    self.json(JsonCall::fenced(FENCES[fence], tools))
                }
            }
        };
        true
    }

    fn open(&mut self, opener: &str) {
        let (format, tools) = (self.format, Arc::clone(&self.tools));
        self.state = match &format.layout {
            CallLayout::Xml(layout) => {
                let block_close = format.closer.unwrap_or_default();
                State::Xml(Box::new(XmlCall::new(layout, opener, block_close, tools)))
            }
            CallLayout::Json { .. } | CallLayout::Named { .. } => {
                self.json(JsonCall::marked(opener, format.closer.as_slice()))
            }
            CallLayout::Harmony => State::Content,
        };
    }

    fn json(&self, call: JsonCall) -> State {
        State::Json(Box::new(if self.format.has_lists() { call.or_list() } else { call }))
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
                self.closers.truncate(self.format.closer.as_slice().len());
                self.content(text);
            }
        }
        true
    }

    fn after_call(&mut self) -> bool {
        if self.list.is_some() {
            return self.in_list();
        }
        let blank = leading(&self.buffer, |byte| self.is_layout(byte));
        let rest = &self.buffer[blank..];
        match start_of(rest, &self.closers) {
            Start::Marker(closer) => {
                self.buffer.drain(..blank + self.closers[closer].len());
                return true;
            }
            Start::Partial => return false,
            Start::Other if rest.is_empty() => return false,
            Start::Other => {}
        }
        // Several calls between one pair of markers, or in a row without any.
        if rest.starts_with('{') && self.format.is_json() {
            let before: String = self.buffer.drain(..blank).collect();
            self.content(&before);
            self.state = State::Json(Box::new(JsonCall::unmarked(Arc::clone(&self.tools))));
        } else {
            self.state = State::Content;
        }
        true
    }

    /// Behind a call in a list: another one, or the end of the list.
    fn in_list(&mut self) -> bool {
        let separator = leading(&self.buffer, |byte| self.is_layout(byte));
        match self.buffer.as_bytes().get(separator) {
            None => return false,
            Some(b'{') => {
                let text: String = self.buffer.drain(..separator).collect();
                let only = self.list.take().flatten();
                self.state =
                    State::Json(Box::new(JsonCall::further(&text, self.format.closer.as_slice(), only)));
            }
            Some(b']') => {
                self.buffer.drain(..=separator);
                self.list = None;
            }
            // The list was not closed.
            Some(_) => self.list = None,
        }
        true
    }

    /// Whether a byte may stand between calls and mean nothing. A comma does in a list only.
    fn is_layout(&self, byte: u8) -> bool {
        let separates = match self.format.has_lists() {
            true => self.list.is_some() && byte == b',',
            false => self.format.separator.as_bytes().contains(&byte),
        };
        separates || byte.is_ascii_whitespace()
    }

    fn take_content(&mut self, length: usize) {
        let text: String = self.buffer.drain(..length).collect();
        self.content(&text);
    }

    /// Gives content, and holds back the white space at its end.
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
