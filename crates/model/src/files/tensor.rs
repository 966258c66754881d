//! Tensors as they lie in a file, and the interface both containers share.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use oscar_kernels::DType;
use oscar_kernels::backend::{SharedBytes, StoredMatrix};

use super::FileError;

/// Element type of a stored tensor, including those that can be listed but not read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ElementType {
    /// A type the kernels know.
    Supported(DType),
    /// The container's name of any other type.
    Unsupported(Cow<'static, str>),
}

impl fmt::Display for ElementType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ElementType::Supported(dtype) => dtype.fmt(f),
            ElementType::Unsupported(name) => f.write_str(name),
        }
    }
}

/// One entry of a container's table of tensors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorEntry {
    /// Name in the container.
    pub name: String,
    /// Dimensions of the row-major tensor, outermost first.
    pub shape: Vec<usize>,
    /// The type of the elements.
    pub element_type: ElementType,
    /// Start in the file, checked to lie inside it.
    pub offset: usize,
    /// Size in the file, checked to lie inside it; `None` for a type whose block size is not known.
    pub byte_len: Option<usize>,
}

impl TensorEntry {
    /// Number of elements. The containers reject shapes for which this overflows.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }
}

/// A tensor inside a file: a window whose bounds were checked when the file was opened.
#[derive(Clone)]
pub struct StoredTensor {
    /// The file, for error messages.
    pub path: Arc<Path>,
    /// Name in the container.
    pub name: String,
    /// Dimensions of the row-major tensor, outermost first.
    pub shape: Vec<usize>,
    /// The type of the elements.
    pub dtype: DType,
    /// The bytes of the whole file; the tensor is a part of them.
    pub bytes: SharedBytes,
    /// Start of the tensor in `bytes`.
    pub offset: usize,
}

impl StoredTensor {
    /// The tensor as a matrix `[rows, cols]`; a vector becomes a single row.
    pub fn matrix(&self) -> Result<StoredMatrix, FileError> {
        match self.shape[..] {
            [cols] => Ok(self.stored(1, cols)),
            [rows, cols] => Ok(self.stored(rows, cols)),
            _ => Err(self.wrong_shape("a matrix")),
        }
    }

    /// The bytes of the tensor, whatever its shape.
    pub fn data(&self) -> Result<&[u8], FileError> {
        let all: &[u8] = (*self.bytes).as_ref();
        let len = self.dtype.bytes_for(self.shape.iter().product());
        len.and_then(|len| all.get(self.offset..self.offset.checked_add(len)?))
            .ok_or_else(|| self.wrong_shape("whole blocks"))
    }

    /// A tensor of three dimensions as the matrices it is made of.
    pub fn matrices(&self) -> Result<Vec<StoredMatrix>, FileError> {
        let [count, rows, cols] = self.shape[..] else { return Err(self.wrong_shape("a stack of matrices")) };
        let bytes = self.dtype.bytes_for(cols).and_then(|bytes| bytes.checked_mul(rows));
        let bytes = bytes.ok_or_else(|| self.wrong_shape("rows of whole blocks"))?;
        let at =
            |index: usize| StoredMatrix { offset: self.offset + index * bytes, ..self.stored(rows, cols) };
        Ok((0..count).map(at).collect())
    }

    /// The tensor as a vector (a matrix of one row).
    pub fn vector(&self) -> Result<StoredMatrix, FileError> {
        match self.shape[..] {
            [cols] => Ok(self.stored(1, cols)),
            _ => Err(self.wrong_shape("a vector")),
        }
    }

    fn stored(&self, rows: usize, cols: usize) -> StoredMatrix {
        StoredMatrix {
            bytes: self.bytes.clone(),
            offset: self.offset,
            dtype: self.dtype,
            rows,
            cols,
            scales: None,
        }
    }

    fn wrong_shape(&self, expected: &'static str) -> FileError {
        FileError::WrongShape {
            path: self.path.to_path_buf(),
            tensor: self.name.clone(),
            expected,
            shape: self.shape.clone(),
        }
    }
}

impl fmt::Debug for StoredTensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StoredTensor")
            .field("path", &self.path)
            .field("name", &self.name)
            .field("shape", &self.shape)
            .field("dtype", &self.dtype)
            .field("offset", &self.offset)
            .finish_non_exhaustive()
    }
}

/// The bytes of a tensor, whatever they mean.
#[derive(Clone)]
pub struct TensorBytes {
    /// The file, for error messages.
    pub path: Arc<Path>,
    /// Dimensions of the row-major tensor, outermost first.
    pub shape: Vec<usize>,
    /// The type of the elements.
    pub element_type: ElementType,
    file: SharedBytes,
    range: Range<usize>,
}

impl TensorBytes {
    /// The bytes of an entry of a table, whose bounds were checked when `file` was opened.
    pub(super) fn of_entry(path: Arc<Path>, entry: &TensorEntry, file: SharedBytes) -> TensorBytes {
        let range = entry.offset..entry.offset + entry.byte_len.unwrap_or(0);
        TensorBytes {
            path,
            shape: entry.shape.clone(),
            element_type: entry.element_type.clone(),
            file,
            range,
        }
    }

    /// The bytes of the tensor.
    pub fn data(&self) -> &[u8] {
        (*self.file).as_ref().get(self.range.clone()).unwrap_or_default()
    }
}

/// A container of named tensors.
pub trait TensorSource: Send + Sync {
    /// The file or folder, for messages.
    fn path(&self) -> &Path;

    /// The table of tensors.
    fn entries(&self) -> &[TensorEntry];

    /// Index of `name` in [`TensorSource::entries`].
    fn position(&self, name: &str) -> Option<usize>;

    /// The tensor `name`; an error if it is missing or of a type that cannot be read.
    fn get(&self, name: &str) -> Result<StoredTensor, FileError>;

    /// The bytes of the tensor `name`; an error if it is missing. Formats that keep a matrix in several tensors have some of a type
    /// that is no weight's.
    fn bytes(&self, name: &str) -> Result<TensorBytes, FileError> {
        let StoredTensor { path, shape, dtype, bytes, offset, .. } = self.get(name)?;
        let len = dtype.bytes_for(shape.iter().product()).unwrap_or(0);
        let element_type = ElementType::Supported(dtype);
        Ok(TensorBytes { path, shape, element_type, file: bytes, range: offset..offset + len })
    }

    /// The tensor `name`, `None` if it is missing.
    fn find(&self, name: &str) -> Result<Option<StoredTensor>, FileError> {
        self.contains(name).then(|| self.get(name)).transpose()
    }

    /// Whether there is a tensor `name`.
    fn contains(&self, name: &str) -> bool {
        self.position(name).is_some()
    }

    /// Names of all tensors, in the order of the table.
    fn names(&self) -> Box<dyn Iterator<Item = &str> + '_> {
        Box::new(self.entries().iter().map(|entry| entry.name.as_str()))
    }

    /// Counts tensors, elements and bytes by element type.
    fn summary(&self) -> TensorSummary {
        let mut summary = TensorSummary::default();
        for entry in self.entries() {
            let totals = summary.types.entry(entry.element_type.to_string()).or_default();
            totals.supported = matches!(entry.element_type, ElementType::Supported(_));
            for sum in [totals, &mut summary.total] {
                sum.tensors += 1;
                sum.elements = sum.elements.saturating_add(entry.elements() as u64);
                sum.bytes = sum.bytes.saturating_add(entry.byte_len.unwrap_or(0) as u64);
            }
        }
        summary.total.supported = summary.types.values().all(|totals| totals.supported);
        summary
    }
}

/// How many tensors of each element type a container has.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TensorSummary {
    /// Totals per element type, by name.
    pub types: BTreeMap<String, TypeTotals>,
    /// The sums over all types.
    pub total: TypeTotals,
}

/// What the tensors of one element type add up to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TypeTotals {
    /// The number of tensors of the type.
    pub tensors: usize,
    /// The number of elements in all of them.
    pub elements: u64,
    /// Bytes in the file; tensors of a type with unknown block size count as 0.
    pub bytes: u64,
    /// Whether the type can be read.
    pub supported: bool,
}
