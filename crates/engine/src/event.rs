//! What comes back from a request.

use std::sync::Arc;
use std::time::Duration;

use crate::error::EngineError;

/// Where the events of a request go. Called on the engine's thread, so it must not wait for anything.
pub type Sink = Box<dyn FnMut(Event) + Send>;

/// News of a request. Every choice ends with exactly one [`Event::Finished`] or [`Event::Failed`].
#[derive(Clone, Debug)]
pub enum Event {
    /// The prompt is being read.
    Prefill {
        /// Tokens done, those from the cache included.
        done: usize,
        /// Tokens of the prompt.
        total: usize,
        /// Tokens that came from the cache.
        cached: usize,
    },
    /// The prompt has been read and its probabilities are known. Comes before the first token, once for all choices,
    /// if they were asked for.
    Scored {
        /// One entry per token of the prompt.
        prompt: Arc<[PromptLogprob]>,
    },
    /// A token was drawn.
    Token {
        /// Which answer.
        choice: usize,
        /// What was drawn.
        token: Token,
    },
    /// An answer is complete.
    Finished {
        /// Which answer.
        choice: usize,
        /// How it went.
        summary: Box<Summary>,
    },
    /// An answer cannot be completed.
    Failed {
        /// Which answer.
        choice: usize,
        /// Why.
        error: Arc<EngineError>,
    },
}

impl Event {
    /// Text that can be shown, if the event brings any.
    pub fn text(&self) -> Option<&str> {
        match self {
            Event::Token { token, .. } => Some(token.text.as_str()).filter(|text| !text.is_empty()),
            _ => None,
        }
    }

    /// Whether this is the last event of its choice.
    pub fn is_last(&self) -> bool {
        matches!(self, Event::Finished { .. } | Event::Failed { .. })
    }
}

/// A drawn token.
#[derive(Clone, Debug, PartialEq)]
pub struct Token {
    /// Token id.
    pub id: u32,
    /// Text that can be shown now. A token whose characters are not complete, or that may begin a stop text, shows
    /// up with a later one.
    pub text: String,
    /// Logarithm of its probability, if asked for.
    pub logprob: Option<f32>,
    /// The most likely tokens, if asked for.
    pub top: Vec<(u32, f32)>,
}

/// A token of the prompt and how likely it was.
#[derive(Clone, Debug, PartialEq)]
pub struct PromptLogprob {
    /// Token id.
    pub token: u32,
    /// Logarithm of its probability; `None` for the first.
    pub logprob: Option<f32>,
    /// The most likely tokens in its place.
    pub top: Vec<(u32, f32)>,
}

/// Why an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// The model ended its turn.
    End,
    /// A stop text or stop token came up.
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

/// What ended an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MatchedStop {
    /// This token.
    Token(u32),
    /// This text.
    Text(String),
}

/// What happened in one choice of a request.
#[derive(Clone, Debug, PartialEq)]
pub struct Summary {
    /// Why it ended.
    pub finish: FinishReason,
    /// The token or text that ended it, if one did.
    pub matched: Option<MatchedStop>,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Tokens of the prompt whose keys and values were still there.
    pub cached_tokens: usize,
    /// Generated token ids, an ending one included.
    pub tokens: Vec<u32>,
    /// The whole text.
    pub text: String,
    /// Logarithm of the probability of each generated token, if asked for.
    pub logprobs: Vec<f32>,
    /// Probabilities of the prompt, if asked for.
    pub prompt_logprobs: Vec<PromptLogprob>,
    /// Seed of the draws.
    pub seed: u64,
    /// From the request to the start of its work.
    pub queued: Duration,
    /// From the request to the first token.
    pub first_token: Duration,
    /// From the first token to the last.
    pub decode: Duration,
    /// How often it lost its place in the cache to an older request and was taken up again.
    pub preemptions: usize,
}

impl Summary {
    /// Tokens per second after the first one.
    pub fn decode_tokens_per_s(&self) -> Option<f64> {
        let steps = self.tokens.len().checked_sub(1).filter(|&steps| steps > 0)?;
        Some(steps as f64 / self.decode.as_secs_f64())
    }
}
