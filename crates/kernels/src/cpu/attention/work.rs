//! What a call of attention is about: query rows, what each of them sees, and pages.

use std::ops::Range;

use oscar_codec::PAGE_TOKENS;

use crate::cpu::page_means::widen;

/// The positions a query row sees, `from..to`, counted from the start of the sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// The first position that the row sees.
    pub from: usize,
    /// One past the last position that the row sees.
    pub to: usize,
}

impl Span {
    /// A row sees the first `to` positions.
    pub fn up_to(to: usize) -> Span {
        Span { from: 0, to }
    }

    /// The tokens of the page starting at position `start` that are seen, as a range inside the page.
    #[inline]
    pub(super) fn in_page(self, start: usize) -> Range<usize> {
        let inside = |position: usize| position.saturating_sub(start).min(PAGE_TOKENS);
        inside(self.from)..inside(self.to)
    }

    /// [`Self::in_page`] as one bit per token.
    #[cfg(target_arch = "x86_64")]
    #[inline]
    pub(super) fn page_mask(self, start: usize) -> u64 {
        let first = |count: usize| u64::MAX.checked_shr((PAGE_TOKENS - count) as u32).unwrap_or(0);
        let Range { start: from, end: to } = self.in_page(start);
        first(to) & !first(from)
    }
}

/// The arguments of a call after they were checked. Pages are made of `T`.
pub(super) struct Work<'a, T = u16> {
    /// Query rows of `d` channels, scaled so that `q · k` is a logit in units of log₂.
    pub(super) q: &'a [f32],
    /// What each row sees.
    pub(super) spans: &'a [Span],
    /// Number of the first page in its sequence.
    pub(super) first_page: usize,
    pub(super) pages: &'a [&'a [T]],
    /// What the stored keys of each page are less of, in bf16; empty if that is nothing.
    pub(super) means: &'a [&'a [u16]],
    /// Channels of a head.
    pub(super) d: usize,
}

impl<'a, T> Work<'a, T> {
    /// One past the last position any row sees.
    pub(super) fn end(&self) -> usize {
        self.spans.iter().map(|span| span.to).max().unwrap_or(0)
    }

    /// The first position any row sees.
    pub(super) fn first_seen(&self) -> usize {
        self.spans.iter().map(|span| span.from).min().unwrap_or(0)
    }

    /// Tokens of the page at `start` below the last one seen by any row.
    pub(super) fn written(&self, start: usize) -> usize {
        Span::up_to(self.end()).in_page(start).end
    }

    /// What the logits of a page are less of for a query row, because its keys are stored less their mean.
    #[inline(always)]
    pub(super) fn page_logit(&self, row: usize, page: usize) -> f32 {
        /// Sums that are independent of each other.
        const LANES: usize = 16;
        let Some(mean) = self.means.get(page) else { return 0.0 };
        let q = &self.q[row * self.d..][..self.d];
        let mut sums = [0.0_f32; LANES];
        for (q, mean) in q.chunks(LANES).zip(mean.chunks(LANES)) {
            sums.iter_mut().zip(q.iter().zip(mean)).for_each(|(sum, (q, mean))| *sum += q * widen(*mean));
        }
        // Halves at a time, which vectors can do.
        let mut half = LANES;
        while half > 1 {
            half /= 2;
            for lane in 0..half {
                sums[lane] += sums[lane + half];
            }
        }
        sums[0]
    }

    /// The pages that any row sees, with the position of their first token.
    pub(super) fn visible_pages(&self) -> impl Iterator<Item = (&'a [T], usize)> + use<'a, T> {
        let (from, to) = (self.first_seen(), self.end());
        let first_page = self.first_page;
        self.pages
            .iter()
            .enumerate()
            .map(move |(index, page)| (*page, (first_page + index) * PAGE_TOKENS))
            .skip_while(move |(_, start)| start + PAGE_TOKENS <= from)
            .take_while(move |(_, start)| *start < to)
    }
}

/// Query rows times the scale of logits and log₂ e, so that every exponential is a power of two.
pub(super) fn scale_queries<'a>(q: &[f32], scale: f32, scaled: &'a mut [f32]) -> &'a [f32] {
    let scale = scale * std::f32::consts::LOG2_E;
    scaled.iter_mut().zip(q).for_each(|(scaled, q)| *scaled = q * scale);
    scaled
}
