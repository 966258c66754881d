//! Parsers of what the model wrote: reasoning, content and tool calls.
//!
//! Models write all of it as one text, each family with markers of its own (`crate::families`). Parsers here take that
//! text in chunks, as it is generated, and give [`Piece`]s. How the text was cut into chunks makes no difference to the joined pieces.
//! Text is held back only while it may still turn out to be a marker, or layout beside one. What does not form a call
//! comes out as content, unchanged.

use oscar_model::text::Tokenizer;

mod harmony;
mod marker;
mod message;
mod parts;
mod reasoning;
mod tool_calls;

pub(crate) use harmony::HarmonyParser;
pub(crate) use message::{Message, MessageCall};
pub(crate) use parts::{Change, Part, Parts};
pub use reasoning::ReasoningFormat;
pub(crate) use reasoning::{ReasoningParser, THINK};
pub(crate) use tool_calls::{CallLayout, ToolCallParser, XmlLayout, may_be_text};
pub use tool_calls::{Tool, ToolCallFormat};

/// A piece of an answer, as it is streamed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Piece {
    /// More of the reasoning before the content.
    Reasoning(String),
    /// More of the content.
    Content(String),
    /// A tool call begins; its arguments follow.
    ToolCallStart {
        /// The index of the call in the answer, from 0.
        index: usize,
        /// The id by which the client names the call when it sends the result.
        id: String,
        /// The name of the function.
        name: String,
    },
    /// More of the JSON text of a call's arguments.
    ToolCallArguments {
        /// The index of the call in the answer, from 0.
        index: usize,
        /// The JSON text that follows what came before.
        text: String,
    },
}

/// Whether the engine must keep special tokens in the text: some vocabularies have markers among them, and parsers can
/// only find what is in the text.
pub(crate) fn needs_special_tokens(
    tokenizer: &Tokenizer,
    reasoning: Option<&ReasoningFormat>,
    tool_calls: Option<&ToolCallFormat>,
) -> bool {
    if reasoning.is_some_and(|format| format.harmony) || tool_calls.is_some_and(ToolCallFormat::is_harmony) {
        return true;
    }
    let (open, close) = reasoning.map(|format| format.markers).unzip();
    let markers =
        open.into_iter().chain(close).chain(tool_calls.into_iter().flat_map(ToolCallFormat::markers));
    let mut ids = markers.filter_map(|marker| tokenizer.token_id(marker));
    ids.any(|id| tokenizer.is_special(id))
}

/// Both parsers in a row: the reasoning is split off first, and tool calls are looked for in the rest. Or one that does both.
#[derive(Debug, Default)]
pub(crate) struct OutputParser {
    reasoning: Option<ReasoningParser>,
    tool_calls: Option<ToolCallParser>,
    harmony: Option<HarmonyParser>,
}

impl OutputParser {
    /// Without one of the parsers, what it would find stays in the content.
    pub(crate) fn new(
        reasoning: Option<ReasoningParser>,
        tool_calls: Option<ToolCallParser>,
    ) -> OutputParser {
        OutputParser { reasoning, tool_calls, harmony: None }
    }

    /// A parser of messages in channels.
    pub(crate) fn harmony(parser: HarmonyParser) -> OutputParser {
        OutputParser { harmony: Some(parser), ..OutputParser::default() }
    }

    /// Takes the next chunk of the text and gives the pieces that are certain by now.
    pub(crate) fn push(&mut self, text: &str) -> Vec<Piece> {
        if let Some(harmony) = &mut self.harmony {
            return harmony.push(text);
        }
        let pieces = match &mut self.reasoning {
            Some(reasoning) => reasoning.push(text),
            None => content(text),
        };
        self.look_for_calls(pieces)
    }

    /// Gives what was held back, because the text has ended. `cut_off` says that the model had more to say: a call that
    /// it was writing then is dropped.
    pub(crate) fn finish(&mut self, cut_off: bool) -> Vec<Piece> {
        if let Some(harmony) = &mut self.harmony {
            return harmony.finish(cut_off);
        }
        let rest = self.reasoning.as_mut().map(ReasoningParser::finish).unwrap_or_default();
        let mut pieces = self.look_for_calls(rest);
        if let Some(tool_calls) = &mut self.tool_calls {
            pieces.append(&mut if cut_off { tool_calls.cut_off() } else { tool_calls.finish() });
        }
        pieces
    }

    fn look_for_calls(&mut self, pieces: Vec<Piece>) -> Vec<Piece> {
        let Some(tool_calls) = &mut self.tool_calls else { return pieces };
        let mut out = Vec::with_capacity(pieces.len());
        for piece in pieces {
            match piece {
                Piece::Content(text) => out.append(&mut tool_calls.push(&text)),
                other => out.push(other),
            }
        }
        out
    }
}

/// Reads an answer that is messages in channels for a program that shows it: what was thought and what was said.
pub struct ChannelReader(HarmonyParser);

impl ChannelReader {
    /// A reader of the answers of models with this chat template, if they are messages in channels. Special tokens must be kept
    /// in their text.
    pub fn of_template(template: &str) -> Option<ChannelReader> {
        let format = ReasoningFormat::choose("auto", Some(template)).ok()??;
        format.harmony.then(|| ChannelReader(HarmonyParser::new(true, None)))
    }

    /// Takes the next chunk of the text; gives reasoning and content that are certain by now.
    pub fn push(&mut self, text: &str) -> (String, String) {
        ChannelReader::joined(self.0.push(text))
    }

    /// Gives what was held back, because the text has ended.
    pub fn finish(&mut self) -> (String, String) {
        ChannelReader::joined(self.0.finish(false))
    }

    fn joined(pieces: Vec<Piece>) -> (String, String) {
        let mut message = Message::default();
        message.extend(pieces);
        (message.reasoning, message.content)
    }
}

fn content(text: &str) -> Vec<Piece> {
    if text.is_empty() { Vec::new() } else { vec![Piece::Content(text.to_owned())] }
}
