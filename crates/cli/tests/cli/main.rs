//! The built program, from the outside.

mod bad_models;
mod bench;
mod generate;
#[cfg(unix)]
mod pull;
mod support;
mod usage;
mod zoo;
