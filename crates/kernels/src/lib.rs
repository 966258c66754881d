//! How a page is written and attended to, and every other tensor operation of a forward pass.
//!
//! | module | what it holds |
//! |---|---|
//! | [`backend`] | the door: one trait that a device implements, and the descriptors that pass through it |
//! | [`inspect`] | what calibration and evaluation need from a device beyond serving |
//! | `dtype` | element types and block sizes of stored weights |
//! | [`quant`] | the scalar meaning of every quantised block, the oracle for all fast paths |
//! | [`cpu`] | the CPU backend: scalar reference, AVX2, AVX-512, AMX and NEON paths |
//! | [`cuda`] | kernels for NVIDIA GPUs, compiled at run time; builds and loads without CUDA |

// Vector instructions, memory that threads share and calls of the CUDA driver: what this crate is made of. Each block says
// why it is sound.
#![allow(unsafe_code)]

pub mod backend;
pub mod cpu;
pub mod cuda;
mod dtype;
pub mod inspect;
pub mod quant;

pub use backend::{Backend, KernelError};
pub use dtype::DType;
pub use inspect::Inspect;
