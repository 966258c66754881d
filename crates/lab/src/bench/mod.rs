//! Benchmarks.

mod attention;
mod codec;
mod cuda;
mod cuda_codec;
mod engine;
mod model;
mod serve;

pub use attention::{AttentionBench, AttentionBenchError, AttentionRow, AttentionSlope, run as attention};
pub use codec::{CodecBench, run as codec};
pub use cuda::{CudaBench, CudaBenchError, CudaRow, roofline, run as cuda_attention};
pub use cuda_codec::{CudaCodecBench, CudaCodecRow, run as cuda_codec};
pub use engine::{
    LongContext, LongContextRow, SharedPrefix, SharedPrefixRow, Stage, long_context, shared_prefix,
};
pub use model::{ModelBench, run as model};
pub use serve::{
    AddedLatencyRow, Arrival, Limits, Pace, ServeBench, ServeBenchError, ServeRow, StreamedRow, Workload,
    added_latency, serve, streamed,
};
