//! Benchmarks.

mod codec;
mod engine;
mod model;

pub use codec::{CodecBench, run as codec};
pub use engine::{
    LongContext, LongContextRow, SharedPrefix, SharedPrefixRow, long_context, shared_prefix,
};
pub use model::{ModelBench, run as model};
