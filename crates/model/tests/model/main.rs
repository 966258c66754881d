//! Loading, tokenising and running models, from outside the crate.

#![allow(clippy::unwrap_used)] // helpers of tests are tests too

#[cfg(feature = "cuda-tests")]
mod card;
mod files_gguf;
mod files_safetensors;
#[path = "../files_writer/mod.rs"]
mod files_writer;
mod fp8_shards;
mod gguf_gpt_oss;
mod logits;
mod real_model;
mod room;
mod sampling_defaults;
mod source_fetch;
mod source_resolve;
mod text_control_tokens;
mod text_real_models;
mod text_remembered;
mod text_templates;
mod text_tokenizers;
