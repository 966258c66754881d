//! How a command fails: one line that says what, one that says what to do, and an exit code.

use std::fmt::Display;
use std::io;
use std::process::ExitCode;

use oscar_engine::EngineError;
use oscar_kernels::KernelError;
use oscar_kernels::cuda::CudaError;
use oscar_model::ModelError;
use oscar_model::source::SourceError;
use oscar_model::text::TextError;
use oscar_rotations::RotationError;

/// The exit code of a process stopped from the keyboard.
const INTERRUPTED: u8 = 130;

/// How a card that others use too gets room.
const MAKE_ROOM: &str = "free memory on the card (`nvidia-smi` lists who has it; another `oscar serve` takes less with --gpu-memory-fraction)";

/// Why a command ends early.
#[derive(Debug)]
pub(crate) enum Failure {
    /// Something went wrong, and there may be a way to put it right.
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
        match error {
            ModelError::Kernel(error) => error.into(),
            ModelError::WeightsTooLarge { .. } => Failure::new(error).with_fix(format!(
                "choose a model with fewer bytes per weight, such as a smaller quantisation, or {MAKE_ROOM}"
            )),
            error => Failure::new(error),
        }
    }
}

impl From<KernelError> for Failure {
    fn from(error: KernelError) -> Failure {
        let fix = kernel_fix(&error);
        Failure::Error { message: error.to_string(), fix }
    }
}

/// What to do about an error of a device, where there is something.
fn kernel_fix(error: &KernelError) -> Option<String> {
    let full = matches!(error, KernelError::Cuda(CudaError::OutOfMemory { .. }));
    full.then(|| format!("give a smaller --kv-memory or --context, or {MAKE_ROOM}"))
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

impl From<EngineError> for Failure {
    fn from(error: EngineError) -> Failure {
        engine_failure(&error)
    }
}

/// How an error of the engine fails a command.
pub(crate) fn engine_failure(error: &EngineError) -> Failure {
    let fix = match error {
        EngineError::Shared(error) => return engine_failure(error),
        EngineError::Kernel(kernel) => {
            return Failure::Error { message: error.to_string(), fix: kernel_fix(kernel) };
        }
        EngineError::PromptTooLong { .. } => {
            Some("shorten the prompt, or give a larger --context (and --kv-memory, if that is given)")
        }
        EngineError::MemoryTooSmall { .. } => Some("give a larger --kv-memory, or a smaller --context"),
        EngineError::DeviceFailed(_) => Some(
            "start it again; if the device fails again, the kernel's log names the cause (`dmesg | grep Xid` for NVIDIA's \
             cards)",
        ),
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
    use std::sync::Arc;

    use super::*;

    #[test]
    fn messages_are_one_line() {
        assert_eq!(one_line("first\r\n  second\n"), "first; second");
        assert_eq!(one_line("a\u{1b}[31mb"), "a\u{fffd}[31mb");
    }

    #[test]
    fn whoever_shares_a_card_is_told_how_to_make_room() {
        let full = || CudaError::OutOfMemory { what: "bf16 pages", bytes: 5, free: 2 };
        let failures = [
            Failure::from(ModelError::Kernel(full().into())),
            Failure::from(EngineError::Shared(Arc::new(EngineError::Kernel(full().into())))),
            Failure::from(ModelError::WeightsTooLarge { path: "m".into(), needed: 5, free: 2, missing: 3 }),
        ];
        for failure in failures {
            let Failure::Error { message, fix } = failure else { panic!("{failure:?}") };
            assert!(message.ends_with("are missing"), "{message}");
            assert!(fix.is_some_and(|fix| fix.contains("--gpu-memory-fraction")), "{message}");
        }
    }

    #[test]
    fn a_closed_pipe_is_not_a_failure() {
        assert!(matches!(Failure::from(io::Error::from(io::ErrorKind::BrokenPipe)), Failure::OutputClosed));
        assert!(matches!(Failure::from(io::Error::from(io::ErrorKind::StorageFull)), Failure::Error { .. }));
    }
}
