//! How a page is written and attended to, and every other tensor operation of a forward pass.
//!
//! | module | what it holds |
//! |---|---|
//! | [`backend`] | the door: one trait that a device implements, and the descriptors that pass through it |
//! | [`inspect`] | what calibration and evaluation need from a device beyond serving |
//! | `dtype` | element types and block sizes of stored weights |
//! | `sequence` | the sequences of a step and their page tables, checked once |
//! | [`routing`] | which experts a row goes to, the same on every device |
//! | `sampling` | drawing a token from a row of logits |
//! | [`quant`] | the scalar meaning of every quantised block, the oracle for all fast paths |
//! | [`cpu`] | the CPU backend: scalar reference, AVX2, AVX-512, AMX and NEON paths |
//! | [`cuda`] | the CUDA backend; its kernels are compiled at run time, and it builds and loads without CUDA |

// Vector instructions, memory that threads share and calls of the CUDA driver: what this crate is made of. Each block says
// why it is sound.
#![allow(unsafe_code)]

pub mod backend;
pub mod cpu;
pub mod cuda;
mod dtype;
pub mod inspect;
pub mod quant;
pub mod routing;
mod sampling;
mod sequence;

pub use backend::{Backend, KernelError};
pub use dtype::DType;
pub use inspect::Inspect;
