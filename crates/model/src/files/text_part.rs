//! The tensors of the text model inside a checkpoint that has other parts as well.

use std::collections::HashMap;
use std::path::Path;

use super::{FileError, StoredTensor, TensorBytes, TensorEntry, TensorSource};

/// Tensors under the names that they have in a checkpoint of the text model alone; tensors of other parts are left out.
pub(crate) struct TextPart {
    all: Box<dyn TensorSource>,
    /// The tensors that are left, renamed.
    entries: Vec<TensorEntry>,
    /// Index in `entries` by the new name.
    positions: HashMap<String, usize>,
    /// The names that the tensors of `entries` have in `all`.
    stored_names: Vec<String>,
}

impl TextPart {
    /// Renames the tensors of `all`; those that get no name are left out.
    pub(crate) fn new(
        all: Box<dyn TensorSource>,
        rename: impl Fn(&str) -> Option<String>,
    ) -> Result<TextPart, FileError> {
        let (mut entries, mut stored_names, mut positions) = (Vec::new(), Vec::new(), HashMap::new());
        for entry in all.entries() {
            let Some(name) = rename(&entry.name) else { continue };
            if positions.insert(name.clone(), entries.len()).is_some() {
                let problem = format!("there are two tensors for `{name}` of the text model");
                return Err(FileError::Invalid {
                    path: all.path().to_path_buf(),
                    field: entry.name.clone(),
                    problem,
                });
            }
            stored_names.push(entry.name.clone());
            entries.push(TensorEntry { name, ..entry.clone() });
        }
        Ok(TextPart { all, entries, positions, stored_names })
    }

    /// A missing tensor is missed under the name that is looked for.
    fn stored_name<'a>(&'a self, name: &'a str) -> &'a str {
        self.position(name).map_or(name, |index| &self.stored_names[index])
    }

    /// How many tensors were left out.
    pub(crate) fn left_out(&self) -> usize {
        self.all.entries().len() - self.entries.len()
    }
}

impl TensorSource for TextPart {
    fn path(&self) -> &Path {
        self.all.path()
    }

    fn entries(&self) -> &[TensorEntry] {
        &self.entries
    }

    fn position(&self, name: &str) -> Option<usize> {
        self.positions.get(name).copied()
    }

    fn get(&self, name: &str) -> Result<StoredTensor, FileError> {
        self.all.get(self.stored_name(name))
    }

    fn bytes(&self, name: &str) -> Result<TensorBytes, FileError> {
        self.all.bytes(self.stored_name(name))
    }
}
