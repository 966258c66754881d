//! Models that cannot be run: every one is refused with a typed error of one line that names the file and the field
//! or tensor at fault, or fails later with a typed error. None of them panics or takes memory it has no use for.

#![allow(clippy::unwrap_used)]

#[path = "../files_writer/mod.rs"]
mod files_writer;

mod config_json;
mod experts;
mod folders;
mod gemma3;
mod gguf;
mod gpt_oss;
mod mutations;
mod numbers;
mod support;
