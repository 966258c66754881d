//! Hub ids: the standard cache layout on disk first, then the hub's own client.
//!
//! Layout: `models--ORG--NAME/refs/main` holds a revision, and `snapshots/REVISION/` the files (links to blobs,
//! dangling if a download was interrupted).

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::{FetchPolicy, ModelPath, Settings, SourceError};

/// How deep below a snapshot GGUF files are looked for.
const SEARCH_DEPTH: usize = 2;
/// The quantisation that is downloaded from a repository of GGUF files if the user does not choose.
const USUAL_QUANTISATION: &str = "Q4_K_M";

/// `org/name`, with an optional `:file-or-quantisation`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HubId {
    /// Owner of the repository.
    pub organisation: String,
    /// Name of the repository.
    pub name: String,
    /// Which GGUF file: its name or a part of it, such as `Q4_K_M`.
    pub selector: Option<String>,
}

impl HubId {
    /// Reads a hub id; anything with more or fewer parts, or with characters the hub does not allow, is none.
    pub fn parse(text: &str) -> Option<HubId> {
        let (id, selector) = match text.split_once(':') {
            Some((id, selector)) => (id, Some(selector)),
            None => (text, None),
        };
        let (organisation, name) = id.split_once('/')?;
        let allowed = |part: &str| {
            part.len() <= 96
                && part.starts_with(|c: char| c.is_ascii_alphanumeric() || c == '_')
                && part.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte))
        };
        if !allowed(organisation) || !allowed(name) || selector.is_some_and(|text| text.trim().is_empty()) {
            return None;
        }
        Some(HubId {
            organisation: organisation.to_owned(),
            name: name.to_owned(),
            selector: selector.map(str::to_owned),
        })
    }

    fn repository(&self) -> String {
        format!("{}/{}", self.organisation, self.name)
    }

    /// The arguments that make the hub's client fetch this model.
    fn client_arguments(&self) -> Vec<String> {
        let mut arguments = vec!["download".to_owned(), self.repository()];
        let holds_gguf = self.name.to_ascii_lowercase().ends_with("-gguf");
        match &self.selector {
            Some(file) if file.to_ascii_lowercase().ends_with(".gguf") => arguments.push(file.clone()),
            Some(part) => arguments.extend(["--include".to_owned(), pattern(part)]),
            // All files of such a repository are the same model many times over.
            None if holds_gguf => arguments.extend(["--include".to_owned(), pattern(USUAL_QUANTISATION)]),
            // Llama repositories hold the weights a second time in their maker's own form.
            None => arguments.extend(["--exclude".to_owned(), "original/*".to_owned()]),
        }
        arguments
    }

    /// The command a user would type.
    fn client_command(&self) -> String {
        let quoted = self.client_arguments().into_iter().map(|argument| {
            if argument.contains(['*', '[', ' ']) { format!("'{argument}'") } else { argument }
        });
        format!("hf {}", quoted.collect::<Vec<_>>().join(" "))
    }
}

impl fmt::Display for HubId {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}/{}", self.organisation, self.name)?;
        self.selector.iter().try_for_each(|selector| write!(out, ":{selector}"))
    }
}

/// A pattern of the client that matches `part` in either case.
fn pattern(part: &str) -> String {
    let either_case = |letter: char| {
        if letter.is_ascii_alphabetic() {
            format!("[{}{}]", letter.to_ascii_lowercase(), letter.to_ascii_uppercase())
        } else {
            letter.to_string()
        }
    };
    format!("*{}*.gguf", part.chars().map(either_case).collect::<String>())
}

/// Finds a hub model on disk, or fetches it with the hub's client.
pub(super) fn locate(id: &HubId, settings: &Settings, policy: FetchPolicy) -> Result<ModelPath, SourceError> {
    let incomplete = match in_cache(id, &settings.hub_cache) {
        Ok(Some(found)) => return Ok(found),
        Ok(None) => None,
        // What the user chose may simply not have been fetched yet.
        Err(error @ (SourceError::HubIncomplete { .. } | SourceError::NoMatchingFile { .. })) => Some(error),
        Err(error) => return Err(error),
    };
    let client = match policy {
        FetchPolicy::Allow => settings.program(&["hf", "huggingface-cli"]),
        FetchPolicy::Never => None,
    };
    let missing = || SourceError::HubMissing {
        id: id.to_string(),
        cache: settings.hub_cache.clone(),
        command: id.client_command(),
        offline: policy == FetchPolicy::Never,
    };
    let Some(client) = client else {
        return Err(incomplete.unwrap_or_else(missing));
    };
    run_client(id, &client, &settings.hub_cache)?;
    in_cache(id, &settings.hub_cache)?.ok_or_else(|| SourceError::HubDownload {
        id: id.to_string(),
        command: id.client_command(),
        detail: format!("it left nothing in {}", settings.hub_cache.display()),
    })
}

fn run_client(id: &HubId, client: &Path, hub_cache: &Path) -> Result<(), SourceError> {
    let failed = |detail: String| SourceError::HubDownload {
        id: id.to_string(),
        command: id.client_command(),
        detail,
    };
    tracing::info!("running {}", id.client_command());
    let status = Command::new(client)
        .args(id.client_arguments())
        .env("HF_HUB_CACHE", hub_cache)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .status()
        .map_err(|error| failed(error.to_string()))?;
    if status.success() { Ok(()) } else { Err(failed(status.to_string())) }
}

/// The model in the hub cache, if its snapshot is there.
fn in_cache(id: &HubId, hub_cache: &Path) -> Result<Option<ModelPath>, SourceError> {
    let folder = hub_cache.join(format!("models--{}--{}", id.organisation, id.name));
    let Some(snapshot) = snapshot(&folder) else { return Ok(None) };
    if id.selector.is_none() && snapshot.join("config.json").is_file() {
        match missing_weights(&snapshot) {
            SnapshotWeights::Complete => return Ok(Some(ModelPath::Folder(snapshot))),
            SnapshotWeights::Missing(missing) => {
                let command = id.client_command();
                return Err(SourceError::HubIncomplete { path: snapshot, missing, command });
            }
            SnapshotWeights::None => {}
        }
    }
    let mut files = Vec::new();
    gguf_files(&snapshot, Path::new(""), SEARCH_DEPTH, &mut files);
    files.sort();
    choose(id, &snapshot, files)
}

fn choose(id: &HubId, snapshot: &Path, files: Vec<String>) -> Result<Option<ModelPath>, SourceError> {
    let gguf = |file: &String| Ok(Some(ModelPath::Gguf(snapshot.join(file))));
    let Some(selector) = &id.selector else {
        return match files.as_slice() {
            [] => Ok(None),
            [file] => gguf(file),
            _ => Err(SourceError::SeveralFiles { id: id.to_string(), files }),
        };
    };
    let wanted = selector.to_ascii_lowercase();
    let exact = |file: &&String| {
        let file = file.to_ascii_lowercase();
        file == wanted || file.strip_suffix(".gguf") == Some(wanted.as_str())
    };
    if let Some(file) = files.iter().find(exact) {
        return gguf(file);
    }
    let matching: Vec<String> =
        files.iter().filter(|file| file.to_ascii_lowercase().contains(&wanted)).cloned().collect();
    match matching.as_slice() {
        [] => Err(SourceError::NoMatchingFile { id: id.repository(), selector: selector.clone(), files }),
        [file] => gguf(file),
        _ => Err(SourceError::SeveralFiles { id: id.repository(), files: matching }),
    }
}

/// The snapshot `main` points at, or the only one.
fn snapshot(folder: &Path) -> Option<PathBuf> {
    let snapshots = folder.join("snapshots");
    if let Ok(revision) = fs::read_to_string(folder.join("refs").join("main")) {
        let revision = revision.trim();
        // The revision becomes part of a path: nothing but a plain name is accepted.
        let plain = !revision.is_empty() && revision.bytes().all(|byte| byte.is_ascii_alphanumeric());
        return plain.then(|| snapshots.join(revision)).filter(|path| path.is_dir());
    }
    let mut folders =
        fs::read_dir(snapshots).ok()?.flatten().map(|file| file.path()).filter(|path| path.is_dir());
    let only = folders.next()?;
    folders.next().is_none().then_some(only)
}

enum SnapshotWeights {
    Complete,
    Missing(String),
    None,
}

/// Whether the safetensors of a snapshot are all there, shards included.
fn missing_weights(snapshot: &Path) -> SnapshotWeights {
    if snapshot.join("model.safetensors").is_file() {
        return SnapshotWeights::Complete;
    }
    let index = snapshot.join("model.safetensors.index.json");
    let Ok(text) = fs::read_to_string(&index) else {
        let single = snapshot.join("model.safetensors").symlink_metadata().is_ok();
        return if single {
            SnapshotWeights::Missing("model.safetensors".to_owned())
        } else {
            SnapshotWeights::None
        };
    };
    let shards = serde_json::from_str::<serde_json::Value>(&text)
        .ok()
        .and_then(|value| Some(value.get("weight_map")?.as_object()?.clone()));
    // A broken index is the loader's to report, with its position.
    let Some(shards) = shards else { return SnapshotWeights::Complete };
    let missing =
        shards.values().filter_map(|shard| shard.as_str()).find(|shard| !snapshot.join(shard).is_file());
    missing.map_or(SnapshotWeights::Complete, |shard| SnapshotWeights::Missing(shard.to_owned()))
}

fn gguf_files(snapshot: &Path, below: &Path, depth: usize, found: &mut Vec<String>) {
    let Ok(files) = fs::read_dir(snapshot.join(below)) else { return };
    for file in files.flatten() {
        let relative = below.join(file.file_name());
        let path = file.path();
        if path.is_dir() && depth > 0 {
            gguf_files(snapshot, &relative, depth - 1, found);
        } else if path.is_file() && path.extension().is_some_and(|extension| extension == "gguf") {
            found.extend(relative.to_str().map(str::to_owned));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hub_ids_are_two_plain_parts() {
        let id = HubId::parse("Qwen/Qwen3-8B-GGUF:Q4_K_M").expect("hub id");
        assert_eq!(
            (id.repository().as_str(), id.selector.as_deref()),
            ("Qwen/Qwen3-8B-GGUF", Some("Q4_K_M"))
        );
        assert_eq!(id.to_string(), "Qwen/Qwen3-8B-GGUF:Q4_K_M");
        for text in ["smollm2", "a/b/c", "../x", "a/..", "/a", "a/", "a b/c", "a/b:", "a/b: ", "./a"] {
            assert_eq!(HubId::parse(text), None, "{text}");
        }
    }

    #[test]
    fn the_client_fetches_one_file_of_many() {
        let command = |text| HubId::parse(text).expect("hub id").client_command();
        assert_eq!(command("a/b"), "hf download a/b --exclude 'original/*'");
        assert_eq!(command("a/b-GGUF:x-Q8_0.gguf"), "hf download a/b-GGUF x-Q8_0.gguf");
        assert_eq!(command("a/b-GGUF:q8_0"), "hf download a/b-GGUF --include '*[qQ]8_0*.gguf'");
        assert_eq!(command("a/b-GGUF"), "hf download a/b-GGUF --include '*[qQ]4_[kK]_[mM]*.gguf'");
    }
}
