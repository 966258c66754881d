//! Kernels for NVIDIA GPUs from sm_80 on. Nothing here needs CUDA to build: the driver and the run-time compiler are
//! looked for when [`Device::open`] is called, and what is missing is an error that names it.
//!
//! | module | job |
//! |---|---|
//! | `device` | opening a card, its limits, loading kernels |
//! | [`compile`] | `.cu` sources to machine code with NVRTC, and the cache on disk |
//! | `page_order` | the order of bytes inside a page on the device, and converters from and to the CPU's |
//! | `page_means` | what the keys of sealed pages are centred by |
//! | `plan` | a ragged batch cut into work of equal cost for every block |
//! | `tuning` | how the decode kernel is laid out on a multiprocessor |
//! | `attention` | decode attention over bf16 and sealed pages in one launch |
//! | [`seal`] | full bf16 pages to sealed pages, all layers and heads in one launch, bytes equal to the CPU's |
//! | [`mod@write`] | QK-norm, rotary embedding, the codec's basis and the write to bf16 pages in one launch |
//! | [`mod@reference`] | attention in f64 and random pages, which tests and benchmarks compare with |
//! | `weights` | weights in tiles on the card, from every stored type |
//! | `products`, `multiply`, `blas` | products with weights: own kernels for few rows, cuBLASLt for many |
//! | `norm` | norms over all heads of a layer |
//! | `routed` | mixtures of experts: routing, and products of the experts that were chosen |
//! | `prefill` | attention of many rows over bf16 and sealed pages |
//! | `readings` | which kernels read the history of which layers and sequences |
//! | `cache`, `step` | page pools, and the tables of a step |
//! | `sample` | tokens from logits that stay on the card |
//! | `graphs` | recorded decode steps |
//! | `backend`, `inspect` | the traits, on all of these |
//! | `kernels/` | the sources: they include no header, and their options are in `configurations.json` |

mod attend_layer;
mod attention;
mod backend;
#[cfg(test)]
mod backend_tests;
mod blas;
mod cache;
pub mod compile;
mod device;
#[cfg(test)]
mod exact_tests;
mod experts_few;
mod graphs;
mod host;
mod inspect;
mod multiply;
mod norm;
mod operands;
mod outputs;
mod page_means;
mod page_order;
mod plan;
mod prefill;
mod products;
mod readings;
pub mod reference;
mod routed;
mod row_blocks;
mod sample;
pub mod seal;
mod step;
mod step_tables;
mod tile_kind;
mod tuning;
mod unpacked;
mod weights;
pub mod write;

pub use crate::error::CudaError;
pub use attention::{DecodeAttention, PoolView, ScratchView, ValueTransform};
pub use backend::{CudaBackend, CudaBuffer};
pub use cache::CudaCache;
pub use device::Device;
pub use page_means::{PageMeanTable, PageMeansView};
pub use page_order::PageOrder;
pub use plan::{DecodeSequence, Plan, Split};
pub use prefill::{PrefillAttention, PrefillPlan, PrefillPools};
pub use row_blocks::PrefillSequence;
pub use sample::CudaDraws;
pub use seal::{PageSealer, SealPools};
pub use step::CudaStep;
pub use tuning::{DecodeShape, Tuning};
pub use weights::CudaWeight;
pub use write::{RowWriter, WritePools};
