//! Files in, logits out.

pub mod files;
pub mod source;
pub mod text;
