//! The facts about a family's tool calls that the parser and the grammar of forced calls work from.

/// How a model family writes tool calls. The families are in `crate::families`; `--tool-call-parser` chooses one.
pub struct ToolCallFormat {
    /// Values of `--tool-call-parser` that choose it, as SGLang spells them.
    pub(crate) names: &'static [&'static str],
    /// Whether a chat template teaches this format.
    pub(crate) detect: fn(&str) -> bool,
    /// Markers with which a call begins. Reasoning ends at one of them.
    pub(crate) openers: &'static [&'static str],
    /// The marker that may follow the end of a call and means nothing more.
    pub(crate) closer: Option<&'static str>,
    /// How one call is laid out.
    pub(crate) layout: CallLayout,
    /// What a forced call has before and behind it, with the line breaks of the chat template. The brackets of a list
    /// are not part of it.
    pub(crate) block: (&'static str, &'static str),
    /// Whether all calls of an answer stand in one block; otherwise each has a block of its own.
    pub(crate) one_block: bool,
    /// What separates calls, or their blocks.
    pub(crate) separator: &'static str,
}

/// How one call is laid out.
#[derive(Debug)]
pub(crate) enum CallLayout {
    /// A JSON object, `{"name": …, "arguments": {…}}`.
    Json {
        /// The name of the field that holds the arguments.
        arguments: &'static str,
        /// Whether the calls of a block stand in a JSON list, be there one or several.
        list: bool,
    },
    /// The name as it is, and the arguments as a JSON object: `name[ARGS]{…}`.
    Named {
        /// The marker between the two.
        separator: &'static str,
    },
    /// Tags, with a pair of them for each argument.
    Xml(XmlLayout),
    /// A message for a function; see [`crate::parse::HarmonyParser`], which reads the whole answer.
    Harmony,
}

/// The tags of a call.
#[derive(Debug)]
pub(crate) struct XmlLayout {
    /// The tag before the name, up to the name. Without one the name follows the opening marker.
    pub(crate) call_open: Option<&'static str>,
    /// The tag behind the last argument.
    pub(crate) call_close: &'static str,
    /// What stands before and behind the name of an argument.
    pub(crate) key: (&'static str, &'static str),
    /// What stands before and behind the value of an argument.
    pub(crate) value: (&'static str, &'static str),
    /// Whether values stand on lines of their own.
    pub(crate) values_on_lines: bool,
    /// Whether the names of functions and arguments are written in quotes.
    pub(crate) quoted_names: bool,
}

impl ToolCallFormat {
    /// Whether calls, or at least their arguments, are JSON objects.
    pub(crate) fn is_json(&self) -> bool {
        matches!(self.layout, CallLayout::Json { .. } | CallLayout::Named { .. })
    }

    /// Whether calls may stand in a JSON list, or as a bare name before its arguments. Models that learned one of the two
    /// write the other now and then, so both are read.
    pub(crate) fn has_lists(&self) -> bool {
        matches!(self.layout, CallLayout::Json { list: true, .. } | CallLayout::Named { .. })
    }

    /// Whether calls are messages for functions.
    pub(crate) fn is_harmony(&self) -> bool {
        matches!(self.layout, CallLayout::Harmony)
    }

    /// All markers and tags that a vocabulary may have as single tokens.
    pub(crate) fn markers(&self) -> impl Iterator<Item = &'static str> {
        let tags = match &self.layout {
            CallLayout::Json { .. } | CallLayout::Harmony => [""; 5],
            CallLayout::Named { separator } => [*separator, "", "", "", ""],
            CallLayout::Xml(XmlLayout { call_close, key, value, .. }) => {
                [*call_close, key.0, key.1, value.0, value.1]
            }
        };
        let whole = |tag: &&str| {
            let between = |open, close| tag.starts_with(open) && tag.ends_with(close);
            between('<', '>') || between('[', ']')
        };
        self.openers.iter().copied().chain(self.closer).chain(tags).filter(whole)
    }
}

/// Formats are equal when `--tool-call-parser` chooses them by the same names.
impl PartialEq for ToolCallFormat {
    fn eq(&self, other: &ToolCallFormat) -> bool {
        self.names == other.names
    }
}

impl std::fmt::Debug for ToolCallFormat {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_tuple("ToolCallFormat").field(&self.names).finish()
    }
}
