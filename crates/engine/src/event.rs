//! The events of a request and the summary of an answer.

use std::sync::Arc;
use std::time::Duration;

use crate::error::EngineError;

/// Where the events of a request go. Called on the engine's thread, so it must not wait for anything.
pub type Sink = Box<dyn FnMut(Event) + Send>;

/// Something that happened to a request. Every choice ends with exactly one [`Event::Finished`] or [`Event::Failed`].
#[derive(Clone, Debug)]
pub enum Event {
    /// A part of the prompt, or all of it, has been computed.
    Prefill {
        /// Tokens that are in the cache by now, those from the prefix tree included.
        done: usize,
        /// Tokens that the prompt has.
        total: usize,
        /// Tokens that came from the prefix tree.
        cached: usize,
    },
    /// The prompt has been computed and the probabilities of its tokens are known. Comes before the first token, once for all choices,
    /// if the request wants them.
    Scored {
        /// One entry per token of the prompt, or of its part whose probabilities the request wants.
        prompt: Arc<[PromptLogprob]>,
    },
    /// A token was sampled.
    Token {
        /// The number of the answer within its request.
        choice: usize,
        /// The token and its text.
        token: Token,
    },
    /// An answer is complete.
    Finished {
        /// The number of the answer within its request.
        choice: usize,
        /// The whole answer, why it ended and how long it took.
        summary: Box<Summary>,
    },
    /// An answer cannot be completed.
    Failed {
        /// The number of the answer within its request.
        choice: usize,
        /// The error that ended the request.
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

/// A token that was sampled.
#[derive(Clone, Debug, PartialEq)]
pub struct Token {
    /// The id of the token.
    pub id: u32,
    /// Text that can be shown now. A token whose characters are not complete, or that may begin a stop text, shows
    /// up with a later one.
    pub text: String,
    /// The natural logarithm of its probability, if the request wants it.
    pub logprob: Option<f32>,
    /// The most likely tokens in its place with the logarithms of their probabilities, if the request wants them.
    pub top: Vec<(u32, f32)>,
}

/// A token of the prompt and how likely it was.
#[derive(Clone, Debug, PartialEq)]
pub struct PromptLogprob {
    /// The id of the token.
    pub token: u32,
    /// The natural logarithm of its probability; `None` for the first token.
    pub logprob: Option<f32>,
    /// The most likely tokens in its place with the logarithms of their probabilities.
    pub top: Vec<(u32, f32)>,
}

/// Why an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// The model ended its turn.
    End,
    /// A stop text or stop token came up.
    Stop,
    /// The answer has as many tokens as the request allows.
    Length,
    /// The context is full.
    Context,
    /// The caller cancelled the request.
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

/// The stop condition that ended an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MatchedStop {
    /// A token that ends the answer.
    Token(u32),
    /// A stop text of the request.
    Text(String),
}

/// One choice of a request after its end.
#[derive(Clone, Debug, PartialEq)]
pub struct Summary {
    /// Why the answer ended.
    pub finish: FinishReason,
    /// The token or text that ended it, if one did.
    pub matched: Option<MatchedStop>,
    /// Tokens that the prompt has.
    pub prompt_tokens: usize,
    /// Tokens of the prompt whose keys and values came from the prefix tree.
    pub cached_tokens: usize,
    /// Generated token ids, an ending one included.
    pub tokens: Vec<u32>,
    /// The text of the answer.
    pub text: String,
    /// Logarithm of the probability of each generated token, if the request wants it.
    pub logprobs: Vec<f32>,
    /// Probabilities of the prompt, if the request wants them.
    pub prompt_logprobs: Vec<PromptLogprob>,
    /// The hidden states of the prompt as one vector, if the request wants it and the prompt was computed.
    pub embedding: Option<Vec<f32>>,
    /// The seed with which tokens were sampled.
    pub seed: u64,
    /// Time from the request to the start of its work.
    pub queued: Duration,
    /// Time from the request to the first token.
    pub first_token: Duration,
    /// Time from the first token to the last.
    pub decode: Duration,
    /// How often it was preempted: it lost its pages to an older request and was computed again.
    pub preemptions: usize,
    /// Tokens of its history that were to stay in bf16 and were sealed for want of pages.
    pub demoted_tokens: usize,
}

impl Summary {
    /// Tokens per second after the first one.
    pub fn decode_tokens_per_s(&self) -> Option<f64> {
        let steps = self.tokens.len().checked_sub(1).filter(|&steps| steps > 0)?;
        Some(steps as f64 / self.decode.as_secs_f64())
    }
}
