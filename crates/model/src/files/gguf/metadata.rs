//! The key-value part of a GGUF file and typed access to it.

use std::borrow::Cow;
use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

use super::value::{FromMetadata, MetadataValue, Strings};
use crate::files::FileError;

/// Metadata in file order, with unique keys.
#[derive(Clone, Debug)]
pub struct Metadata {
    path: Arc<Path>,
    entries: Vec<(String, MetadataValue)>,
    index: HashMap<String, usize>,
}

impl Metadata {
    pub(super) fn new(path: Arc<Path>) -> Self {
        Self { path, entries: Vec::new(), index: HashMap::new() }
    }

    pub(super) fn insert(&mut self, key: String, value: MetadataValue) -> Result<(), FileError> {
        if self.index.insert(key.clone(), self.entries.len()).is_some() {
            let field = format!("metadata key `{key}`");
            return Err(FileError::Duplicate { path: self.path.to_path_buf(), field });
        }
        self.entries.push((key, value));
        Ok(())
    }

    /// All entries in file order.
    pub fn entries(&self) -> &[(String, MetadataValue)] {
        &self.entries
    }

    /// Whether `key` is there.
    pub fn contains(&self, key: &str) -> bool {
        self.index.contains_key(key)
    }

    /// The value of `key`, whatever its type.
    pub fn value(&self, key: &str) -> Option<&MetadataValue> {
        self.index.get(key).map(|&at| &self.entries[at].1)
    }

    /// The value of `key` as `T`, `None` if it is missing, an error if it is of another type.
    pub fn get<'a, T: FromMetadata<'a>>(&'a self, key: &str) -> Result<Option<T>, FileError> {
        let Some(value) = self.value(key) else { return Ok(None) };
        T::from_value(value).map(Some).ok_or_else(|| FileError::WrongType {
            path: self.path.to_path_buf(),
            key: key.to_owned(),
            expected: T::EXPECTED,
            found: value.describe(),
        })
    }

    /// The value of `key` as `T`, an error if it is missing or of another type.
    pub fn require<'a, T: FromMetadata<'a>>(&'a self, key: &str) -> Result<T, FileError> {
        self.get(key)?
            .ok_or_else(|| FileError::MissingKey { path: self.path.to_path_buf(), key: key.to_owned() })
    }

    /// The integer at `key`; an error that names the key if there is none.
    pub fn u32(&self, key: &str) -> Result<u32, FileError> {
        self.require(key)
    }

    /// The integer at `key`; an error that names the key if there is none.
    pub fn u64(&self, key: &str) -> Result<u64, FileError> {
        self.require(key)
    }

    /// The float at `key`; an error that names the key if there is none.
    pub fn f32(&self, key: &str) -> Result<f32, FileError> {
        self.require(key)
    }

    /// The boolean at `key`; an error that names the key if there is none.
    pub fn bool(&self, key: &str) -> Result<bool, FileError> {
        self.require(key)
    }

    /// The string at `key`; an error that names the key if there is none.
    pub fn str(&self, key: &str) -> Result<&str, FileError> {
        self.require(key)
    }

    /// A required list of strings.
    pub fn strings(&self, key: &str) -> Result<&Strings, FileError> {
        self.require(key)
    }

    /// A required list of floats.
    pub fn f32s(&self, key: &str) -> Result<&[f32], FileError> {
        self.require(key)
    }

    /// A required list of integers.
    pub fn i32s(&self, key: &str) -> Result<Cow<'_, [i32]>, FileError> {
        self.require(key)
    }
}
