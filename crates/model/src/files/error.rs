//! What can be wrong with a model file. Every message names the file and the field, tensor or key at fault.

use std::io;
use std::path::PathBuf;

use oscar_kernels::DType;

/// Why a model file could not be read.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum FileError {
    #[error("{}: cannot read the file: {source}", path.display())]
    Io { path: PathBuf, source: io::Error },
    #[error("{}: is not a regular file", path.display())]
    NotAFile { path: PathBuf },
    #[error("{}: {size} bytes is more than the {limit} bytes a file of this kind may have", path.display())]
    TooLarge { path: PathBuf, size: u64, limit: u64 },
    #[error("{}: magic: expected `GGUF`, found {found}; this is not a GGUF file", path.display())]
    BadMagic { path: PathBuf, found: String },
    #[error(
        "{}: version: the file is big-endian; convert it to a little-endian GGUF file first",
        path.display()
    )]
    BigEndian { path: PathBuf },
    #[error("{}: version: {version} is not supported; supported: 2, 3", path.display())]
    UnsupportedVersion { path: PathBuf, version: u32 },
    #[error(
        "{}: {field}: the file is truncated: expected at least {expected} bytes, it has {actual}",
        path.display()
    )]
    Truncated { path: PathBuf, field: String, expected: u64, actual: u64 },
    #[error("{}: {field}: {count} entries cannot fit in the file, which has room for {limit}", path.display())]
    CountTooLarge { path: PathBuf, field: String, count: u64, limit: u64 },
    #[error("{}: {field}: {problem}", path.display())]
    Invalid { path: PathBuf, field: String, problem: String },
    #[error("{}: {field}: appears twice", path.display())]
    Duplicate { path: PathBuf, field: String },
    #[error("{}: tensors `{first}` and `{second}` overlap", path.display())]
    Overlap { path: PathBuf, first: String, second: String },
    #[error("{}: key `{key}` is missing", path.display())]
    MissingKey { path: PathBuf, key: String },
    #[error("{}: key `{key}`: expected {expected}, found {found}", path.display())]
    WrongType { path: PathBuf, key: String, expected: &'static str, found: String },
    #[error("{}: field `{field}`: expected {expected}, got {got}", path.display())]
    WrongField { path: PathBuf, field: String, expected: &'static str, got: String },
    #[error("{}: tensor `{tensor}` is missing", path.display())]
    MissingTensor { path: PathBuf, tensor: String },
    #[error(
        "{}: tensor `{tensor}` has type {found}, which oscar cannot read; supported: {}",
        path.display(),
        supported_types()
    )]
    UnsupportedType { path: PathBuf, tensor: String, found: String },
    #[error("{}: tensor `{tensor}`: expected {expected}, its shape is {shape:?}", path.display())]
    WrongShape { path: PathBuf, tensor: String, expected: &'static str, shape: Vec<usize> },
    #[error("{}: shard `{shard}` named in the index is missing", path.display())]
    MissingShard { path: PathBuf, shard: String },
    #[error("{}: not valid JSON: {source}", path.display())]
    Json { path: PathBuf, source: serde_json::Error },
}

fn supported_types() -> String {
    DType::ALL.map(|dtype| dtype.to_string()).join(", ")
}
