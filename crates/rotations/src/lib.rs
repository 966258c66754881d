//! Which codec the cache of a model gets.
//!
//! ```text
//! CacheOptions ──► RotationSource::find ──► FoundRotations ──► CachePlan::settle ──► PageCodec for the engine
//!                  (own file, published        (file in the model's own
//!                   pair, cache, shipped)       channel order, certificate)
//! ```
//!
//! | module | job |
//! |---|---|
//! | [`CachePlan`] | from what a user asks for to the codec of a cache, and why |
//! | [`codec`] | from a rotation file to a codec |
//! | [`find`] | which rotation file a model has |
//! | [`means`] | mean keys for rotations that came without |
//! | [`certificate`] | what calibration found out about a model's rotations |
//! | `probe` | the part of it that tells whether a model still finds what it read long ago |
//! | [`rotation`] | rotations in memory |
//! | [`safetensors`] | our own file: rotations, means, metrics and what they were made for |
//! | [`pt`] | published PyTorch files, read without running anything |
//! | [`import`] | between the two |
//! | [`interleaved`] | between the two orders of key channels |
//! | [`verify`], [`diff`] | whether a file can be trusted, and how two differ |
//! | [`identity`] | which model a file is for |
//! | [`shipped`] | files inside the program |

mod atomic;
mod basis;
mod cache_type;
pub mod certificate;
pub mod codec;
pub mod diff;
mod error;
pub mod find;
mod hadamard;
pub mod identity;
pub mod import;
pub mod interleaved;
mod limits;
pub mod means;
mod notice;
mod pickle;
mod plan;
mod probe;
pub mod pt;
pub mod rotation;
pub mod safetensors;
pub mod shipped;
mod sliding;
mod verdict;
pub mod verify;

pub use cache_type::CacheType;
pub use certificate::Certificate;
pub use codec::{Int2Encoder, Int2Options, PAPER_RULES};
pub use error::RotationError;
pub use find::{FoundRotations, RotationFiles, RotationSource, check_model};
pub use identity::ModelIdentity;
pub use limits::ORTHOGONALITY_LIMIT;
pub use notice::Notice;
pub use pickle::PickleError;
pub use plan::{CacheOptions, CachePlan, EncoderOptions};
pub use probe::{ProbeDistance, RetrievalProbe};
pub use rotation::{LayerRotations, RotationFile, RotationHeader, RotationSet, Scope, SideRotations};
pub use verdict::Verdict;
