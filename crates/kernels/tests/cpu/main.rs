//! Kernels of the CPU against their references, from outside the crate.

#![allow(clippy::unwrap_used)] // helpers of tests are tests too

mod experts;
mod history;
mod mixed;
mod quant_oracle;
mod sinks;
mod windows;
