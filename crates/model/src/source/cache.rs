//! The cache directory: complete files only, one downloader per model, nothing left behind.
//!
//! A download is assembled in a staging folder next to the finished files and renamed into place, so a file under
//! its final name is always whole. An advisory lock per model makes a second downloader wait, and tells a
//! staging folder that is in use from one whose owner died.

use std::fs::{self, File, TryLockError};
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::time::Duration;

use sha2::{Digest, Sha256};

use super::{Entry, Progress, SourceError};

const STAGING_PREFIX: &str = ".partial-";
const LOCK_PREFIX: &str = ".lock-";
const LOCK_POLL: Duration = Duration::from_millis(100);

/// The directory of downloaded models.
#[derive(Clone, Debug)]
pub struct Cache {
    directory: PathBuf,
}

impl Cache {
    /// A cache in `directory`, which need not exist yet.
    pub fn new(directory: impl Into<PathBuf>) -> Cache {
        Cache { directory: directory.into() }
    }

    /// The directory in which the files are.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Where the file of a model is or will be.
    pub fn file(&self, entry: &Entry) -> PathBuf {
        self.directory.join(&entry.file_name)
    }

    /// True if the file is there, has the right size and was verified before. Reads no more than a line.
    pub fn contains(&self, entry: &Entry) -> bool {
        self.has_right_size(entry)
            && fs::read_to_string(self.sidecar(entry))
                .is_ok_and(|text| text.split_whitespace().next() == Some(entry.sha256.as_str()))
    }

    /// The file of a model if it can be trusted. A file without a record of its checksum is hashed first.
    pub fn find(&self, entry: &Entry) -> Option<PathBuf> {
        let path = self.file(entry);
        if self.contains(entry) {
            return Some(path);
        }
        let intact = self.has_right_size(entry) && file_sha256(&path).is_ok_and(|hash| hash == entry.sha256);
        if !intact {
            return None;
        }
        // The record only saves time: a cache that cannot be written is still good to read.
        let _ = self.write_sidecar(entry);
        Some(path)
    }

    /// Hashes the file again, whatever the record says.
    pub fn is_intact(&self, entry: &Entry) -> Result<bool, SourceError> {
        let path = self.file(entry);
        let hash = file_sha256(&path).map_err(|error| SourceError::io(&path, "read", error))?;
        Ok(hash == entry.sha256)
    }

    /// Removes the record that the file was verified.
    pub(super) fn forget_verification(&self, entry: &Entry) -> Result<(), SourceError> {
        match fs::remove_file(self.sidecar(entry)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(self.not_writable(error)),
            _ => Ok(()),
        }
    }

    /// Creates the directory and takes the lock of a model, waiting while another process has it.
    pub(super) fn lock(&self, entry: &Entry, progress: &dyn Progress) -> Result<CacheLock, SourceError> {
        fs::create_dir_all(&self.directory).map_err(|error| self.not_writable(error))?;
        let file = self.open_lock(&entry.name).map_err(|error| self.not_writable(error))?;
        let mut waiting = false;
        loop {
            match file.try_lock() {
                Ok(()) => return Ok(CacheLock { _file: file, exclusive: true }),
                Err(TryLockError::WouldBlock) => {
                    if progress.cancelled() {
                        return Err(SourceError::Interrupted);
                    }
                    if !waiting {
                        progress.message(&format!("waiting for another process that fetches {}", entry.name));
                        waiting = true;
                    }
                    std::thread::sleep(LOCK_POLL);
                }
                // Some network file systems have no locks. Downloads still end in an atomic rename there.
                Err(TryLockError::Error(error)) => {
                    tracing::debug!(%error, "no file locks in {}", self.directory.display());
                    return Ok(CacheLock { _file: file, exclusive: false });
                }
            }
        }
    }

    /// Removes staging folders whose owners are gone; `held` is the lock of `entry`.
    pub(super) fn remove_stale(&self, entry: &Entry, held: &CacheLock) {
        let Ok(files) = fs::read_dir(&self.directory) else { return };
        for file in files.flatten() {
            let name = file.file_name();
            let Some(owner) = name.to_str().and_then(staging_owner) else { continue };
            let other_lock;
            let abandoned = if owner == entry.name {
                held.exclusive
            } else {
                other_lock = self.open_lock(owner).ok();
                other_lock.as_ref().is_some_and(|lock| lock.try_lock().is_ok())
            };
            if abandoned {
                tracing::debug!("removing {}", file.path().display());
                let _ = fs::remove_dir_all(file.path());
            }
        }
    }

    /// An empty staging folder, removed when dropped.
    pub(super) fn staging(&self, entry: &Entry) -> Result<Staging, SourceError> {
        let name = format!("{STAGING_PREFIX}{}-{}", entry.name, std::process::id());
        // Two threads of one process fetch the same model only where there are no locks.
        for attempt in 0.. {
            let path = self.directory.join(format!("{name}.{attempt}"));
            match fs::create_dir(&path) {
                Ok(()) => return Ok(Staging { path }),
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists && attempt < 100 => {}
                Err(error) => return Err(self.not_writable(error)),
            }
        }
        unreachable!("the loop returns")
    }

    /// Moves a verified file into place and records its checksum.
    pub(super) fn publish(&self, entry: &Entry, assembled: &Path) -> Result<PathBuf, SourceError> {
        let path = self.file(entry);
        fs::rename(assembled, &path).map_err(|error| self.not_writable(error))?;
        self.write_sidecar(entry).map_err(|error| self.not_writable(error))?;
        Ok(path)
    }

    fn has_right_size(&self, entry: &Entry) -> bool {
        self.file(entry).metadata().is_ok_and(|metadata| metadata.is_file() && metadata.len() == entry.size)
    }

    fn sidecar(&self, entry: &Entry) -> PathBuf {
        self.directory.join(format!("{}.sha256", entry.file_name))
    }

    /// Writes the checksum beside the file, in the format of `sha256sum -c`.
    fn write_sidecar(&self, entry: &Entry) -> io::Result<()> {
        let temporary = self.directory.join(format!(".{}.sha256-{}", entry.file_name, std::process::id()));
        fs::write(&temporary, format!("{}  {}\n", entry.sha256, entry.file_name))
            .and_then(|()| fs::rename(&temporary, self.sidecar(entry)))
            .inspect_err(|_| drop(fs::remove_file(&temporary)))
    }

    fn open_lock(&self, name: &str) -> io::Result<File> {
        let path = self.directory.join(format!("{LOCK_PREFIX}{name}"));
        File::options().create(true).truncate(false).write(true).open(path)
    }

    pub(super) fn not_writable(&self, source: io::Error) -> SourceError {
        SourceError::CacheNotWritable { path: self.directory.clone(), source }
    }
}

/// The lock of one model; released when dropped, or when the process ends in any way.
#[derive(Debug)]
pub(super) struct CacheLock {
    _file: File,
    exclusive: bool,
}

/// A folder for a download that is not complete.
#[derive(Debug)]
pub(super) struct Staging {
    path: PathBuf,
}

impl Staging {
    pub(super) fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir_all(&self.path) {
            tracing::warn!("{}: cannot remove: {error}", self.path.display());
        }
    }
}

/// The model a staging folder belongs to: `.partial-NAME-PID.ATTEMPT`.
fn staging_owner(file_name: &str) -> Option<&str> {
    let (owner, process) = file_name.strip_prefix(STAGING_PREFIX)?.rsplit_once('-')?;
    let numeric = process.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.');
    (numeric && !owner.is_empty() && !owner.contains(['/', '\\'])).then_some(owner)
}

fn file_sha256(path: &Path) -> io::Result<String> {
    let mut file = File::open(path)?;
    let mut hasher = Sha256::new();
    let mut buffer = vec![0; 1 << 20];
    loop {
        match file.read(&mut buffer)? {
            0 => return Ok(hexadecimal(&hasher.finalize())),
            read => hasher.update(&buffer[..read]),
        }
    }
}

pub(super) fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn staging_names_give_their_owner() {
        assert_eq!(staging_owner(".partial-qwen2.5-coder-0.5b-123.0"), Some("qwen2.5-coder-0.5b"));
        for other in [".partial-", ".partial-x-y", "partial-x-1", ".partial-../x-1", ".lock-x"] {
            assert_eq!(staging_owner(other), None, "{other}");
        }
    }

    #[test]
    fn hashes_match_known_values() {
        let folder = tempfile::tempdir().expect("folder");
        let path = folder.path().join("abc");
        fs::write(&path, "abc").expect("write");
        let expected = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert_eq!(file_sha256(&path).expect("hash"), expected);
    }
}
