//! Rotation files: our own, the published ones, those that ship with the program, and whether they can be
//! trusted.
//!
//! | module | job |
//! |---|---|
//! | [`rotation`] | rotations in memory |
//! | [`safetensors`] | our own file: rotations, means, metrics and what they were made for |
//! | [`pt`] | published PyTorch files, read without running anything |
//! | [`import`] | between the two |
//! | [`interleaved`] | between the two orders of key channels |
//! | [`verify`], [`diff`] | whether a file can be trusted, and how two differ |
//! | [`fingerprint`], [`resolve`] | which model a file is for, and which file a model has |
//! | [`shipped`] | files inside the program |

mod atomic;
mod basis;
pub mod diff;
mod error;
pub mod fingerprint;
pub mod import;
pub mod interleaved;
mod limits;
mod pickle;
pub mod pt;
pub mod resolve;
pub mod rotation;
pub mod safetensors;
pub mod shipped;
pub mod verify;

pub use error::ZooError;
pub use limits::ORTHOGONALITY_LIMIT;
pub use pickle::PickleError;
pub use resolve::check_model;
pub use rotation::{Header, LayerRotations, RotationFile, RotationSet, Scope, SideRotations};
