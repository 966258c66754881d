//! Pieces put together again, for answers that are sent in one go.

use super::Piece;

/// A whole answer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Message {
    /// Thoughts before the answer.
    pub(crate) reasoning: String,
    /// The answer itself.
    pub(crate) content: String,
    /// Calls, in order.
    pub(crate) tool_calls: Vec<MessageCall>,
}

/// A whole call.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct MessageCall {
    /// Identifies the call when its result is sent back.
    pub(crate) id: String,
    /// The function.
    pub(crate) name: String,
    /// JSON text.
    pub(crate) arguments: String,
}

impl Message {
    /// Adds a piece.
    pub(crate) fn push(&mut self, piece: Piece) {
        match piece {
            Piece::Reasoning(text) => self.reasoning.push_str(&text),
            Piece::Content(text) => self.content.push_str(&text),
            Piece::ToolCallStart { id, name, .. } => {
                self.tool_calls.push(MessageCall { id, name, arguments: String::new() });
            }
            Piece::ToolCallArguments { index, text } => {
                if let Some(call) = self.tool_calls.get_mut(index) {
                    call.arguments.push_str(&text);
                }
            }
        }
    }
}

impl Extend<Piece> for Message {
    fn extend<T: IntoIterator<Item = Piece>>(&mut self, pieces: T) {
        pieces.into_iter().for_each(|piece| self.push(piece));
    }
}
