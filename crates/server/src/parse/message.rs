//! The pieces of an answer put together, for answers that are not streamed.

use super::Piece;

/// An answer with its reasoning and tool calls.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Message {
    /// The reasoning before the content.
    pub(crate) reasoning: String,
    /// The content.
    pub(crate) content: String,
    /// The tool calls, in order.
    pub(crate) tool_calls: Vec<MessageCall>,
}

/// A tool call.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct MessageCall {
    /// The id by which the client names the call when it sends the result.
    pub(crate) id: String,
    /// The name of the function.
    pub(crate) name: String,
    /// The arguments, as JSON text.
    pub(crate) arguments: String,
}

impl Message {
    /// Adds a piece of the answer.
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
