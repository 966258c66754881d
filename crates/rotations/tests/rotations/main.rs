//! Rotation files, from outside the crate.

mod files;
mod fingerprint;
mod mutations;
mod pt;
