//! How a command fails: one line that says what, one that says what to do, and an exit code.

use std::fmt::Display;
use std::io;
use std::process::ExitCode;

use oscar_engine::EngineError;
use oscar_kernels::KernelError;
use oscar_lab::calibrate::CalibrateError;
use oscar_lab::eval::EvalError;
use oscar_model::ModelError;
use oscar_model::source::SourceError;
use oscar_model::text::TextError;
use oscar_rotations::RotationError;

/// The exit code of a process stopped from the keyboard.
const INTERRUPTED: u8 = 130;

/// Why a command ends early.
#[derive(Debug)]
pub(crate) enum Failure {
    /// Something went wrong.
    Error { message: String, fix: Option<String> },
    /// The user pressed Ctrl-C.
    Interrupted(String),
    /// The reader of standard output closed it, which is not an error.
    OutputClosed,
}

impl Failure {
    /// A failure with no known fix.
    pub(crate) fn new(message: impl Display) -> Failure {
        Failure::Error { message: message.to_string(), fix: None }
    }

    /// The same failure with what to do about it.
    pub(crate) fn with_fix(self, fix: impl Display) -> Failure {
        match self {
            Failure::Error { message, .. } => Failure::Error { message, fix: Some(fix.to_string()) },
            other => other,
        }
    }

    /// Prints the failure and returns the exit code.
    pub(crate) fn report(self) -> ExitCode {
        match self {
            Failure::Error { message, fix } => {
                eprintln!("error: {}", one_line(&message));
                if let Some(fix) = fix {
                    eprintln!("fix: {}", one_line(&fix));
                }
                ExitCode::FAILURE
            }
            Failure::Interrupted(message) => {
                eprintln!("{}", one_line(&message));
                ExitCode::from(INTERRUPTED)
            }
            Failure::OutputClosed => ExitCode::SUCCESS,
        }
    }
}

impl From<SourceError> for Failure {
    fn from(error: SourceError) -> Failure {
        match error {
            SourceError::Interrupted => Failure::Interrupted(error.to_string()),
            other => Failure::Error { message: other.to_string(), fix: other.fix() },
        }
    }
}

/// Errors of standard output; all other files have errors that name them.
impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Failure {
        match error.kind() {
            io::ErrorKind::BrokenPipe => Failure::OutputClosed,
            _ => Failure::new(format!("cannot write to standard output: {error}")),
        }
    }
}

impl From<ModelError> for Failure {
    fn from(error: ModelError) -> Failure {
        Failure::new(error)
    }
}

impl From<KernelError> for Failure {
    fn from(error: KernelError) -> Failure {
        Failure::new(error)
    }
}

impl From<TextError> for Failure {
    fn from(error: TextError) -> Failure {
        Failure::new(error)
    }
}

impl From<RotationError> for Failure {
    fn from(error: RotationError) -> Failure {
        Failure::Error { fix: error.fix(), message: error.to_string() }
    }
}

impl From<CalibrateError> for Failure {
    fn from(error: CalibrateError) -> Failure {
        match error {
            CalibrateError::Rotations(error) => error.into(),
            error => Failure::new(error),
        }
    }
}

impl From<EvalError> for Failure {
    fn from(error: EvalError) -> Failure {
        match error {
            EvalError::Rotations(error) => (*error).into(),
            EvalError::Calibrate(error) => (*error).into(),
            EvalError::Engine(error) => engine(&error),
            error => Failure::new(error),
        }
    }
}

impl From<EngineError> for Failure {
    fn from(error: EngineError) -> Failure {
        engine(&error)
    }
}

fn engine(error: &EngineError) -> Failure {
    let fix = match error {
        EngineError::PromptTooLong { .. } => {
            Some("shorten the prompt, or give a larger --context (and --kv-memory, if that is given)")
        }
        EngineError::MemoryTooSmall { .. } => Some("give a larger --kv-memory, or a smaller --context"),
        _ => None,
    };
    Failure::Error { message: error.to_string(), fix: fix.map(str::to_owned) }
}

fn one_line(text: &str) -> String {
    let line = text
        .split(['\n', '\r'])
        .map(str::trim)
        .filter(|part| !part.is_empty())
        .collect::<Vec<_>>()
        .join("; ");
    // Names from a hostile file must not reach the terminal as commands.
    line.replace(char::is_control, "\u{fffd}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_one_line() {
        assert_eq!(one_line("first\r\n  second\n"), "first; second");
        assert_eq!(one_line("a\u{1b}[31mb"), "a\u{fffd}[31mb");
    }

    #[test]
    fn a_closed_pipe_is_not_a_failure() {
        assert!(matches!(Failure::from(io::Error::from(io::ErrorKind::BrokenPipe)), Failure::OutputClosed));
        assert!(matches!(Failure::from(io::Error::from(io::ErrorKind::StorageFull)), Failure::Error { .. }));
    }
}
