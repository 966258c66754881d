//! Model files: GGUF, safetensors and their JSON companions, read without trusting a single length in them.
//!
//! Weights stay in the file mapping, or in what [`WeightMemory`] puts in its place; a [`StoredTensor`] is a checked window
//! into it. Both containers implement [`TensorSource`], so the loader does not care which one it reads.

mod bytes;
pub mod config;
mod error;
pub mod gguf;
mod large_pages;
pub mod safetensors;
mod tensor;
mod text_part;

pub use bytes::{MappedFile, WeightMemory};
pub use config::{Fields, JsonFile};
pub use error::FileError;
pub(crate) use error::on_one_line;
pub use gguf::Gguf;
pub use safetensors::Safetensors;
pub use tensor::{
    ElementType, StoredTensor, TensorBytes, TensorEntry, TensorSource, TensorSummary, TypeTotals,
};
pub(crate) use text_part::TextPart;
