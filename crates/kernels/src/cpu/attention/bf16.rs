//! Attention over bf16 pages.

use oscar_codec::{Bf16Layout, Side};

use super::page::page_elements;
use super::scratch::AttentionScratch;
use super::state::SoftmaxState;
#[cfg(target_arch = "x86_64")]
use super::state::TILES_FROM;
use super::work::{Span, Work, scale_queries};
use super::{floats, scalar};
use crate::cpu::isa::Isa;
use crate::cpu::memory;
use crate::cpu::simd::Simd;

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
    let simd = Simd::new(isa);
    if spans.is_empty() || d == 0 {
        return;
    }

    let mut queries = std::mem::take(&mut scratch.queries);
    let q = scale_queries(q, scale, queries.at_least(q.len()));
    let work = Work { q, spans, first_page, pages, means: &[], d };
    // Kernels prefetch the next page while they read one; nobody has prefetched the first.
    if let Some((page, _)) = work.visible_pages().next() {
        memory::prefetch(page);
    }
    let fast = d.is_multiple_of(16) && (32..=256).contains(&d);
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Amx if fast && spans.len() >= TILES_FROM => super::amx::attend(&work, scratch, state),
        Isa::Avx2 | Isa::Avx512 | Isa::Amx | Isa::Neon if fast => floats::attend(simd, &work, scratch, state),
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
