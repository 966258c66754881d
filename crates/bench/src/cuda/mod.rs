//! Kernels of a card, timed as they run in a model: on pages that are in no cache, replayed from a graph.
//!
//! | module | job |
//! |---|---|
//! | `attention` | decode attention: every format, batch and context, as `oscar bench attention` shows it |
//! | `codec` | sealing by format and rule, as `oscar bench codec` shows it |
//! | `decode` | one case of decode attention, timed and compared with f64 |
//! | `page_means` | keys that are centred page by page |
//! | `pages` | one case of sealing or writing |
//! | `prefill` | attention of prompts, as `oscar bench attention --prompt-tokens` shows it |
//! | `read` | the kernel of the read ceiling |

mod attention;
mod codec;
mod decode;
mod page_means;
mod pages;
mod prefill;
mod read;

pub use attention::{CudaAttentionBench, CudaAttentionRow, CudaBenchError, roofline, run as attention};
pub use codec::{CudaCodecBench, CudaCodecRow, run as codec};
pub use decode::{DecodeCase, MeasuredDecode, measure, read_ceiling};
pub use pages::{MeasuredPages, measure_sealing, measure_writing};
pub use prefill::{CudaPrefillBench, CudaPrefillRow, run as prefill};
