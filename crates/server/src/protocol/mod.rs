//! Wire types: what clients send and are sent. Fields may be null; those that a request does not have are refused by name
//! unless they are known to change nothing.

mod answer_format;
mod content_format;
mod embeddings;
mod error;
mod field_error;
mod fields;
mod generate;
mod lists;
mod llama;
mod messages;
mod openai;
mod precision;
mod responses;
mod sampling;
mod score;
mod sent_names;
mod usage;

pub(crate) use answer_format::AnswerFormat;
pub(crate) use embeddings::{EmbeddingEncoding, EmbeddingsRequest};
pub(crate) use error::{ApiError, text_error};
pub(crate) use field_error::FieldError;
pub(crate) use fields::{
    FieldPolicy, RequestKind, UnreadFields, check_forms, check_forms_of_messages, check_forms_of_responses,
    either, leave_tools_of_servers, penalties, says_nothing,
};
pub(crate) use generate::{GenerateRequest, SamplingParams};
pub(crate) use lists::{Ids, MAX_MESSAGES, MAX_PARTS, OneOrMany, Prompt, at_most, json_bytes, short_json};
pub(crate) use llama::LlamaRequest;
pub(crate) use messages::MessagesRequest;
pub(crate) use openai::OpenAiRequest;
pub(crate) use precision::PrecisionFields;
pub(crate) use responses::ResponsesRequest;
pub(crate) use sampling::{SamplingFields, short};
pub(crate) use score::ScoreRequest;
pub(crate) use sent_names::SentNames;
pub(crate) use usage::Usage;
