//! The process itself.

use std::io::{Read, Write};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use oscar_model::source::find_program;

use super::{Limits, Outcome, Sandbox};
use crate::eval::tasks::TaskError;

const BOOTSTRAP: &str = include_str!("bootstrap.py");
/// The status of a program that ran to its end, by agreement with the bootstrap.
const RAN_TO_ITS_END: i32 = 77;
/// SIGXCPU, the same number on Linux, macOS and the BSDs.
const PROCESSOR_TIME: i32 = 24;
const POLL: Duration = Duration::from_millis(5);
/// A user namespace, which every user may have where the system allows them, and a network namespace in it.
const NAMESPACES: [&str; 3] = ["--user", "--map-root-user", "--net"];

impl Sandbox {
    /// Finds the interpreter (`python`, else `python3` or `python` on the search path) and the strictest way to
    /// shut a program in that works here.
    pub fn new(python: Option<PathBuf>, limits: Limits) -> Result<Sandbox, TaskError> {
        let search_path = std::env::var_os("PATH").unwrap_or_default();
        let found = ["python3", "python"].iter().find_map(|name| find_program(&search_path, name));
        let python = python.or(found).ok_or_else(|| problem("neither python3 nor python is on PATH"))?;
        let python = real_interpreter(&python)?;
        let unshare = find_program(&search_path, "unshare");
        let mut ways: Vec<Option<Vec<String>>> = Vec::new();
        if let Some(unshare) = unshare.as_ref().and_then(|path| path.to_str()) {
            let command = std::iter::once(unshare).chain(NAMESPACES);
            ways.push(Some(command.map(str::to_owned).collect()));
        }
        ways.push(None);
        let mut said = String::new();
        for unshare in ways {
            let sandbox = Sandbox { python: python.clone(), unshare, limits };
            match sandbox.run("pass\n")? {
                Outcome::Passed => {
                    tracing::debug!(network = %sandbox.network(), "programs are shut in");
                    return Ok(sandbox);
                }
                Outcome::Failed(message) => said = message,
                Outcome::TimedOut => said = "an empty program took too long".to_owned(),
            }
        }
        Err(problem(format!("{} does not run an empty program: {said}", python.display())))
    }

    /// Runs a program to its end or to a limit.
    pub fn run(&self, program: &str) -> Result<Outcome, TaskError> {
        let folder = tempfile::tempdir().map_err(|error| problem(format!("no temporary folder: {error}")))?;
        let started = Instant::now();
        let mut child =
            self.command(folder.path()).spawn().map_err(|error| problem(format!("cannot start: {error}")))?;
        let mut input = child.stdin.take().expect("standard input is a pipe");
        let messages = child.stderr.take().expect("standard error is a pipe");
        let kept = self.limits.message_bytes;
        let reader = std::thread::spawn(move || last_bytes(messages, kept));
        let program = program.to_owned();
        // A child that ends early does not read; that is seen in its status.
        let writer = std::thread::spawn(move || drop(input.write_all(program.as_bytes())));
        let ended = wait(&mut child, started + self.limits.wall);
        // Also after a good end: nothing of the group may outlive it and hold the pipe open.
        kill_group(child.id());
        let status = match ended {
            Ok(Some(status)) => Some(status),
            Ok(None) => {
                let _ = child.kill();
                let _ = child.wait();
                None
            }
            Err(error) => return Err(problem(format!("cannot wait: {error}"))),
        };
        let _ = writer.join();
        let said = reader.join().unwrap_or_default();
        Ok(status.map_or(Outcome::TimedOut, |status| outcome(status, &said)))
    }

    fn command(&self, folder: &Path) -> Command {
        let mut command = match &self.unshare {
            Some(unshare) => {
                let mut command = Command::new(&unshare[0]);
                command.args(&unshare[1..]).arg("--").arg(&self.python);
                command
            }
            None => Command::new(&self.python),
        };
        command
            // Isolated from the user's settings, no compiled files, messages at once.
            .args(["-I", "-B", "-u", "-c", BOOTSTRAP])
            .arg(self.limits.cpu_seconds.to_string())
            .arg(self.limits.memory_bytes.to_string())
            .arg(self.limits.file_bytes.to_string())
            .current_dir(folder)
            .env_clear()
            .env("HOME", folder)
            .env("TMPDIR", folder)
            .env("LANG", "C.UTF-8")
            .env("PATH", "/usr/bin:/bin")
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .process_group(0);
        command
    }
}

fn problem(problem: impl Into<String>) -> TaskError {
    TaskError::Sandbox { problem: problem.into() }
}

/// The interpreter behind a launcher: launchers read the environment, which a program does not get.
fn real_interpreter(python: &Path) -> Result<PathBuf, TaskError> {
    let output = Command::new(python)
        .args(["-I", "-c", "import sys; print(sys.executable)"])
        .stdin(Stdio::null())
        .output()
        .map_err(|error| problem(format!("{}: {error}", python.display())))?;
    let path = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    if output.status.success() && !path.is_empty() {
        Ok(PathBuf::from(path))
    } else {
        Err(problem(format!("{} is not a Python interpreter", python.display())))
    }
}

fn wait(child: &mut Child, deadline: Instant) -> std::io::Result<Option<ExitStatus>> {
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        if Instant::now() >= deadline {
            return Ok(None);
        }
        std::thread::sleep(POLL);
    }
}

/// Ends every process of a group. The shell's own command does it: it needs no unsafe call here.
fn kill_group(leader: u32) {
    let result = Command::new("/bin/sh")
        .args(["-c", "kill -s KILL -- \"-$1\"", "sh", &leader.to_string()])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
    if let Err(error) = result {
        tracing::warn!("a program may still run: {error}");
    }
}

/// The last bytes of a stream, which is read to its end so that its writer is never held up.
fn last_bytes(mut stream: impl Read, kept: usize) -> String {
    let mut all = Vec::new();
    let mut buffer = vec![0; 8192];
    while let Ok(read) = stream.read(&mut buffer) {
        if read == 0 {
            break;
        }
        all.extend_from_slice(&buffer[..read]);
        if all.len() > 2 * kept + buffer.len() {
            all.drain(..all.len() - kept);
        }
    }
    let start = all.len().saturating_sub(kept);
    String::from_utf8_lossy(&all[start..]).trim().to_owned()
}

fn outcome(status: ExitStatus, said: &str) -> Outcome {
    if status.code() == Some(RAN_TO_ITS_END) {
        return Outcome::Passed;
    }
    match status.signal() {
        Some(PROCESSOR_TIME) => Outcome::TimedOut,
        Some(signal) => Outcome::Failed(format!("{said}\nended by signal {signal}").trim().to_owned()),
        None if said.is_empty() => Outcome::Failed("ended before its test did".to_owned()),
        None => Outcome::Failed(said.to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_bytes_of_a_long_stream_are_kept() {
        let text = "x".repeat(100_000) + "the end";
        let kept = last_bytes(text.as_bytes(), 20);
        assert_eq!(kept.len(), 20);
        assert!(kept.ends_with("the end"));
    }

    #[test]
    fn a_missing_interpreter_is_named() {
        let error = Sandbox::new(Some("/no/such/python".into()), Limits::default()).expect_err("missing");
        assert!(error.to_string().contains("/no/such/python"), "{error}");
        let error = Sandbox::new(Some("/bin/true".into()), Limits::default()).expect_err("not Python");
        assert!(error.to_string().contains("not a Python interpreter"), "{error}");
    }
}
