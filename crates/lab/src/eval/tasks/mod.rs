//! Questions with checkable answers: multiple choice, maths by exact match, code by running its tests.
//!
//! Everything here works on text. What answers is an [`Answerer`]; the lab gives one for a model and a codec, tests
//! give one with a script. Datasets are the user's files in the layouts their authors publish.

mod choice;
mod code;
mod dataset;
mod layout;
mod lines;
mod maths;
mod run;
mod sandbox;

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

pub use choice::letter;
pub use code::{completed, program};
pub use dataset::{dataset, fetch_dataset};
pub use layout::read;
pub use maths::{equal, final_answer, normalise};
pub use run::{Graded, Score, run};
pub use sandbox::{Limits, Network, Outcome, Sandbox};

/// A set of questions and how they are graded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Task {
    /// Multiple choice in the layout of GPQA.
    Gpqa,
    /// Maths whose answers are whole numbers of up to three digits.
    Aime,
    /// Maths whose answers are short formulas.
    Math500,
    /// Python functions with tests.
    HumanEval,
}

impl Task {
    /// All tasks, in the order they are shown.
    pub const ALL: [Task; 4] = [Task::Gpqa, Task::Aime, Task::Math500, Task::HumanEval];

    /// What users type.
    pub fn name(self) -> &'static str {
        match self {
            Task::Gpqa => "gpqa",
            Task::Aime => "aime",
            Task::Math500 => "math500",
            Task::HumanEval => "humaneval",
        }
    }

    /// What the score counts.
    pub fn metric(self) -> &'static str {
        match self {
            Task::Gpqa => "accuracy",
            Task::Aime | Task::Math500 => "exact_match",
            Task::HumanEval => "pass@1",
        }
    }
}

impl fmt::Display for Task {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.pad(self.name())
    }
}

impl FromStr for Task {
    type Err = TaskError;

    fn from_str(text: &str) -> Result<Task, TaskError> {
        let task = Task::ALL.into_iter().find(|task| task.name() == text);
        task.ok_or_else(|| TaskError::UnknownTask { name: text.to_owned() })
    }
}

/// How a question is put to the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Style {
    /// As a message in a conversation.
    Chat,
    /// As text to be continued, for models without a chat template.
    Plain,
}

/// What the model is given.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prompt {
    /// The message, or the text to continue.
    pub text: String,
    /// Which of the two.
    pub style: Style,
    /// The answer ends before the first of these.
    pub stop: Vec<String>,
}

/// What a right answer is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Expected {
    /// This option, of so many.
    Choice {
        /// The letter of the right option.
        letter: char,
        /// Number of options.
        options: usize,
    },
    /// This value.
    Maths(String),
    /// Code that passes a test.
    Code {
        /// The beginning of the program, which the answer completes.
        prompt: String,
        /// The program that defines `check`.
        test: String,
        /// The function that is checked.
        entry_point: String,
    },
}

/// One question.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Question {
    /// Its name in the dataset, or its line.
    pub id: String,
    /// What the model is given.
    pub prompt: Prompt,
    /// What a right answer is.
    pub expected: Expected,
}

/// What an answerer fails with.
pub type AnswererError = Box<dyn std::error::Error + Send + Sync>;

/// Something that answers questions, such as a model with several codecs.
pub trait Answerer {
    /// The answer of a variant, such as one of the codecs, of at most `max_tokens` tokens. The variants of a prompt
    /// are asked for one after another, so that what they share can be computed once.
    fn answer(&mut self, prompt: &Prompt, variant: usize, max_tokens: usize)
    -> Result<String, AnswererError>;
}

/// Why questions cannot be read, asked or graded.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum TaskError {
    #[error("unknown task {name:?}; there are gpqa, aime, math500 and humaneval")]
    UnknownTask { name: String },
    #[error("{}: cannot read: {source}", path.display())]
    Read { path: PathBuf, source: std::io::Error },
    #[error("{}: more than {limit} bytes", path.display())]
    TooLarge { path: PathBuf, limit: u64 },
    #[error("{}: line {line}: {problem}", path.display())]
    Line { path: PathBuf, line: usize, problem: String },
    #[error("{}: no questions", path.display())]
    Empty { path: PathBuf },
    #[error("{task} needs --data FILE: no package carries it")]
    NoPackage { task: Task },
    #[error("answers to {task} are programs; they are run only with --allow-code-execution")]
    CodeNotAllowed { task: Task },
    #[error("code cannot be run: {problem}")]
    Sandbox { problem: String },
    #[error("question {id}: {source}")]
    Answerer { id: String, source: AnswererError },
    #[error(transparent)]
    Source(#[from] oscar_model::source::SourceError),
}
