//! The CPU backend.
//!
//! | module | job |
//! |---|---|
//! | [`isa`] | which instruction sets this machine has, and the override that forces a lower one |
//! | [`pool`] | worker threads for the decode loop |
//! | [`activation`] | activations prepared for integer dot products |

pub mod activation;
pub mod isa;
pub mod pool;
