//! Engines with tiny models, from outside the crate.

#![allow(clippy::unwrap_used)] // helpers of tests are tests too

mod batching;
mod cache_events;
mod conversations;
mod experts;
mod generate;
mod high_tier;
#[cfg(feature = "cuda-tests")]
mod host_pages;
mod mock;
mod options;
mod pressure;
mod sliding;
mod stress;
mod support;
mod tiers;
