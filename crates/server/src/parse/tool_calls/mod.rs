//! Tool calls in what the model writes, in the format of its family.

mod arguments;
mod format;
mod json_call;
mod json_text;
mod parser;
mod write;
mod xml_call;

pub(crate) use arguments::may_be_text;
pub use format::ToolCallFormat;
pub(crate) use format::{CallLayout, XmlLayout};
pub(crate) use parser::ToolCallParser;

use serde_json::Value;

use super::Piece;

/// The most bytes of the name of a function or argument.
const LONGEST_NAME: usize = 256;

/// Whether a byte may be part of the name of a function.
fn is_name_byte(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"_-.:/".contains(&byte)
}

/// A function that the model may call.
#[derive(Clone, Debug, PartialEq)]
pub struct Tool {
    /// The name of the function.
    pub name: String,
    /// The JSON schema of its arguments; `null` when they are not described.
    pub parameters: Value,
    /// Whether forced calls must match the schema in full.
    pub strict: bool,
}

/// Collects the pieces of the answer and numbers its calls.
#[derive(Debug)]
pub(super) struct Calls {
    out: Vec<Piece>,
    id_stem: String,
    begun: usize,
}

impl Calls {
    pub(super) fn new(id_stem: String) -> Calls {
        Calls { out: Vec::new(), id_stem, begun: 0 }
    }

    /// Adds a piece that is no part of a call.
    pub(super) fn push(&mut self, piece: Piece) {
        self.out.push(piece);
    }

    /// The pieces since the last time.
    pub(super) fn take(&mut self) -> Vec<Piece> {
        std::mem::take(&mut self.out)
    }

    pub(super) fn start(&mut self, name: &str) {
        let index = self.begun;
        self.begun += 1;
        let id = format!("call_{}{index}", self.id_stem);
        self.out.push(Piece::ToolCallStart { index, id, name: name.to_owned() });
    }

    /// Adds text to the arguments of the last call.
    pub(super) fn arguments(&mut self, text: &str) {
        if let Some(index) = self.begun.checked_sub(1).filter(|_| !text.is_empty()) {
            self.out.push(Piece::ToolCallArguments { index, text: text.to_owned() });
        }
    }
}

/// What the parser of one call made of the buffer.
#[derive(Debug, PartialEq, Eq)]
enum Progress {
    /// It needs more text: all was taken, or what is left is not yet clear.
    More,
    /// The call, or the block of calls, has ended; the rest of the buffer is behind it.
    Done,
    /// This is not a call. The text that was taken is content, and the rest of the buffer follows it.
    Malformed,
}
