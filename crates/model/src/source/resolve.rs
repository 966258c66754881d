//! Finds a model by whatever a user typed: a path, a catalogue name or a hub id.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use super::{FetchPolicy, HubId, ModelPath, Progress, Settings, SourceError, fetch, hub};

const GGUF_MAGIC: &[u8; 4] = b"GGUF";

/// Finds a model by path, catalogue name or hub id; see [`resolve_with`].
pub fn resolve(model: &str, policy: FetchPolicy, progress: &dyn Progress) -> Result<ModelPath, SourceError> {
    // A path needs nothing of the environment, not even a home directory.
    let path = Path::new(model);
    match on_disk(path) {
        Ok(Some(found)) => Ok(found),
        looked => {
            let settings = Settings::from_environment()?;
            by_name(model, looked.err(), &settings, policy, progress)
        }
    }
}

/// Finds a model: an existing file or folder, else a name of the catalogue, else a hub id. Names and ids that are
/// on disk are found without starting a process; others are fetched if `policy` allows it.
pub fn resolve_with(
    settings: &Settings,
    model: &str,
    policy: FetchPolicy,
    progress: &dyn Progress,
) -> Result<ModelPath, SourceError> {
    match on_disk(Path::new(model)) {
        Ok(Some(found)) => Ok(found),
        looked => by_name(model, looked.err(), settings, policy, progress),
    }
}

/// `not_a_model` is what was wrong with a file of that name; it is the answer if nothing else fits.
fn by_name(
    model: &str,
    not_a_model: Option<SourceError>,
    settings: &Settings,
    policy: FetchPolicy,
    progress: &dyn Progress,
) -> Result<ModelPath, SourceError> {
    if let Some(entry) = settings.catalogue.find(model) {
        if let Some(path) = settings.cache.find(entry) {
            return Ok(ModelPath::Gguf(path));
        }
        if policy == FetchPolicy::Never {
            let cache = settings.cache.directory().to_owned();
            return Err(SourceError::NotCached { name: entry.name.clone(), cache });
        }
        return fetch(entry, settings, progress).map(ModelPath::Gguf);
    }
    if let Some(error) = not_a_model {
        return Err(error);
    }
    if looks_like_a_path(model) {
        return Err(SourceError::NoSuchPath { path: model.into() });
    }
    if let Some(mut id) = HubId::parse(model) {
        if id.selector.is_none() {
            id.selector = usual_file(settings, &id);
        }
        return hub::locate(&id, settings, policy);
    }
    let names: Vec<&str> = settings.catalogue.entries().iter().map(|entry| entry.name.as_str()).collect();
    Err(SourceError::UnknownModel {
        name: model.to_owned(),
        names: names.join(", "),
        nearest: settings.catalogue.nearest(model).map(str::to_owned),
    })
}

/// The file to take from a hub repository the catalogue knows.
fn usual_file(settings: &Settings, id: &HubId) -> Option<String> {
    let repository = format!("{}/{}", id.organisation, id.name);
    settings.catalogue.entries().iter().find(|entry| entry.hub_id == repository)?.hub_file.clone()
}

/// `None` if there is nothing at `path`, an error if what is there is not a model.
fn on_disk(path: &Path) -> Result<Option<ModelPath>, SourceError> {
    let Ok(metadata) = path.metadata() else { return Ok(None) };
    let not_a_model = |reason: String| SourceError::NotAModel { path: path.to_owned(), reason };
    if metadata.is_dir() {
        return if path.join("config.json").is_file() {
            Ok(Some(ModelPath::Folder(path.to_owned())))
        } else {
            Err(not_a_model("the folder has no config.json; for a GGUF model name the .gguf file".to_owned()))
        };
    }
    if !metadata.is_file() {
        return Err(not_a_model("neither a file nor a folder".to_owned()));
    }
    let mut magic = [0; GGUF_MAGIC.len()];
    let read = File::open(path).and_then(|mut file| file.read_exact(&mut magic));
    match read {
        Ok(()) if &magic == GGUF_MAGIC => Ok(Some(ModelPath::Gguf(path.to_owned()))),
        Err(error) if error.kind() != std::io::ErrorKind::UnexpectedEof => {
            Err(SourceError::io(path, "read", error))
        }
        _ => Err(not_a_model("the file does not begin with the GGUF magic".to_owned())),
    }
}

fn looks_like_a_path(model: &str) -> bool {
    let hub_file = HubId::parse(model).is_some_and(|id| id.selector.is_some());
    model.starts_with(['.', '/', '~'])
        || model.contains('\\')
        || model.matches('/').count() > 1
        || (model.to_ascii_lowercase().ends_with(".gguf") && !hub_file)
}
