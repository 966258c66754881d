//! What the policy knows of a request at each stage of its life.

use std::ops::Range;

use oscar_kv::{Append, PrefixKey, Sequence};

use super::super::plan::{AnswerId, WantedRows};
use super::super::segment::{Segment, with_answer};
use crate::pooling::Pooling;

/// Place in the order of arrival: number of the request, then choice. Older ones win.
pub(super) type Order = (u64, usize);

/// A request that was submitted.
#[derive(Debug)]
pub(crate) struct NewRequest {
    pub(crate) id: u64,
    /// Keeps sequences apart that must not share pages.
    pub(crate) key: PrefixKey,
    /// Bf16 history may be sealed for want of pages.
    pub(crate) demote: bool,
    pub(crate) tokens: Vec<u32>,
    /// How many answers are wanted to the prompt.
    pub(crate) choices: usize,
    pub(crate) wants: PromptWants,
    /// Whether any token is sampled after the prompt.
    pub(crate) generates: bool,
}

/// What is reported of a prompt itself.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct PromptWants {
    /// Alternatives to report with the probability of each of its tokens, if those are asked for.
    pub(crate) prompt_logprobs: Option<usize>,
    /// The first token whose probability is asked for.
    pub(crate) score_from: usize,
    /// How its hidden states become an embedding, if that is asked for.
    pub(crate) embedding: Option<Pooling>,
}

impl PromptWants {
    /// How many tokens of the beginning are looked for in the prefix tree, which leaves out the last of them.
    pub(super) fn reusable(&self, tokens: usize) -> usize {
        let scored = if self.prompt_logprobs.is_some() { self.score_from.max(1) } else { tokens };
        let pooled = if self.embedding == Some(Pooling::Mean) { 1 } else { tokens };
        tokens.min(scored).min(pooled)
    }

    /// What is read from the rows of a prompt at these positions.
    pub(super) fn of_rows<'a>(&self, positions: &Range<usize>, tokens: &'a [u32]) -> WantedRows<'a> {
        let mut wanted = WantedRows::default();
        if let Some(alternatives) = self.prompt_logprobs {
            let first = (positions.start + 1).max(self.score_from);
            let end = (positions.end + 1).min(tokens.len());
            wanted.alternatives = alternatives;
            wanted.scored = tokens.get(first..end).unwrap_or_default();
            wanted.scored_after = first - 1 - positions.start;
        }
        wanted.hidden = self.pooled_rows(positions, tokens.len());
        wanted
    }

    /// The rows of a prompt at these positions that count for its embedding.
    pub(super) fn pooled_rows(&self, positions: &Range<usize>, tokens: usize) -> Range<usize> {
        self.embedding.map_or(0..0, |pooling| pooling.rows(positions, tokens))
    }
}

/// A request that waits: new, or preempted.
#[derive(Debug)]
pub(super) struct Waiting {
    pub(super) id: u64,
    pub(super) arrival: u64,
    /// The first answer that begins after the prompt.
    pub(super) choice: usize,
    /// Answers that begin after the prompt.
    pub(super) choices: usize,
    pub(super) key: PrefixKey,
    pub(super) demote: bool,
    /// Tokens to be in the cache before the next one is sampled, and how they get there.
    pub(super) tokens: Vec<u32>,
    pub(super) segments: Vec<Segment>,
    /// The token to go on with, if it was sampled already.
    pub(super) next: Option<u32>,
    pub(super) wants: PromptWants,
    pub(super) generates: bool,
    /// Tokens that the prefix tree had when the request was first admitted.
    pub(super) cached: usize,
    /// Counted as waiting by those who submit.
    pub(super) queued: bool,
    /// The request lost its pages at least once.
    pub(super) preempted: bool,
    /// Not to be computed in one pass with others, because that failed once.
    pub(super) alone: bool,
}

impl Waiting {
    pub(super) fn new(request: NewRequest, arrival: u64, segments: Vec<Segment>) -> Waiting {
        let NewRequest { id, key, demote, tokens, choices, wants, generates } = request;
        Waiting {
            id,
            arrival,
            choice: 0,
            choices,
            key,
            demote,
            tokens,
            segments,
            next: None,
            wants,
            generates,
            cached: 0,
            queued: true,
            preempted: false,
            alone: false,
        }
    }

    pub(super) fn answer(&self) -> AnswerId {
        AnswerId { request: self.id, choice: self.choice }
    }

    pub(super) fn order(&self) -> Order {
        (self.arrival, self.choice)
    }

    /// Whether this is a new prompt with one answer of which nothing else is wanted.
    pub(super) fn can_be_batched(&self) -> bool {
        self.next.is_none() && self.choices == 1 && !self.alone && self.wants.prompt_logprobs.is_none()
    }
}

/// A prompt in the cache whose answers get their first token next.
#[derive(Debug)]
pub(super) struct Starting {
    pub(super) id: u64,
    pub(super) arrival: u64,
    pub(super) choices: usize,
    pub(super) segments: Vec<Segment>,
    pub(super) sequence: Sequence,
    pub(super) demote: bool,
    /// Row of the last batch that has its logits; `None` if they are there for every choice.
    pub(super) row: Option<usize>,
}

impl Starting {
    pub(super) fn answers(&self) -> impl Iterator<Item = AnswerId> {
        let request = self.id;
        (0..self.choices).map(move |choice| AnswerId { request, choice })
    }
}

/// An answer in progress.
#[derive(Debug)]
pub(super) struct Running {
    pub(super) id: u64,
    pub(super) arrival: u64,
    pub(super) choice: usize,
    pub(super) sequence: Sequence,
    /// How the sequence was computed up to its answer.
    pub(super) segments: Vec<Segment>,
    /// Bf16 history may be sealed for want of pages.
    pub(super) demote: bool,
    /// Sampled, but not in the cache yet.
    pub(super) next: u32,
    /// The pages for `next`, reserved in this step.
    pub(super) append: Option<Append>,
}

impl Running {
    pub(super) fn answer(&self) -> AnswerId {
        AnswerId { request: self.id, choice: self.choice }
    }

    pub(super) fn order(&self) -> Order {
        (self.arrival, self.choice)
    }

    /// The request that computes this answer again; the sequence is the caller's to close.
    pub(super) fn into_waiting(self) -> (Waiting, Sequence) {
        let Running { id, arrival, choice, sequence, segments, demote, next, .. } = self;
        let waiting = Waiting {
            id,
            arrival,
            choice,
            choices: 1,
            key: sequence.key(),
            demote,
            tokens: sequence.tokens().to_vec(),
            segments: with_answer(&segments, sequence.len()),
            next: Some(next),
            wants: PromptWants::default(),
            generates: true,
            cached: 0,
            queued: false,
            preempted: true,
            alone: false,
        };
        (waiting, sequence)
    }
}
