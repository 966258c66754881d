//! What tests of several crates need. Nothing that is shipped depends on this crate.
//!
//! | item | what it is for |
//! |---|---|
//! | [`tiny_model`] | a random model of a few kilobytes with any context length |
//! | [`skipped`] | the line that says what a test could not do on this machine |
//! | [`HashBackend`] | a device whose tokens are hashes of everything that a sequence may see |

mod hash_backend;
mod skipped;
mod tiny_model;

pub use hash_backend::{FaultCounts, FaultRates, HashBackend, HashBuffer, HashCache, HashStep};
pub use skipped::skipped;
pub use tiny_model::{tiny_global_model, tiny_model, tiny_model_with, tiny_sliding_model};
