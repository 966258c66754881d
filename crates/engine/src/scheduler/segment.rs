//! How the tokens of a sequence were computed, so that they can be computed again in the same way.

use oscar_kv::PrefillMode;

/// The tokens from the end of the segment before up to `end` are computed by one extension in one mode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Segment {
    pub(super) end: usize,
    pub(super) mode: PrefillMode,
}

/// The segments of a sequence of `len` tokens whose last ones were decoded.
pub(super) fn with_answer(segments: &[Segment], len: usize) -> Vec<Segment> {
    let mut segments = segments.to_vec();
    match segments.last_mut() {
        Some(last) if last.end >= len => {}
        Some(last) if last.mode == PrefillMode::Uniform => last.end = len,
        _ => segments.push(Segment { end: len, mode: PrefillMode::Uniform }),
    }
    segments
}

/// Notes that a computation began on a prefix hit of `length` tokens: those were computed without the rest.
pub(super) fn split_at(segments: &mut Vec<Segment>, length: usize) {
    let index = segments.partition_point(|segment| segment.end < length);
    if let Some(&Segment { end, mode: mode @ PrefillMode::Exact }) = segments.get(index)
        && (1..end).contains(&length)
    {
        segments.insert(index, Segment { end: length, mode });
    }
}

/// Whether a sequence whose first `length` tokens are in the cache can go on as it was computed: not in the middle of a
/// prompt whose tokens read each other in bf16.
pub(super) fn can_resume_at(segments: &[Segment], length: usize) -> bool {
    let of = segments.iter().find(|segment| segment.end >= length);
    of.is_none_or(|of| of.end == length || of.mode == PrefillMode::Uniform)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn segments_say_where_to_go_on() {
        let segment = |end, mode| Segment { end, mode };
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
}
