//! Downloads one package with the package client the user already has, watching its files grow.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use super::{Entry, Package, Progress, Settings, SourceError};

const POLL: Duration = Duration::from_millis(50);
/// What pip and the libraries below it say when nothing answers.
const NETWORK_SIGNS: [&str; 7] = [
    "connection broken",
    "NewConnectionError",
    "ConnectTimeoutError",
    "ReadTimeoutError",
    "ProxyError",
    "name resolution",
    "Network is unreachable",
];

/// An interpreter whose pip downloads packages.
#[derive(Debug)]
pub(super) struct PackageClient {
    python: PathBuf,
}

impl PackageClient {
    /// `OSCAR_PYTHON`, else `python3` or `python` on the search path.
    pub(super) fn locate(entry: &Entry, settings: &Settings) -> Result<PackageClient, SourceError> {
        let python = match &settings.python {
            Some(python) => Some(python.clone()),
            None => settings.program(&["python3", "python"]),
        };
        python
            .map(|python| PackageClient { python })
            .ok_or_else(|| missing(entry, "neither python3 nor python is on PATH".to_owned()))
    }

    /// Downloads the wheel of `package` into `staging` and returns its path. Nothing in it is run or installed.
    pub(super) fn download(
        &self,
        entry: &Entry,
        package: &Package,
        staging: &Path,
        progress: &dyn Progress,
    ) -> Result<PathBuf, SourceError> {
        let wheels = fresh_folder(staging, "wheels")?;
        let temporary = fresh_folder(staging, "temporary")?;
        let log_path = staging.join("pip.log");
        let log = File::create(&log_path).map_err(|error| SourceError::io(&log_path, "create", error))?;
        let mut command = Command::new(&self.python);
        command
            .args(["-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir"])
            .args(["--disable-pip-version-check", "--no-input", "--progress-bar", "off", "-d"])
            .arg(&wheels)
            .arg(package.requirement())
            // pip writes to its temporary folder first: keep that beside the result, where it is cleaned up.
            .env("TMPDIR", &temporary)
            .env("TEMP", &temporary)
            .env("TMP", &temporary)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log);
        let child =
            command.spawn().map_err(|error| missing(entry, format!("{}: {error}", self.python.display())))?;
        let status = watch(child, [&wheels, &temporary], progress)?;
        if status.success() {
            only_wheel(&wheels).ok_or_else(|| SourceError::BadPackage {
                package: package.requirement(),
                detail: "pip succeeded but left no wheel".to_owned(),
            })
        } else {
            let said = fs::read(&log_path).unwrap_or_default();
            Err(self.explain(entry, package, staging, &String::from_utf8_lossy(&said), status))
        }
    }

    fn explain(
        &self,
        entry: &Entry,
        package: &Package,
        staging: &Path,
        said: &str,
        status: ExitStatus,
    ) -> SourceError {
        let name = entry.name.clone();
        if said.contains("No module named pip") {
            return SourceError::PipMissing { name, python: self.python.clone() };
        }
        if said.contains("No space left on device") {
            let path = staging.parent().unwrap_or(staging).to_owned();
            return SourceError::DiskFull { name, path, needed: entry.size };
        }
        let package = package.requirement();
        if NETWORK_SIGNS.iter().any(|sign| said.contains(sign)) {
            return SourceError::Network { name, package };
        }
        let lines = || said.lines().rev().map(str::trim).filter(|line| !line.is_empty());
        let detail = lines().find_map(|line| line.strip_prefix("ERROR: ")).or_else(|| lines().next());
        let detail = detail.map_or_else(|| status.to_string(), |line| line.chars().take(300).collect());
        SourceError::Download { name, package, detail }
    }
}

/// Waits for the client, reporting the growth of the largest file below `folders`: that is the wheel, which the
/// client may move from one to the other.
fn watch(mut child: Child, folders: [&Path; 2], progress: &dyn Progress) -> Result<ExitStatus, SourceError> {
    let mut reported = 0;
    loop {
        if progress.cancelled() {
            let _ = child.kill();
            let _ = child.wait();
            return Err(SourceError::Interrupted);
        }
        let ended = child.try_wait().map_err(|error| SourceError::io(folders[0], "wait for pip", error))?;
        let largest = folders.iter().map(|folder| largest_file(folder, 4)).max().unwrap_or(0);
        if largest > reported {
            progress.advance(largest - reported);
            reported = largest;
        }
        match ended {
            // An interrupt from the keyboard reaches the client too; it may end before we look.
            Some(status) if !status.success() && progress.cancelled() => {
                tracing::debug!(%status, "pip was interrupted");
                return Err(SourceError::Interrupted);
            }
            Some(status) => return Ok(status),
            None => std::thread::sleep(POLL),
        }
    }
}

fn largest_file(folder: &Path, depth: usize) -> u64 {
    let Ok(files) = fs::read_dir(folder) else { return 0 };
    files
        .flatten()
        .map(|file| match file.metadata() {
            Ok(metadata) if metadata.is_file() => metadata.len(),
            Ok(metadata) if metadata.is_dir() && depth > 0 => largest_file(&file.path(), depth - 1),
            _ => 0,
        })
        .max()
        .unwrap_or(0)
}

fn only_wheel(folder: &Path) -> Option<PathBuf> {
    let files = fs::read_dir(folder).ok()?;
    let mut wheels = files.flatten().map(|file| file.path()).filter(|path| {
        path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("whl")) && path.is_file()
    });
    let wheel = wheels.next()?;
    wheels.next().is_none().then_some(wheel)
}

fn fresh_folder(staging: &Path, name: &str) -> Result<PathBuf, SourceError> {
    let path = staging.join(name);
    let _ = fs::remove_dir_all(&path);
    fs::create_dir(&path).map_err(|error| SourceError::io(&path, "create", error))?;
    Ok(path)
}

fn missing(entry: &Entry, tried: String) -> SourceError {
    SourceError::PythonMissing { name: entry.name.clone(), tried }
}
