//! What the bytes of a KV page mean.
//!
//! A page holds [`PAGE_TOKENS`] consecutive tokens of one sequence, for one layer and one KV head. This crate
//! knows numbers only: no I/O, no threads, no models.

pub mod page;

pub use page::{KvGeometry, PAGE_TOKENS, PageFormat};
