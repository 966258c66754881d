//! Logprobs of tokens, in the forms of chats and of completions.

use std::sync::Arc;

use oscar_engine::{GenerateOptions, PromptLogprob, Token};
use oscar_model::text::{StreamDecoder, Tokenizer};
use serde::Serialize;
use serde_json::{Map, Value, json};

use crate::text::{bytes_of, shown};

/// The logprob of a token with probability zero: JSON has no infinity.
const LEAST: f32 = -9999.0;

/// A logprob for JSON. It is written with as few digits as its 32 bits allow, so that equal ones look equal: evaluation
/// harnesses compare them.
pub(crate) fn number(logprob: f32) -> f64 {
    let finite = if logprob.is_nan() { LEAST } else { logprob.max(LEAST) };
    finite.to_string().parse().unwrap_or(f64::from(finite))
}

/// The tokens that end an answer. They are no part of its text, and so not of its logprobs either.
#[derive(Clone, Debug)]
pub(crate) struct EndTokens {
    tokenizer: Arc<Tokenizer>,
    ignore_end: bool,
    stop_tokens: Vec<u32>,
}

impl EndTokens {
    pub(crate) fn new(tokenizer: &Arc<Tokenizer>, options: &GenerateOptions) -> EndTokens {
        let stop_tokens = options.stop_tokens.clone();
        EndTokens { tokenizer: Arc::clone(tokenizer), ignore_end: options.ignore_end, stop_tokens }
    }

    pub(crate) fn contains(&self, token: u32) -> bool {
        !self.ignore_end && self.tokenizer.is_end(token) || self.stop_tokens.contains(&token)
    }
}

/// The logprob of a token of a chat's answer, with its alternatives.
#[derive(Debug, Serialize)]
pub(crate) struct ChatLogprob {
    token: String,
    logprob: f64,
    bytes: Vec<u8>,
    top_logprobs: Vec<Alternative>,
}

/// The logprob of one alternative to a token.
#[derive(Debug, Serialize)]
struct Alternative {
    token: String,
    logprob: f64,
    bytes: Vec<u8>,
}

impl ChatLogprob {
    pub(crate) fn new(tokenizer: &Tokenizer, token: &Token) -> ChatLogprob {
        let alternative = |&(id, logprob): &(u32, f32)| Alternative {
            token: shown(tokenizer, id),
            logprob: number(logprob),
            bytes: bytes_of(tokenizer, id).to_vec(),
        };
        ChatLogprob {
            token: shown(tokenizer, token.id),
            logprob: number(token.logprob.unwrap_or(LEAST)),
            bytes: bytes_of(tokenizer, token.id).to_vec(),
            top_logprobs: token.top.iter().map(alternative).collect(),
        }
    }
}

/// The logprobs of a prompt as vLLM lists them: for each token an object with the token and its alternatives by their ids,
/// null for the first.
pub(crate) fn prompt_logprobs(tokenizer: &Tokenizer, prompt: &[PromptLogprob]) -> Value {
    let token = |entry: &PromptLogprob| {
        let own = entry.logprob?;
        // How likely a token is among all others is known only for the likeliest.
        let ranked =
            entry.top.iter().enumerate().map(|(index, &(id, logprob))| (id, logprob, Some(index + 1)));
        let mut map = Map::new();
        for (id, logprob, rank) in ranked.chain([(entry.token, own, None)]) {
            let decoded = shown(tokenizer, id);
            map.entry(id.to_string()).or_insert_with(
                || json!({"logprob": number(logprob), "rank": rank, "decoded_token": decoded}),
            );
        }
        Some(Value::Object(map))
    };
    prompt.iter().map(token).collect::<Vec<Option<Value>>>().into()
}

/// The logprobs of a completion, as lists of equal length. Those of the prompt come first if it is echoed.
#[derive(Debug, Default, Serialize)]
pub(crate) struct CompletionLogprobs {
    tokens: Vec<String>,
    token_logprobs: Vec<Option<f64>>,
    top_logprobs: Vec<Option<Value>>,
    text_offset: Vec<usize>,
}

/// Builds [`CompletionLogprobs`] and keeps count of characters across the pieces of a stream.
#[derive(Debug)]
pub(crate) struct CompletionTokens {
    tokenizer: Arc<Tokenizer>,
    decoder: StreamDecoder,
    offset: usize,
    list: CompletionLogprobs,
}

impl CompletionTokens {
    pub(crate) fn new(tokenizer: &Arc<Tokenizer>) -> CompletionTokens {
        let decoder = StreamDecoder::new(Arc::clone(tokenizer)).keep_special();
        let tokenizer = Arc::clone(tokenizer);
        CompletionTokens { tokenizer, decoder, offset: 0, list: CompletionLogprobs::default() }
    }

    /// Adds the tokens of the prompt; the first has no logprob.
    pub(crate) fn prompt(&mut self, prompt: &[PromptLogprob]) {
        for entry in prompt {
            self.push(entry.token, entry.logprob, &entry.top);
        }
    }

    pub(crate) fn token(&mut self, token: &Token) {
        self.push(token.id, token.logprob, &token.top);
    }

    fn push(&mut self, id: u32, logprob: Option<f32>, top: &[(u32, f32)]) {
        self.list.tokens.push(shown(&self.tokenizer, id));
        self.list.token_logprobs.push(logprob.map(number));
        let top = logprob.map(|own| {
            // The token itself is always among them; ids that look alike keep the likeliest.
            let mut map = Map::new();
            for &(id, logprob) in top.iter().chain([&(id, own)]) {
                map.entry(shown(&self.tokenizer, id)).or_insert_with(|| number(logprob).into());
            }
            Value::Object(map)
        });
        self.list.top_logprobs.push(top);
        self.list.text_offset.push(self.offset);
        if let Ok(Some(text)) = self.decoder.push(id) {
            self.offset += text.chars().count();
        }
    }

    /// The tokens that were added since the last call.
    pub(crate) fn take(&mut self) -> CompletionLogprobs {
        std::mem::take(&mut self.list)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_short_and_finite() {
        assert_eq!(number(-0.1).to_string(), "-0.1");
        assert_eq!(number(f32::NEG_INFINITY), -9999.0);
        assert_eq!(number(f32::NAN), -9999.0);
    }
}
