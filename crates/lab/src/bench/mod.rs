//! Benchmarks.

mod codec;
mod model;

pub use codec::{CodecBench, run as codec};
pub use model::{ModelBench, run as model};
