//! Model files: GGUF, safetensors and their JSON companions, read without trusting a single length in them.
//!
//! Weights stay in the file mapping; a [`StoredTensor`] is a checked window into it. Both containers implement
//! [`TensorSource`], so the loader does not care which one it reads.

mod bytes;
mod error;
pub mod gguf;
mod tensor;

pub use bytes::MappedFile;
pub use error::FileError;
pub use gguf::Gguf;
pub use tensor::{ElementType, StoredTensor, Summary, TensorEntry, TensorSource, TypeTotals};
