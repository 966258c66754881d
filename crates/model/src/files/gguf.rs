//! GGUF: one memory-mapped file with metadata, a table of tensors, and their data.
//!
//! Everything a file claims is checked when it is opened: counts and lengths against the bytes that are there,
//! offsets against the file's end and against each other. After that, a tensor is only a window.

mod element;
mod metadata;
mod reader;
mod value;

use std::collections::HashMap;
use std::fmt;
use std::path::Path;
use std::sync::Arc;

use oscar_kernels::backend::SharedBytes;

pub use metadata::Metadata;
pub use value::{FromMetadata, MetadataArray, MetadataValue, Strings};

use super::{ElementType, FileError, MappedFile, StoredTensor, TensorEntry, TensorSource, WeightMemory};
use element::GgmlType;
use reader::{GgufProblem, GgufReader};

const MAGIC: &[u8; 4] = b"GGUF";

/// Alignment of tensor data unless the metadata says otherwise.
const DEFAULT_ALIGNMENT: u32 = 32;

/// Tensors have at most this many dimensions.
const MAX_DIMENSIONS: u32 = 4;

/// Key length, type id and the smallest value: the least a metadata entry can take.
const LEAST_METADATA_BYTES: usize = 8 + 4 + 1;

/// Name length, dimension count, one dimension, type and offset: the least a table entry can take.
const LEAST_TENSOR_BYTES: usize = 8 + 4 + 8 + 4 + 8;

/// An opened GGUF file.
pub struct Gguf {
    path: Arc<Path>,
    bytes: SharedBytes,
    version: u32,
    metadata: Metadata,
    tensors: Vec<TensorEntry>,
    index: HashMap<String, usize>,
}

/// A table entry before its offset is resolved against the start of the data.
struct RawTensor {
    name: String,
    shape: Vec<usize>,
    kind: GgmlType,
    offset: u64,
    byte_len: Option<u64>,
}

impl Gguf {
    /// Maps and parses `path`.
    pub fn open(path: &Path) -> Result<Self, FileError> {
        Self::open_in(path, WeightMemory::Mapped)
    }

    /// Does the same as [`Self::open`], with the bytes in a given kind of memory.
    pub fn open_in(path: &Path, memory: WeightMemory) -> Result<Self, FileError> {
        Self::parse(MappedFile::shared(path, memory)?, path)
    }

    /// Parses `bytes`; `path` is only used in messages.
    pub fn parse(bytes: SharedBytes, path: &Path) -> Result<Self, FileError> {
        let path: Arc<Path> = Arc::from(path);
        let file: &[u8] = (*bytes).as_ref();
        let mut reader = GgufReader::new(file);
        let version = read_version(&mut reader, &path)?;
        let tensor_count = reader.u64().map_err(|problem| problem.at(&path, "tensor count"))?;
        // Tensors follow the metadata, so this bound is loose; it is checked again when the table starts.
        reader
            .check_count(tensor_count, LEAST_TENSOR_BYTES)
            .map_err(|problem| problem.at(&path, "tensor count"))?;
        let metadata = read_metadata(&mut reader, &path)?;
        let raw = read_table(&mut reader, tensor_count, &path)?;
        let alignment = alignment(&metadata, &path)?;
        let data_start = (reader.position() as u64).next_multiple_of(alignment);
        let tensors = place(raw, data_start, alignment, file.len() as u64, &path)?;
        check_overlaps(&tensors, &path)?;
        let index = tensors.iter().enumerate().map(|(at, tensor)| (tensor.name.clone(), at)).collect();
        Ok(Self { path, bytes, version, metadata, tensors, index })
    }

    /// The path that the file was opened from.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Version of the format: 2 or 3.
    pub fn version(&self) -> u32 {
        self.version
    }

    /// The metadata, which is the key-value part of the file.
    pub fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    /// The table of tensors in file order.
    pub fn tensors(&self) -> &[TensorEntry] {
        &self.tensors
    }

    /// The tensor `name`; an error if it is missing or of a type that cannot be read.
    pub fn tensor(&self, name: &str) -> Result<StoredTensor, FileError> {
        let path = || self.path.to_path_buf();
        let entry = self
            .index
            .get(name)
            .map(|&at| &self.tensors[at])
            .ok_or_else(|| FileError::MissingTensor { path: path(), tensor: name.to_owned() })?;
        match &entry.element_type {
            ElementType::Supported(dtype) => Ok(StoredTensor {
                path: self.path.clone(),
                name: entry.name.clone(),
                shape: entry.shape.clone(),
                dtype: *dtype,
                bytes: self.bytes.clone(),
                offset: entry.offset,
            }),
            ElementType::Unsupported(found) => Err(FileError::UnsupportedType {
                path: path(),
                tensor: name.to_owned(),
                found: found.to_string(),
            }),
        }
    }
}

impl TensorSource for Gguf {
    fn path(&self) -> &Path {
        &self.path
    }

    fn entries(&self) -> &[TensorEntry] {
        &self.tensors
    }

    fn position(&self, name: &str) -> Option<usize> {
        self.index.get(name).copied()
    }

    fn get(&self, name: &str) -> Result<StoredTensor, FileError> {
        self.tensor(name)
    }
}

impl fmt::Debug for Gguf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Gguf")
            .field("path", &self.path)
            .field("version", &self.version)
            .field("metadata", &self.metadata.entries().len())
            .field("tensors", &self.tensors.len())
            .finish_non_exhaustive()
    }
}

fn read_version(reader: &mut GgufReader<'_>, path: &Path) -> Result<u32, FileError> {
    let magic = reader.take(4).map_err(|problem| problem.at(path, "magic"))?;
    if magic != MAGIC {
        let found = format!("`{}`", magic.escape_ascii());
        return Err(FileError::BadMagic { path: path.to_path_buf(), found });
    }
    let version = reader.u32().map_err(|problem| problem.at(path, "version"))?;
    match version {
        2 | 3 => Ok(version),
        // Only the byte order of small numbers tells a big-endian file apart.
        _ if (1..=0xffff).contains(&version.swap_bytes()) && version > 0xffff => {
            Err(FileError::BigEndian { path: path.to_path_buf() })
        }
        _ => Err(FileError::UnsupportedVersion { path: path.to_path_buf(), version }),
    }
}

fn read_metadata(reader: &mut GgufReader<'_>, path: &Arc<Path>) -> Result<Metadata, FileError> {
    let count = reader.count(LEAST_METADATA_BYTES).map_err(|problem| problem.at(path, "metadata count"))?;
    let mut metadata = Metadata::new(path.clone());
    for entry in 0..count {
        let key = reader.string().map_err(|problem| problem.at(path, format!("metadata key {entry}")))?;
        let value = reader.value().map_err(|problem| problem.at(path, format!("metadata key `{key}`")))?;
        metadata.insert(key.to_owned(), value)?;
    }
    Ok(metadata)
}

fn alignment(metadata: &Metadata, path: &Path) -> Result<u64, FileError> {
    let alignment = metadata.get::<u32>("general.alignment")?.unwrap_or(DEFAULT_ALIGNMENT);
    if !alignment.is_power_of_two() {
        let problem = format!("{alignment} is not a power of two");
        return Err(GgufProblem::Invalid(problem).at(path, "metadata key `general.alignment`"));
    }
    Ok(alignment.into())
}

fn read_table(reader: &mut GgufReader<'_>, count: u64, path: &Path) -> Result<Vec<RawTensor>, FileError> {
    let count =
        reader.check_count(count, LEAST_TENSOR_BYTES).map_err(|problem| problem.at(path, "tensor count"))?;
    let mut tensors = Vec::new();
    let mut names = std::collections::HashSet::new();
    for entry in 0..count {
        let name = reader.string().map_err(|problem| problem.at(path, format!("name of tensor {entry}")))?;
        if !names.insert(name) {
            let field = format!("tensor `{name}`");
            return Err(FileError::Duplicate { path: path.to_path_buf(), field });
        }
        let tensor =
            read_tensor(reader, name).map_err(|problem| problem.at(path, format!("tensor `{name}`")))?;
        tensors.push(tensor);
    }
    Ok(tensors)
}

fn read_tensor(reader: &mut GgufReader<'_>, name: &str) -> Result<RawTensor, GgufProblem> {
    let dimensions = reader.u32()?;
    if !(1..=MAX_DIMENSIONS).contains(&dimensions) {
        let problem = format!("{dimensions} dimensions, expected 1 to {MAX_DIMENSIONS}");
        return Err(GgufProblem::Invalid(problem));
    }
    let mut shape = Vec::with_capacity(dimensions as usize);
    for _ in 0..dimensions {
        shape.push(reader.u64()?);
    }
    let kind = GgmlType::from_id(reader.u32()?);
    let offset = reader.u64()?;
    let too_large = || GgufProblem::Invalid(format!("the size of shape {shape:?} overflows"));
    if shape.contains(&0) {
        return Err(GgufProblem::Invalid(format!("shape {shape:?} has no elements")));
    }
    let elements = shape.iter().try_fold(1u64, |product, &len| product.checked_mul(len));
    let elements = elements.filter(|&count| isize::try_from(count).is_ok()).ok_or_else(too_large)?;
    let byte_len = match kind.block {
        Some((block_len, _)) if !shape[0].is_multiple_of(block_len as u64) => {
            let problem = format!(
                "rows of {} elements do not fill blocks of {block_len}, as type {} needs",
                shape[0], kind.element_type
            );
            return Err(GgufProblem::Invalid(problem));
        }
        Some((block_len, block_bytes)) => {
            let blocks = elements / block_len as u64;
            Some(blocks.checked_mul(block_bytes as u64).ok_or_else(too_large)?)
        }
        None => None,
    };
    // Every dimension divides the product, which fits in an isize.
    let shape = shape.iter().rev().map(|&len| len as usize).collect();
    Ok(RawTensor { name: name.to_owned(), shape, kind, offset, byte_len })
}

/// Turns offsets into the data into offsets into the file, and checks that every tensor ends inside it.
fn place(
    raw: Vec<RawTensor>,
    data_start: u64,
    alignment: u64,
    file_len: u64,
    path: &Path,
) -> Result<Vec<TensorEntry>, FileError> {
    let mut placed = Vec::with_capacity(raw.len());
    for tensor in raw {
        let RawTensor { name, shape, kind, offset, byte_len } = tensor;
        let field = || format!("tensor `{name}`");
        if !offset.is_multiple_of(alignment) {
            let problem = format!("offset {offset} is not a multiple of the alignment {alignment}");
            return Err(GgufProblem::Invalid(problem).at(path, field()));
        }
        let start = data_start.checked_add(offset);
        // At least one byte of a tensor of unknown size must be there.
        let end = start.and_then(|start| start.checked_add(byte_len.unwrap_or(1)));
        let (Some(start), Some(end)) = (start, end) else {
            return Err(GgufProblem::Invalid(format!("offset {offset} overflows")).at(path, field()));
        };
        if end > file_len {
            return Err(GgufProblem::Truncated { expected: end, actual: file_len }.at(path, field()));
        }
        placed.push(TensorEntry {
            name,
            shape,
            element_type: kind.element_type,
            // Both are at most the length of the file, which is in memory.
            offset: start as usize,
            byte_len: byte_len.map(|len| len as usize),
        });
    }
    Ok(placed)
}

fn check_overlaps(tensors: &[TensorEntry], path: &Path) -> Result<(), FileError> {
    let mut order: Vec<&TensorEntry> = tensors.iter().collect();
    order.sort_by_key(|tensor| tensor.offset);
    for pair in order.windows(2) {
        let [first, second] = pair else { continue };
        if first.offset + first.byte_len.unwrap_or(1) > second.offset {
            return Err(FileError::Overlap {
                path: path.to_path_buf(),
                first: first.name.clone(),
                second: second.name.clone(),
            });
        }
    }
    Ok(())
}
