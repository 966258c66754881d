//! The built program, from the outside.

mod generate;
#[cfg(unix)]
mod pull;
mod support;
mod usage;
