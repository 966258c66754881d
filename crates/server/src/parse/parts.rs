//! The parts of an answer in the order they came, for interfaces whose answers are lists of blocks or items.

use super::{MessageCall, Piece};

/// A part of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    /// Reasoning.
    Reasoning(String),
    /// Content.
    Text(String),
    /// A tool call.
    Call(MessageCall),
}

/// What a piece of the answer changed in the list. One part ends before the next begins.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    /// The part with this index begins.
    Begin(usize),
    /// The part with this index grows by this text, which for a call is text of its arguments.
    Grow(usize, String),
    /// The part with this index is complete.
    End(usize),
}

/// The parts of an answer so far.
#[derive(Clone, Debug, Default)]
pub(crate) struct Parts {
    list: Vec<Part>,
    open: bool,
}

impl Parts {
    /// The parts so far, the last of which may still grow.
    pub(crate) fn list(&self) -> &[Part] {
        &self.list
    }

    /// Whether a tool call is among the parts.
    pub(crate) fn has_calls(&self) -> bool {
        self.list.iter().any(|part| matches!(part, Part::Call(_)))
    }

    /// Adds a piece of the answer and notes what it changed.
    pub(crate) fn push(&mut self, piece: Piece, changes: &mut Vec<Change>) {
        let last = self.list.last_mut().filter(|_| self.open);
        let (part, text) = match (last, piece) {
            (Some(Part::Reasoning(all)), Piece::Reasoning(text))
            | (Some(Part::Text(all)), Piece::Content(text))
            | (Some(Part::Call(MessageCall { arguments: all, .. })), Piece::ToolCallArguments { text, .. }) =>
            {
                all.push_str(&text);
                changes.push(Change::Grow(self.list.len() - 1, text));
                return;
            }
            (_, Piece::Reasoning(text)) => (Part::Reasoning(text.clone()), text),
            (_, Piece::Content(text)) => (Part::Text(text.clone()), text),
            (_, Piece::ToolCallStart { id, name, .. }) => {
                (Part::Call(MessageCall { id, name, arguments: String::new() }), String::new())
            }
            // The arguments of a call come right after its start.
            (_, Piece::ToolCallArguments { .. }) => return,
        };
        self.finish(changes);
        let index = self.list.len();
        self.list.push(part);
        self.open = true;
        changes.push(Change::Begin(index));
        if !text.is_empty() {
            changes.push(Change::Grow(index, text));
        }
    }

    /// Ends the last part, because the answer has ended.
    pub(crate) fn finish(&mut self, changes: &mut Vec<Change>) {
        if std::mem::take(&mut self.open) {
            changes.push(Change::End(self.list.len() - 1));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn start(index: usize) -> Piece {
        Piece::ToolCallStart { index, id: format!("call_{index}"), name: "f".into() }
    }

    #[test]
    fn parts_keep_their_order_and_tell_what_changed() {
        let mut parts = Parts::default();
        let mut changes = Vec::new();
        for piece in [
            Piece::Reasoning("h".into()),
            Piece::Reasoning("m".into()),
            Piece::Content("I ".into()),
            Piece::Content("ask".into()),
            start(0),
            Piece::ToolCallArguments { index: 0, text: "{".into() },
            Piece::ToolCallArguments { index: 0, text: "}".into() },
            start(1),
            Piece::Content("done".into()),
        ] {
            parts.push(piece, &mut changes);
        }
        parts.finish(&mut changes);
        parts.finish(&mut changes);
        let call = |index: usize, arguments: &str| {
            let (id, name) = (format!("call_{index}"), "f".to_owned());
            Part::Call(MessageCall { id, name, arguments: arguments.to_owned() })
        };
        let expected = [
            Part::Reasoning("hm".into()),
            Part::Text("I ask".into()),
            call(0, "{}"),
            call(1, ""),
            Part::Text("done".into()),
        ];
        assert_eq!(parts.list(), expected);
        assert!(parts.has_calls());
        let grow = |index: usize, text: &str| Change::Grow(index, text.to_owned());
        let expected = [
            Change::Begin(0),
            grow(0, "h"),
            grow(0, "m"),
            Change::End(0),
            Change::Begin(1),
            grow(1, "I "),
            grow(1, "ask"),
            Change::End(1),
            Change::Begin(2),
            grow(2, "{"),
            grow(2, "}"),
            Change::End(2),
            Change::Begin(3),
            Change::End(3),
            Change::Begin(4),
            grow(4, "done"),
            Change::End(4),
        ];
        assert_eq!(changes, expected);
    }
}
