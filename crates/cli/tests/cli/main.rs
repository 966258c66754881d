//! The built program, from the outside.

mod bad_models;
mod generate;
#[cfg(unix)]
mod pull;
mod support;
mod usage;
