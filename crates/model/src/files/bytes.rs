//! A file mapped into memory, read-only, so that weights are paged in by the operating system; or read into larger pages.

use std::fs::{self, File};
use std::path::Path;
use std::sync::Arc;

use memmap2::{MmapOptions, MmapRaw};
use oscar_kernels::backend::SharedBytes;

use super::{FileError, large_pages};

/// Where the bytes of weights are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WeightMemory {
    /// In the system's cache of the file: read when they are needed, shared with other processes, dropped when memory is
    /// short.
    #[default]
    Mapped,
    /// In memory of this process, in pages of 2 MiB where the system has them.
    LargePages,
}

/// A read-only mapping of a whole file.
#[derive(Debug)]
pub struct MappedFile {
    map: MmapRaw,
}

impl MappedFile {
    /// Maps the file at `path`, or reads it, as `memory` says.
    pub fn open(path: &Path, memory: WeightMemory) -> Result<Self, FileError> {
        let io_error = |source| FileError::Io { path: path.to_path_buf(), source };
        // Asked before opening: opening a pipe would wait for a writer, and a folder opens but cannot be mapped.
        if !fs::metadata(path).map_err(io_error)?.is_file() {
            return Err(FileError::NotAFile { path: path.to_path_buf() });
        }
        let file = File::open(path).map_err(io_error)?;
        let map = MmapOptions::new().map_raw_read_only(&file).map_err(io_error)?;
        let map = match memory {
            WeightMemory::Mapped => map,
            WeightMemory::LargePages => large_pages::read(map, &file).map_err(io_error)?,
        };
        Ok(Self { map })
    }

    /// Maps `path` for sharing with tensors.
    pub fn shared(path: &Path, memory: WeightMemory) -> Result<SharedBytes, FileError> {
        Ok(Arc::new(Self::open(path, memory)?))
    }
}

impl AsRef<[u8]> for MappedFile {
    #[allow(unsafe_code)]
    fn as_ref(&self) -> &[u8] {
        // SAFETY: the mapping lives as long as `self`, and this program never writes to it or to the file. Another process
        // that shortens or rewrites the file while it is mapped can still change what we read or end the process with a
        // signal; every program that maps weights accepts this, and parsed structures are copies, so a later change of the
        // header cannot move a tensor out of the mapping.
        unsafe { std::slice::from_raw_parts(self.map.as_ptr(), self.map.len()) }
    }
}
