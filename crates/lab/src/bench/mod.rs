//! Benchmarks.

mod attention;
mod codec;
mod cuda;
mod engine;
mod model;

pub use attention::{AttentionBench, AttentionBenchError, AttentionRow, AttentionSlope, run as attention};
pub use codec::{CodecBench, run as codec};
pub use cuda::{CudaBench, CudaBenchError, CudaRow, run as cuda_attention};
pub use engine::{
    LongContext, LongContextRow, SharedPrefix, SharedPrefixRow, Stage, long_context, shared_prefix,
};
pub use model::{ModelBench, run as model};
