//! Which layout a model uses.

use super::super::UnknownParser;
use super::xml_call::{GLM, MINIMAX, QWEN_CODER, XmlLayout};

/// How a model family writes calls; names are those of SGLang's `--tool-call-parser`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ToolKind {
    /// `qwen25`, `qwen`, `hermes`: `<tool_call>{"name": …, "arguments": …}</tool_call>`.
    Hermes,
    /// `qwen3_coder`: `<tool_call><function=…><parameter=…>…</parameter></function></tool_call>`.
    QwenCoder,
    /// `llama3`: `{"name": …, "parameters": …}`, with or without `<|python_tag|>` before it.
    Llama3,
    /// `glm45`, `glm47`, `glm`: `<tool_call>name<arg_key>…</arg_key><arg_value>…</arg_value></tool_call>`.
    Glm,
    /// `minimax-m2`: `<minimax:tool_call><invoke name="…"><parameter name="…">…</parameter></invoke>…`.
    MiniMaxM2,
}

const NAMES: [(&str, ToolKind); 10] = [
    ("qwen25", ToolKind::Hermes),
    ("qwen", ToolKind::Hermes),
    ("hermes", ToolKind::Hermes),
    ("qwen3_coder", ToolKind::QwenCoder),
    ("step3p5", ToolKind::QwenCoder),
    ("llama3", ToolKind::Llama3),
    ("glm45", ToolKind::Glm),
    ("glm47", ToolKind::Glm),
    ("glm", ToolKind::Glm),
    ("minimax-m2", ToolKind::MiniMaxM2),
];

impl ToolKind {
    /// Chooses by the value of `--tool-call-parser`: a name, `none`, or `auto` to go by the chat template.
    pub fn choose(name: &str, template: Option<&str>) -> Result<Option<ToolKind>, UnknownParser> {
        match name {
            "none" => Ok(None),
            "auto" => Ok(template.and_then(ToolKind::of_template)),
            _ => match NAMES.iter().find(|(known, _)| *known == name) {
                Some((_, kind)) => Ok(Some(*kind)),
                None => {
                    let known = NAMES.iter().map(|(known, _)| *known).chain(["auto", "none"]);
                    Err(UnknownParser {
                        option: "--tool-call-parser",
                        name: name.to_owned(),
                        known: known.collect::<Vec<_>>().join(", "),
                    })
                }
            },
        }
    }

    /// The kind whose layout a chat template teaches.
    pub fn of_template(template: &str) -> Option<ToolKind> {
        let has = |text: &str| template.contains(text);
        match () {
            () if has("<minimax:tool_call>") => Some(ToolKind::MiniMaxM2),
            () if has("<tool_call>") && has("<arg_key>") => Some(ToolKind::Glm),
            () if has("<tool_call>") && has("<function=") && has("<parameter=") => Some(ToolKind::QwenCoder),
            () if has("<tool_call>") && has("arguments") && !has("<invoke") => Some(ToolKind::Hermes),
            // The tag alone is not enough: templates of other layouts of the same family have it too.
            () if has(r#"{"name": function name, "parameters": dictionary"#) => Some(ToolKind::Llama3),
            () => None,
        }
    }

    /// Markers with which calls begin. Reasoning ends at one of them.
    pub fn openers(self) -> &'static [&'static str] {
        match self {
            ToolKind::Hermes | ToolKind::Glm => &["<tool_call>"],
            ToolKind::QwenCoder => &["<tool_call>", "<function="],
            ToolKind::Llama3 => &["<|python_tag|>"],
            ToolKind::MiniMaxM2 => &["<minimax:tool_call>"],
        }
    }

    /// Markers that may follow the end of a call and mean nothing more.
    pub(super) fn closers(self) -> &'static [&'static str] {
        match self {
            ToolKind::Hermes | ToolKind::Glm | ToolKind::QwenCoder => &["</tool_call>"],
            ToolKind::Llama3 => &[],
            ToolKind::MiniMaxM2 => &["</minimax:tool_call>"],
        }
    }

    /// Whether a marker of the layout is a special token in its family's vocabulary, so that the engine must be asked
    /// to keep the text of special tokens.
    pub fn needs_special_tokens(self) -> bool {
        self == ToolKind::Llama3
    }

    /// Whether calls are JSON objects.
    pub fn is_json(self) -> bool {
        matches!(self, ToolKind::Hermes | ToolKind::Llama3)
    }

    pub(super) fn xml_layout(self) -> Option<&'static XmlLayout> {
        match self {
            ToolKind::Hermes | ToolKind::Llama3 => None,
            ToolKind::QwenCoder => Some(&QWEN_CODER),
            ToolKind::Glm => Some(&GLM),
            ToolKind::MiniMaxM2 => Some(&MINIMAX),
        }
    }
}
