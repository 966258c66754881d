//! The server as its clients see it: in front of a mock, and in front of a tiny model.

#![allow(clippy::unwrap_used)]

mod bad_input;
mod chat;
mod completions;
mod connections;
mod control_tokens;
mod cut_calls;
mod deployment;
mod earlier_calls;
mod embeddings;
mod fields;
mod forms;
mod front_ends;
mod hostile;
mod kv_events;
mod llama;
mod lost_device;
mod messages;
mod model;
mod native;
mod observe;
mod openapi;
mod page;
mod parsed;
mod responses;
mod sampling;
mod sent_names;
mod support;
mod templates;
mod thinking;
mod tiers;
