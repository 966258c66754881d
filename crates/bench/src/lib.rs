//! Everything that is timed, on every device. What a measurement gives is a row, which `oscar bench` puts into an
//! [`oscar_report::Report`] together with the machine.
//!
//! | module | what it times |
//! |---|---|
//! | `model` | prefill and decoding of a whole model; what memory holds of its cache |
//! | `engine` | long contexts by cache type; requests with a common prefix |
//! | `host_prefix` | a prompt whose pages come back from the host's memory |
//! | `resident` | decode steps of many sequences at once |
//! | `calibration` | calibration of some layers of a shape |
//! | `experts` | the feed-forward block of a mixture of experts alone |
//! | `streams` | answers in progress while a long prompt is read |
//! | `serve` | a server as its clients see it |
//! | `attention`, `codec` | attention and the encoder alone, on the processor |
//! | [`cuda`] | attention, sealing and writing on a card, against its read ceiling |

mod attention;
mod calibration;
mod capacity;
mod codec;
pub mod cuda;
mod engine;
mod experts;
mod formats;
mod host_prefix;
mod model;
mod resident;
mod serve;
mod streams;

pub use attention::{AttentionBench, AttentionBenchError, AttentionRow, AttentionSlope, run as attention};
pub use calibration::{CalibrationRow, calibration};
pub use capacity::Capacity;
pub use codec::{CodecBench, run as codec};
pub use engine::{
    LongContext, LongContextRow, LongContextStage, SharedPrefix, SharedPrefixRow, long_context, shared_prefix,
};
pub use experts::{ExpertsBench, ExpertsRow, experts};
pub use formats::PageFormat;
pub use host_prefix::{HostPrefixRow, host_prefix};
pub use model::{ModelBench, run as model};
pub use resident::{ResidentBench, ResidentRow, resident, sequence_bytes};
pub use serve::{
    AddedLatencyRow, Arrival, GoodputLimits, Pace, ServeBench, ServeBenchError, ServeRow, StreamedRow,
    Workload, added_latency, serve, streamed,
};
pub use streams::{StreamsRow, stream_tokens, streams};
