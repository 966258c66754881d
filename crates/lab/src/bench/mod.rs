//! Benchmarks.

mod model;

pub use model::{ModelBench, run as model};
