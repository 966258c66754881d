//! Wire types: what clients send and are sent. Fields may be null or unknown; those that would change an answer and are
//! not supported are refused by name.

mod answer_format;
mod embeddings;
mod error;
mod generate;
mod lists;
mod messages;
mod openai;
mod responses;
mod sampling;
mod score;
mod usage;

pub(crate) use answer_format::{AnswerFormat, FieldError};
pub(crate) use embeddings::{EmbeddingEncoding, EmbeddingsRequest};
pub(crate) use error::{ApiError, text_error};
pub(crate) use generate::{GenerateRequest, SamplingParams};
pub(crate) use lists::{Ids, OneOrMany, Prompt};
pub(crate) use messages::MessagesRequest;
pub(crate) use openai::OpenAiRequest;
pub(crate) use responses::ResponsesRequest;
pub(crate) use sampling::{SamplingFields, check_kv_precision, short};
pub(crate) use score::ScoreRequest;
pub(crate) use usage::Usage;
