//! What can be wrong with a model file. Every message names the file and the field, tensor or key at fault.

use std::borrow::Cow;
use std::io;
use std::path::PathBuf;

use oscar_kernels::DType;

/// Why a model file could not be read.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
#[non_exhaustive]
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
        "{}: {}: the file is truncated: expected at least {expected} bytes, it has {actual}",
        path.display(),
        on_one_line(field)
    )]
    Truncated { path: PathBuf, field: String, expected: u64, actual: u64 },
    #[error(
        "{}: {}: {count} entries cannot fit in the file, which has room for {limit}",
        path.display(),
        on_one_line(field)
    )]
    CountTooLarge { path: PathBuf, field: String, count: u64, limit: u64 },
    #[error("{}: {}: {}", path.display(), on_one_line(field), on_one_line(problem))]
    Invalid { path: PathBuf, field: String, problem: String },
    #[error("{}: {}: appears twice", path.display(), on_one_line(field))]
    Duplicate { path: PathBuf, field: String },
    #[error(
        "{}: tensors `{}` and `{}` overlap",
        path.display(),
        on_one_line(first),
        on_one_line(second)
    )]
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
    #[error("{}: shard `{}` named in the index is missing", path.display(), on_one_line(shard))]
    MissingShard { path: PathBuf, shard: String },
    #[error("{}: not valid JSON: {}", path.display(), on_one_line(&source.to_string()))]
    Json { path: PathBuf, source: serde_json::Error },
}

/// Text out of a file, fit for a message: a line end or a terminal's escape sequence shows instead of acting.
pub(crate) fn on_one_line(text: &str) -> Cow<'_, str> {
    if !text.contains(char::is_control) {
        return Cow::Borrowed(text);
    }
    let mut shown = String::with_capacity(text.len());
    for character in text.chars() {
        if character.is_control() {
            shown.extend(character.escape_default());
        } else {
            shown.push(character);
        }
    }
    Cow::Owned(shown)
}

fn supported_types() -> String {
    DType::ALL.map(|dtype| dtype.to_string()).join(", ")
}
