//! How a page is written and attended to, and every other tensor operation of a forward pass.
//!
//! | module | what it holds |
//! |---|---|
//! | [`backend`] | one trait that a device implements, and the descriptors that forward passes hand to it |
//! | [`inspect`] | what calibration and evaluation need from a device beyond serving |
//! | `dtype` | element types and block sizes of stored weights |
//! | `error` | what can go wrong on a device, and what a device may not have |
//! | `sequence` | the sequences of a step and their page tables, checked once |
//! | [`routing`] | which experts a row goes to, the same on every device |
//! | `sampling` | drawing a token from a row of logits |
//! | [`quant`] | every quantised block decoded by plain loops, which all fast paths are compared with |
//! | [`cpu`] | the CPU backend: scalar reference, AVX2, AVX-512, AMX and NEON paths |
//! | [`cuda`] | the CUDA backend; its kernels are compiled at run time, and it builds and loads without CUDA |

// Vector instructions, memory that threads share and calls of the CUDA driver: what this crate is made of. Each block says
// why it is sound.
#![allow(unsafe_code)]

pub mod backend;
pub mod cpu;
pub mod cuda;
mod dtype;
mod error;
pub mod inspect;
pub mod quant;
pub mod routing;
mod sampling;
mod sequence;

pub use backend::{Backend, KernelError};
pub use dtype::DType;
pub use inspect::Inspect;
