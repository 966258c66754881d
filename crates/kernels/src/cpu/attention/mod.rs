//! Attention over pages: softmax of `q · k`, weighted sum of `v`, page by page.
//!
//! Rows are (token, query head) pairs that share one KV head, so a page is read once for all of them: decoding has
//! one row per head of the group, prefill several tokens' worth. Softmax runs online, in the way of flash
//! attention, and its state can be merged with that of other pages.
//!
//! | module | job |
//! |---|---|
//! | [`page`] | order of the elements inside a page |
//! | `state` | running softmax and its merge |
//! | `scalar` | the reference |
//! | `floats` | the loop over pages and groups of rows |
//! | `avx512`, `avx2`, `neon` | products and softmax in `f32` |
//! | `amx` | products in tiles of split bf16 |
//! | [`sealed`] | the same over sealed pages |

#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod floats;
#[cfg(target_arch = "aarch64")]
mod neon;
pub mod page;
mod scalar;
pub mod sealed;
mod state;
#[cfg(test)]
pub(super) mod tests;

pub use page::{expect_side, page_elements, read_token, write_side, write_token};
pub use state::SoftmaxState;

use std::ops::Range;

use oscar_codec::{Bf16Layout, PAGE_TOKENS, Side};

use super::gemm::aligned::AlignedScratch;
use super::isa::Isa;
use super::memory;

/// 2ˣ for |x| <= 1/2 as a polynomial, lowest power first: the Chebyshev fit of relative error, good to 2e-8 in `f32`.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
const EXP2: [f32; 7] =
    [1.0, std::f32::consts::LN_2, 0.240_226_46, 0.055_503_29, 0.009_618_52, 0.001_339_986, 0.000_153_375_77];

/// Rows from which tiles beat vectors: below, most of a tile is empty.
const TILES_FROM: usize = 5;

/// The positions a query row sees, `from..to`, counted from the start of the sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// First position.
    pub from: usize,
    /// One past the last.
    pub to: usize,
}

impl Span {
    /// The first `to` positions.
    pub fn up_to(to: usize) -> Span {
        Span { from: 0, to }
    }

    /// The tokens of the page starting at position `start` that are seen, as a range inside the page.
    #[inline]
    fn in_page(self, start: usize) -> Range<usize> {
        let inside = |position: usize| position.saturating_sub(start).min(PAGE_TOKENS);
        inside(self.from)..inside(self.to)
    }

    /// [`Self::in_page`] as one bit per token.
    #[cfg(target_arch = "x86_64")]
    #[inline]
    fn page_mask(self, start: usize) -> u64 {
        let first = |count: usize| u64::MAX.checked_shr((PAGE_TOKENS - count) as u32).unwrap_or(0);
        let Range { start: from, end: to } = self.in_page(start);
        first(to) & !first(from)
    }
}

/// Memory of one thread for [`attend`]; keeps its allocation between calls.
#[derive(Default)]
pub struct AttentionScratch {
    /// Scaled queries.
    queries: AlignedScratch,
    /// Logits of a group of rows, then their weights.
    scores: AlignedScratch,
    /// The values of a partly filled page, with zeros for tokens that are not there.
    values: AlignedScratch,
    /// The queries as tiles.
    #[cfg(target_arch = "x86_64")]
    query_tiles: AlignedScratch,
    /// The weights of a group of rows as tiles.
    #[cfg(target_arch = "x86_64")]
    score_tiles: AlignedScratch,
    /// The last channels of the keys of a page, padded to a whole tile.
    #[cfg(target_arch = "x86_64")]
    keys: AlignedScratch,
    /// What sealed pages need besides.
    sealed: sealed::SealedScratch,
}

/// Adds the tokens of `pages` to the softmax of each row.
///
/// * `q`: `spans.len()` rows of `d` channels, not scaled; logits are `scale · q · k`.
/// * `spans[row]`: the positions of the sequence the row sees.
/// * `pages`: pages `first_page..` of the sequence for one layer and KV head, [`page_elements`] each. Only tokens
///   below the largest end of a span need to have been written.
/// * `state`: [`SoftmaxState::reset`] for these rows, or what earlier pages left.
///
/// `d` is a multiple of 2; multiples of 16 from 32 to 256 have fast paths.
pub fn attend(
    isa: Isa,
    q: &[f32],
    scale: f32,
    spans: &[Span],
    first_page: usize,
    pages: &[&[u16]],
    d: usize,
    scratch: &mut AttentionScratch,
    state: &mut SoftmaxState,
) {
    assert!(d.is_multiple_of(2), "a head of {d} channels");
    assert_eq!(q.len(), spans.len() * d, "queries of {} rows of {d} channels", spans.len());
    assert!(state.rows() == spans.len() && state.head_dim() == d, "a state for other rows");
    assert!(pages.iter().all(|page| page.len() == page_elements(d)), "pages of another head dimension");
    assert!(isa.is_available(), "{isa} kernels on a machine without them");
    if spans.is_empty() || d == 0 {
        return;
    }

    let scale = scale * std::f32::consts::LOG2_E;
    let mut queries = std::mem::take(&mut scratch.queries);
    let scaled = queries.at_least::<f32>(q.len());
    scaled.iter_mut().zip(q).for_each(|(scaled, q)| *scaled = q * scale);
    let work = Work { q: scaled, spans, first_page, pages, d };
    // Kernels ask for the next page while they read one; nobody has asked for the first.
    if let Some((page, _)) = work.visible_pages().next() {
        memory::expect(page);
    }
    let fast = d.is_multiple_of(16) && (32..=256).contains(&d);
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Amx if fast && spans.len() >= TILES_FROM => amx::attend(&work, scratch, state),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 | Isa::Amx if fast => floats::attend(&floats::AVX512, &work, scratch, state),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 if fast => floats::attend(&floats::AVX2, &work, scratch, state),
        #[cfg(target_arch = "aarch64")]
        Isa::Neon if fast => floats::attend(&floats::NEON, &work, scratch, state),
        _ => {
            let layout = Bf16Layout::new(d);
            for (page, start) in work.visible_pages() {
                for (row, span) in spans.iter().enumerate() {
                    let key = |token, channel| scalar::element(page, layout.index(Side::Key, token, channel));
                    let value =
                        |token, channel| scalar::element(page, layout.index(Side::Value, token, channel));
                    let q = &work.q[row * d..][..d];
                    scalar::attend_row(q, span.in_page(start), key, value, row, state);
                }
            }
        }
    }
    scratch.queries = queries;
}

/// The arguments of [`attend`], checked, with scaled queries. Pages are made of `T`.
struct Work<'a, T = u16> {
    q: &'a [f32],
    spans: &'a [Span],
    first_page: usize,
    pages: &'a [&'a [T]],
    d: usize,
}

impl<'a, T> Work<'a, T> {
    /// One past the last position any row sees.
    fn end(&self) -> usize {
        self.spans.iter().map(|span| span.to).max().unwrap_or(0)
    }

    /// The first position any row sees.
    fn first_seen(&self) -> usize {
        self.spans.iter().map(|span| span.from).min().unwrap_or(0)
    }

    /// Tokens of the page at `start` below the last one seen by any row.
    fn written(&self, start: usize) -> usize {
        Span::up_to(self.end()).in_page(start).end
    }

    /// The pages that any row sees, with the position of their first token.
    fn visible_pages(&self) -> impl Iterator<Item = (&'a [T], usize)> + use<'a, T> {
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

/// The values of a page with zeros for tokens from `visible` on.
///
/// What was never written may be NaN, and a weight of zero does not hide that.
fn written_values<'a>(
    values: &'a [u16],
    d: usize,
    visible: usize,
    scratch: &'a mut AlignedScratch,
) -> &'a [u16] {
    if visible == PAGE_TOKENS {
        return values;
    }
    let copy = scratch.at_least::<u16>(PAGE_TOKENS * d);
    let pairs = visible.div_ceil(2) * 2 * d;
    copy[..pairs].copy_from_slice(&values[..pairs]);
    if !visible.is_multiple_of(2) {
        copy[pairs - 2 * d..pairs].iter_mut().skip(1).step_by(2).for_each(|value| *value = 0);
    }
    copy[pairs..].fill(0);
    copy
}
