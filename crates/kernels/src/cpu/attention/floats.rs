//! The loop over pages and groups of rows for the paths that multiply in `f32`.
//!
//! Both products have the same shape, `rows x pairs` times `pairs x width` with the right side in bf16 pairs, so a
//! path provides one product and one softmax step.

use oscar_codec::PAGE_TOKENS;

use super::page::split;
use super::state::SoftmaxState;
use super::{AttentionScratch, Span, Work, written_values};

/// The rows of one group inside a softmax step.
pub(super) struct SoftmaxRows<'a> {
    /// `[rows][64]` logits; weights afterwards.
    pub(super) scores: &'a mut [f32],
    /// What the rows see, and the position of the page's first token.
    pub(super) spans: &'a [Span],
    pub(super) start: usize,
    pub(super) max: &'a mut [f32],
    pub(super) sum: &'a mut [f32],
    /// `[rows][d]`, scaled down when the maximum grows.
    pub(super) values: &'a mut [f32],
    pub(super) d: usize,
}

/// Places of memory that are asked for side by side: the hardware fetches ahead in each by itself, and starts anew where a
/// page of memory ends.
pub(super) type Places<'a> = [&'a [u16]; 4];

/// Nothing that will be read.
pub(super) const NOWHERE: Places<'static> = [&[]; 4];

/// What each of the two products of a page asks for of the next one: a half of every quarter of it.
fn halves(page: &[u16]) -> [Places<'_>; 2] {
    let quarter = page.len() / 4;
    [0, 1]
        .map(|half| std::array::from_fn(|place| &page[place * quarter + half * quarter / 2..][..quarter / 2]))
}

/// Adds `left · right` to `out`: `left` is `[rows][left_stride]` of which `2 * pairs` count, `right` is
/// `[pairs][width][2]` in bf16, `out` is `[rows][width]`. The memory in `next` is about to be read.
pub(super) type Product = unsafe fn(
    left: &[f32],
    left_stride: usize,
    rows: usize,
    right: &[u16],
    pairs: usize,
    width: usize,
    out: &mut [f32],
    next: &Places<'_>,
);

/// One path.
pub(super) struct Path {
    /// Most rows of a group.
    pub(super) rows: usize,
    pub(super) product: Product,
    pub(super) softmax: unsafe fn(SoftmaxRows<'_>),
}

#[cfg(target_arch = "x86_64")]
pub(super) static AVX512: Path =
    Path { rows: 4, product: super::avx512::product, softmax: super::avx512::softmax };

#[cfg(target_arch = "x86_64")]
pub(super) static AVX2: Path = Path { rows: 4, product: super::avx2::product, softmax: super::avx2::softmax };

#[cfg(target_arch = "aarch64")]
pub(super) static NEON: Path = Path { rows: 4, product: super::neon::product, softmax: super::neon::softmax };

/// Attends all rows to all pages. The path must be available, which [`super::attend`] has checked.
pub(super) fn attend(path: &Path, work: &Work<'_>, scratch: &mut AttentionScratch, state: &mut SoftmaxState) {
    let Work { q, spans, d, .. } = *work;
    let rows = spans.len();
    // Equal groups: seven rows are four and three, not six and one.
    let group = rows.div_ceil(rows.div_ceil(path.rows));
    let mut pages = work.visible_pages().peekable();
    while let Some((page, start)) = pages.next() {
        let (keys, values) = split(page, d);
        let next = pages.peek().map_or([NOWHERE; 2], |(page, _)| halves(page));
        let values = written_values(values, d, work.written(start), &mut scratch.values);
        for first in (0..rows).step_by(group) {
            let count = group.min(rows - first);
            let spans = &spans[first..first + count];
            let seen = spans.iter().map(|span| span.in_page(start)).filter(|seen| !seen.is_empty());
            let Some(seen) = seen.map(|seen| seen.end).max() else {
                continue;
            };
            // The first group fetches the next page while it computes.
            let next = if first == 0 { next } else { [NOWHERE; 2] };
            let scores = scratch.scores.at_least::<f32>(count * PAGE_TOKENS);
            scores.fill(0.0);
            let channels = first * d..(first + count) * d;
            // SAFETY: the path is available, which the caller has checked.
            unsafe {
                (path.product)(&q[channels.clone()], d, count, keys, d / 2, PAGE_TOKENS, scores, &next[0]);
                (path.softmax)(SoftmaxRows {
                    scores,
                    spans,
                    start,
                    max: &mut state.max[first..first + count],
                    sum: &mut state.sum[first..first + count],
                    values: &mut state.values[channels.clone()],
                    d,
                });
                let pairs = seen.div_ceil(2);
                let sums = &mut state.values[channels];
                (path.product)(scores, PAGE_TOKENS, count, values, pairs, d, sums, &next[1]);
            }
        }
    }
}
