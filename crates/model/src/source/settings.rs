//! Where things are on this machine: cache directories and helper programs, read from the environment once.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

use super::{Cache, Catalogue, SourceError};

/// The places a model may come from. Tests build their own; programs use [`Settings::from_environment`].
#[derive(Clone, Debug)]
pub struct Settings {
    /// The directory of models that were downloaded by catalogue name.
    pub cache: Cache,
    /// The hub client's cache, in its standard layout.
    pub hub_cache: PathBuf,
    /// An interpreter chosen by the user (`OSCAR_PYTHON`).
    pub python: Option<PathBuf>,
    /// Where programs are looked up (`PATH`).
    pub search_path: OsString,
    /// The models known by name.
    pub catalogue: Catalogue,
}

impl Settings {
    /// Reads `OSCAR_CACHE`, `OSCAR_PYTHON`, `PATH` and the variables of the hub client.
    pub fn from_environment() -> Result<Settings, SourceError> {
        Settings::from_variables(&|name| std::env::var_os(name).filter(|value| !value.is_empty()))
    }

    /// As [`Settings::from_environment`], with the variables given by a function.
    pub fn from_variables(get: &dyn Fn(&str) -> Option<OsString>) -> Result<Settings, SourceError> {
        let home = get("HOME").or_else(|| get("USERPROFILE")).map(PathBuf::from);
        Ok(Settings {
            cache: Cache::new(cache_directory(get, home.as_deref()).ok_or(SourceError::NoCacheDirectory)?),
            hub_cache: hub_cache_directory(get, home.as_deref()).ok_or(SourceError::NoCacheDirectory)?,
            python: get("OSCAR_PYTHON").map(PathBuf::from),
            search_path: get("PATH").unwrap_or_default(),
            catalogue: Catalogue::built_in(),
        })
    }

    /// Returns the folder in which rotations are kept.
    pub fn rotation_folder(&self) -> PathBuf {
        self.cache.directory().join("rotations")
    }

    /// Returns the folder in which compiled GPU kernels are kept.
    pub fn kernel_folder(&self) -> PathBuf {
        self.cache.directory().join("cuda")
    }

    /// The first of `names` on the search path.
    pub fn program(&self, names: &[&str]) -> Option<PathBuf> {
        names.iter().find_map(|name| find_program(&self.search_path, name))
    }
}

fn cache_directory(get: &dyn Fn(&str) -> Option<OsString>, home: Option<&Path>) -> Option<PathBuf> {
    if let Some(directory) = get("OSCAR_CACHE") {
        return Some(PathBuf::from(directory));
    }
    if let Some(base) = get("XDG_CACHE_HOME") {
        return Some(PathBuf::from(base).join("oscar"));
    }
    if cfg!(windows) {
        return get("LOCALAPPDATA").map(|base| PathBuf::from(base).join("oscar").join("cache"));
    }
    let base = if cfg!(target_os = "macos") { "Library/Caches" } else { ".cache" };
    home.map(|home| home.join(base).join("oscar"))
}

/// The order of the hub's client: the cache itself, its home, the user's cache directory.
fn hub_cache_directory(get: &dyn Fn(&str) -> Option<OsString>, home: Option<&Path>) -> Option<PathBuf> {
    if let Some(directory) = get("HF_HUB_CACHE").or_else(|| get("HUGGINGFACE_HUB_CACHE")) {
        return Some(PathBuf::from(directory));
    }
    if let Some(base) = get("HF_HOME") {
        return Some(PathBuf::from(base).join("hub"));
    }
    let base = get("XDG_CACHE_HOME").map(PathBuf::from).or_else(|| home.map(|home| home.join(".cache")))?;
    Some(base.join("huggingface").join("hub"))
}

/// Looks a program up in `search_path` (the value of `PATH`).
pub fn find_program(search_path: &OsStr, name: &str) -> Option<PathBuf> {
    std::env::split_paths(search_path)
        .filter(|directory| !directory.as_os_str().is_empty())
        .map(|directory| directory.join(format!("{name}{}", std::env::consts::EXE_SUFFIX)))
        .find(|candidate| is_executable(candidate))
}

#[cfg(unix)]
fn is_executable(path: &Path) -> bool {
    use std::os::unix::fs::PermissionsExt;
    path.metadata().is_ok_and(|metadata| metadata.is_file() && metadata.permissions().mode() & 0o111 != 0)
}

#[cfg(not(unix))]
fn is_executable(path: &Path) -> bool {
    path.is_file()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(variables: &[(&str, &str)]) -> Result<Settings, SourceError> {
        Settings::from_variables(&|name| {
            variables.iter().find(|(key, _)| *key == name).map(|(_, value)| OsString::from(value))
        })
    }

    #[test]
    fn the_most_specific_variable_wins() {
        let all = [("HOME", "/h"), ("XDG_CACHE_HOME", "/x"), ("OSCAR_CACHE", "/o"), ("HF_HOME", "/f")];
        let found = settings(&all).expect("settings");
        assert_eq!(found.cache.directory(), Path::new("/o"));
        assert_eq!(found.hub_cache, Path::new("/f/hub"));
        let found = settings(&all[..2]).expect("settings");
        assert_eq!(found.cache.directory(), Path::new("/x/oscar"));
        assert_eq!(found.hub_cache, Path::new("/x/huggingface/hub"));
        let found = settings(&[("HF_HUB_CACHE", "/c"), ("HF_HOME", "/f"), ("HOME", "/h")]).expect("settings");
        assert_eq!(found.hub_cache, Path::new("/c"));
        #[cfg(target_os = "linux")]
        assert_eq!(found.cache.directory(), Path::new("/h/.cache/oscar"));
    }

    #[test]
    fn no_home_is_an_error_with_a_fix() {
        let error = settings(&[]).expect_err("no home");
        assert!(error.fix().expect("fix").contains("OSCAR_CACHE"));
    }
}
