//! Rotation files, from outside the crate.

mod codecs;
mod files;
mod fingerprint;
mod mutations;
mod pt;
mod verification;
