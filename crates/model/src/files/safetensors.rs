//! Safetensors: a single file, or shards named by an index.
//!
//! The `safetensors` crate checks the header of a file; sizes against the file and everything the index claims
//! are checked here.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use oscar_kernels::DType;
use oscar_kernels::backend::SharedBytes;
use safetensors::tensor::{Dtype, Metadata};
use serde::Deserialize;

use super::config::read_limited;
use super::{
    ElementType, FileError, MappedFile, StoredTensor, TensorBytes, TensorEntry, TensorSource, WeightMemory,
};

/// The index of a sharded checkpoint.
const INDEX_NAME: &str = "model.safetensors.index.json";

/// The usual name of an unsharded checkpoint.
const SINGLE_NAME: &str = "model.safetensors";

/// Bytes of the length that opens a file.
const PREFIX_BYTES: usize = 8;

/// No header of a real model comes near this.
const MAX_HEADER_BYTES: u64 = 100 << 20;

/// The largest models have indexes of about ten megabytes.
const MAX_INDEX_BYTES: u64 = 64 << 20;

/// The tensors of one or more safetensors files.
pub struct Safetensors {
    path: PathBuf,
    shards: Vec<Shard>,
    entries: Vec<TensorEntry>,
    /// The shard that holds each entry.
    homes: Vec<usize>,
    index: HashMap<String, usize>,
}

/// One mapped file and its table, in the order of the data.
struct Shard {
    path: Arc<Path>,
    bytes: SharedBytes,
    entries: Vec<TensorEntry>,
}

impl Safetensors {
    /// Opens the weights of a checkpoint folder: `model.safetensors`, else the shards of
    /// `model.safetensors.index.json`, else the only `*.safetensors` file.
    pub fn open_folder(folder: &Path) -> Result<Self, FileError> {
        Self::open_folder_in(folder, WeightMemory::Mapped)
    }

    /// As [`Self::open_folder`], with the bytes in a given kind of memory.
    pub fn open_folder_in(folder: &Path, memory: WeightMemory) -> Result<Self, FileError> {
        let single = folder.join(SINGLE_NAME);
        let index = folder.join(INDEX_NAME);
        if single.exists() {
            Self::open(&single, memory)
        } else if index.exists() {
            Self::open_index(&index, memory)
        } else {
            Self::open(&only_safetensors_file(folder)?, memory)
        }
    }

    /// Opens one file and reads its header.
    pub fn open(path: &Path, memory: WeightMemory) -> Result<Self, FileError> {
        Self::parse(MappedFile::shared(path, memory)?, path)
    }

    /// Parses one file; `path` is only used in messages.
    pub fn parse(bytes: SharedBytes, path: &Path) -> Result<Self, FileError> {
        let mut shard = Shard::parse(bytes, path)?;
        let entries = std::mem::take(&mut shard.entries);
        let homes = vec![0; entries.len()];
        Ok(Self::assemble(path, vec![shard], entries, homes))
    }

    /// Opens the shards that an index names; they lie next to it.
    pub fn open_index(path: &Path, memory: WeightMemory) -> Result<Self, FileError> {
        let weight_map = parse_index(&read_limited(path, MAX_INDEX_BYTES)?, path)?;
        let folder = path.parent().unwrap_or(Path::new(""));
        let mut shards: Vec<Shard> = Vec::new();
        let mut opened: HashMap<&str, (usize, HashMap<String, usize>)> = HashMap::new();
        let (mut entries, mut homes) = (Vec::new(), Vec::new());
        for (tensor, file) in &weight_map {
            if !opened.contains_key(file.as_str()) {
                let shard_path = folder.join(file);
                if !shard_path.exists() {
                    return Err(FileError::MissingShard { path: path.to_path_buf(), shard: file.clone() });
                }
                let shard = Shard::parse(MappedFile::shared(&shard_path, memory)?, &shard_path)?;
                opened.insert(file, (shards.len(), positions(&shard.entries)));
                shards.push(shard);
            }
            let (home, table) = &opened[file.as_str()];
            let Some(&at) = table.get(tensor) else {
                return Err(FileError::Invalid {
                    path: path.to_path_buf(),
                    field: format!("weight_map entry `{tensor}`"),
                    problem: format!("shard `{file}` has no such tensor"),
                });
            };
            entries.push(shards[*home].entries[at].clone());
            homes.push(*home);
        }
        // From here on only the merged table is needed.
        shards.iter_mut().for_each(|shard| shard.entries = Vec::new());
        Ok(Self::assemble(path, shards, entries, homes))
    }

    fn assemble(path: &Path, shards: Vec<Shard>, entries: Vec<TensorEntry>, homes: Vec<usize>) -> Self {
        let index = positions(&entries);
        Self { path: path.to_path_buf(), shards, entries, homes, index }
    }

    /// The files in use.
    pub fn shard_paths(&self) -> impl Iterator<Item = &Path> {
        self.shards.iter().map(|shard| &*shard.path)
    }

    /// The tensor `name`; an error if it is missing or of a type that cannot be read.
    pub fn tensor(&self, name: &str) -> Result<StoredTensor, FileError> {
        let Some(&at) = self.index.get(name) else {
            return Err(FileError::MissingTensor { path: self.path.clone(), tensor: name.to_owned() });
        };
        let (entry, shard) = (&self.entries[at], &self.shards[self.homes[at]]);
        match &entry.element_type {
            ElementType::Supported(dtype) => Ok(StoredTensor {
                path: shard.path.clone(),
                name: entry.name.clone(),
                shape: entry.shape.clone(),
                dtype: *dtype,
                bytes: shard.bytes.clone(),
                offset: entry.offset,
            }),
            ElementType::Unsupported(found) => Err(FileError::UnsupportedType {
                path: shard.path.to_path_buf(),
                tensor: name.to_owned(),
                found: found.to_string(),
            }),
        }
    }
}

impl TensorSource for Safetensors {
    fn path(&self) -> &Path {
        &self.path
    }

    fn entries(&self) -> &[TensorEntry] {
        &self.entries
    }

    fn position(&self, name: &str) -> Option<usize> {
        self.index.get(name).copied()
    }

    fn get(&self, name: &str) -> Result<StoredTensor, FileError> {
        self.tensor(name)
    }

    fn bytes(&self, name: &str) -> Result<TensorBytes, FileError> {
        let missing = || FileError::MissingTensor { path: self.path.clone(), tensor: name.to_owned() };
        let at = self.position(name).ok_or_else(missing)?;
        let shard = &self.shards[self.homes[at]];
        Ok(TensorBytes::of_entry(shard.path.clone(), &self.entries[at], shard.bytes.clone()))
    }
}

impl fmt::Debug for Safetensors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Safetensors")
            .field("path", &self.path)
            .field("shards", &self.shards.len())
            .field("tensors", &self.entries.len())
            .finish_non_exhaustive()
    }
}

impl Shard {
    fn parse(bytes: SharedBytes, path: &Path) -> Result<Self, FileError> {
        let file: &[u8] = (*bytes).as_ref();
        let (data_start, header) = read_header(file, path)?;
        let entries = header
            .offset_keys()
            .into_iter()
            .filter_map(|name| {
                let info = header.info(&name)?;
                let (start, end) = info.data_offsets;
                Some(TensorEntry {
                    element_type: element_type(info.dtype),
                    shape: info.shape.clone(),
                    // In bounds: the header's last offset was checked against the length of the file.
                    offset: data_start + start,
                    byte_len: Some(end - start),
                    name,
                })
            })
            .collect();
        Ok(Self { path: Arc::from(path), bytes, entries })
    }
}

/// Reads the header and returns where the data starts.
///
/// The crate's own entry point adds the last offset to the header's length without a check, which panics on a
/// lying file where overflow is checked; so only its header type is used, and the sizes are compared here.
fn read_header(file: &[u8], path: &Path) -> Result<(usize, Metadata), FileError> {
    let actual = file.len() as u64;
    let truncated = |field: &str, expected: u64| FileError::Truncated {
        path: path.to_path_buf(),
        field: field.to_owned(),
        expected,
        actual,
    };
    let (prefix, rest) = file
        .split_first_chunk::<PREFIX_BYTES>()
        .ok_or_else(|| truncated("header length", PREFIX_BYTES as u64))?;
    let header_len = u64::from_le_bytes(*prefix);
    if header_len > MAX_HEADER_BYTES {
        return Err(FileError::Invalid {
            path: path.to_path_buf(),
            field: "header length".to_owned(),
            problem: format!("{header_len} is more than {MAX_HEADER_BYTES}; this is not a safetensors file"),
        });
    }
    let data_start = PREFIX_BYTES + header_len as usize;
    let json = rest.get(..header_len as usize).ok_or_else(|| truncated("header", data_start as u64))?;
    // Wrong shapes and offsets come back as errors of the JSON parser too, so the text must carry the message.
    let header: Metadata = serde_json::from_slice(json).map_err(|error| FileError::Invalid {
        path: path.to_path_buf(),
        field: "header".to_owned(),
        problem: error.to_string(),
    })?;
    let expected = (data_start as u64).saturating_add(header.data_len() as u64);
    if expected > actual {
        return Err(truncated("tensor data", expected));
    }
    if expected < actual {
        return Err(FileError::Invalid {
            path: path.to_path_buf(),
            field: "tensor data".to_owned(),
            problem: format!("the header describes {expected} bytes, the file has {actual}"),
        });
    }
    Ok((data_start, header))
}

#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

/// Parses an index: which tensor lies in which file. File names that could leave the folder are refused.
pub fn parse_index(json: &[u8], path: &Path) -> Result<BTreeMap<String, String>, FileError> {
    let index: Index = serde_json::from_slice(json)
        .map_err(|source| FileError::Json { path: path.to_path_buf(), source })?;
    for (tensor, file) in &index.weight_map {
        let escapes = file.is_empty() || file == "." || file == ".." || file.contains(['/', '\\', ':', '\0']);
        if escapes {
            return Err(FileError::Invalid {
                path: path.to_path_buf(),
                field: format!("weight_map entry `{tensor}`"),
                problem: format!("{file:?} is not a plain file name"),
            });
        }
    }
    Ok(index.weight_map)
}

fn element_type(dtype: Dtype) -> ElementType {
    match dtype {
        Dtype::F32 => ElementType::Supported(DType::F32),
        Dtype::F16 => ElementType::Supported(DType::F16),
        Dtype::BF16 => ElementType::Supported(DType::BF16),
        Dtype::F8_E4M3 => ElementType::Supported(DType::F8E4M3),
        other => ElementType::Unsupported(other.to_string().into()),
    }
}

fn positions(entries: &[TensorEntry]) -> HashMap<String, usize> {
    entries.iter().enumerate().map(|(at, entry)| (entry.name.clone(), at)).collect()
}

fn only_safetensors_file(folder: &Path) -> Result<PathBuf, FileError> {
    let io_error = |source| FileError::Io { path: folder.to_path_buf(), source };
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).map_err(io_error)? {
        let path = entry.map_err(io_error)?.path();
        if path.extension().is_some_and(|extension| extension == "safetensors") {
            found.push(path);
        }
    }
    let problem = match found.len() {
        1 => return Ok(found.remove(0)),
        0 => format!("found no `{SINGLE_NAME}`, no `{INDEX_NAME}` and no other safetensors file"),
        count => format!(
            "found {count} safetensors files but no `{INDEX_NAME}` that says how they belong together"
        ),
    };
    Err(FileError::Invalid { path: folder.to_path_buf(), field: "weights".to_owned(), problem })
}
