//! Engines with tiny models, from outside the crate.

#![allow(clippy::unwrap_used)] // helpers of tests are tests too

mod batching;
mod cache_events;
mod conversations;
#[cfg(not(feature = "cuda-tests"))] // a card has no experts yet
mod experts;
mod generate;
#[cfg(not(feature = "cuda-tests"))]
mod high_tier;
mod mock;
mod options;
mod pressure;
#[cfg(not(feature = "cuda-tests"))]
mod sliding;
mod stress;
mod support;
mod tiers;
