//! What sets families of models apart in the text they write: markers of reasoning, and the format of tool calls.
//!
//! A family is one file of facts with its tests. The parsers (`crate::parse`) and the grammar of forced calls
//! (`crate::grammar`) work from the facts and know no family.
//!
//! # A new family in three steps
//! 1. Write `families/NAME.rs` with a `FAMILY`: the values of `--tool-call-parser` and `--reasoning-parser`, how to tell
//!    the chat template, the markers, and whether calls are JSON, a list of it, or tags. `qwen.rs` is an example of the
//!    first, `granite.rs` of the second, `glm.rs` of the third.
//! 2. Add `mod NAME;` and its line in [`FAMILIES`]. Detection asks the last line first, so a family whose markers
//!    others have too stands above them.
//! 3. In the tests of the file, give texts as its chat template writes them to `testing::check`, texts that are no
//!    calls to `testing::no_call`, and the format to `testing::forced_calls_are_calls`. The tests in `tests.rs` go
//!    through all of [`FAMILIES`] by themselves.

mod deepseek;
mod glm;
mod gpt_oss;
mod granite;
mod kimi;
mod llama;
mod minimax;
mod mistral;
mod phi;
mod qwen;
mod qwen_coder;
#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;

use crate::parse::{ReasoningFormat, ToolCallFormat};

/// The registry of families. Detection by the chat template asks the last one first.
static FAMILIES: [&Family; 12] = [
    &qwen::FAMILY,
    &qwen_coder::FAMILY,
    &llama::FAMILY,
    &deepseek::FAMILY,
    &glm::FAMILY,
    &minimax::FAMILY,
    &kimi::FAMILY,
    &granite::FAMILY,
    &phi::FAMILY,
    &mistral::FAMILY,
    &mistral::FAMILY_V11,
    &gpt_oss::FAMILY,
];

/// What sets a family apart. A family may have only one of the two, and share the other with another family.
struct Family {
    tool_calls: Option<ToolCallFormat>,
    /// One for each way of reading the reasoning that `--reasoning-parser` offers.
    reasoning: &'static [ReasoningFormat],
}

fn tool_call_formats() -> impl DoubleEndedIterator<Item = &'static ToolCallFormat> + Clone {
    FAMILIES.iter().filter_map(|family| family.tool_calls.as_ref())
}

fn reasoning_formats() -> impl DoubleEndedIterator<Item = &'static ReasoningFormat> + Clone {
    FAMILIES.iter().flat_map(|family| family.reasoning)
}

impl ToolCallFormat {
    /// Chooses by the value of `--tool-call-parser`: a name, `none`, or `auto` to go by the chat template.
    pub fn choose(
        name: &str,
        template: Option<&str>,
    ) -> Result<Option<&'static ToolCallFormat>, UnknownParser> {
        let detect = |template| tool_call_formats().rev().find(|format| (format.detect)(template));
        let named = tool_call_formats().map(|format| (format.names, format));
        choose("--tool-call-parser", name, named, || template.and_then(detect))
    }
}

impl ReasoningFormat {
    /// Chooses by the value of `--reasoning-parser`: a name, `none`, or `auto` to go by the chat template.
    pub fn choose(
        name: &str,
        template: Option<&str>,
    ) -> Result<Option<&'static ReasoningFormat>, UnknownParser> {
        let detect = |template| reasoning_formats().rev().find(|format| (format.detect)(template));
        let named = reasoning_formats().map(|format| (format.names, format));
        choose("--reasoning-parser", name, named, || template.and_then(detect))
    }
}

fn choose<F>(
    option: &'static str,
    name: &str,
    mut named: impl Iterator<Item = (&'static [&'static str], F)> + Clone,
    detect: impl FnOnce() -> Option<F>,
) -> Result<Option<F>, UnknownParser> {
    let all = named.clone().flat_map(|(names, _)| names.iter().copied()).chain(["auto", "none"]);
    match name {
        "none" => Ok(None),
        "auto" => Ok(detect()),
        _ => match named.find(|(names, _)| names.contains(&name)) {
            Some((_, format)) => Ok(Some(format)),
            None => Err(UnknownParser {
                option,
                name: name.to_owned(),
                known: all.collect::<Vec<_>>().join(", "),
            }),
        },
    }
}

/// `--tool-call-parser` or `--reasoning-parser` has a value that names no family.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{option} is `{name}`, expected one of: {known}")]
pub struct UnknownParser {
    /// The option that was set.
    pub option: &'static str,
    /// The value it was set to.
    pub name: String,
    /// The values that it may have.
    pub known: String,
}
