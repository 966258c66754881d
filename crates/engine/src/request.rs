//! What a request asks for and what comes back.

use std::time::Duration;

use crate::error::EngineError;

/// How tokens are drawn.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingOptions {
    /// 0 is greedy.
    pub temperature: f32,
    /// Keep the smallest set of tokens whose probability reaches this.
    pub top_p: f32,
    /// Keep this many tokens; 0 keeps all.
    pub top_k: usize,
    /// Drop tokens less likely than this share of the most likely one.
    pub min_p: f32,
    /// Seed of the draws; a fresh one is taken and reported when there is none.
    pub seed: Option<u64>,
}

impl Default for SamplingOptions {
    fn default() -> Self {
        SamplingOptions { temperature: 0.0, top_p: 1.0, top_k: 0, min_p: 0.0, seed: None }
    }
}

impl SamplingOptions {
    pub(crate) fn validate(&self) -> Result<(), EngineError> {
        let bad = |name, value: f32, expected| {
            Err(EngineError::BadOption { name, value: value.to_string(), expected })
        };
        if !(self.temperature.is_finite() && self.temperature >= 0.0) {
            return bad("temperature", self.temperature, "a number of 0 or more");
        }
        if !(self.top_p > 0.0 && self.top_p <= 1.0) {
            return bad("top_p", self.top_p, "a number above 0, at most 1");
        }
        if !(self.min_p >= 0.0 && self.min_p <= 1.0) {
            return bad("min_p", self.min_p, "a number from 0 to 1");
        }
        Ok(())
    }
}

/// When and how a request ends.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GenerateOptions {
    /// Most tokens to generate; `None` goes on until the model or the context ends.
    pub max_tokens: Option<usize>,
    /// How tokens are drawn.
    pub sampling: SamplingOptions,
    /// Texts that end the answer; they are not part of it.
    pub stop: Vec<String>,
    /// Go on when the model says that it is done.
    pub ignore_end: bool,
    /// The answer is a text of its own rather than the rest of the prompt: the space that some tokenizers put before
    /// the first word is dropped.
    pub new_text: bool,
}

/// A piece of an answer.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// The prompt is being read: tokens done so far, of how many.
    Prefill {
        /// Tokens done.
        done: usize,
        /// Tokens to do.
        total: usize,
    },
    /// Text that can be shown. A token whose characters are not complete yet shows up with a later one.
    Text(String),
}

/// Why an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// The model ended its turn.
    End,
    /// A stop text came up.
    Stop,
    /// `max_tokens` were generated.
    Length,
    /// The context is full.
    Context,
    /// The caller broke off.
    Cancelled,
}

impl FinishReason {
    /// The name OpenAI's interface has for it.
    pub fn name(self) -> &'static str {
        match self {
            FinishReason::End | FinishReason::Stop => "stop",
            FinishReason::Length | FinishReason::Context => "length",
            FinishReason::Cancelled => "cancelled",
        }
    }
}

/// What happened in a request.
#[derive(Clone, Debug, PartialEq)]
pub struct Summary {
    /// Why it ended.
    pub finish: FinishReason,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Tokens of the prompt whose keys and values were still there.
    pub cached_tokens: usize,
    /// Generated token ids, an ending one included.
    pub tokens: Vec<u32>,
    /// Logarithm of the probability of each generated token.
    pub logprobs: Vec<f32>,
    /// Seed of the draws.
    pub seed: u64,
    /// From the request to the first token.
    pub first_token: Duration,
    /// From the first token to the last.
    pub decode: Duration,
}

impl Summary {
    /// Tokens per second after the first one.
    pub fn decode_tokens_per_s(&self) -> Option<f64> {
        let steps = self.tokens.len().checked_sub(1).filter(|&steps| steps > 0)?;
        Some(steps as f64 / self.decode.as_secs_f64())
    }
}
