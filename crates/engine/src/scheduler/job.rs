//! What the scheduler knows of a request at each stage of its life.

use oscar_kv::{Append, Extend, Sequence};

use crate::output::Output;
use crate::serve::SharedSink;

/// Place in the order of arrival: number of the request's turn, then choice. Older ones win.
pub(super) type Order = (u64, usize);

/// Tokens up to `end` that are computed in one way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Segment {
    pub(super) end: usize,
    pub(super) mode: Extend,
}

/// A request that waits: new, continued, or taken up again after it lost its pages.
pub(super) struct Job {
    pub(super) id: u64,
    pub(super) arrival: u64,
    pub(super) salt: u64,
    pub(super) sink: SharedSink,
    pub(super) output: Output,
    /// Answers to begin after the prompt.
    pub(super) choices: usize,
    /// Tokens to be in the cache before the next one is drawn, and how they get there.
    pub(super) tokens: Vec<u32>,
    pub(super) segments: Vec<Segment>,
    /// The token to go on with, if it was drawn already.
    pub(super) next: Option<u32>,
    /// Pages of a request that was kept open.
    pub(super) sequence: Option<Sequence>,
    /// Counted as waiting by those who submit.
    pub(super) counted: bool,
    /// Not to be computed together with others: that went wrong once.
    pub(super) alone: bool,
}

impl Job {
    pub(super) fn order(&self) -> Order {
        (self.arrival, self.output.choice)
    }
}

/// An answer in progress.
pub(super) struct Running {
    pub(super) id: u64,
    pub(super) arrival: u64,
    pub(super) sink: SharedSink,
    pub(super) output: Output,
    pub(super) sequence: Sequence,
    /// How the sequence was computed up to its answer.
    pub(super) segments: Vec<Segment>,
    /// Drawn, but not in the cache yet.
    pub(super) next: u32,
    /// Room for `next`, made in this step.
    pub(super) append: Option<Append>,
}

impl Running {
    pub(super) fn order(&self) -> Order {
        (self.arrival, self.output.choice)
    }

    /// Everything said so far, the token that is not in the cache yet included, and how it is computed again.
    pub(super) fn history(&self) -> (Vec<u32>, Vec<Segment>) {
        let tokens = self.sequence.tokens().iter().copied().chain([self.next]).collect();
        (tokens, with_answer(&self.segments, self.sequence.len()))
    }
}

/// The segments of a sequence of `len` tokens whose last ones were decoded.
pub(super) fn with_answer(segments: &[Segment], len: usize) -> Vec<Segment> {
    let mut segments = segments.to_vec();
    match segments.last_mut() {
        Some(last) if last.end >= len => {}
        Some(last) if last.mode == Extend::Uniform => last.end = len,
        _ => segments.push(Segment { end: len, mode: Extend::Uniform }),
    }
    segments
}

/// Whether a sequence whose first `length` tokens are in the cache goes on as it was computed: not in the middle of a prompt
/// whose tokens read each other in bf16.
pub(super) fn is_restart(segments: &[Segment], length: usize) -> bool {
    let begins = segments.iter().any(|segment| segment.end == length);
    begins || segments.iter().find(|segment| segment.end > length).is_none_or(|of| of.mode == Extend::Uniform)
}

/// A finished request that may be continued.
pub(super) struct Kept {
    pub(super) salt: u64,
    pub(super) tokens: Vec<u32>,
    pub(super) segments: Vec<Segment>,
    /// Its pages, unless others needed them more.
    pub(super) sequence: Option<Sequence>,
}

impl Kept {
    /// No tokens and no pages.
    pub(super) fn nothing(salt: u64) -> Kept {
        Kept { salt, tokens: Vec::new(), segments: Vec::new(), sequence: None }
    }
}
