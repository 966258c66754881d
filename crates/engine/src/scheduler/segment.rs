//! How the tokens of a sequence were computed, so that they can be computed again in the same way.

use oscar_kv::PrefillMode;

/// The tokens from the end of the segment before up to `end` are computed by one extension in one mode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Segment {
    pub(super) end: usize,
    pub(super) mode: PrefillMode,
    /// Pages of a history in bf16 below which it was demoted before: they were read sealed.
    pub(super) demoted: usize,
}

impl Segment {
    /// Tokens that are computed before any demotion.
    pub(super) fn new(end: usize, mode: PrefillMode) -> Segment {
        Segment { end, mode, demoted: 0 }
    }
}

/// The segments of a sequence of `len` tokens whose last ones were decoded.
pub(super) fn with_answer(segments: &[Segment], len: usize) -> Vec<Segment> {
    let mut segments = segments.to_vec();
    match segments.last_mut() {
        Some(last) if last.end >= len => {}
        Some(last) if last.mode == PrefillMode::Uniform => last.end = len,
        _ => segments.push(Segment::new(len, PrefillMode::Uniform)),
    }
    segments
}

/// Notes that the history of a sequence of `len` tokens was demoted below page `demoted`: what is computed from now on
/// reads it so.
pub(super) fn demote(segments: &mut Vec<Segment>, len: usize, demoted: usize) {
    *segments = with_answer(segments, len);
    segments.push(Segment { end: len, mode: PrefillMode::Uniform, demoted });
}

/// The page below which the history of a sequence is demoted before its tokens from `len` on are computed.
pub(super) fn demoted_at(segments: &[Segment], len: usize) -> usize {
    let next = segments.iter().find(|segment| segment.end > len).or(segments.last());
    next.map_or(0, |segment| segment.demoted)
}

/// Notes that a computation began on a prefix hit of `length` tokens: those were computed without the rest.
pub(super) fn split_at(segments: &mut Vec<Segment>, length: usize) {
    let index = segments.partition_point(|segment| segment.end < length);
    if let Some(&segment) = segments.get(index)
        && segment.mode == PrefillMode::Exact
        && (1..segment.end).contains(&length)
    {
        segments.insert(index, Segment { end: length, ..segment });
    }
}

/// Whether a sequence whose first `length` tokens are in the cache can go on as it was computed: not in the middle of a
/// prompt whose tokens read each other in bf16, and not behind a demotion, since the cache keeps nothing of what came after.
pub(super) fn can_resume_at(segments: &[Segment], length: usize) -> bool {
    let of = segments.iter().find(|segment| segment.end >= length);
    of.is_none_or(|of| of.demoted == 0 && (of.end == length || of.mode == PrefillMode::Uniform))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn segments_say_where_to_go_on() {
        let segment = Segment::new;
        let mut segments = vec![segment(100, PrefillMode::Exact), segment(150, PrefillMode::Uniform)];
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
        assert_eq!(segments[..2], [segment(64, PrefillMode::Exact), segment(100, PrefillMode::Exact)]);
        assert_eq!(resumable(&segments), [64].into_iter().chain(100..=160).collect::<Vec<_>>());
    }

    #[test]
    fn demotions_are_repeated_where_they_happened() {
        let mut segments = vec![Segment::new(100, PrefillMode::Uniform)];
        demote(&mut segments, 120, 1);
        let at = |segments: &[Segment], lengths: &[usize]| {
            lengths.iter().map(|&length| demoted_at(segments, length)).collect::<Vec<_>>()
        };
        // Lost at once: the demotion comes before the next token.
        let replay = with_answer(&segments, 120);
        assert_eq!(at(&replay, &[0, 99, 100, 119, 120]), [0, 0, 0, 0, 1]);
        // Again before a token was computed, and again later.
        demote(&mut segments, 120, 2);
        demote(&mut segments, 150, 5);
        let replay = with_answer(&segments, 170);
        assert_eq!(at(&replay, &[0, 119, 120, 149, 150, 169, 170]), [0, 0, 2, 2, 5, 5, 5]);
        let ends: Vec<usize> = replay.iter().map(|segment| segment.end).collect();
        assert_eq!(ends.last(), Some(&170));
        assert!((0..=120).all(|length| can_resume_at(&replay, length)));
        assert!((121..=170).all(|length| !can_resume_at(&replay, length)));
    }
}
