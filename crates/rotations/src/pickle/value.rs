//! The values that a pickle describes, in one arena.

/// Element type of a stored tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Element {
    F32,
    F64,
    F16,
    Bf16,
}

impl Element {
    pub(crate) fn bytes(self) -> usize {
        match self {
            Element::F64 => 8,
            Element::F32 => 4,
            Element::F16 | Element::Bf16 => 2,
        }
    }
}

/// Bytes of a tensor that lie in another member of the archive.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct TensorStorage {
    pub(crate) key: String,
    pub(crate) element: Element,
    pub(crate) elements: usize,
}

/// A strided view of a storage.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TensorView {
    pub(crate) storage: TensorStorage,
    pub(crate) offset: usize,
    pub(crate) shape: Vec<usize>,
    pub(crate) strides: Vec<usize>,
}

/// Index of a value in the arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ValueId(pub(super) u32);

/// A value that a pickle can describe.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum PickleValue {
    None,
    Bool(bool),
    Integer(i64),
    Float(f64),
    Text(String),
    Tuple(Vec<ValueId>),
    List(Vec<ValueId>),
    Dictionary(Vec<(ValueId, ValueId)>),
    RebuildTensor,
    OrderedDictionary,
    StorageType(Element),
    TensorStorage(TensorStorage),
    Tensor(TensorView),
}

/// The object a pickle describes.
#[derive(Debug)]
pub(crate) struct PickleDocument {
    pub(super) values: Vec<PickleValue>,
    pub(super) root: ValueId,
}

impl PickleDocument {
    pub(crate) fn root(&self) -> &PickleValue {
        self.get(self.root)
    }

    pub(crate) fn get(&self, id: ValueId) -> &PickleValue {
        &self.values[id.0 as usize]
    }
}
