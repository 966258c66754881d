//! The server: what clients send, and what the model says to them.

pub mod grammar;
pub mod parse;
