//! A call written as a JSON object: `{"name": "…", "arguments": {…}}`, alone or in a list, or as a name before such
//! arguments: `name[ARGS]{…}`.
//!
//! Arguments are passed on as they come when the name stands before them, as it nearly always does. Otherwise the
//! call comes when its object ends.

use std::sync::Arc;

use super::super::marker::{find_first, held_back};
use super::json_text::{JsonText, Step, is_json};
use super::{Calls, LONGEST_NAME, Progress, Tool, is_name_byte};

/// Fields that a call may have. An object with others is part of the answer.
const FIELDS: [&str; 6] = ["name", "arguments", "parameters", "type", "function", "id"];

/// What may stand between a bare name and its arguments. Mistral's models of 2025 write an identifier behind the first.
const CALL_ID: &str = "[CALL_ID]";
const ARGUMENTS: &str = "[ARGS]";

/// Openings of a block of code that may be a call.
pub(super) const FENCES: [&str; 2] = ["```json\n", "```\n"];

/// The text that closes such a block of code.
pub(super) const FENCE_END: &str = "```";

/// Parses one call.
#[derive(Debug)]
pub(super) struct JsonCall {
    /// All text that was taken until it is certain that this is a call.
    text: String,
    /// The tools whose names make it a call. Behind a marker, where this is `None`, any name does.
    only: Option<Arc<[Tool]>>,
    /// The markers at which arguments end that are not JSON.
    closers: &'static [&'static str],
    /// Whether a list may open here, or a bare name stand before the arguments.
    lists: bool,
    /// Whether a list has been opened.
    listed: bool,
    /// Whether the call is a bare name and its arguments, and ends with them.
    bare: bool,
    phase: Phase,
    value: JsonText,
    /// The place in `text` where the key or value began.
    began: usize,
    key: String,
    name: Option<String>,
    /// The arguments as JSON text, if they were not passed on as they came.
    arguments: Option<String>,
    begun: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Open,
    /// In a bare name, or what stands between it and its arguments.
    BareName,
    /// A key, or the end of an object without fields.
    FirstKey,
    Key,
    KeyText,
    Colon,
    /// Before a value.
    Value,
    ValueText,
    /// In arguments that are passed on as they come.
    Arguments,
    /// The same, after they have ceased to be JSON.
    Broken,
    Comma,
}

impl JsonCall {
    /// A call behind a marker, which is taken already.
    pub(super) fn marked(opener: &str, closers: &'static [&'static str]) -> JsonCall {
        JsonCall {
            text: opener.to_owned(),
            only: None,
            closers,
            lists: false,
            listed: opener.ends_with('['),
            bare: false,
            phase: Phase::Open,
            value: JsonText::default(),
            began: 0,
            key: String::new(),
            name: None,
            arguments: None,
            begun: false,
        }
    }

    /// A call that no marker announces, so it must name one of these tools.
    pub(super) fn unmarked(tools: Arc<[Tool]>) -> JsonCall {
        JsonCall { only: Some(tools), ..JsonCall::marked("", &[]) }
    }

    /// A call in a block of code, whose fence is taken already and says only that it is JSON.
    pub(super) fn fenced(fence: &str, tools: Arc<[Tool]>) -> JsonCall {
        JsonCall { only: Some(tools), ..JsonCall::marked(fence, &[FENCE_END]) }
    }

    /// A further call of a list, behind what separates it from the one before.
    pub(super) fn further(
        separator: &str,
        closers: &'static [&'static str],
        only: Option<Arc<[Tool]>>,
    ) -> JsonCall {
        JsonCall { only, listed: true, ..JsonCall::marked(separator, closers) }
    }

    /// A call that may stand in a list, or be a bare name before its arguments.
    pub(super) fn or_list(self) -> JsonCall {
        JsonCall { lists: !self.listed, ..self }
    }

    /// If the call stands in a list, the tools that calls there must name: none where any name does.
    pub(super) fn list(&self) -> Option<Option<Arc<[Tool]>>> {
        self.listed.then(|| self.only.clone())
    }

    /// The text that was taken of what turned out not to be a call.
    pub(super) fn take_text(&mut self) -> String {
        std::mem::take(&mut self.text)
    }

    /// Whether this cannot be anything but a call, as far as it goes.
    pub(super) fn is_certain(&self) -> bool {
        self.only.is_none() || self.name.is_some()
    }

    /// The text that was taken without becoming a call, because the answer has ended.
    pub(super) fn finish(&mut self) -> String {
        if self.begun { String::new() } else { self.take_text() }
    }

    /// Takes from the buffer what can be parsed by now.
    pub(super) fn read(&mut self, buffer: &mut String, calls: &mut Calls) -> Progress {
        loop {
            let progress = match self.phase {
                Phase::Arguments => self.pass_on(buffer, calls),
                Phase::Broken => self.pass_on_all(buffer, calls),
                _ => self.read_around(buffer, calls),
            };
            if let Some(progress) = progress {
                return progress;
            }
        }
    }

    /// Reads what is around arguments that are passed on, and those that are not. `None` when another phase begins.
    fn read_around(&mut self, buffer: &mut String, calls: &mut Calls) -> Option<Progress> {
        for (index, character) in buffer.char_indices() {
            // Bytes of characters outside ASCII are all the same to JSON.
            let byte = u8::try_from(character).ok().filter(u8::is_ascii).unwrap_or(0x80);
            self.text.push(character);
            match self.step(byte) {
                Around::Inside => {}
                Around::Arguments => {
                    self.begun = true;
                    calls.start(self.name.as_deref().unwrap_or_default());
                    buffer.drain(..index);
                    self.phase = Phase::Arguments;
                    self.value = JsonText::default();
                    return None;
                }
                Around::End => {
                    buffer.drain(..index + character.len_utf8());
                    return Some(self.complete(calls));
                }
                Around::Invalid => {
                    self.text.pop();
                    buffer.drain(..index);
                    // A call that has all it needs is not undone by a missing brace.
                    return Some(if self.begun { Progress::Done } else { Progress::Malformed });
                }
            }
        }
        buffer.clear();
        Some(Progress::More)
    }

    /// Parses a byte, which is the last of `text`.
    fn step(&mut self, byte: u8) -> Around {
        let last = self.text.len() - 1;
        match (self.phase, byte) {
            (Phase::KeyText, _) => match self.value.step(byte) {
                Step::More | Step::Unescaped => Around::Inside,
                Step::Last => self.key_ends(),
                Step::Before | Step::Invalid => Around::Invalid,
            },
            (Phase::ValueText, _) => match self.value.step(byte) {
                Step::More | Step::Unescaped => Around::Inside,
                Step::Last => self.value_ends(last + 1),
                Step::Before => match self.value_ends(last) {
                    Around::Inside => self.step(byte),
                    other => other,
                },
                Step::Invalid => Around::Invalid,
            },
            (Phase::BareName, _) => self.bare_name(byte, last),
            (_, b' ' | b'\n' | b'\r' | b'\t') => Around::Inside,
            (Phase::Open, b'{') => self.go(Phase::FirstKey),
            (Phase::Open, b'[') if self.lists => {
                (self.lists, self.listed) = (false, true);
                Around::Inside
            }
            // Without a marker, a word is a word.
            (Phase::Open, _) if self.lists && self.only.is_none() && is_name_byte(byte) => {
                self.began = last;
                self.go(Phase::BareName)
            }
            (Phase::FirstKey | Phase::Comma, b'}') => Around::End,
            (Phase::FirstKey | Phase::Key, b'"') => self.begin(Phase::KeyText, last, byte),
            (Phase::Colon, b':') => self.go(Phase::Value),
            (Phase::Value, b'{') if self.is_arguments() && self.name.is_some() && !self.begun => {
                Around::Arguments
            }
            (Phase::Value, _) => self.begin(Phase::ValueText, last, byte),
            (Phase::Comma, b',') => self.go(Phase::Key),
            _ => Around::Invalid,
        }
    }

    /// Parses a byte of a bare name, of what stands between it and its arguments, or the brace that opens those.
    fn bare_name(&mut self, byte: u8, last: usize) -> Around {
        // The byte may be inside a character.
        if !byte.is_ascii() {
            return Around::Invalid;
        }
        let head = &self.text[self.began..last];
        match byte {
            _ if head.len() > LONGEST_NAME => Around::Invalid,
            b'{' => {
                let head = head.trim_ascii_end();
                let head = head.strip_suffix(ARGUMENTS).unwrap_or(head);
                let name = head.split_once(CALL_ID).map_or(head, |(name, _)| name);
                if name.is_empty() || !name.bytes().all(is_name_byte) {
                    return Around::Invalid;
                }
                self.name = Some(name.to_owned());
                self.bare = true;
                Around::Arguments
            }
            b' ' | b'\n' if head.trim_ascii_end().ends_with(ARGUMENTS) => Around::Inside,
            b'[' | b']' => Around::Inside,
            _ if is_name_byte(byte) && !head.ends_with(ARGUMENTS) => Around::Inside,
            _ => Around::Invalid,
        }
    }

    fn go(&mut self, phase: Phase) -> Around {
        self.phase = phase;
        Around::Inside
    }

    fn begin(&mut self, phase: Phase, at: usize, byte: u8) -> Around {
        self.phase = phase;
        self.began = at;
        self.value = JsonText::default();
        if self.value.step(byte) == Step::Invalid { Around::Invalid } else { Around::Inside }
    }

    fn is_arguments(&self) -> bool {
        matches!(self.key.as_str(), "arguments" | "parameters")
    }

    fn key_ends(&mut self) -> Around {
        let Ok(key) = serde_json::from_str::<String>(&self.text[self.began..]) else {
            return Around::Invalid;
        };
        if !FIELDS.contains(&key.as_str()) {
            return Around::Invalid;
        }
        self.key = key;
        self.go(Phase::Colon)
    }

    /// Takes the value that ends at this place in `text`.
    fn value_ends(&mut self, end: usize) -> Around {
        let value = &self.text[self.began..end];
        let text = || serde_json::from_str::<String>(value).ok();
        match self.key.as_str() {
            "name" if !self.begun => match text().filter(|name| self.may_be(name)) {
                Some(name) => self.name = Some(name),
                None => return Around::Invalid,
            },
            // One of the ways in which Llama gets it wrong.
            "function" if self.name.is_none() => self.name = text().filter(|name| self.may_be(name)),
            "arguments" | "parameters" if !self.begun => self.arguments = Some(value.to_owned()),
            _ => {}
        }
        self.go(Phase::Comma)
    }

    fn may_be(&self, name: &str) -> bool {
        let known = |tools: &Arc<[Tool]>| tools.iter().any(|tool| tool.name == name);
        !name.is_empty() && self.only.as_ref().is_none_or(known)
    }

    /// Takes the end of the object: a call whose arguments were not passed on comes now.
    fn complete(&mut self, calls: &mut Calls) -> Progress {
        if self.begun {
            return Progress::Done;
        }
        let arguments = match self.arguments.as_deref() {
            None | Some("null") => Some("{}".to_owned()),
            // Arguments written as a string, the way they are sent to clients.
            Some(text) if text.starts_with('"') => serde_json::from_str::<String>(text).ok(),
            Some(text) => Some(text.to_owned()),
        };
        let arguments = arguments.filter(|text| text.trim_start().starts_with('{') && is_json(text));
        let (Some(name), Some(arguments)) = (&self.name, arguments) else { return Progress::Malformed };
        self.begun = true;
        calls.start(name);
        calls.arguments(&arguments);
        Progress::Done
    }

    /// Passes arguments on. `None` when they have ended.
    fn pass_on(&mut self, buffer: &mut String, calls: &mut Calls) -> Option<Progress> {
        let mut repaired = String::new();
        let mut taken = 0;
        for (index, character) in buffer.char_indices() {
            let byte = u8::try_from(character).ok().filter(u8::is_ascii).unwrap_or(0x80);
            let end = match self.value.step(byte) {
                Step::More => continue,
                Step::Unescaped => {
                    repaired.push_str(&buffer[taken..index]);
                    repaired.push_str(&format!("\\u{byte:04x}"));
                    taken = index + 1;
                    continue;
                }
                Step::Last if self.bare => {
                    calls.arguments(&(repaired + &buffer[taken..=index]));
                    buffer.drain(..=index);
                    return Some(Progress::Done);
                }
                Step::Last => {
                    self.phase = Phase::Comma;
                    index + 1
                }
                Step::Before | Step::Invalid => {
                    self.phase = Phase::Broken;
                    index
                }
            };
            calls.arguments(&(repaired + &buffer[taken..end]));
            buffer.drain(..end);
            return None;
        }
        calls.arguments(&(repaired + &buffer[taken..]));
        buffer.clear();
        Some(Progress::More)
    }

    /// Passes on what the model wrote where arguments should be.
    fn pass_on_all(&self, buffer: &mut String, calls: &mut Calls) -> Option<Progress> {
        let (end, progress) = match find_first(buffer, self.closers) {
            Some((start, _)) => (start, Progress::Done),
            None => (buffer.len() - held_back(buffer, self.closers), Progress::More),
        };
        calls.arguments(&buffer[..end]);
        buffer.drain(..end);
        Some(progress)
    }
}

/// What a byte outside the arguments did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Around {
    Inside,
    /// It opens arguments that can be passed on as they come.
    Arguments,
    /// It closes the call.
    End,
    Invalid,
}
