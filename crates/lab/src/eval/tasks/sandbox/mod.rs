//! Runs a program of a model in a process of its own, with limits.
//!
//! The process has an empty temporary folder, no environment, no input, no network, bounded time, memory, files and
//! output, and may not start others. The network is taken away by a namespace where the system allows one, else by a
//! hook in the interpreter, which stops code that does not fight it. Neither makes hostile native code harmless:
//! programs run only when the user asks for it.

#[cfg(unix)]
mod process;

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

#[cfg(not(unix))]
use super::TaskError;

/// What a program may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Time on the clock.
    pub wall: Duration,
    /// Time of the processor, in seconds.
    pub cpu_seconds: u64,
    /// Address space.
    pub memory_bytes: u64,
    /// Size of a file it writes.
    pub file_bytes: u64,
    /// How much of its messages is kept.
    pub message_bytes: usize,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            wall: Duration::from_secs(10),
            cpu_seconds: 10,
            memory_bytes: 1 << 30,
            file_bytes: 1 << 20,
            message_bytes: 4096,
        }
    }
}

/// How the network is taken away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Network {
    /// By an empty network namespace of the system.
    Namespace,
    /// By a hook in the interpreter.
    Hook,
}

impl fmt::Display for Network {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.pad(match self {
            Network::Namespace => "namespace",
            Network::Hook => "interpreter hook",
        })
    }
}

/// How a program ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It ran to its end.
    Passed,
    /// It failed; the last lines it said.
    Failed(String),
    /// It took too long.
    TimedOut,
}

/// An interpreter and how programs are shut in.
#[derive(Clone, Debug)]
pub struct Sandbox {
    python: PathBuf,
    unshare: Option<Vec<String>>,
    limits: Limits,
}

impl Sandbox {
    /// How the network is taken away.
    pub fn network(&self) -> Network {
        if self.unshare.is_some() { Network::Namespace } else { Network::Hook }
    }

    /// The limits.
    pub fn limits(&self) -> Limits {
        self.limits
    }
}

#[cfg(not(unix))]
impl Sandbox {
    /// Programs can be limited on Unix only.
    pub fn new(_python: Option<PathBuf>, _limits: Limits) -> Result<Sandbox, TaskError> {
        Err(TaskError::Sandbox { problem: "limits on programs need a Unix system".to_owned() })
    }

    /// Never reached: there is no sandbox to call it on.
    pub fn run(&self, _program: &str) -> Result<Outcome, TaskError> {
        Err(TaskError::Sandbox { problem: "limits on programs need a Unix system".to_owned() })
    }
}

#[cfg(all(test, unix))]
mod tests;
