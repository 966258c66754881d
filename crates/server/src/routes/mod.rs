//! The routes, one file or folder for each group, and the router that leads to them.

mod chat;
mod collect;
mod completions;
mod constrain;
mod embeddings;
mod generate;
mod health;
mod info;
mod kept;
mod llama;
mod logprobs;
mod messages;
mod models;
mod observe;
mod openapi;
mod responses;
mod router;
mod score;
mod tokens;

pub(crate) use router::router;

use oscar_engine::FinishReason;
use uuid::Uuid;

use crate::http::sse::write_json;
use crate::state::{AppState, unix_seconds};

/// A new id such as `chatcmpl-…`; `prefix` is all before the dots.
pub(crate) fn fresh_id(prefix: &str) -> String {
    format!("{prefix}{}", Uuid::new_v4().simple())
}

/// Why an answer ended, as OpenAI's clients know it.
pub(crate) fn finish_name(finish: FinishReason) -> &'static str {
    match finish {
        FinishReason::Cancelled => "abort",
        finish => finish.name(),
    }
}

/// The beginning that all chunks of a stream share, up to the number of the choice.
pub(crate) fn chunk_head(app: &AppState, id: &str, object: &str) -> bytes::Bytes {
    use std::fmt::Write;
    let mut head = bytes::BytesMut::new();
    let _ = write!(head, "data: {{\"id\":");
    write_json(&mut head, id);
    let now = unix_seconds(std::time::SystemTime::now());
    let _ = write!(head, ",\"object\":\"{object}\",\"created\":{now},\"model\":");
    write_json(&mut head, &app.model.name);
    let _ = write!(head, ",\"system_fingerprint\":");
    write_json(&mut head, &app.fingerprint);
    let _ = write!(head, ",\"choices\":[");
    head.freeze()
}
