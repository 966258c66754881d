//! Attention over sealed pages, on the bytes as they are stored.
//!
//! A call is a `schedule` of work items, one per page and group of rows. What a format provides is what happens to an
//! item: logits, softmax, values accumulated with weights. A new format is a new module.
//!
//! Codes are never turned into numbers. With `k = s·c - o` per token and group of channels,
//! `q · k = s·Σ q·c - o·Σ q`, and with `v = s·c - o` likewise `Σ p·v = Σ (p·s)·c - Σ p·o`: the large sums multiply
//! small integers. Keys in bands have a group of their own for each band, with codes of its width and an offset of half the
//! largest code times the scale. Queries and weights are split into two signed bytes each (`fixed_point`), so these sums are
//! exact, in whatever order and on whatever instruction set.
//!
//! A row's result does not depend on the rows it shares a call with, except that on AMX many rows go to tiles, which
//! round differently.
//!
//! | module | job |
//! |---|---|
//! | `schedule` | the work items of a call |
//! | `codes` | pages of codes: the order of what happens to an item |
//! | `engine` | what that needs of an instruction set |
//! | `product` | integer products with codes |
//! | `fixed_point` | numbers to pairs of bytes, integer sums to logits and values: AVX2, NEON |
//! | `avx512`, `registers` | the same without leaving registers |
//! | `band_places` | where the bands of keys lie in a page |
//! | `bands` | logits of keys in bands |
//! | `prefill` | many rows on AMX, as tiles of bf16 |
//! | `fp8` | 8-bit floats, widened to bf16 |
//! | `scales` | scales and offsets of a page as numbers |
//! | `scalar` | the reference |

#[cfg(target_arch = "x86_64")]
mod avx512;
mod band_places;
mod bands;
mod codes;
mod engine;
mod fixed_point;
mod fp8;
#[cfg(target_arch = "x86_64")]
mod prefill;
mod product;
#[cfg(target_arch = "x86_64")]
mod registers;
mod scalar;
mod scales;
mod schedule;
#[cfg(test)]
mod tests;

use oscar_codec::PageLayout;

use self::engine::Shape;
use self::schedule::PREFILL_ROWS;
use super::bf16;
use super::scratch::AttentionScratch;
use super::state::SoftmaxState;
use super::work::{Span, Work, scale_queries};
use crate::cpu::isa::Isa;
use crate::cpu::simd::Simd;

/// Neighbouring sealed pages of a sequence, for one layer and one KV head or several.
#[derive(Clone, Copy)]
pub struct SealedPages<'a> {
    /// How the pages are stored; [`PageLayout::Bf16`] needs them on even addresses.
    pub layout: &'a PageLayout,
    /// The number of the first page in its sequence.
    pub first: usize,
    /// `[page][head]`, [`PageLayout::page_bytes`] each. The pages of neighbouring heads are neighbours in a pool, so memory is
    /// read in longer stretches than head by head.
    pub bytes: &'a [&'a [u8]],
    /// What the stored keys of each page are less of, in bf16 and in the same order; empty if that is nothing. For keys in bands only.
    pub means: &'a [&'a [u16]],
}

/// [`super::attend`] over sealed pages: adds the tokens of `pages` to the softmax of each row.
///
/// * `q`: `spans.len()` rows of the state's head dimension, rotated as the pages are, not scaled.
/// * `spans[row]`: the positions of the sequence the row sees. All tokens of a sealed page are there.
///
/// What is added to the state is in the space of the stored values, that is, rotated.
pub fn attend_sealed(
    isa: Isa,
    pages: SealedPages<'_>,
    q: &[f32],
    scale: f32,
    spans: &[Span],
    scratch: &mut AttentionScratch,
    state: &mut SoftmaxState,
) {
    attend_sealed_heads(isa, pages, q, scale, spans, scratch, std::slice::from_mut(state));
}

/// [`attend_sealed`] for several KV heads, each with its own state, pages and queries (`[head][row]`), and rows that see the
/// same.
pub fn attend_sealed_heads(
    isa: Isa,
    pages: SealedPages<'_>,
    q: &[f32],
    scale: f32,
    spans: &[Span],
    scratch: &mut AttentionScratch,
    states: &mut [SoftmaxState],
) {
    let SealedPages { layout, first, bytes, means } = pages;
    let heads = states.len();
    let d = states.first().map_or(0, SoftmaxState::head_dim);
    assert!(states.iter().all(|state| state.head_dim() == d), "states of different head dimensions");
    assert!(states.is_empty() || layout.head_dim() == d, "pages of another head dimension");
    assert_eq!(q.len(), heads * spans.len() * d, "queries of {heads} x {} rows of {d} channels", spans.len());
    assert!(states.iter().all(|state| state.rows() == spans.len()), "a state for other rows");
    assert!(bytes.iter().all(|page| page.len() == layout.page_bytes()), "pages of another size");
    assert!(
        means.is_empty() || means.len() == bytes.len() && matches!(layout, PageLayout::Banded(_)),
        "means of other pages, or of keys that are not in bands"
    );
    assert!(means.iter().all(|mean| mean.len() == d), "means of another head dimension");
    let simd = Simd::new(isa);
    if spans.is_empty() || d == 0 {
        return;
    }
    assert!(bytes.len().is_multiple_of(heads), "{} pages of {heads} heads", bytes.len());
    if heads > 1 && !reads_heads_together(isa, layout, spans.len()) {
        for (head, (q, state)) in q.chunks_exact(spans.len() * d).zip(states).enumerate() {
            let bytes: Vec<&[u8]> = bytes.iter().skip(head).step_by(heads).copied().collect();
            let means: Vec<&[u16]> = means.iter().skip(head).step_by(heads).copied().collect();
            let pages = SealedPages { bytes: &bytes, means: &means, ..pages };
            attend_sealed(isa, pages, q, scale, spans, scratch, state);
        }
        return;
    }
    if layout.is_bf16() {
        let pages: Vec<&[u16]> = bytes.iter().map(|page| bytemuck::cast_slice(page)).collect();
        return bf16::attend(isa, q, scale, spans, first, &pages, d, scratch, &mut states[0]);
    }

    let mut queries = std::mem::take(&mut scratch.queries);
    let q = scale_queries(q, scale, queries.at_least(q.len()));
    let work = Work { q, spans, first_page: first, pages: bytes, means, d };
    let decode = |page: &[u8], side, token, row: &mut [f32]| layout.decode_token(page, side, token, row);
    match layout {
        PageLayout::Codes(layout) => {
            codes::attend(simd, Shape::new(layout), decode, &work, scratch, states);
        }
        PageLayout::Fp8(layout) => fp8::attend(simd, layout, &work, scratch, &mut states[0]),
        PageLayout::Banded(layout) => {
            codes::attend(simd, Shape::banded(layout), decode, &work, scratch, states);
        }
        PageLayout::Bf16(_) => unreachable!("bf16 pages were attended to above"),
    }
    scratch.queries = queries;
}

/// About how many pages of a format take as long as one in bf16. Codes are bound by arithmetic, not by their bytes.
pub(in crate::cpu) fn pages_per_bf16_page(layout: &PageLayout) -> usize {
    match layout {
        PageLayout::Codes(layout) => 10 / layout.bits() as usize,
        PageLayout::Banded(_) => 5,
        PageLayout::Bf16(_) | PageLayout::Fp8(_) => 1,
    }
}

/// Whether a kernel reads the pages of several heads in one pass, which pays where memory is what it waits for.
fn reads_heads_together(isa: Isa, layout: &PageLayout, rows: usize) -> bool {
    match layout {
        PageLayout::Codes(_) => {
            let tiles = isa == Isa::Amx && rows >= PREFILL_ROWS;
            isa != Isa::Scalar && !tiles
        }
        PageLayout::Banded(_) => isa != Isa::Scalar,
        PageLayout::Bf16(_) | PageLayout::Fp8(_) => false,
    }
}
