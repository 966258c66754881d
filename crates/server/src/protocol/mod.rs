//! What clients send and are sent. Fields may be null or unknown; what would change an answer and is not there is
//! refused by name.

mod generate;
mod openai;
mod sampling;
mod usage;

pub(crate) use generate::{GenerateRequest, Ids, SamplingParams};
pub(crate) use openai::{OpenAiRequest, Prompt};
pub(crate) use sampling::{OneOrMany, check_kv_precision};
pub(crate) use usage::Usage;
