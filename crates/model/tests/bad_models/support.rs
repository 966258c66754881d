//! Fixture checkpoints that can be edited, and what every refusal must look like.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use oscar_codec::ExactSlot;
use oscar_kernels::backend::{Batch, Sampled, Sampling, SequenceRows};
use oscar_kernels::cpu::CpuBackend;
use oscar_kernels::{Backend, DType, KernelError};
use oscar_model::files::gguf::{MetadataArray, MetadataValue};
use oscar_model::files::{ElementType, Gguf};
use oscar_model::source::ModelPath;
use oscar_model::{Model, ModelError, ModelFiles};
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView};
use serde_json::{Map, Value};
use tempfile::TempDir;

use crate::files_writer::{GgufWriter, WrittenTensor, array, string};

pub(crate) fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/models").join(name)
}

pub(crate) fn backend() -> Arc<CpuBackend> {
    static BACKEND: OnceLock<Arc<CpuBackend>> = OnceLock::new();
    BACKEND.get_or_init(|| Arc::new(CpuBackend::new(1).unwrap())).clone()
}

/// Opens and loads a model.
pub(crate) fn load(path: &ModelPath) -> Result<Model<CpuBackend>, ModelError> {
    ModelFiles::open(path)?.load_model(backend())
}

/// Runs three tokens and draws a fourth.
pub(crate) fn run<B: Backend>(model: &Model<B>) -> Result<Sampled, KernelError> {
    let last = model.config().vocab_size as u32 - 1;
    let mut cache = model.cache(2)?;
    let mut activations = model.activations(3, 1)?;
    let pages = ExactSlot::first(1);
    let rows = SequenceRows::exact(0, 3, &pages);
    let batch = Batch { tokens: &[0, last / 2, last], sequences: &[rows] };
    model.forward(&batch, &[2], &mut cache, &mut activations)?;
    model
        .backend()
        .sample(activations.logits(), &[Sampling { logprobs: Some(0), ..Sampling::default() }])?
        .remove(0)
}

/// The error of a model that must be refused: one line that names the file and contains `words`.
pub(crate) fn refusal(path: &ModelPath, words: &[&str]) -> ModelError {
    let Err(error) = load(path) else { panic!("{words:?} was not refused") };
    let message = error.to_string();
    assert!(!message.contains(char::is_control), "more than one line: {message:?}");
    let file = path.path().display().to_string();
    assert_eq!(message.matches(&file).count(), 1, "{message:?} must name {file} once");
    for word in words {
        assert!(message.contains(word), "{word:?} is not in {message:?}");
    }
    error
}

/// Asserts the type of a refusal and the words in it.
macro_rules! refused {
    ($model:expr, $pattern:pat, $($word:expr),+ $(,)?) => {{
        let error = $crate::support::refusal(&$model.path(), &[$($word),+]);
        assert!(matches!(error, $pattern), "{error:?}");
    }};
}
pub(crate) use refused;

/// One stored tensor of a safetensors file.
#[derive(Clone)]
pub(crate) struct Stored {
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<usize>,
    pub(crate) data: Vec<u8>,
}

/// A copy of a fixture folder.
pub(crate) struct Folder {
    folder: TempDir,
}

impl Folder {
    pub(crate) fn copy(name: &str) -> Folder {
        let folder = tempfile::tempdir().unwrap();
        for entry in fs::read_dir(fixture(name)).unwrap() {
            let entry = entry.unwrap();
            if !["expected.safetensors", "fixture.json"].contains(&entry.file_name().to_str().unwrap()) {
                fs::copy(entry.path(), folder.path().join(entry.file_name())).unwrap();
            }
        }
        Folder { folder }
    }

    pub(crate) fn path(&self) -> ModelPath {
        ModelPath::Folder(self.folder.path().to_path_buf())
    }

    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Changes a JSON object of the folder.
    pub(crate) fn json(self, name: &str, change: impl FnOnce(&mut Map<String, Value>)) -> Folder {
        let mut value: Value = serde_json::from_slice(&fs::read(self.file(name)).unwrap()).unwrap();
        change(value.as_object_mut().unwrap());
        fs::write(self.file(name), value.to_string()).unwrap();
        self
    }

    /// Sets a field of `config.json`.
    pub(crate) fn set(self, field: &str, value: impl Into<Value>) -> Folder {
        self.json("config.json", |config| {
            config.insert(field.to_owned(), value.into());
        })
    }

    /// Drops a field of `config.json`.
    pub(crate) fn without(self, field: &str) -> Folder {
        self.json("config.json", |config| {
            config.remove(field).unwrap();
        })
    }

    /// Changes the tensors of `model.safetensors`.
    pub(crate) fn tensors(self, change: impl FnOnce(&mut BTreeMap<String, Stored>)) -> Folder {
        let path = self.file("model.safetensors");
        let bytes = fs::read(&path).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let stored = |view: TensorView<'_>| Stored {
            dtype: view.dtype(),
            shape: view.shape().to_vec(),
            data: view.data().to_vec(),
        };
        let mut tensors = file.tensors().into_iter().map(|(name, view)| (name, stored(view))).collect();
        change(&mut tensors);
        let views = tensors.iter().map(|(name, tensor)| {
            (name, TensorView::new(tensor.dtype, tensor.shape.clone(), &tensor.data).unwrap())
        });
        fs::write(path, safetensors::serialize(views, None).unwrap()).unwrap();
        self
    }

    /// Changes one tensor.
    pub(crate) fn tensor(self, name: &str, change: impl FnOnce(&mut Stored)) -> Folder {
        self.tensors(|tensors| change(tensors.get_mut(name).unwrap()))
    }
}

/// A GGUF file taken apart.
#[derive(Clone)]
pub(crate) struct GgufParts {
    folder: Arc<TempDir>,
    pub(crate) metadata: Vec<(String, u32, Vec<u8>)>,
    pub(crate) tensors: Vec<WrittenTensor>,
}

impl GgufParts {
    pub(crate) fn copy(name: &str) -> GgufParts {
        let path = fixture(name).join("model.gguf");
        let bytes = fs::read(&path).unwrap();
        let file = Gguf::open(&path).unwrap();
        let metadata = file.metadata().entries().iter().map(|(key, value)| {
            let (type_id, value) = encode(value);
            (key.clone(), type_id, value)
        });
        let tensors = file.tensors().iter().map(|entry| WrittenTensor {
            name: entry.name.clone().into(),
            dims: entry.shape.iter().rev().map(|&len| len as u64).collect(),
            type_id: type_id(&entry.element_type),
            data: bytes[entry.offset..][..entry.byte_len.unwrap()].to_vec(),
            ..Default::default()
        });
        let folder = Arc::new(tempfile::tempdir().unwrap());
        GgufParts { folder, metadata: metadata.collect(), tensors: tensors.collect() }
    }

    pub(crate) fn bytes(&self) -> Vec<u8> {
        let mut writer = GgufWriter::new();
        for (key, type_id, value) in &self.metadata {
            writer = writer.raw(key, *type_id, value);
        }
        writer.tensors = self.tensors.clone();
        writer.build()
    }

    /// Writes the file.
    pub(crate) fn path(&self) -> ModelPath {
        let path = self.folder.path().join("model.gguf");
        fs::write(&path, self.bytes()).unwrap();
        ModelPath::Gguf(path)
    }

    /// Sets a key to an encoded value.
    pub(crate) fn set(mut self, key: &str, (type_id, value): (u32, Vec<u8>)) -> GgufParts {
        let entry = (key.to_owned(), type_id, value);
        match self.metadata.iter_mut().find(|(found, ..)| found == key) {
            Some(found) => *found = entry,
            None => self.metadata.push(entry),
        }
        self
    }

    pub(crate) fn without(mut self, key: &str) -> GgufParts {
        let before = self.metadata.len();
        self.metadata.retain(|(found, ..)| found != key);
        assert!(self.metadata.len() < before, "{key}");
        self
    }

    pub(crate) fn tensor(mut self, name: &str, change: impl FnOnce(&mut WrittenTensor)) -> GgufParts {
        change(self.tensors.iter_mut().find(|tensor| tensor.name == name.as_bytes()).unwrap());
        self
    }

    pub(crate) fn without_tensor(mut self, name: &str) -> GgufParts {
        self.tensors.retain(|tensor| tensor.name != name.as_bytes());
        self
    }
}

pub(crate) fn u32_value(value: u32) -> (u32, Vec<u8>) {
    encode(&MetadataValue::U32(value))
}

pub(crate) fn bools_value(values: &[bool]) -> (u32, Vec<u8>) {
    encode(&MetadataValue::Array(MetadataArray::Bool(values.to_vec())))
}

pub(crate) fn i32s_value(values: &[i32]) -> (u32, Vec<u8>) {
    encode(&MetadataValue::Array(MetadataArray::I32(values.to_vec())))
}

pub(crate) fn f32_value(value: f32) -> (u32, Vec<u8>) {
    encode(&MetadataValue::F32(value))
}

pub(crate) fn str_value(value: &str) -> (u32, Vec<u8>) {
    encode(&MetadataValue::String(value.to_owned()))
}

/// Type id and bytes of the values fixtures hold.
pub(crate) fn encode(value: &MetadataValue) -> (u32, Vec<u8>) {
    match value {
        MetadataValue::U32(value) => (4, value.to_le_bytes().to_vec()),
        MetadataValue::I32(value) => (5, value.to_le_bytes().to_vec()),
        MetadataValue::F32(value) => (6, value.to_le_bytes().to_vec()),
        MetadataValue::Bool(value) => (7, vec![u8::from(*value)]),
        MetadataValue::String(value) => (8, string(value)),
        MetadataValue::Array(MetadataArray::I32(values)) => {
            let elements: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
            (9, array(5, values.len() as u64, &elements))
        }
        MetadataValue::Array(MetadataArray::Bool(values)) => {
            let elements: Vec<u8> = values.iter().map(|&value| value.into()).collect();
            (9, array(7, values.len() as u64, &elements))
        }
        MetadataValue::Array(MetadataArray::Strings(values)) => {
            let elements: Vec<u8> = values.iter().flat_map(string).collect();
            (9, array(8, values.len() as u64, &elements))
        }
        MetadataValue::U64(value) => (10, value.to_le_bytes().to_vec()),
        other => panic!("{other:?} is in no fixture"),
    }
}

fn type_id(element_type: &ElementType) -> u32 {
    match element_type {
        ElementType::Supported(DType::F32) => 0,
        ElementType::Supported(DType::F16) => 1,
        ElementType::Supported(DType::Q8_0) => 8,
        ElementType::Supported(DType::BF16) => 30,
        ElementType::Supported(DType::Mxfp4) => 39,
        other => panic!("{other} is in no fixture"),
    }
}

/// Notes the largest piece of memory each thread asks for.
struct NotingAllocator;

thread_local! {
    static LARGEST: Cell<usize> = const { Cell::new(0) };
}

// SAFETY: every call is passed on unchanged to the system's allocator.
#[allow(unsafe_code)]
unsafe impl GlobalAlloc for NotingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LARGEST.set(LARGEST.get().max(layout.size()));
        // SAFETY: the caller keeps the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        LARGEST.set(LARGEST.get().max(layout.size()));
        // SAFETY: the caller keeps the contract of `alloc_zeroed`.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the pointer came from `System` through this allocator.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        LARGEST.set(LARGEST.get().max(size));
        // SAFETY: the pointer came from `System` through this allocator.
        unsafe { System.realloc(pointer, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: NotingAllocator = NotingAllocator;

/// The largest single piece of memory `work` asks for on this thread.
pub(crate) fn largest_allocation(work: impl FnOnce()) -> usize {
    LARGEST.set(0);
    work();
    LARGEST.get()
}
