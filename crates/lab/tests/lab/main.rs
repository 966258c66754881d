//! Codecs in whole models, from outside the crate.

#![allow(clippy::unwrap_used)] // helpers of tests are tests too

mod codec_attention;
mod families;
mod real_model;
mod served_cache;
