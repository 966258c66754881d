//! What the model wrote, told apart: reasoning, answer, tool calls.
//!
//! Models write all of it as one text, each family with markers of its own. Parsers here take that text in chunks, as
//! it is generated, and give [`Piece`]s. How the text was cut into chunks makes no difference to the joined pieces.
//! Text is held back only while it may still turn out to be a marker, or layout beside one. What does not form a call
//! comes out as content, unchanged.

use oscar_model::text::Tokenizer;

mod marker;
mod message;
mod parts;
mod reasoning;
mod request;
mod tools;

pub use message::{Message, MessageCall};
pub(crate) use parts::{Change, Part, Parts};
pub use reasoning::{ReasoningKind, ReasoningParser};
pub use request::{AnswerForm, AnswerRequest, FieldError, ToolChoice};
pub(crate) use tools::may_be_text;
pub use tools::{Tool, ToolKind, ToolParser};

/// A part of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Piece {
    /// Thoughts before the answer.
    Reasoning(String),
    /// The answer itself.
    Content(String),
    /// A call begins; its arguments follow.
    ToolCallStart {
        /// Which call of the answer, from 0.
        index: usize,
        /// Identifies the call when its result is sent back.
        id: String,
        /// The function.
        name: String,
    },
    /// More of the JSON text of a call's arguments.
    ToolCallArguments {
        /// Which call of the answer, from 0.
        index: usize,
        /// The next part of the text.
        text: String,
    },
}

/// A parser name that is not known.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{option} is `{name}`, expected one of: {known}")]
pub struct UnknownParser {
    /// The option that was set.
    pub option: &'static str,
    /// Its value.
    pub name: String,
    /// Names that would do.
    pub known: String,
}

/// Whether the engine must be asked to show special tokens: some vocabularies have the markers among them, and parsers
/// can only find what is in the text.
pub fn needs_special_tokens(
    tokenizer: &Tokenizer,
    reasoning: Option<ReasoningKind>,
    tools: Option<ToolKind>,
) -> bool {
    let (open, close) = reasoning.map(ReasoningKind::markers).unzip();
    let markers =
        open.into_iter().chain(close).chain(tools.iter().flat_map(|kind| kind.markers().iter().copied()));
    let mut ids = markers.filter_map(|marker| tokenizer.token_id(marker));
    ids.any(|id| tokenizer.is_special(id))
}

/// Both parsers in a row: the reasoning is taken off first, calls are looked for in the rest.
#[derive(Debug, Default)]
pub struct OutputParser {
    reasoning: Option<ReasoningParser>,
    tools: Option<ToolParser>,
}

impl OutputParser {
    /// Where a parser is missing, its kind of piece is left in the content.
    pub fn new(reasoning: Option<ReasoningParser>, tools: Option<ToolParser>) -> OutputParser {
        OutputParser { reasoning, tools }
    }

    /// Takes the next part of the text.
    pub fn push(&mut self, text: &str) -> Vec<Piece> {
        let pieces = match &mut self.reasoning {
            Some(reasoning) => reasoning.push(text),
            None => content(text),
        };
        self.look_for_calls(pieces)
    }

    /// The text has ended: gives what was held back.
    pub fn finish(&mut self) -> Vec<Piece> {
        let rest = self.reasoning.as_mut().map(ReasoningParser::finish).unwrap_or_default();
        let mut pieces = self.look_for_calls(rest);
        if let Some(tools) = &mut self.tools {
            pieces.append(&mut tools.finish());
        }
        pieces
    }

    fn look_for_calls(&mut self, pieces: Vec<Piece>) -> Vec<Piece> {
        let Some(tools) = &mut self.tools else { return pieces };
        let mut out = Vec::with_capacity(pieces.len());
        for piece in pieces {
            match piece {
                Piece::Content(text) => out.append(&mut tools.push(&text)),
                other => out.push(other),
            }
        }
        out
    }
}

fn content(text: &str) -> Vec<Piece> {
    if text.is_empty() { Vec::new() } else { vec![Piece::Content(text.to_owned())] }
}
