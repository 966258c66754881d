//! How tokens are drawn, and what was drawn.

use super::KernelError;

/// How one token is drawn from a row of logits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling<'a> {
    /// 0 takes the most likely token, the lowest id on a tie.
    pub temperature: f32,
    /// Keep the `top_k` most likely tokens; 0 keeps all.
    pub top_k: usize,
    /// Keep the smallest set of tokens whose probability reaches this; 1 keeps all.
    pub top_p: f32,
    /// Keep the tokens whose information is nearest to the entropy, until their probability reaches this; 1 keeps all.
    pub typical_p: f32,
    /// Drop tokens less likely than this share of the most likely one; 0 keeps all.
    pub min_p: f32,
    /// Only the first so many tokens may be drawn: an embedding can have more rows than the tokenizer has tokens.
    pub vocabulary: usize,
    /// Uniform draw in `[0, 1)`; ignored when greedy. The caller owns the random state, so devices agree.
    pub draw: f32,
    /// Changes of single logits before anything else (penalties, biases), at most one for a token.
    pub changes: &'a [LogitChange],
    /// One bit per token, lowest first: tokens without a bit are not drawn. `None` allows all.
    pub allowed: Option<&'a [u32]>,
    /// Takes this token instead of drawing one: its probability is what the caller wants.
    pub given: Option<u32>,
    /// Report the probability of the token and of this many most likely ones; `None` saves the work.
    pub logprobs: Option<usize>,
}

impl Default for Sampling<'_> {
    /// Takes the most likely token and reports no probabilities.
    fn default() -> Self {
        Sampling {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            typical_p: 1.0,
            min_p: 0.0,
            vocabulary: usize::MAX,
            draw: 0.0,
            changes: &[],
            allowed: None,
            given: None,
            logprobs: None,
        }
    }
}

/// A change of the logit of one token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LogitChange {
    /// Token id; one outside the vocabulary changes nothing.
    pub token: u32,
    /// Divides a positive logit and multiplies a negative one (repetition penalty); 1 changes nothing.
    pub penalty: f32,
    /// What is added after that; negative infinity rules the token out.
    pub add: f32,
}

/// A token that was drawn, and its probability.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampled {
    /// The id of the token.
    pub token: u32,
    /// Natural logarithm of its probability under the unmodified logits, if it was requested.
    pub logprob: Option<f32>,
    /// The most likely tokens under the unmodified logits, most likely first, as many as were requested.
    pub top: Vec<(u32, f32)>,
}

/// A token that was drawn, or why none could be.
#[derive(Debug)]
pub struct Draw {
    /// The token, or the reason why the row has none.
    pub sampled: Result<Sampled, KernelError>,
    /// Whether a step of [`Backend::begin_step_of_draws`](super::Backend::begin_step_of_draws) computes this token; if not,
    /// what it computes for the row is worthless.
    pub passed_on: bool,
}
