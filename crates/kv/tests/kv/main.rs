//! The cache's bookkeeping, from outside the crate.

mod edges;
mod host;
mod liveness;
mod model_check;
mod sharing;
mod support;
mod tiers;
