//! The CPU backend.
//!
//! | module | job |
//! |---|---|
//! | [`isa`] | which instruction sets this machine has, and the override that forces a lower one |
//! | [`pool`] | worker threads for the decode loop |
//! | `per_thread` | memory that belongs to one of them at a time |
//! | `handover` | a value that one of them makes for all |
//! | `sync` | the primitives both are made of, which a checker replaces |
//! | [`activation`] | activations prepared for integer dot products |
//! | [`dot`] | dot products of stored weights with a few rows |
//! | [`encode`] | rows into 2-bit pages and back |
//! | `elementwise` | norms, activations, rotary embedding |
//! | `memory` | aligned buffers and disjoint writes |
//! | `simd` | vectors and tiles: what the kernels use of an instruction set |
//! | `aligned` | scratch memory on cache lines |
//! | `gemm` | matrix products for many rows |
//! | [`attention`] | attention over bf16 and sealed pages |
//! | `tensors` | weights and activations |
//! | `cache`, `page_means` | page pools, and what the keys of sealed pages are centred by |
//! | `heads` | the shape of an attention layer |
//! | `step` | tables of one step |
//! | `experts` | mixtures of experts: rows sorted by the experts that they chose |
//! | `outputs` | what a block adds to the residual stream |
//! | `rows` | loops over the rows of a matrix |
//! | `project`, `store`, `attend` | projections, page writes and attention over the pool |
//! | `backend`, `inspect` | the traits, on all of these |

pub mod activation;
mod aligned;
mod attend;
pub mod attention;
mod backend;
mod cache;
pub mod dot;
mod elementwise;
pub mod encode;
mod experts;
mod gemm;
mod handover;
mod heads;
mod inspect;
pub mod isa;
pub mod memory;
mod outputs;
mod page_means;
mod per_thread;
pub mod pool;
mod project;
mod rows;
mod simd;
mod step;
mod store;
mod sync;
mod tensors;

pub use backend::CpuBackend;
pub use cache::Cache;
pub use experts::Experts;
pub use step::Step;
pub use tensors::{Matrix, Weight};
