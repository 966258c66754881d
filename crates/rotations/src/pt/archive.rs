//! The zip archive around a PyTorch pickle, read with suspicion.
//!
//! Opening reads a bounded number of bytes, so a table of contents with millions of lines is refused before
//! it is held in memory. Sizes are checked before a member is read, and again against what decompression
//! really gives.

use std::cell::Cell;
use std::io::{self, BufReader, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::rc::Rc;

use zip::ZipArchive;

use crate::error::RotationError;

/// Most bytes that are read to find the members: torch writes about 100 per member.
const DIRECTORY_BYTES: u64 = 8 << 20;
/// Most members of an archive: two for each layer and a handful around them.
const MEMBER_LIMIT: usize = 16_384;
/// Most bytes of a pickle; that of 36 layers takes 5 kB.
const PICKLE_LIMIT: u64 = 4 << 20;
/// Most bytes of all tensors of a file together.
const STORAGE_LIMIT: u64 = 512 << 20;

const PICKLE_NAME: &str = "/data.pkl";

/// An opened archive.
pub(super) struct Archive<R: Read + Seek> {
    path: PathBuf,
    zip: ZipArchive<BufReader<LimitedReader<R>>>,
    /// The folder all members are in.
    folder: String,
    storage_left: u64,
}

impl<R: Read + Seek> Archive<R> {
    /// Reads the table of contents. `path` is for messages.
    pub(super) fn open(path: &Path, reader: R) -> Result<Archive<R>, RotationError> {
        let bad = |problem: String| RotationError::Archive { path: path.to_owned(), problem };
        let left = Rc::new(Cell::new(DIRECTORY_BYTES));
        let metered = BufReader::new(LimitedReader { inner: reader, left: left.clone() });
        let zip = ZipArchive::new(metered).map_err(|error| bad(error.to_string()))?;
        left.set(u64::MAX);
        if zip.len() > MEMBER_LIMIT {
            return Err(bad(format!("{} members, at most {MEMBER_LIMIT} are read", zip.len())));
        }
        if zip.has_duplicate_names() {
            return Err(bad("two members have the same name".to_owned()));
        }
        let mut pickles = Vec::new();
        for name in zip.file_names() {
            let name = name.map_err(|error| bad(error.to_string()))?;
            if let Some(folder) = name.strip_suffix(PICKLE_NAME).filter(|folder| !folder.contains('/')) {
                pickles.push(folder.to_owned());
            }
        }
        let [folder] = &pickles[..] else {
            return Err(bad(format!("it has {} members named data.pkl, expected one", pickles.len())));
        };
        let folder = folder.clone();
        let mut archive = Archive { path: path.to_owned(), zip, folder, storage_left: STORAGE_LIMIT };
        archive.check_byte_order()?;
        Ok(archive)
    }

    fn check_byte_order(&mut self) -> Result<(), RotationError> {
        let name = format!("{}/byteorder", self.folder);
        if self.zip.index_for_name(&name).is_none() {
            return Ok(());
        }
        match &self.member("byteorder", 16)?[..] {
            b"little" => Ok(()),
            _ => Err(self.bad("its numbers are not little-endian".to_owned())),
        }
    }

    /// The pickle that describes the tensors.
    pub(super) fn pickle(&mut self) -> Result<Vec<u8>, RotationError> {
        self.member("data.pkl", PICKLE_LIMIT)
    }

    /// The bytes of a storage, which must be exactly `expected`.
    pub(super) fn storage(&mut self, key: &str, expected: u64) -> Result<Vec<u8>, RotationError> {
        // torch numbers its storages; anything else could name another member.
        if key.is_empty() || !key.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_') {
            return Err(self.bad(format!("{key:?} is not the name of a storage")));
        }
        let bytes = self.member(&format!("data/{key}"), self.storage_left.min(expected))?;
        if bytes.len() as u64 != expected {
            return Err(self.bad(format!(
                "storage {key:?} has {} bytes, its tensors were made of {expected}",
                bytes.len()
            )));
        }
        self.storage_left -= expected;
        Ok(bytes)
    }

    fn member(&mut self, name: &str, limit: u64) -> Result<Vec<u8>, RotationError> {
        let full_name = format!("{}/{name}", self.folder);
        let (path, what) = (self.path.clone(), format!("member `{name}`"));
        let bad = |problem: String| RotationError::Archive { path: path.clone(), problem };
        let too_large =
            |size| RotationError::TooLarge { path: path.clone(), what: what.clone(), size, limit };
        let member = self.zip.by_name(&full_name).map_err(|error| bad(format!("{what}: {error}")))?;
        let claimed = member.size();
        if claimed > limit {
            return Err(too_large(claimed));
        }
        // The buffer grows with what is really there, never with what is claimed.
        let mut bytes = Vec::new();
        member.take(claimed + 1).read_to_end(&mut bytes).map_err(|error| bad(format!("{what}: {error}")))?;
        if bytes.len() as u64 != claimed {
            return Err(bad(format!("{what} is {} bytes long, the archive says {claimed}", bytes.len())));
        }
        Ok(bytes)
    }

    fn bad(&self, problem: String) -> RotationError {
        RotationError::Archive { path: self.path.clone(), problem }
    }
}

/// A reader that may give a limited number of bytes.
struct LimitedReader<R> {
    inner: R,
    left: Rc<Cell<u64>>,
}

impl<R: Read> Read for LimitedReader<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let left = self.left.get();
        if left == 0 {
            return Err(io::Error::other("the table of contents is too large"));
        }
        let most = buffer.len().min(usize::try_from(left).unwrap_or(usize::MAX));
        let read = self.inner.read(&mut buffer[..most])?;
        self.left.set(left - read as u64);
        Ok(read)
    }
}

impl<R: Seek> Seek for LimitedReader<R> {
    fn seek(&mut self, position: SeekFrom) -> io::Result<u64> {
        self.inner.seek(position)
    }
}
