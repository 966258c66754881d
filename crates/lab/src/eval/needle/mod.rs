//! Needles in a haystack: sentences with a key and a number hidden in long text, of which the question at the end names one key.
//!
//! Everything in a prompt comes from its seed: the keys, the numbers, the depths of the needles that are not asked
//! for, and where a user's text begins. Context and question are separate because a table of codecs prefills the
//! context exactly once and lets each codec answer from it.

mod build;
mod haystack;
mod keys;
mod score;

use std::fmt;
use std::str::FromStr;

pub use build::build;
pub use haystack::Haystack;
pub use score::score;

/// The kind of a needle prompt: what is hidden, and what is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum NeedleKind {
    /// One key with one number.
    Single,
    /// Several keys, of which the question names one.
    MultiKey,
    /// Several numbers under one key, all of which the question wants.
    MultiValue,
    /// Several keys that share a word with the one asked, with numbers that share digits with the answer.
    Distractors,
}

impl NeedleKind {
    /// All kinds, in the order they are shown.
    pub const ALL: [NeedleKind; 4] =
        [NeedleKind::Single, NeedleKind::MultiKey, NeedleKind::MultiValue, NeedleKind::Distractors];

    /// The name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            NeedleKind::Single => "single",
            NeedleKind::MultiKey => "multi-key",
            NeedleKind::MultiValue => "multi-value",
            NeedleKind::Distractors => "distractors",
        }
    }
}

impl fmt::Display for NeedleKind {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.pad(self.name())
    }
}

impl FromStr for NeedleKind {
    type Err = NeedleError;

    fn from_str(text: &str) -> Result<NeedleKind, NeedleError> {
        let kind = NeedleKind::ALL.into_iter().find(|kind| kind.name() == text);
        kind.ok_or_else(|| NeedleError::UnknownKind { name: text.to_owned() })
    }
}

/// What a prompt with needles is like.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NeedleOptions {
    /// The kind of the prompt.
    pub kind: NeedleKind,
    /// Tokens of context and question together.
    pub tokens: usize,
    /// Where the asked needle is: 0 before the first sentence, 100 after the last.
    pub depth: f64,
    /// Keys hidden in all, the asked one included; 1 for single and multi-value needles whatever is given.
    pub keys: usize,
    /// Numbers under the asked key of a multi-value needle; 1 for all others whatever is given.
    pub values: usize,
    /// Digits of a number, 3 to 18.
    pub digits: usize,
    /// Seed of everything that is random in the prompt.
    pub seed: u64,
}

impl Default for NeedleOptions {
    fn default() -> NeedleOptions {
        NeedleOptions {
            kind: NeedleKind::Single,
            tokens: 4096,
            depth: 50.0,
            keys: 8,
            values: 4,
            digits: 7,
            seed: 0,
        }
    }
}

/// A prompt and what a right answer holds.
#[derive(Clone, Debug, PartialEq)]
pub struct NeedlePrompt {
    /// Instruction, haystack and needles.
    pub context: String,
    /// The question, which follows the context.
    pub question: String,
    /// A beginning of the answer, for models that only continue text.
    pub lead_in: String,
    /// The numbers that a right answer contains.
    pub answers: Vec<String>,
    /// Depth of the (first) needle that the question wants in percent, as it was requested.
    pub depth: f64,
    /// Tokens of context and question, as they were requested.
    pub target_tokens: usize,
    /// Tokens of context and question, as counted.
    pub tokens: usize,
    /// The kind of the prompt.
    pub kind: NeedleKind,
    /// The seed that the prompt was built from.
    pub seed: u64,
}

/// Why a prompt cannot be built.
#[derive(Debug, PartialEq, thiserror::Error)]
#[allow(missing_docs)]
#[non_exhaustive]
pub enum NeedleError {
    #[error("unknown kind of needle {name:?}; there are single, multi-key, multi-value and distractors")]
    UnknownKind { name: String },
    #[error("a depth of {depth} % is not between 0 and 100")]
    Depth { depth: f64 },
    #[error("numbers of {digits} digits: between 3 and 18 are possible")]
    Digits { digits: usize },
    #[error("{count} {what}: between 1 and {most} are possible")]
    Count { what: &'static str, count: usize, most: usize },
    #[error("the haystack holds nearly every number of {digits} digits; ask for more digits")]
    NoFreeNumber { digits: usize },
    #[error("{target} tokens are too few: the instruction, the needles and the question alone have {needed}")]
    TooShort { target: usize, needed: usize },
    #[error("the haystack has no text")]
    EmptyHaystack,
    #[error("no prompt of {target} tokens within 1 % was found; the nearest has {nearest}")]
    Length { target: usize, nearest: usize },
}
