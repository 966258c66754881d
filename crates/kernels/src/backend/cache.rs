//! The page pools of a cache, and the sequences of a step that read and write them.

use std::sync::Arc;

use oscar_codec::{ExactSlot, KvGeometry, PageCodec, PageWindows, SealedSlot};

/// Size of the page pools of a cache. Slot 0 of every pool is a dummy that padded rows may name.
#[derive(Clone, Debug)]
pub struct CacheSpec {
    /// Layers, KV heads and head dimension.
    pub geometry: KvGeometry,
    /// Query heads of a layer, which read the KV heads in equal groups.
    pub query_heads: usize,
    /// Slots of bf16 pages.
    pub slots: usize,
    /// Slots of bf16 pages that hold one layer only: a prompt on its way to sealed pages, layer by layer. They follow
    /// the bf16 slots in number, `slots..slots + scratch_slots`.
    pub scratch_slots: usize,
    /// The sealed pages, if pages are ever sealed.
    pub sealed: Option<SealedSpec>,
    /// Room in the host's memory for pages that leave the device.
    pub host: HostSlots,
}

/// Slots in the host's memory, the dummies included, which hold nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostSlots {
    /// Slots that hold a bf16 page each.
    pub exact: usize,
    /// Slots that hold a sealed page each.
    pub sealed: usize,
}

/// The sealed pages of a cache.
#[derive(Clone, Debug)]
pub struct SealedSpec {
    /// What sealed bytes mean, and the maps that rows go through before they are stored in any pool.
    pub codec: Arc<PageCodec>,
    /// Slots of sealed pages.
    pub slots: usize,
    /// Which pages a query reads exactly.
    pub windows: PageWindows,
    /// Pages of the longest sequence that the cache may hold.
    pub sequence_pages: usize,
    /// Sealed pages of a second codec, if some sequences have those instead; see [`Feature::HighTier`](super::Feature::HighTier).
    pub high: Option<HighSpec>,
}

/// Sealed pages of a codec of more bits. All sealed pages of a sequence are of one codec.
#[derive(Clone, Debug)]
pub struct HighSpec {
    /// [`PageCodec::high`] of the codec beside it: rows go through the same maps.
    pub codec: Arc<PageCodec>,
    /// Slots of its pages. They follow those of the other codec in number.
    pub slots: usize,
}

impl SealedSpec {
    /// Slots of sealed pages of either codec.
    pub fn all_slots(&self) -> usize {
        self.slots + self.high.as_ref().map_or(0, |high| high.slots)
    }
}

impl CacheSpec {
    /// A cache of bf16 pages alone.
    pub fn exact(geometry: KvGeometry, query_heads: usize, slots: usize) -> CacheSpec {
        let host = HostSlots::default();
        CacheSpec { geometry, query_heads, slots, scratch_slots: 0, sealed: None, host }
    }

    /// Slots of bf16 pages, scratch included.
    pub fn exact_slots(&self) -> usize {
        self.slots + self.scratch_slots
    }
}

/// Consecutive tokens of one sequence inside a step.
#[derive(Clone, Copy, Debug)]
pub struct SequenceRows<'a> {
    /// Position of the first token.
    pub start: usize,
    /// Number of tokens.
    pub len: usize,
    /// Page table: `pages[p]` is the slot of the bf16 page that holds positions `[64p, 64p + 64)`, if there is one.
    /// Covers `start + len` tokens. Padded rows have no page at all and read the dummy.
    pub pages: &'a [Option<ExactSlot>],
    /// The sealed pages of a sequence that has any.
    pub sealed: Option<SealedRows<'a>>,
}

/// The sealed side of a page table, and what is read from it; see [`PageWindows::history`].
#[derive(Clone, Copy, Debug)]
pub struct SealedRows<'a> {
    /// Sealed slot of each page that has one.
    pub pages: &'a [Option<SealedSlot>],
    /// Pages from here on are read exactly, whatever the windows say; `usize::MAX` if that holds for none.
    pub exact_from: usize,
    /// Pages below (and after the sink) are read sealed, whatever the windows say.
    pub sealed_until: usize,
}

impl<'a> SequenceRows<'a> {
    /// Rows of a sequence whose pages are all bf16.
    pub fn exact(start: usize, len: usize, pages: &'a [Option<ExactSlot>]) -> SequenceRows<'a> {
        SequenceRows { start, len, pages, sealed: None }
    }
}

/// A full bf16 page and the sealed page it becomes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SealPage {
    /// Number of the page in its sequence: it holds positions `[64 · page, 64 · page + 64)`.
    pub page: usize,
    /// Slot of the bf16 page, scratch slots included.
    pub exact: ExactSlot,
    /// Slot of the sealed page.
    pub sealed: SealedSlot,
}

/// The tokens of one step: the rows of all sequences, one after the other.
#[derive(Clone, Copy, Debug)]
pub struct Batch<'a> {
    /// Token ids, `sequences` laid end to end.
    pub tokens: &'a [u32],
    /// The sequences they belong to.
    pub sequences: &'a [SequenceRows<'a>],
}
