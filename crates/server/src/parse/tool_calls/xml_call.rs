//! Calls written with tags, one for each argument. Each call comes when it is complete: only then is it known whether
//! it is one.

use std::sync::Arc;

use super::super::marker::{Start, start_of};
use super::arguments::{arguments_text, json_of};
use super::{Calls, LONGEST_NAME, Progress, Tool, XmlLayout, is_name_byte};

/// Parses a block of calls.
#[derive(Debug)]
pub(super) struct XmlCall {
    layout: &'static XmlLayout,
    /// The marker that closes the block.
    block_close: &'static str,
    tools: Arc<[Tool]>,
    /// All text that was taken since the last complete call.
    text: String,
    phase: Phase,
    /// The bytes of the buffer in which the end of the value is not.
    searched: usize,
    name: String,
    key: String,
    /// The arguments so far, as names and JSON texts.
    arguments: Vec<(String, String)>,
    calls: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// In the block, outside a call.
    Block,
    /// In a name that a tag closes.
    Name,
    /// In a name that ends where something else begins.
    BareName,
    /// In a call, outside an argument.
    Call,
    Key,
    /// Before the tag of a value.
    BeforeValue,
    Value,
}

impl XmlCall {
    /// Behind an opening marker, which is taken already; `block_close` is the closing one.
    pub(super) fn new(
        layout: &'static XmlLayout,
        opener: &str,
        block_close: &'static str,
        tools: Arc<[Tool]>,
    ) -> XmlCall {
        let phase = match layout.call_open {
            None => Phase::BareName,
            Some(open) if open == opener => Phase::Name,
            Some(_) => Phase::Block,
        };
        XmlCall {
            layout,
            block_close,
            tools,
            text: opener.to_owned(),
            phase,
            searched: 0,
            name: String::new(),
            key: String::new(),
            arguments: Vec::new(),
            calls: 0,
        }
    }

    /// The text that was taken of what turned out not to be a call.
    pub(super) fn take_text(&mut self) -> String {
        std::mem::take(&mut self.text)
    }

    /// The text that was taken since the last complete call, because the answer has ended.
    pub(super) fn finish(&mut self) -> String {
        if self.calls > 0 && self.phase == Phase::Block { String::new() } else { self.take_text() }
    }

    /// Whether nothing but the opening marker was taken.
    pub(super) fn is_blank(&self) -> bool {
        self.calls == 0 && matches!(self.phase, Phase::Block | Phase::BareName)
    }

    /// Takes from the buffer what can be parsed by now.
    pub(super) fn read(&mut self, buffer: &mut String, calls: &mut Calls) -> Progress {
        loop {
            if matches!(self.phase, Phase::Block | Phase::Call | Phase::BeforeValue) {
                let blank = buffer.len() - buffer.trim_ascii_start().len();
                self.take(buffer, blank);
            }
            if buffer.is_empty() {
                return Progress::More;
            }
            if let Some(progress) = self.step(buffer, calls) {
                return progress;
            }
        }
    }

    /// Parses one tag, name or value. It is `None` when there may be more in the buffer.
    fn step(&mut self, buffer: &mut String, calls: &mut Calls) -> Option<Progress> {
        let layout = self.layout;
        match self.phase {
            Phase::Block => {
                let call_open = layout.call_open.unwrap_or(self.block_close);
                let tags = [call_open, self.block_close];
                match start_of(buffer, &tags) {
                    Start::Partial => return Some(Progress::More),
                    Start::Marker(0) => {
                        self.take(buffer, call_open.len());
                        self.phase = Phase::Name;
                    }
                    // The marker, or anything else, behind a call ends the block.
                    _ if self.calls > 0 => return Some(Progress::Done),
                    _ => return Some(Progress::Malformed),
                }
            }
            Phase::Name => {
                let name = match self.until(buffer, ">", LONGEST_NAME) {
                    Ok(name) => unquoted(&name).to_owned(),
                    Err(progress) => return Some(progress),
                };
                if !is_name(&name) {
                    return Some(Progress::Malformed);
                }
                self.name = name;
                self.phase = Phase::Call;
            }
            Phase::BareName => {
                let blank = buffer.len() - buffer.trim_ascii_start().len();
                let ends = |character: char| character == '<' || character.is_ascii_whitespace();
                let Some(length) = buffer[blank..].find(ends) else {
                    if buffer[blank..].is_empty() || is_name(&buffer[blank..]) {
                        return Some(Progress::More);
                    }
                    self.take(buffer, blank);
                    return Some(Progress::Malformed);
                };
                let name = buffer[blank..blank + length].to_owned();
                if !is_name(&name) {
                    self.take(buffer, blank);
                    return Some(Progress::Malformed);
                }
                self.take(buffer, blank + length);
                self.name = name;
                self.phase = Phase::Call;
            }
            Phase::Call => match start_of(buffer, &[layout.key.0, layout.call_close, self.block_close]) {
                Start::Partial => return Some(Progress::More),
                Start::Marker(0) => {
                    self.take(buffer, layout.key.0.len());
                    self.phase = Phase::Key;
                }
                Start::Marker(closer) => {
                    if closer == 1 {
                        self.take(buffer, layout.call_close.len());
                    }
                    return self.complete(calls);
                }
                Start::Other => return Some(Progress::Malformed),
            },
            Phase::Key => {
                let key = match self.until(buffer, layout.key.1, LONGEST_NAME) {
                    Ok(key) => unquoted(&key).to_owned(),
                    Err(progress) => return Some(progress),
                };
                if key.is_empty() {
                    return Some(Progress::Malformed);
                }
                self.key = key;
                self.phase = if layout.value.0.is_empty() { Phase::Value } else { Phase::BeforeValue };
            }
            Phase::BeforeValue => match start_of(buffer, &[layout.value.0]) {
                Start::Partial => return Some(Progress::More),
                Start::Marker(_) => {
                    self.take(buffer, layout.value.0.len());
                    self.phase = Phase::Value;
                }
                Start::Other => return Some(Progress::Malformed),
            },
            Phase::Value => {
                let Some(end) = self.value_end(buffer) else { return Some(Progress::More) };
                let value = buffer[..end].to_owned();
                self.take(buffer, end + layout.value.1.len());
                let value = if layout.values_on_lines { without_line_breaks(&value) } else { &value };
                let tool = self.tools.iter().find(|tool| tool.name == self.name);
                let json = json_of(value, tool.map(|tool| &tool.parameters), &self.key);
                // Told twice, the last counts.
                self.arguments.retain(|(key, _)| *key != self.key);
                self.arguments.push((std::mem::take(&mut self.key), json));
                self.phase = Phase::Call;
            }
        }
        None
    }

    /// Takes the end of a call, which comes as a whole.
    fn complete(&mut self, calls: &mut Calls) -> Option<Progress> {
        // A word between the markers is hardly a layout: it must at least be the name of something.
        let known = || self.tools.iter().any(|tool| tool.name == self.name);
        if self.layout.call_open.is_none() && self.arguments.is_empty() && !known() {
            return Some(Progress::Malformed);
        }
        calls.start(&self.name);
        calls.arguments(&arguments_text(&self.arguments));
        self.arguments.clear();
        self.text.clear();
        self.calls += 1;
        self.phase = Phase::Block;
        self.layout.call_open.is_none().then_some(Progress::Done)
    }

    fn take(&mut self, buffer: &mut String, length: usize) {
        self.text.push_str(&buffer[..length]);
        buffer.drain(..length);
        self.searched = 0;
    }

    /// Takes the text before a tag, and the tag.
    fn until(&mut self, buffer: &mut String, tag: &str, longest: usize) -> Result<String, Progress> {
        match buffer.find(tag) {
            Some(at) if at <= longest => {
                let found = buffer[..at].to_owned();
                self.take(buffer, at + tag.len());
                Ok(found)
            }
            None if buffer.len() <= longest => Err(Progress::More),
            _ => Err(Progress::Malformed),
        }
    }

    /// The place where the value ends. Values may contain the tag that closes them, as code that deals with such tags does: it
    /// counts only where the call goes on, or ends, behind it.
    fn value_end(&mut self, buffer: &str) -> Option<usize> {
        let tag = self.layout.value.1;
        let next = [self.layout.key.0, self.layout.call_close, self.block_close];
        loop {
            let from = buffer.floor_char_boundary(self.searched);
            let Some(end) = buffer[from..].find(tag).map(|at| from + at) else {
                self.searched = (buffer.len() + 1).saturating_sub(tag.len()).max(self.searched);
                return None;
            };
            let behind = end + tag.len();
            match start_of(buffer[behind..].trim_ascii_start(), &next) {
                Start::Marker(_) => return Some(end),
                Start::Partial => {
                    self.searched = end;
                    return None;
                }
                Start::Other => self.searched = behind,
            }
        }
    }
}

fn is_name(text: &str) -> bool {
    !text.is_empty() && text.len() <= LONGEST_NAME && text.bytes().all(is_name_byte)
}

fn unquoted(text: &str) -> &str {
    let text = text.trim();
    let quoted = |quote: char| text.strip_prefix(quote)?.strip_suffix(quote);
    quoted('"').or_else(|| quoted('\'')).unwrap_or(text)
}

/// The value without the line break before it and the one behind it.
fn without_line_breaks(value: &str) -> &str {
    let value = value.strip_prefix('\n').unwrap_or(value);
    value.strip_suffix('\n').unwrap_or(value)
}
