//! Published rotation files: a PyTorch `.pt` archive for keys and one for values.
//!
//! A file is a dictionary with `format_version`, `objective`, `source_grouping` and `layers`: layer id (a
//! number or its digits) to `layer_id`, `rotation` and `eigenvalues`. In format 1 a rotation is `[d, d]` and
//! shared by the heads of a layer; in format 2 it is `[kv_heads, d, d]`. Layer ids may be sparse. Reading
//! runs no code: see the `pickle` module beside this one.

mod archive;
mod write;

use std::collections::{BTreeMap, HashMap};
use std::fs::{self, File};
use std::io::{Read, Seek};
use std::path::{Path, PathBuf};

use half::{bf16, f16};
use oscar_codec::SquareMatrix;

use self::archive::Archive;
pub use self::write::{PtFormat, write};
use super::error::RotationError;
use super::limits::{ELEMENT_LIMIT, FILE_LIMIT, HEAD_DIM_LIMIT, HEAD_LIMIT, LAYER_ID_LIMIT, LAYER_LIMIT};
use super::pickle::{self, Element, PickleDocument, PickleValue, TensorStorage, TensorView, ValueId};

/// One side of a published rotation file.
#[derive(Clone, Debug, PartialEq)]
pub struct PtFile {
    /// The path of the file, for messages.
    pub path: PathBuf,
    /// The version as it is written: `1`, `2` or a word such as `identity-v1`.
    pub format_version: String,
    /// What was minimised and how it was composed, such as `qqt_r_h_pbr`.
    pub objective: Option<String>,
    /// Rotations of each layer.
    pub layers: BTreeMap<usize, PtLayer>,
    /// Channels per head.
    pub head_dim: usize,
    /// KV heads, where each has a rotation of its own.
    pub heads: Option<usize>,
}

/// Rotations of one layer.
#[derive(Clone, Debug, PartialEq)]
pub struct PtLayer {
    /// One matrix, or one for each KV head.
    pub rotations: Vec<SquareMatrix>,
    /// Eigenvalues, ascending, where the file has them.
    pub eigenvalues: Option<Vec<Vec<f64>>>,
}

/// Reads a `.pt` file. Shapes and numbers are checked; whether the matrices are rotations is for the caller.
pub fn read(path: &Path) -> Result<PtFile, RotationError> {
    let metadata = fs::metadata(path).map_err(|error| RotationError::io(path, "read", error))?;
    if !metadata.is_file() {
        return Err(RotationError::NotARotationFile {
            path: path.to_owned(),
            problem: "not a file".to_owned(),
        });
    }
    if metadata.len() > FILE_LIMIT {
        let what = "the file".to_owned();
        return Err(RotationError::TooLarge {
            path: path.to_owned(),
            what,
            size: metadata.len(),
            limit: FILE_LIMIT,
        });
    }
    let file = File::open(path).map_err(|error| RotationError::io(path, "read", error))?;
    read_from(path, file)
}

/// Does the same as [`read`] with bytes in memory; `path` is for messages.
pub fn read_from(path: &Path, reader: impl Read + Seek) -> Result<PtFile, RotationError> {
    let mut archive = Archive::open(path, reader)?;
    let bytes = archive.pickle()?;
    let document =
        pickle::parse(&bytes).map_err(|source| RotationError::Pickle { path: path.to_owned(), source })?;
    PtReader { path, archive, document: &document, storages: HashMap::new(), elements_left: ELEMENT_LIMIT }
        .file()
}

struct PtReader<'a, R: Read + Seek> {
    path: &'a Path,
    archive: Archive<R>,
    document: &'a PickleDocument,
    storages: HashMap<TensorStorage, Vec<u8>>,
    elements_left: usize,
}

impl<'a, R: Read + Seek> PtReader<'a, R> {
    fn file(mut self) -> Result<PtFile, RotationError> {
        let top = self.dictionary("the file", self.document.root())?;
        let format_version = match top.get("format_version") {
            Some(PickleValue::Integer(version)) => version.to_string(),
            Some(PickleValue::Text(version)) => version.clone(),
            Some(_) => return Err(self.field("format_version", "expected a number or text")),
            None => return Err(self.field("format_version", "is missing")),
        };
        let objective = match top.get("objective") {
            Some(PickleValue::Text(objective)) => Some(objective.clone()),
            Some(PickleValue::None) | None => None,
            Some(_) => return Err(self.field("objective", "expected text")),
        };
        let Some(PickleValue::Dictionary(entries)) = top.get("layers").copied() else {
            return Err(self.field("layers", "expected a dictionary of layers"));
        };
        if entries.is_empty() || entries.len() > LAYER_LIMIT {
            let problem = format!("{} layers, expected 1 to {LAYER_LIMIT}", entries.len());
            return Err(self.field("layers", problem));
        }
        let mut layers = BTreeMap::new();
        let mut shape: Option<(usize, Option<usize>)> = None;
        for &(key, value) in entries {
            let id = self.layer_id("layers", key)?;
            let (layer, found) = self.layer(id, value)?;
            if let Some(first) = shape.filter(|first| *first != found) {
                let tensor = format!("layers[{id}].rotation");
                let problem = format!("is {}, other layers are {}", describe(found), describe(first));
                return Err(RotationError::tensor(self.path, tensor, problem));
            }
            shape = Some(found);
            if layers.insert(id, layer).is_some() {
                return Err(self.field(format!("layers[{id}]"), "appears twice"));
            }
        }
        let (head_dim, heads) = shape.unwrap_or_default();
        let path = self.path.to_owned();
        Ok(PtFile { path, format_version, objective, layers, head_dim, heads })
    }

    fn layer(
        &mut self,
        id: usize,
        value: ValueId,
    ) -> Result<(PtLayer, (usize, Option<usize>)), RotationError> {
        let name = format!("layers[{id}]");
        let entries = self.dictionary(&name, self.document.get(value))?;
        match entries.get("layer_id") {
            None => {}
            Some(found) if self.number(found) == Some(id) => {}
            Some(_) => return Err(self.field(format!("{name}.layer_id"), format!("is not {id}"))),
        }
        let tensor = format!("{name}.rotation");
        let Some(PickleValue::Tensor(view)) = entries.get("rotation") else {
            return Err(self.field(tensor, "expected a tensor"));
        };
        let (heads, dim) = match view.shape[..] {
            [rows, columns] if rows == columns => (None, rows),
            [heads, rows, columns] if rows == columns => (Some(heads), rows),
            _ => {
                let problem = format!("has shape {:?}, expected [d, d] or [kv_heads, d, d]", view.shape);
                return Err(RotationError::tensor(self.path, tensor, problem));
            }
        };
        if !(2..=HEAD_DIM_LIMIT).contains(&dim) || heads.is_some_and(|heads| heads > HEAD_LIMIT) {
            let problem =
                format!("has shape {:?}, up to {HEAD_LIMIT} heads of 2 to {HEAD_DIM_LIMIT}", view.shape);
            return Err(RotationError::tensor(self.path, tensor, problem));
        }
        let values = self.values(&tensor, view)?;
        let rotations = values.chunks_exact(dim * dim).map(|matrix| SquareMatrix::new(dim, matrix.to_vec()));
        let rotations = rotations
            .collect::<Result<_, _>>()
            .map_err(|source| RotationError::Codec { path: self.path.to_owned(), source })?;
        let eigenvalues = match entries.get("eigenvalues") {
            None | Some(PickleValue::None) => None,
            Some(PickleValue::Tensor(view)) => {
                let tensor = format!("{name}.eigenvalues");
                let expected = heads.map_or(vec![dim], |heads| vec![heads, dim]);
                if view.shape != expected {
                    let problem = format!("has shape {:?}, expected {expected:?}", view.shape);
                    return Err(RotationError::tensor(self.path, tensor, problem));
                }
                let values = self.values(&tensor, view)?;
                Some(values.chunks_exact(dim).map(<[f64]>::to_vec).collect())
            }
            Some(_) => return Err(self.field(format!("{name}.eigenvalues"), "expected a tensor")),
        };
        Ok((PtLayer { rotations, eigenvalues }, (dim, heads)))
    }

    /// The numbers of a tensor in row-major order, all finite.
    fn values(&mut self, tensor: &str, view: &TensorView) -> Result<Vec<f64>, RotationError> {
        let count = view.shape.iter().try_fold(1usize, |count, &size| count.checked_mul(size));
        // A shared storage makes a file that is far smaller than its tensors, so they are counted on their
        // own.
        let count =
            count.filter(|&count| count <= self.elements_left).ok_or_else(|| RotationError::TooLarge {
                path: self.path.to_owned(),
                what: "all tensors together".to_owned(),
                size: count.unwrap_or(usize::MAX).saturating_mul(size_of::<f64>()) as u64,
                limit: (ELEMENT_LIMIT * size_of::<f64>()) as u64,
            })?;
        self.elements_left -= count;
        if !self.storages.contains_key(&view.storage) {
            let expected = (view.storage.elements as u64).saturating_mul(view.storage.element.bytes() as u64);
            let bytes = self.archive.storage(&view.storage.key, expected)?;
            self.storages.insert(view.storage.clone(), bytes);
        }
        let values = gather(view, &self.storages[&view.storage], count);
        if values.iter().all(|value| value.is_finite()) {
            Ok(values)
        } else {
            Err(RotationError::NotFinite { path: self.path.to_owned(), tensor: tensor.to_owned() })
        }
    }

    /// Entries of a dictionary by name; entries under other kinds of key are not ours.
    fn dictionary(
        &self,
        name: &str,
        value: &'a PickleValue,
    ) -> Result<HashMap<&'a str, &'a PickleValue>, RotationError> {
        let PickleValue::Dictionary(entries) = value else {
            return Err(self.field(name, "expected a dictionary"));
        };
        let named = entries.iter().filter_map(|&(key, value)| match self.document.get(key) {
            PickleValue::Text(key) => Some((key.as_str(), self.document.get(value))),
            _ => None,
        });
        Ok(named.collect())
    }

    fn layer_id(&self, field: &str, key: ValueId) -> Result<usize, RotationError> {
        let id = self.number(self.document.get(key)).filter(|&id| id <= LAYER_ID_LIMIT);
        id.ok_or_else(|| self.field(field, format!("a layer id is not a number from 0 to {LAYER_ID_LIMIT}")))
    }

    /// A whole number, as a number or as digits.
    fn number(&self, value: &PickleValue) -> Option<usize> {
        match value {
            PickleValue::Integer(number) => usize::try_from(*number).ok(),
            PickleValue::Text(digits) if digits.bytes().all(|byte| byte.is_ascii_digit()) => {
                digits.parse().ok()
            }
            _ => None,
        }
    }

    fn field(&self, field: impl std::fmt::Display, problem: impl std::fmt::Display) -> RotationError {
        RotationError::field(self.path, field, problem)
    }
}

fn describe((dim, heads): (usize, Option<usize>)) -> String {
    heads.map_or(format!("[{dim}, {dim}]"), |heads| format!("[{heads}, {dim}, {dim}]"))
}

/// The elements of a view in row-major order. The interpreter checked that the view lies in its storage, and
/// the archive that the storage has the bytes it claims.
fn gather(view: &TensorView, bytes: &[u8], count: usize) -> Vec<f64> {
    let mut values = Vec::with_capacity(count);
    let mut index = vec![0usize; view.shape.len()];
    for _ in 0..count {
        let position = index.iter().zip(&view.strides).map(|(i, stride)| i * stride).sum::<usize>();
        values.push(element(view.storage.element, bytes, view.offset + position));
        for (i, &size) in index.iter_mut().zip(&view.shape).rev() {
            *i += 1;
            if *i < size {
                break;
            }
            *i = 0;
        }
    }
    values
}

fn element(kind: Element, bytes: &[u8], index: usize) -> f64 {
    fn at<const N: usize>(bytes: &[u8], index: usize) -> [u8; N] {
        let mut array = [0; N];
        array.copy_from_slice(&bytes[index * N..][..N]);
        array
    }
    match kind {
        Element::F64 => f64::from_le_bytes(at(bytes, index)),
        Element::F32 => f32::from_le_bytes(at(bytes, index)).into(),
        Element::F16 => f16::from_le_bytes(at(bytes, index)).into(),
        Element::Bf16 => bf16::from_le_bytes(at(bytes, index)).into(),
    }
}
