//! Engines with tiny models, from outside the crate.

#![allow(clippy::unwrap_used)] // helpers of tests are tests too

mod batching;
mod cache_events;
mod conversations;
mod generate;
mod mock;
mod options;
mod pressure;
#[cfg(not(feature = "cuda-tests"))]
mod sliding;
mod stress;
mod support;
