//! What the stored keys of sealed pages are less of, for all pages that sequences have reached.
//!
//! The mean key of a page depends on its number in its sequence alone, so all sequences share one table. It grows as they do.

use oscar_codec::{HeadIndex, KvGeometry};

use super::encode::{SealScratch, Sealer};

/// The mean keys of pages as they are stored, in bf16.
#[derive(Default)]
pub(super) struct PageMeanTable {
    /// By layer, `[page][head][channel]`; empty for layers whose pages are not centred.
    layers: Vec<Vec<u16>>,
}

impl PageMeanTable {
    /// Adds what is missing of the first `pages` pages. There is room for `most` from the beginning, which takes memory only when it
    /// is written.
    pub(super) fn extend(&mut self, sealer: &Sealer, pages: usize, most: usize) {
        let KvGeometry { layers, kv_heads, head_dim } = sealer.codec().geometry();
        self.layers.resize_with(layers, Vec::new);
        let mut scratch = SealScratch::default();
        for (layer, means) in self.layers.iter_mut().enumerate() {
            for page in means.len() / (kv_heads * head_dim)..pages {
                let of_head = |head| sealer.page_mean(HeadIndex { layer, head }, page, &mut scratch);
                let Some(rows) = (0..kv_heads).map(of_head).collect::<Option<Vec<_>>>() else { break };
                if means.is_empty() {
                    means.reserve_exact(most.max(pages) * kv_heads * head_dim);
                }
                means.extend(rows.into_iter().flatten());
            }
        }
    }

    /// The rows of a layer by page and head, if its pages are centred. There are those of the pages that the table was extended
    /// to.
    pub(super) fn of_layer<'a>(
        &'a self,
        layer: usize,
        geometry: KvGeometry,
    ) -> Option<impl Fn(usize, usize) -> &'a [u16] + use<'a>> {
        let KvGeometry { kv_heads, head_dim, .. } = geometry;
        let means = self.layers.get(layer).filter(|means| !means.is_empty())?;
        Some(move |page: usize, head: usize| &means[(page * kv_heads + head) * head_dim..][..head_dim])
    }
}

/// A number in bf16 as the same number in f32.
#[inline(always)]
pub(super) fn widen(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}
