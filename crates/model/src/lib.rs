//! Files in, logits out.

pub mod files;
pub mod text;
pub mod source;
