//! What clients send and are sent. Fields may be null or unknown; what would change an answer and is not there is
//! refused by name.

mod generate;
mod messages;
mod openai;
mod responses;
mod sampling;
mod usage;

pub(crate) use generate::{GenerateRequest, Ids, SamplingParams};
pub(crate) use messages::MessagesRequest;
pub(crate) use openai::{OpenAiRequest, Prompt};
pub(crate) use responses::ResponsesRequest;
pub(crate) use sampling::{OneOrMany, check_kv_precision, short};
pub(crate) use usage::Usage;
