//! Attention over sealed pages, on the bytes as they are stored.
//!
//! A call is a `schedule` of `Step`s, one per page and group of rows. What a format provides is what happens in a
//! step: logits, softmax, values summed with weights. A new format is a new module.
//!
//! Codes are never turned into numbers. With `k = s·c - o` per token and group of channels,
//! `q · k = s·Σ q·c - o·Σ q`, and with `v = s·c - o` likewise `Σ p·v = Σ (p·s)·c - Σ p·o`: the large sums multiply
//! small integers. Queries and weights are split into two signed bytes each (`fixed_point`), so these sums are
//! exact, in whatever order and on whatever instruction set.
//!
//! A row's result does not depend on the rows it shares a call with, except that on AMX many rows go to tiles, which
//! round differently.
//!
//! | module | job |
//! |---|---|
//! | `codes` | 2-bit and 4-bit pages: the order of what happens in a step |
//! | `engine` | what an instruction set provides for them |
//! | `fixed_point` | numbers to pairs of bytes, integer sums to logits and values |
//! | `prefill` | the same for many rows on AMX, as tiles of bf16 |
//! | `vnni`, `maddubs`, `sdot` | the integer products: AVX-512, AVX2, NEON |
//! | `weigh`, `registers` | AVX-512: from sums to weights without leaving registers |
//! | `fp8` | 8-bit floats, widened to bf16 |
//! | `scalar` | the reference |

mod codes;
mod engine;
mod fixed_point;
mod fp8;
#[cfg(target_arch = "x86_64")]
mod maddubs;
#[cfg(target_arch = "x86_64")]
mod prefill;
#[cfg(target_arch = "x86_64")]
mod registers;
mod scalar;
#[cfg(target_arch = "aarch64")]
mod sdot;
#[cfg(test)]
mod tests;
#[cfg(target_arch = "x86_64")]
mod vnni;
#[cfg(target_arch = "x86_64")]
mod weigh;

use std::ops::Range;

use oscar_codec::{PAGE_TOKENS, PageLayout};

use super::{AttentionScratch, SoftmaxState, Span, Work};
use crate::cpu::isa::Isa;

/// Part of [`AttentionScratch`].
#[derive(Default)]
pub(super) struct SealedScratch {
    codes: codes::CodeScratch,
    fp8: fp8::Fp8Scratch,
}

/// [`super::attend`] over sealed pages: adds the tokens of `pages` to the softmax of each row.
///
/// * `q`: `spans.len()` rows of the state's head dimension, rotated as the pages are, not scaled.
/// * `spans[row]`: the positions of the sequence the row sees. All tokens of a sealed page are there.
/// * `pages`: pages `first_page..` of the sequence for one layer and KV head, [`PageLayout::page_bytes`] each;
///   [`PageLayout::Bf16`] needs them on even addresses.
///
/// What is added to the state is in the space of the stored values, that is, rotated.
pub fn attend_sealed(
    isa: Isa,
    layout: &PageLayout,
    q: &[f32],
    scale: f32,
    spans: &[Span],
    first_page: usize,
    pages: &[&[u8]],
    scratch: &mut AttentionScratch,
    state: &mut SoftmaxState,
) {
    let states = std::slice::from_mut(state);
    attend_sealed_heads(isa, layout, q, scale, spans, first_page, pages, scratch, states);
}

/// [`attend_sealed`] for several KV heads, each with its own state, pages and queries, and rows that see the same.
///
/// * `q`: `[head][row]`.
/// * `pages`: `[page][head]`. The pages of neighbouring heads are neighbours in a pool, so memory is read in longer
///   stretches than head by head.
pub fn attend_sealed_heads(
    isa: Isa,
    layout: &PageLayout,
    q: &[f32],
    scale: f32,
    spans: &[Span],
    first_page: usize,
    pages: &[&[u8]],
    scratch: &mut AttentionScratch,
    states: &mut [SoftmaxState],
) {
    let heads = states.len();
    let d = states.first().map_or(0, SoftmaxState::head_dim);
    assert!(states.iter().all(|state| state.head_dim() == d), "states of different head dimensions");
    assert!(states.is_empty() || layout.head_dim() == d, "pages of another head dimension");
    assert_eq!(q.len(), heads * spans.len() * d, "queries of {heads} x {} rows of {d} channels", spans.len());
    assert!(states.iter().all(|state| state.rows() == spans.len()), "a state for other rows");
    assert!(pages.iter().all(|page| page.len() == layout.page_bytes()), "pages of another size");
    assert!(isa.is_available(), "{isa} kernels on a machine without them");
    if spans.is_empty() || d == 0 {
        return;
    }
    assert!(pages.len().is_multiple_of(heads), "{} pages of {heads} heads", pages.len());
    if heads > 1 && !reads_heads_together(isa, layout, spans.len()) {
        for (head, (q, state)) in q.chunks_exact(spans.len() * d).zip(states).enumerate() {
            let pages: Vec<&[u8]> = pages.iter().skip(head).step_by(heads).copied().collect();
            attend_sealed(isa, layout, q, scale, spans, first_page, &pages, scratch, state);
        }
        return;
    }
    if let PageLayout::Bf16(_) = layout {
        let pages: Vec<&[u16]> = pages.iter().map(|page| bytemuck::cast_slice(page)).collect();
        return super::attend(isa, q, scale, spans, first_page, &pages, d, scratch, &mut states[0]);
    }

    let scale = scale * std::f32::consts::LOG2_E;
    let mut queries = std::mem::take(&mut scratch.queries);
    let scaled = queries.at_least::<f32>(q.len());
    scaled.iter_mut().zip(q).for_each(|(scaled, q)| *scaled = q * scale);
    let work = Work { q: scaled, spans, first_page, pages, d };
    match layout {
        PageLayout::Codes(layout) => codes::attend(isa, layout, &work, scratch, states),
        PageLayout::Fp8(layout) => fp8::attend(isa, layout, &work, scratch, &mut states[0]),
        PageLayout::Bf16(_) => unreachable!("bf16 pages were attended to above"),
    }
    scratch.queries = queries;
}

/// Fewest rows that read codes in tiles where there are any: two tiles of them, more than the query heads of one token that
/// share a KV head.
const PREFILL_ROWS: usize = 32;

/// Whether a kernel reads the pages of several heads in one pass, which pays where memory is what it waits for.
fn reads_heads_together(isa: Isa, layout: &PageLayout, rows: usize) -> bool {
    let tiles = isa == Isa::Amx && rows >= PREFILL_ROWS;
    isa != Isa::Scalar && !tiles && matches!(layout, PageLayout::Codes(_))
}

/// Rows of a call that are attended together, and a page they see.
struct Step<'a> {
    head: usize,
    /// Of the head.
    rows: Range<usize>,
    page: &'a [u8],
    /// Position of the page's first token.
    start: usize,
    /// Number of the page, counted over the pages that any row sees.
    index: usize,
}

/// Every group of up to `most` rows with every page that one of its rows sees, page by page and head by head.
fn schedule<'a>(work: &Work<'a, u8>, heads: usize, most: usize) -> Vec<Step<'a>> {
    let rows = work.spans.len();
    let group = equal_groups(rows, most);
    let mut steps = Vec::with_capacity(work.pages.len() * rows.div_ceil(group));
    let (from, to) = (work.first_seen(), work.end());
    for (number, pages) in work.pages.chunks_exact(heads).enumerate() {
        let start = (work.first_page + number) * PAGE_TOKENS;
        if start + PAGE_TOKENS <= from || start >= to {
            continue;
        }
        for (head, page) in pages.iter().enumerate() {
            for first in (0..rows).step_by(group) {
                let rows = first..(first + group).min(rows);
                if work.spans[rows.clone()].iter().any(|span| !span.in_page(start).is_empty()) {
                    steps.push(Step { head, rows, page, start, index: number * heads + head });
                }
            }
        }
    }
    steps
}

/// The size of groups of at most `most` rows that differ little: nine rows are five and four, not eight and one.
fn equal_groups(rows: usize, most: usize) -> usize {
    rows.div_ceil(rows.div_ceil(most).max(1)).max(1)
}
