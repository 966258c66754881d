//! Attention over sealed pages, on the bytes as they are stored.
//!
//! The loop over pages and groups of rows is the same for every format; a [`Reader`] knows one format on one
//! instruction set: the logits of a page, and its values summed with weights. A new format is a new reader.
//!
//! Codes are never turned into numbers. With `k = s·c - o` per token and group of channels,
//! `q · k = s·Σ q·c - o·Σ q`, and with `v = s·c - o` likewise `Σ p·v = Σ (p·s)·c - Σ p·o`: the large sums multiply
//! small integers. Queries and weights are split into two signed bytes each ([`fixed_point`]), so these sums are
//! exact, in whatever order and on whatever instruction set.
//!
//! A row's result does not depend on the rows it shares a call with.
//!
//! | module | job |
//! |---|---|
//! | `codes` | 2-bit and 4-bit pages: what happens around the integer products |
//! | `fixed_point` | numbers to pairs of bytes, integer sums to logits and values |
//! | `vnni`, `tiles`, `maddubs`, `sdot` | the integer products: AVX-512, AMX, AVX2, NEON |
//! | `fp8` | 8-bit floats, widened to bf16 |
//! | `scalar` | the reference |

mod codes;
mod fixed_point;
mod fp8;
#[cfg(target_arch = "x86_64")]
mod maddubs;
mod scalar;
#[cfg(target_arch = "aarch64")]
mod sdot;
#[cfg(test)]
mod tests;
#[cfg(target_arch = "x86_64")]
mod tiles;
#[cfg(target_arch = "x86_64")]
mod vnni;

use std::ops::Range;

use oscar_codec::code_page::CodeLayout;
use oscar_codec::fp8_page::Fp8Layout;
use oscar_codec::{PAGE_TOKENS, PageCodec, ScaleType};

use super::floats::{self, SoftmaxRows};
use super::page::page_elements;
use super::{AttentionScratch, SoftmaxState, Span, Work};
use crate::cpu::gemm::aligned::AlignedScratch;
use crate::cpu::isa::Isa;

/// What the bytes of a sealed page mean.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SealedFormat {
    /// The elements of a CPU bf16 page, see [`super::page`].
    Bf16,
    /// 2-bit or 4-bit codes with scales and offsets of a type.
    Codes(CodeLayout, ScaleType),
    /// 8-bit floats.
    Fp8(Fp8Layout),
}

impl SealedFormat {
    /// How a layer of a cache with this codec is read.
    pub fn of(codec: &PageCodec, layer: usize) -> SealedFormat {
        match (codec.code_layout(layer), codec.fp8_layout(layer)) {
            (Some(layout), _) => SealedFormat::Codes(layout, codec.scale_type()),
            (None, Some(layout)) => SealedFormat::Fp8(layout),
            (None, None) => SealedFormat::Bf16,
        }
    }

    /// Bytes of a page of one layer and KV head of `head_dim` channels.
    pub fn page_bytes(&self, head_dim: usize) -> usize {
        match self {
            SealedFormat::Bf16 => page_elements(head_dim) * size_of::<u16>(),
            SealedFormat::Codes(layout, _) => layout.page_bytes(),
            SealedFormat::Fp8(layout) => layout.page_bytes(),
        }
    }

    /// The head dimension of the pages, where the format knows it.
    fn head_dim(&self) -> Option<usize> {
        match self {
            SealedFormat::Bf16 => None,
            SealedFormat::Codes(layout, _) => Some(layout.head_dim()),
            SealedFormat::Fp8(layout) => Some(layout.head_dim()),
        }
    }
}

/// Part of [`AttentionScratch`].
#[derive(Default)]
pub(super) struct SealedScratch {
    codes: codes::CodeScratch,
    fp8: fp8::Fp8Scratch,
}

/// One page format on one instruction set, with the queries of a call.
trait Reader<'a> {
    /// Most rows of a group.
    const ROWS: usize;

    /// Turns to a page; `next` will be read after it.
    fn open(&mut self, page: &'a [u8], next: &'a [u8]);

    /// Logits of some rows with the 64 tokens of the page, `[rows][64]`.
    fn logits(&mut self, rows: Range<usize>, scores: &mut [f32]);

    /// Adds the values of the page with the weights (`[rows][64]`, zero for tokens not seen) of some rows.
    fn add_values(&mut self, rows: Range<usize>, weights: &mut [f32], values: &mut [f32]);
}

/// [`super::attend`] over sealed pages: adds the tokens of `pages` to the softmax of each row.
///
/// * `q`: `spans.len()` rows of the state's head dimension, rotated as the pages are, not scaled.
/// * `spans[row]`: the positions of the sequence the row sees. All tokens of a sealed page are there.
/// * `pages`: pages `first_page..` of the sequence for one layer and KV head, [`SealedFormat::page_bytes`] each;
///   [`SealedFormat::Bf16`] needs them on even addresses.
///
/// What is added to the state is in the space of the stored values, that is, rotated.
pub fn attend_sealed(
    isa: Isa,
    format: &SealedFormat,
    q: &[f32],
    scale: f32,
    spans: &[Span],
    first_page: usize,
    pages: &[&[u8]],
    scratch: &mut AttentionScratch,
    state: &mut SoftmaxState,
) {
    let d = state.head_dim();
    assert!(format.head_dim().is_none_or(|head_dim| head_dim == d), "pages of another head dimension");
    assert_eq!(q.len(), spans.len() * d, "queries of {} rows of {d} channels", spans.len());
    assert_eq!(state.rows(), spans.len(), "a state for other rows");
    assert!(pages.iter().all(|page| page.len() == format.page_bytes(d)), "pages of another size");
    assert!(isa.is_available(), "{isa} kernels on a machine without them");
    if spans.is_empty() || d == 0 {
        return;
    }
    if *format == SealedFormat::Bf16 {
        let pages: Vec<&[u16]> = pages.iter().map(|page| bytemuck::cast_slice(page)).collect();
        return super::attend(isa, q, scale, spans, first_page, &pages, d, scratch, state);
    }

    let scale = scale * std::f32::consts::LOG2_E;
    let mut queries = std::mem::take(&mut scratch.queries);
    let scaled = queries.at_least::<f32>(q.len());
    scaled.iter_mut().zip(q).for_each(|(scaled, q)| *scaled = q * scale);
    let work = Work { q: scaled, spans, first_page, pages, d };
    match format {
        SealedFormat::Codes(layout, scale_type) => {
            codes::attend(isa, layout, *scale_type, &work, scratch, state);
        }
        SealedFormat::Fp8(layout) => fp8::attend(isa, layout, &work, scratch, state),
        SealedFormat::Bf16 => unreachable!("bf16 pages were attended to above"),
    }
    scratch.queries = queries;
}

/// Attends all rows to all pages. The reader and the path must be available, which [`attend_sealed`] has checked.
fn read_pages<'a, R: Reader<'a>>(
    mut reader: R,
    path: &floats::Path,
    work: &Work<'a, u8>,
    scores: &mut AlignedScratch,
    state: &mut SoftmaxState,
) {
    let Work { spans, d, .. } = *work;
    let rows = spans.len();
    // Equal groups: nine rows are five and four, not eight and one.
    let group = rows.div_ceil(rows.div_ceil(R::ROWS));
    let scores = scores.at_least::<f32>(group * PAGE_TOKENS);
    let mut pages = work.visible_pages().peekable();
    while let Some((page, start)) = pages.next() {
        reader.open(page, pages.peek().map_or(&[], |(page, _)| page));
        for first in (0..rows).step_by(group) {
            let count = group.min(rows - first);
            let group = first..first + count;
            let spans = &spans[group.clone()];
            if spans.iter().all(|span| span.in_page(start).is_empty()) {
                continue;
            }
            let scores = &mut scores[..count * PAGE_TOKENS];
            reader.logits(group.clone(), scores);
            let channels = first * d..(first + count) * d;
            // SAFETY: the path is available, which the caller has checked.
            unsafe {
                (path.softmax)(SoftmaxRows {
                    scores,
                    spans,
                    start,
                    max: &mut state.max[group.clone()],
                    sum: &mut state.sum[group.clone()],
                    values: &mut state.values[channels.clone()],
                    d,
                });
            }
            reader.add_values(group, scores, &mut state.values[channels]);
        }
    }
}
