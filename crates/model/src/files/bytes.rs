//! A file mapped into memory, read-only, so that weights are paged in by the operating system and never copied.

use std::fs::{self, File};
use std::path::Path;
use std::sync::Arc;

use memmap2::Mmap;
use oscar_kernels::backend::SharedBytes;

use super::FileError;

/// A read-only mapping of a whole file.
#[derive(Debug)]
pub struct MappedFile {
    map: Mmap,
}

impl MappedFile {
    /// Maps `path`.
    pub fn open(path: &Path) -> Result<Self, FileError> {
        let io_error = |source| FileError::Io { path: path.to_path_buf(), source };
        // Asked before opening: opening a pipe would wait for a writer, and a folder opens but cannot be mapped.
        if !fs::metadata(path).map_err(io_error)?.is_file() {
            return Err(FileError::NotAFile { path: path.to_path_buf() });
        }
        let file = File::open(path).map_err(io_error)?;
        // SAFETY: the mapping is private to reading: this program never writes to it or to the file. Another
        // process that shortens or rewrites the file while it is mapped can still change what we read or end
        // the process with a signal; every program that maps weights accepts this, and parsed structures are
        // copies, so a later change of the header cannot move a tensor out of the mapping.
        let map = unsafe { Mmap::map(&file) }.map_err(io_error)?;
        Ok(Self { map })
    }

    /// Maps `path` for sharing with tensors.
    pub fn shared(path: &Path) -> Result<SharedBytes, FileError> {
        Ok(Arc::new(Self::open(path)?))
    }
}

impl AsRef<[u8]> for MappedFile {
    fn as_ref(&self) -> &[u8] {
        &self.map
    }
}
