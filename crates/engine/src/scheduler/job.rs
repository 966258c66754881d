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

/// A request that waits: new, or taken up again after it lost its pages.
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

/// Notes that a computation began with `length` tokens that were there: those before were computed by themselves.
pub(super) fn split_at(segments: &mut Vec<Segment>, length: usize) {
    let index = segments.partition_point(|segment| segment.end < length);
    if let Some(&Segment { end, mode: mode @ Extend::Exact }) = segments.get(index)
        && (1..end).contains(&length)
    {
        segments.insert(index, Segment { end: length, mode });
    }
}

/// Whether a sequence whose first `length` tokens are in the cache goes on as it was computed: not in the middle of a prompt
/// whose tokens read each other in bf16.
pub(super) fn can_resume_at(segments: &[Segment], length: usize) -> bool {
    let of = segments.iter().find(|segment| segment.end >= length);
    of.is_none_or(|of| of.end == length || of.mode == Extend::Uniform)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn segments_say_where_to_go_on() {
        let segment = |end, mode| Segment { end, mode };
        let mut segments = vec![segment(100, Extend::Exact), segment(150, Extend::Uniform)];
        let resumable = |segments: &[Segment]| {
            (0..=160).filter(|&length| can_resume_at(segments, length)).collect::<Vec<_>>()
        };
        assert_eq!(resumable(&segments), (100..=160).collect::<Vec<_>>());
        for length in [0, 100, 120, 150, 160] {
            let before = segments.clone();
            split_at(&mut segments, length);
            assert_eq!(segments, before, "{length}");
        }
        split_at(&mut segments, 64);
        assert_eq!(segments[..2], [segment(64, Extend::Exact), segment(100, Extend::Exact)]);
        assert_eq!(resumable(&segments), [64].into_iter().chain(100..=160).collect::<Vec<_>>());
    }
}
