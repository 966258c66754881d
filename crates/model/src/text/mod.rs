//! Text in, token ids out, and back: tokenizers, streaming decoding and chat templates.
//!
//! A model file carries its vocabulary either as a `tokenizer.json` or as GGUF metadata; both become one
//! [`Tokenizer`]. Every token also has its raw bytes in a table, so decoding is a table walk that never has to
//! look at more than the newest token ([`StreamDecoder`]). [`ChatTemplate`] turns a conversation into the exact
//! prompt text the model was trained on, and [`RememberedText`] keeps the ids of what was said in it.

mod added;
mod byte_level;
mod chat_template;
mod control;
mod encoder;
mod error;
mod literals;
mod marked;
mod operators;
mod pieces;
mod python_format;
mod remembered;
mod render;
mod render_budget;
mod render_limits;
mod sentence_piece;
mod stream;
mod strftime;
mod tokenizer;
mod tokenizer_json;
mod vocabulary;

pub use chat_template::{ChatTemplate, RenderOptions};
pub use control::{ControlTokens, RenderedText, random_mark};
pub use error::TextError;
pub use remembered::{RememberedIds, RememberedPrefix, RememberedText};
pub use stream::StreamDecoder;
pub use tokenizer::Tokenizer;
pub use vocabulary::GgufVocabulary;
