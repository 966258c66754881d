//! Runs the built binary with a cache and a search path of its own.

use std::ffi::OsStr;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

pub(crate) struct Machine {
    folder: tempfile::TempDir,
}

impl Machine {
    pub(crate) fn new() -> Machine {
        let folder = tempfile::tempdir().expect("folder");
        fs::create_dir(folder.path().join("bin")).expect("bin");
        Machine { folder }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// The program, with nothing of the user's environment that could reach a real cache or a network.
    pub(crate) fn oscar<S: AsRef<OsStr>>(&self, arguments: impl IntoIterator<Item = S>) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_oscar"));
        for variable in [
            "OSCAR_SIMD",
            "OSCAR_THREADS",
            "OSCAR_WEIGHTS",
            "OSCAR_OFFLINE",
            "OSCAR_PYTHON",
            "OSCAR_LOG",
            "HF_HOME",
        ] {
            command.env_remove(variable);
        }
        command
            .args(arguments)
            .env("OSCAR_CACHE", self.path("cache"))
            .env("HF_HUB_CACHE", self.path("hub"))
            .env("PATH", self.path("bin"))
            .stdin(Stdio::null());
        command
    }

    pub(crate) fn run<S: AsRef<OsStr>>(&self, arguments: impl IntoIterator<Item = S>) -> Outcome {
        Outcome::of(self.oscar(arguments).output().expect("oscar"))
    }

    /// Runs with `input` on standard input.
    pub(crate) fn run_with_input(&self, arguments: &[&str], input: &[u8]) -> Outcome {
        let mut child = self
            .oscar(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("oscar");
        // A program that fails early does not read its input; that is not this test's concern.
        let _ = child.stdin.take().expect("stdin").write_all(input);
        Outcome::of(child.wait_with_output().expect("oscar"))
    }

    /// Installs a shell script on the search path. A child writes it: a file that this process, or a fork of it,
    /// holds open for writing cannot be executed.
    #[cfg(unix)]
    pub(crate) fn install(&self, name: &str, body: &str) {
        let mut child = Command::new("sh")
            .args(["-c", "cat > \"$1\" && chmod 755 \"$1\"", "sh"])
            .arg(self.path("bin").join(name))
            .stdin(Stdio::piped())
            .spawn()
            .expect("sh");
        let script = format!("#!/bin/sh\nPATH=/usr/bin:/bin\n{body}\n");
        child.stdin.take().expect("stdin").write_all(script.as_bytes()).expect("write");
        assert!(child.wait().expect("sh").success());
    }

    /// What is in the cache besides lock files.
    pub(crate) fn cached(&self) -> Vec<String> {
        let Ok(files) = fs::read_dir(self.path("cache")) else { return Vec::new() };
        let names = files.map(|file| file.expect("file").file_name().into_string().expect("name"));
        names.filter(|name| !name.starts_with(".lock-")).collect()
    }
}

#[derive(Debug)]
pub(crate) struct Outcome {
    pub(crate) code: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Outcome {
    pub(crate) fn of(output: Output) -> Outcome {
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("UTF-8");
        let outcome =
            Outcome { code: output.status.code(), stdout: text(output.stdout), stderr: text(output.stderr) };
        assert!(!outcome.stderr.contains("panicked"), "{}", outcome.stderr);
        outcome
    }

    pub(crate) fn success(self) -> Outcome {
        assert_eq!(self.code, Some(0), "{self:?}");
        self
    }

    /// Failed with `code`, and the error is one line that contains `words`. The line about the cache may precede it.
    pub(crate) fn failure(self, code: i32, words: &[&str]) -> Outcome {
        assert_eq!(self.code, Some(code), "{self:?}");
        for word in words {
            assert!(self.stderr.contains(word), "{word:?} is not in {:?}", self.stderr);
        }
        if code == 1 {
            let known = ["error: ", "fix: ", "KV cache: "];
            let unexpected = |line: &&str| !known.iter().any(|start| line.starts_with(start));
            assert_eq!(self.stderr.lines().filter(|line| line.starts_with("error: ")).count(), 1, "{self:?}");
            assert_eq!(self.stderr.lines().find(unexpected), None, "{self:?}");
        }
        self
    }

    /// Failed with an error that contains `words`, after other lines.
    pub(crate) fn failure_after_notice(self, words: &[&str]) -> Outcome {
        assert_eq!(self.code, Some(1), "{self:?}");
        let error: String = self.stderr.lines().skip_while(|line| !line.starts_with("error: ")).collect();
        for word in words {
            assert!(error.contains(word), "{word:?} is not in {error:?}");
        }
        self
    }

    /// The one object every `--json` prints.
    pub(crate) fn json(&self) -> serde_json::Value {
        let value: serde_json::Value = serde_json::from_str(&self.stdout).expect("one JSON object");
        let names: Vec<&String> = value.as_object().expect("object").keys().collect();
        assert_eq!(names, ["machine", "rows"]);
        assert!(value["machine"]["cpu"].is_string() && value["rows"].is_array(), "{value}");
        value
    }
}

/// A tiny model of the model crate's fixtures.
pub(crate) fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../model/tests/fixtures/models").join(name)
}

/// A tiny model that may read longer texts than its own limit.
pub(crate) fn patient_model(machine: &Machine) -> PathBuf {
    let folder = machine.path("patient");
    fs::create_dir(&folder).expect("folder");
    for file in ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json"] {
        fs::copy(fixture("llama-tied").join(file), folder.join(file)).expect(file);
    }
    let config = fs::read_to_string(folder.join("config.json")).expect("config");
    let mut config: serde_json::Value = serde_json::from_str(&config).expect("config");
    config["max_position_embeddings"] = 2048.into();
    fs::write(folder.join("config.json"), config.to_string()).expect("config");
    folder
}
