//! The two ends of a sequence that stay in bf16, and what a cache costs with them.
//!
//! There are two ways to count. The **lab** measures quality with windows of any number of tokens: exactly
//! `min(length, sink + recent)` tokens are in bf16 ([`Windows::lab_bits_per_element`]). The **paged cache** holds
//! whole pages: `ceil(sink/64)` sink pages, `ceil(recent/64)` recent pages and the page being filled are in bf16
//! whether full or not ([`Windows::cache_bytes`]). For 64 and 256 at 32K tokens that is 2.38 against 2.41 bits.

use std::ops::Range;

use crate::cache_codec::CacheCodec;
use crate::layout::{PAGE_TOKENS, PageLayout};

/// The first `sink` and the last `recent` tokens are read exactly; what lies between is read from the codec.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Windows {
    /// Tokens at the start of a sequence that are read exactly.
    pub sink: usize,
    /// Tokens at the end, the query's own included.
    pub recent: usize,
}

impl Default for Windows {
    /// 64 and 256, as published.
    fn default() -> Self {
        Windows { sink: 64, recent: 256 }
    }
}

impl Windows {
    /// Windows without tokens: everything is read from the codec.
    pub const NONE: Windows = Windows { sink: 0, recent: 0 };

    /// Sink pages of a paged cache.
    pub fn sink_pages(&self) -> usize {
        self.sink.div_ceil(PAGE_TOKENS)
    }

    /// Recent pages of a paged cache, the one being filled not counted.
    pub fn recent_pages(&self) -> usize {
        self.recent.div_ceil(PAGE_TOKENS)
    }

    /// Tokens of a sequence that the lab keeps in bf16.
    pub fn exact_tokens(&self, length: usize) -> usize {
        self.sink.saturating_add(self.recent).min(length)
    }

    /// Pages (bf16, sealed) of a sequence of `length` tokens whose last token has just been written: page `p` is in
    /// bf16 if `p < S` or `p >= b - R`, with `b` the page being filled.
    pub fn pages(&self, length: usize) -> (usize, usize) {
        PageWindows::from(*self).pages(length)
    }

    /// Bytes a paged cache allocates for one layer and one KV head of a sequence of `length` tokens.
    pub fn cache_bytes(&self, layout: PageLayout, length: usize) -> usize {
        let (exact, sealed) = self.pages(length);
        exact * PageLayout::bf16(layout.head_dim()).page_bytes() + sealed * layout.page_bytes()
    }

    /// Bits a paged cache allocates per key or value element of a sequence of `length` tokens.
    pub fn cache_bits_per_element(&self, layout: PageLayout, length: usize) -> f64 {
        self.cache_bytes(layout, length) as f64 * 8.0 / (length * 2 * layout.head_dim()) as f64
    }

    /// Bits per element when exactly the windows' tokens are in bf16 and the rest costs `history_bits`.
    pub fn mixed_bits_per_element(&self, history_bits: f64, length: usize) -> f64 {
        let exact = self.exact_tokens(length) as f64;
        (exact * 16.0 + (length as f64 - exact) * history_bits) / length as f64
    }

    /// Bits per element of a codec under the lab's windows, token by token.
    pub fn lab_bits_per_element(&self, codec: &dyn CacheCodec, head_dim: usize, length: usize) -> f64 {
        self.mixed_bits_per_element(codec.bits_per_element(head_dim), length)
    }
}

/// The windows of the paged cache in whole pages, and the one rule of who reads what.
///
/// A query in page `b` reads page `p` in bf16 if `p < sink` or `p >= b - recent`, else it reads the sealed page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageWindows {
    /// Pages at the start that are never sealed.
    pub sink: usize,
    /// Full pages before the query's own that are read in bf16.
    pub recent: usize,
}

impl From<Windows> for PageWindows {
    /// Rounded up to whole pages.
    fn from(windows: Windows) -> Self {
        PageWindows { sink: windows.sink_pages(), recent: windows.recent_pages() }
    }
}

impl PageWindows {
    /// Pages that a query in `query_page` reads sealed; all others up to its own it reads in bf16.
    ///
    /// `exact_from`: first page of a prompt that is being prefilled in exact mode, whose tokens read their own prompt
    /// in bf16 (`usize::MAX`: none). `sealed_until`: pages below it exist only sealed although a window might want
    /// them (0: none).
    pub fn history(&self, query_page: usize, exact_from: usize, sealed_until: usize) -> Range<usize> {
        let by_rule = query_page.saturating_sub(self.recent).min(exact_from);
        let end = by_rule.max(sealed_until).min(query_page);
        self.sink..end.max(self.sink)
    }

    /// Pages (bf16, sealed) of a sequence of `length` tokens whose last token has just been written.
    pub fn pages(&self, length: usize) -> (usize, usize) {
        let pages = length.div_ceil(PAGE_TOKENS);
        let sealed = self.history(pages.saturating_sub(1), usize::MAX, 0).len();
        (pages - sealed, sealed)
    }

    /// The page that must be sealed when `page_begun` begins: the one that leaves the window then.
    pub fn due_before(&self, page_begun: usize) -> Option<usize> {
        page_begun.checked_sub(self.recent)?.checked_sub(1).filter(|&page| page >= self.sink)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn int2() -> PageLayout {
        PageLayout::int2(128, 1).expect("a layout")
    }

    /// The published table of effective bits: group and scale bytes, base, at 32K, at 128K.
    #[test]
    fn the_published_bits_per_element() {
        for (group, scale_bytes, base, at_32k, at_128k) in
            [(128.0, 2.0, 2.25, 2.38, 2.284), (128.0, 4.0, 2.5, 2.63, 2.53), (32.0, 4.0, 4.0, 4.12, 4.03)]
        {
            let bits = 2.0 + 16.0 * scale_bytes / group;
            assert_eq!(bits, base);
            let windows = Windows::default();
            assert!((windows.mixed_bits_per_element(bits, 32 << 10) - at_32k).abs() < 0.005);
            assert!((windows.mixed_bits_per_element(bits, 128 << 10) - at_128k).abs() < 0.005);
        }
        assert_eq!(int2().bits_per_element(), 2.25);
        let exact = Windows::default().mixed_bits_per_element(2.25, 128 << 10);
        assert!((exact - 2.284).abs() < 0.0005, "{exact}");
    }

    /// The visibility rule itself, page by page.
    #[test]
    fn pages_follow_the_visibility_rule() {
        for (sink, recent) in [(64, 256), (0, 0), (1, 65), (128, 0), (0, 64), (4, 1024)] {
            let windows = Windows { sink, recent };
            let (s, r) = (sink.div_ceil(64), recent.div_ceil(64));
            for length in [0_usize, 1, 63, 64, 65, 128, 320, 321, 384, 385, 1000, 4096] {
                let pages = length.div_ceil(64);
                let exact = (0..pages).filter(|&p| p < s || p + r >= pages - 1).count();
                assert_eq!(windows.pages(length), (exact, pages - exact), "{windows:?} at {length}");
            }
        }
    }

    #[test]
    fn pages_cost_more_than_tokens_and_say_so() {
        let windows = Windows::default();
        let paged = windows.cache_bits_per_element(int2(), 32 << 10);
        assert!((paged - (6.0 * 16.0 + 506.0 * 2.25) / 512.0).abs() < 1e-12);
        assert!((paged - 2.41).abs() < 0.005, "{paged}");
        assert_eq!(windows.cache_bytes(int2(), 64), PageLayout::bf16(128).page_bytes());
        // A short sequence is all bf16, and a page is allocated whole.
        assert_eq!(windows.cache_bits_per_element(int2(), 16), 64.0);
        assert_eq!(windows.mixed_bits_per_element(2.25, 16), 16.0);
        assert_eq!(Windows::NONE.mixed_bits_per_element(2.25, 4096), 2.25);
    }

    /// Every page and query of small windows against the sentence that defines them.
    #[test]
    fn page_windows_follow_the_visibility_rule() {
        for (sink, recent) in
            [(0, 0), (0, 1), (1, 0), (1, 1), (1, 4), (2, 2), (4, 4), (0, 4), (4, 0), (20, 20)]
        {
            let windows = PageWindows { sink, recent };
            for query in 0..16_usize {
                for exact_from in (0..=query).chain([usize::MAX]) {
                    for sealed_until in 0..=query {
                        let history = windows.history(query, exact_from, sealed_until);
                        for page in 0..=query {
                            let in_window = page + recent >= query;
                            let own_prompt = page >= exact_from;
                            let exact = page < sink || page >= sealed_until && (in_window || own_prompt);
                            assert_eq!(
                                !history.contains(&page),
                                exact,
                                "{windows:?}, page {page} for {query}, {exact_from} {sealed_until}"
                            );
                        }
                    }
                }
            }
        }
    }

    /// A page is due in the step in which a query first reads it sealed, and only then.
    #[test]
    fn a_page_is_due_when_it_is_first_read_sealed() {
        for (sink, recent) in [(0, 0), (0, 1), (1, 0), (1, 4), (2, 1), (4, 4)] {
            let windows = PageWindows { sink, recent };
            for begun in 1..16 {
                let before = windows.history(begun - 1, usize::MAX, 0);
                let after = windows.history(begun, usize::MAX, 0);
                let due: Vec<usize> = after.filter(|page| !before.contains(page)).collect();
                assert_eq!(
                    windows.due_before(begun).into_iter().collect::<Vec<_>>(),
                    due,
                    "{windows:?} at {begun}"
                );
            }
        }
        assert_eq!(PageWindows { sink: 0, recent: usize::MAX }.due_before(9), None);
    }

    #[test]
    fn page_windows_count_as_token_windows_do() {
        for windows in [Windows::default(), Windows::NONE, Windows { sink: 1, recent: 65 }] {
            let pages = PageWindows::from(windows);
            for length in 1..2000_usize {
                let sealed = pages.history((length - 1) / PAGE_TOKENS, usize::MAX, 0).len();
                assert_eq!(windows.pages(length).1, sealed, "{windows:?} at {length}");
            }
        }
    }
}
