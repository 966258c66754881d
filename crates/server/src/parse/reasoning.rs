//! Reasoning before the answer, as thinking models write it: `<think>…</think>`.
//!
//! Some templates open the block in the prompt, some models open it themselves, some can be told not to think at all;
//! [`ReasoningFormat::starts_in_reasoning`] looks at the end of the rendered prompt to know. A tool call ends the
//! reasoning too: models now and then forget the closing marker before one.

use super::Piece;
use super::marker::{Start, find_first, held_back, start_of};

/// The most line breaks that are held back: those beside a marker are layout and not part of the text.
const LAYOUT: usize = 16;

/// The markers of most families.
pub(crate) const THINK: (&str, &str) = ("<think>", "</think>");

/// How a model family writes its reasoning. The families are in `crate::families`; `--reasoning-parser` chooses one.
pub struct ReasoningFormat {
    /// Values of `--reasoning-parser` that choose it, as SGLang spells them.
    pub(crate) names: &'static [&'static str],
    /// Whether the models of a chat template reason in this format.
    pub(crate) detect: fn(&str) -> bool,
    /// The marker that opens a block of reasoning, and the one that closes it.
    pub(crate) markers: (&'static str, &'static str),
    /// Whether an answer begins with reasoning even if neither the prompt nor the model opens a block.
    pub(crate) always: bool,
    /// Whether the reasoning stays in the content, with the opening marker put back before it.
    pub(crate) kept_in_content: bool,
    /// Whether answers are messages in channels, which [`super::HarmonyParser`] reads.
    pub(crate) harmony: bool,
}

impl ReasoningFormat {
    /// Whether the answer to a rendered prompt begins inside a block.
    pub(crate) fn starts_in_reasoning(&self, prompt: &str) -> bool {
        let (open, close) = self.markers;
        let prompt = prompt.trim_end();
        prompt.ends_with(open) || (self.always && !prompt.ends_with(close))
    }
}

/// Formats are equal when `--reasoning-parser` chooses them by the same names.
impl PartialEq for ReasoningFormat {
    fn eq(&self, other: &ReasoningFormat) -> bool {
        self.names == other.names
    }
}

impl std::fmt::Debug for ReasoningFormat {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_tuple("ReasoningFormat").field(&self.names).finish()
    }
}

/// Splits reasoning from content in a text that arrives in chunks.
#[derive(Debug)]
pub(crate) struct ReasoningParser {
    markers: (&'static str, &'static str),
    /// The markers at which reasoning ends: the closing one, then those of tool calls.
    ends: Vec<&'static str>,
    state: State,
    buffer: String,
}

#[derive(Debug, PartialEq, Eq)]
enum State {
    /// Nothing but white space so far, outside a block.
    Start,
    /// Nothing so far, in a block that the prompt opened.
    StartInside,
    /// At the start of a block: line breaks are layout.
    Opened,
    Reasoning,
    /// Behind a block: line breaks are layout.
    Closed,
    Content,
    /// Nothing so far; the marker is to be put back.
    Restore,
}

impl ReasoningParser {
    /// `tool_openers` are the markers of the tool calls that may occur ([`super::ToolCallFormat::openers`]), none when
    /// the request has no tools.
    pub(crate) fn new(
        format: &ReasoningFormat,
        starts_in_reasoning: bool,
        tool_openers: &[&'static str],
    ) -> ReasoningParser {
        let state = match format {
            format if format.kept_in_content => State::Restore,
            _ if starts_in_reasoning => State::StartInside,
            _ => State::Start,
        };
        let ends = [&[format.markers.1], tool_openers].concat();
        ReasoningParser { markers: format.markers, ends, state, buffer: String::new() }
    }

    /// Takes the next chunk of the text and gives the pieces that are certain by now.
    pub(crate) fn push(&mut self, text: &str) -> Vec<Piece> {
        self.buffer.push_str(text);
        let mut out = Vec::new();
        while !self.buffer.is_empty() && self.step(&mut out) {}
        out
    }

    /// Gives what was held back, because the text has ended.
    pub(crate) fn finish(&mut self) -> Vec<Piece> {
        let rest = std::mem::take(&mut self.buffer);
        match self.state {
            _ if rest.is_empty() => Vec::new(),
            State::StartInside | State::Opened | State::Reasoning => vec![Piece::Reasoning(rest)],
            _ => vec![Piece::Content(rest)],
        }
    }

    /// Does what the buffer allows, and says whether there may be more to do.
    fn step(&mut self, out: &mut Vec<Piece>) -> bool {
        let (open, close) = self.markers;
        match self.state {
            State::Start | State::StartInside => {
                let otherwise = if self.state == State::Start { State::Content } else { State::Opened };
                let text = self.buffer.trim_start();
                match start_of(text, &[open]) {
                    Start::Marker(_) => {
                        let skipped = self.buffer.len() - text.len() + open.len();
                        self.buffer.drain(..skipped);
                        self.state = State::Opened;
                    }
                    Start::Partial => return false,
                    Start::Other => self.state = otherwise,
                }
            }
            State::Restore => {
                out.push(Piece::Content(open.to_owned()));
                self.state = State::Content;
            }
            State::Opened | State::Closed => {
                let next = if self.state == State::Opened { State::Reasoning } else { State::Content };
                let layout = self.buffer.len() - self.buffer.trim_start_matches('\n').len();
                self.buffer.drain(..layout);
                if self.buffer.is_empty() {
                    return false;
                }
                self.state = next;
            }
            State::Reasoning => {
                if let Some((start, end)) = find_first(&self.buffer, &self.ends) {
                    let kept = start - trailing_breaks(&self.buffer[..start]);
                    emit(out, Piece::Reasoning, &self.buffer[..kept]);
                    // A tool's marker is for the next parser to see.
                    let skipped = if end == close { end.len() } else { 0 };
                    self.buffer.drain(..start + skipped);
                    self.state = State::Closed;
                } else {
                    let mut sure = self.buffer.len() - held_back(&self.buffer, &self.ends);
                    sure -= trailing_breaks(&self.buffer[..sure]);
                    emit(out, Piece::Reasoning, &self.buffer[..sure]);
                    self.buffer.drain(..sure);
                    return false;
                }
            }
            State::Content => out.push(Piece::Content(std::mem::take(&mut self.buffer))),
        }
        true
    }
}

fn trailing_breaks(text: &str) -> usize {
    (text.len() - text.trim_end_matches('\n').len()).min(LAYOUT)
}

fn emit(out: &mut Vec<Piece>, piece: impl Fn(String) -> Piece, text: &str) {
    if !text.is_empty() {
        out.push(piece(text.to_owned()));
    }
}
