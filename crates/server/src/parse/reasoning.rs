//! Reasoning before the answer, as thinking models write it: `<think>…</think>`.
//!
//! Some templates open the block in the prompt, some models open it themselves, some can be told not to think at all;
//! [`ReasoningKind::starts_in_reasoning`] looks at the end of the rendered prompt to know. A call of a tool ends the
//! reasoning too: models now and then forget the closing marker before one.

use super::marker::{Start, find_first, held_back, start_of};
use super::{Piece, UnknownParser};

/// Line breaks beside a marker are layout and not part of the text. This many are held back at most.
const LAYOUT: usize = 16;

/// How a model family writes its reasoning; names are those of SGLang's `--reasoning-parser`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReasoningKind {
    /// `qwen3`, `deepseek-v3`, `step3p5`: thinks when it or the prompt opens a block.
    Qwen3,
    /// `deepseek-r1`, `qwen3-thinking`, `step3`: always thinks, whether or not the block is opened.
    DeepSeekR1,
    /// `glm45`.
    Glm45,
    /// `kimi`: its markers are `◁think▷` and `◁/think▷`.
    Kimi,
    /// `minimax`: always thinks.
    MiniMax,
    /// `minimax-append-think`: the reasoning stays in the content, and the opening marker is put back before it.
    MiniMaxAppendThink,
}

const NAMES: [(&str, ReasoningKind); 10] = [
    ("qwen3", ReasoningKind::Qwen3),
    ("deepseek-v3", ReasoningKind::Qwen3),
    ("step3p5", ReasoningKind::Qwen3),
    ("deepseek-r1", ReasoningKind::DeepSeekR1),
    ("qwen3-thinking", ReasoningKind::DeepSeekR1),
    ("step3", ReasoningKind::DeepSeekR1),
    ("glm45", ReasoningKind::Glm45),
    ("kimi", ReasoningKind::Kimi),
    ("minimax", ReasoningKind::MiniMax),
    ("minimax-append-think", ReasoningKind::MiniMaxAppendThink),
];

impl ReasoningKind {
    /// Chooses by the value of `--reasoning-parser`: a name, `none`, or `auto` to go by the chat template.
    pub fn choose(name: &str, template: Option<&str>) -> Result<Option<ReasoningKind>, UnknownParser> {
        match name {
            "none" => Ok(None),
            "auto" => Ok(template.and_then(ReasoningKind::of_template)),
            _ => match NAMES.iter().find(|(known, _)| *known == name) {
                Some((_, kind)) => Ok(Some(*kind)),
                None => {
                    let known = NAMES.iter().map(|(known, _)| *known).chain(["auto", "none"]);
                    Err(UnknownParser {
                        option: "--reasoning-parser",
                        name: name.to_owned(),
                        known: known.collect::<Vec<_>>().join(", "),
                    })
                }
            },
        }
    }

    /// The kind whose markers a chat template mentions.
    pub fn of_template(template: &str) -> Option<ReasoningKind> {
        let has = |text: &str| template.contains(text);
        if has("◁think▷") {
            return Some(ReasoningKind::Kimi);
        }
        if !has("</think>") {
            return None;
        }
        // DeepSeek's later templates can switch thinking off; R1 cannot, and its first template opens no block.
        let deepseek_r1 = has("<｜Assistant｜>") && !has("thinking");
        Some(match () {
            () if has("<minimax:tool_call>") => ReasoningKind::MiniMax,
            () if has("[gMASK]") => ReasoningKind::Glm45,
            () if deepseek_r1 => ReasoningKind::DeepSeekR1,
            () => ReasoningKind::Qwen3,
        })
    }

    /// Marker that opens a block, and the one that closes it.
    pub fn markers(self) -> (&'static str, &'static str) {
        match self {
            ReasoningKind::Kimi => ("◁think▷", "◁/think▷"),
            _ => ("<think>", "</think>"),
        }
    }

    /// Whether the answer to a rendered prompt begins inside a block.
    pub fn starts_in_reasoning(self, prompt: &str) -> bool {
        let (open, close) = self.markers();
        let prompt = prompt.trim_end();
        let always = matches!(self, ReasoningKind::DeepSeekR1 | ReasoningKind::MiniMax);
        prompt.ends_with(open) || (always && !prompt.ends_with(close))
    }
}

/// Tells reasoning from the rest.
#[derive(Debug)]
pub struct ReasoningParser {
    kind: ReasoningKind,
    /// Markers at which reasoning ends: the closing one, then those of tools.
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
    /// `tool_openers` are the markers of the tool calls that may occur ([`super::ToolKind::openers`]), none when the
    /// request has no tools.
    pub fn new(
        kind: ReasoningKind,
        starts_in_reasoning: bool,
        tool_openers: &[&'static str],
    ) -> ReasoningParser {
        let state = match kind {
            ReasoningKind::MiniMaxAppendThink => State::Restore,
            _ if starts_in_reasoning => State::StartInside,
            _ => State::Start,
        };
        let ends = [&[kind.markers().1], tool_openers].concat();
        ReasoningParser { kind, ends, state, buffer: String::new() }
    }

    /// Takes the next part of the text.
    pub fn push(&mut self, text: &str) -> Vec<Piece> {
        self.buffer.push_str(text);
        let mut out = Vec::new();
        while !self.buffer.is_empty() && self.step(&mut out) {}
        out
    }

    /// The text has ended: gives what was held back.
    pub fn finish(&mut self) -> Vec<Piece> {
        let rest = std::mem::take(&mut self.buffer);
        match self.state {
            _ if rest.is_empty() => Vec::new(),
            State::StartInside | State::Opened | State::Reasoning => vec![Piece::Reasoning(rest)],
            _ => vec![Piece::Content(rest)],
        }
    }

    /// Does what the buffer allows; whether there may be more to do.
    fn step(&mut self, out: &mut Vec<Piece>) -> bool {
        let (open, close) = self.kind.markers();
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
