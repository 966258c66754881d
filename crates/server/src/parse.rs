//! What the model wrote, told apart: for now all of it is the answer.

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

/// Tells the parts of an answer apart.
#[derive(Debug, Default)]
pub struct OutputParser;

impl OutputParser {
    /// Takes the next part of the text.
    pub fn push(&mut self, text: &str) -> Vec<Piece> {
        if text.is_empty() { Vec::new() } else { vec![Piece::Content(text.to_owned())] }
    }

    /// The text has ended: gives what was held back.
    pub fn finish(&mut self) -> Vec<Piece> {
        Vec::new()
    }
}
