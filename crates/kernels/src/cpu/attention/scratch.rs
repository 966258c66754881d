//! Buffers of one thread for all attention kernels; they keep their allocation between calls.

use crate::cpu::aligned::AlignedScratch;

/// Memory of one thread for attention over bf16 and over sealed pages.
#[derive(Default)]
pub struct AttentionScratch {
    /// The queries of a call times the softmax scale.
    pub(super) queries: AlignedScratch,
    /// Logits of a group of rows, then their weights.
    pub(super) scores: AlignedScratch,
    /// The values of a partly filled page, with zeros for tokens that are not there.
    pub(super) values: AlignedScratch,
    /// What tiles need besides.
    #[cfg(target_arch = "x86_64")]
    pub(super) tiles: TileScratch,
    /// What 2-bit and 4-bit pages need besides.
    pub(super) codes: CodeScratch,
    /// A sealed page widened to bf16, and what is not the same for all of its tokens.
    pub(super) wide: WidePageScratch,
}

/// Buffers of products in tiles.
#[cfg(target_arch = "x86_64")]
#[derive(Default)]
pub(super) struct TileScratch {
    /// The queries as tiles.
    pub(super) queries: AlignedScratch,
    /// The weights of a group of rows as tiles.
    pub(super) weights: AlignedScratch,
    /// The last channels of the keys of a page, padded to a whole tile.
    pub(super) tail: AlignedScratch,
}

/// Buffers of integer products with codes.
#[derive(Default)]
pub(super) struct CodeScratch {
    /// Queries in fixed point.
    pub(super) queries: AlignedScratch,
    pub(super) query_units: AlignedScratch,
    /// Weights in fixed point.
    pub(super) weights: AlignedScratch,
    pub(super) weight_units: AlignedScratch,
    /// Integer sums of keys and of values.
    pub(super) sums: AlignedScratch,
    /// Sums over tokens that are still in lanes.
    #[cfg(target_arch = "x86_64")]
    pub(super) lanes: AlignedScratch,
    /// Logits, and the scales and offsets of a page.
    pub(super) logits: AlignedScratch,
}

/// Buffers of a page that is widened to bf16 before it is multiplied.
#[derive(Default)]
pub(super) struct WidePageScratch {
    /// Queries whose rows are padded as the page is, or the sums of their channels.
    pub(super) queries: AlignedScratch,
    pub(super) page: AlignedScratch,
    pub(super) scales: AlignedScratch,
    /// Values summed over a page, or offsets summed over pages.
    pub(super) sums: AlignedScratch,
}
