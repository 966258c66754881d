//! The page pools of a cache in host memory.
//!
//! | pool | order | holds |
//! |---|---|---|
//! | bf16 | `[slot][layer][head]` | windows, and whole sequences when nothing is sealed |
//! | scratch | `[slot][head]` | one layer of a prompt on its way to sealed pages |
//! | sealed | `[slot][layer][head]`, a format per layer | history |
//! | high | the same, of another codec | history of other sequences |
//!
//! All layers of a slot lie together, so memory becomes resident page by page as sequences grow, not layer by layer.
//! Rows are stored in the codec's basis (centred, rotated) in every pool, because softmax over a mixture of pools is
//! only right when all keys of a row are shifted alike.

use std::ops::Range;
use std::sync::Arc;

use oscar_codec::{Bf16Layout, ExactSlot, HeadIndex, PAGE_TOKENS, PageCodec, PageLayout, SealedSlot, Side};

use super::attention;
use super::encode::Sealer;
use super::isa::Isa;
use super::memory::{self, AlignedBuffer, DisjointSlice};
use super::page_means::PageMeanTable;
use crate::backend::{CacheSpec, KernelError};
use crate::inspect::KvRows;

/// Page pools in host memory.
pub struct Cache {
    spec: CacheSpec,
    /// Elements of a bf16 page of one head.
    page_len: usize,
    exact: AlignedBuffer<u16>,
    scratch: AlignedBuffer<u16>,
    sealed: Option<SealedPool>,
    high: Option<SealedPool>,
    /// What the keys of sealed pages are centred by, in either pool.
    means: PageMeanTable,
}

/// A pool of sealed pages.
pub(super) struct SealedPool {
    pub(super) sealer: Sealer,
    /// The number of the pool's first slot.
    first: usize,
    /// How each layer is read.
    pub(super) layouts: Vec<PageLayout>,
    bytes: AlignedBuffer<u8>,
}

impl SealedPool {
    fn new(isa: Isa, codec: &Arc<PageCodec>, first: usize, slots: usize) -> Result<SealedPool, KernelError> {
        let bytes = product([slots, codec.page_bytes(), 1, 1]);
        Ok(SealedPool {
            layouts: (0..codec.geometry().layers).map(|layer| codec.layout(layer)).collect(),
            bytes: AlignedBuffer::zeroed(bytes, "sealed pages of the KV cache")?,
            sealer: Sealer::new(isa, Arc::clone(codec)),
            first,
        })
    }

    /// The pages of a layer, by KV head and slot.
    pub(super) fn pages<'a>(&'a self, layer: usize) -> impl Fn(usize, Option<SealedSlot>) -> &'a [u8] {
        let places = Places::of(self.sealer.codec(), layer, self.first);
        move |head, slot| &self.bytes[places.range(head, slot)]
    }
}

/// Where the sealed pages of a layer lie.
struct Places {
    /// Bytes of a slot, all layers and heads.
    slot: usize,
    /// Bytes of a page.
    page: usize,
    /// Where the layer begins in a slot.
    first: usize,
    /// The number of the pool's first slot.
    first_slot: usize,
}

impl Places {
    fn of(codec: &PageCodec, layer: usize, first_slot: usize) -> Places {
        let (slot, page, first) = (codec.page_bytes(), codec.head_bytes(layer), codec.layer_offset(layer));
        Places { slot, page, first, first_slot }
    }

    #[inline]
    fn range(&self, head: usize, slot: Option<SealedSlot>) -> Range<usize> {
        let slot = SealedSlot::table_entry(slot) as usize - self.first_slot;
        let start = slot * self.slot + self.first + head * self.page;
        start..start + self.page
    }
}

impl Cache {
    pub(super) fn new(isa: Isa, spec: &CacheSpec) -> Result<Cache, KernelError> {
        let geometry = spec.geometry;
        if !geometry.head_dim.is_multiple_of(2) {
            let got = geometry.head_dim;
            return Err(KernelError::Shape {
                what: "head dimension, an even number",
                expected: got + 1,
                got,
            });
        }
        let page_len = Bf16Layout::new(geometry.head_dim).elements();
        let elements = |slots: usize, layers: usize| product([slots, layers, geometry.kv_heads, page_len]);
        let pool = |codec: &Arc<PageCodec>, first: usize, slots: usize| {
            if codec.geometry() != geometry {
                let (expected, got) = (geometry.layers, codec.geometry().layers);
                return Err(KernelError::Shape {
                    what: "layers, heads and channels of a codec",
                    expected,
                    got,
                });
            }
            SealedPool::new(isa, codec, first, slots)
        };
        let sealed = spec.sealed.as_ref();
        let high = sealed.and_then(|sealed| Some((sealed.slots, sealed.high.as_ref()?)));
        Ok(Cache {
            page_len,
            exact: AlignedBuffer::zeroed(elements(spec.slots, geometry.layers), "the KV cache")?,
            scratch: AlignedBuffer::zeroed(
                elements(spec.scratch_slots, 1),
                "prefill scratch of the KV cache",
            )?,
            sealed: sealed.map(|sealed| pool(&sealed.codec, 0, sealed.slots)).transpose()?,
            high: high.map(|(first, high)| pool(&high.codec, first, high.slots)).transpose()?,
            means: PageMeanTable::default(),
            spec: spec.clone(),
        })
    }

    /// The sizes and formats that the cache was made with.
    pub fn spec(&self) -> &CacheSpec {
        &self.spec
    }

    /// Tells how far the pools are in use: slots below these, each counted from the first of its pool, are or were.
    pub(super) fn settle(&self, exact: usize, sealed: usize, high: usize) {
        let slot_len = self.spec.geometry.layers * self.spec.geometry.kv_heads * self.page_len;
        // The dummy is never written to.
        self.exact.merge_pages(slot_len..exact * slot_len);
        for (pool, slots) in [(&self.sealed, sealed), (&self.high, high)] {
            if let Some(pool) = pool {
                let bytes = pool.sealer.codec().page_bytes();
                pool.bytes.merge_pages(bytes..slots * bytes);
            }
        }
    }

    /// Gives the memory of the scratch pages back, and with it what a long prompt has left in the allocator.
    pub(super) fn release_scratch(&mut self) {
        self.scratch.release();
        memory::trim();
    }

    /// The pool of the cache's own codec, whose transforms all rows go through.
    pub(super) fn sealed(&self) -> Option<&SealedPool> {
        self.sealed.as_ref()
    }

    /// The pool of a sealed slot.
    pub(super) fn sealed_with(&self, slot: Option<SealedSlot>) -> Option<&SealedPool> {
        let high = self.high.as_ref().filter(|high| slot.is_some_and(|slot| slot.index() >= high.first));
        high.or(self.sealed.as_ref())
    }

    /// What the stored keys of a layer's pages are less of, by the number of the page in its sequence and KV head; `None` in a
    /// layer whose pages are not centred, and before any page was sealed.
    pub(super) fn page_means<'a>(
        &'a self,
        layer: usize,
    ) -> Option<impl Fn(usize, usize) -> &'a [u16] + use<'a>> {
        self.means.of_layer(layer, self.spec.geometry)
    }

    /// Slot of the page that holds a position, or an error that names what is missing.
    fn slot_of(pages: &[Option<ExactSlot>], position: usize) -> Result<ExactSlot, KernelError> {
        let page = position / PAGE_TOKENS;
        pages.get(page).copied().flatten().ok_or(KernelError::PageMissing { page, tier: "bf16" })
    }

    /// Reads the key and the value at one position of a head.
    pub(super) fn read_token(
        &self,
        rows: KvRows<'_>,
        position: usize,
        key: &mut [f32],
        value: &mut [f32],
    ) -> Result<(), KernelError> {
        let slot = Cache::slot_of(rows.pages, position)?;
        let page = self.page(rows.layer, Some(slot), rows.head);
        attention::read_token(page, self.spec.geometry.head_dim, position % PAGE_TOKENS, key, value);
        Ok(())
    }

    /// Writes the key and the value at one position of a head, rounded to bf16.
    pub(super) fn write_token(
        &mut self,
        rows: KvRows<'_>,
        position: usize,
        key: &[f32],
        value: &[f32],
    ) -> Result<(), KernelError> {
        let (slot, d) = (Cache::slot_of(rows.pages, position)?, self.spec.geometry.head_dim);
        let writer = self.writer(rows.layer);
        // SAFETY: the writer is borrowed exclusively and gives out one page at a time.
        let page = unsafe { writer.page(slot, rows.head) };
        attention::write_token(page, d, position % PAGE_TOKENS, key, value);
        Ok(())
    }

    /// The bytes of a sealed page of one head, for tests and tools.
    pub fn sealed_bytes(&self, layer: usize, head: usize, slot: SealedSlot) -> Option<&[u8]> {
        self.sealed_with(Some(slot)).map(|sealed| sealed.pages(layer)(head, Some(slot)))
    }

    /// The bf16 page of one head, or the dummy: what padded rows read does not matter.
    pub(super) fn page(&self, layer: usize, slot: Option<ExactSlot>, head: usize) -> &[u16] {
        let (pool, index) = self.place(layer, slot, head);
        let elements = match pool {
            Pool::Exact => &self.exact,
            Pool::Scratch => &self.scratch,
        };
        &elements[index * self.page_len..(index + 1) * self.page_len]
    }

    fn place(&self, layer: usize, slot: Option<ExactSlot>, head: usize) -> (Pool, usize) {
        place(&self.spec, layer, slot, head)
    }

    /// The bf16 pages of a layer, to be written by several threads.
    pub(super) fn writer(&mut self, layer: usize) -> PageWriter<'_> {
        let Cache { spec, page_len, exact, scratch, sealed, .. } = self;
        PageWriter {
            spec,
            layer,
            page_len: *page_len,
            exact: DisjointSlice::new(exact),
            scratch: DisjointSlice::new(scratch),
            sealer: sealed.as_ref().map(|sealed| &sealed.sealer),
        }
    }

    /// Everything needed to seal: bf16 pages to read, sealed pages to write.
    /// Pages have numbers below `pages` in their sequences.
    pub(super) fn sealing(&mut self, pages: usize) -> Option<Sealing<'_>> {
        let Cache { spec, page_len, exact, scratch, sealed, high, means } = self;
        let sealed = sealed.as_mut()?;
        means.extend(&sealed.sealer, pages, spec.sealed.as_ref().map_or(0, |sealed| sealed.sequence_pages));
        let (sealed, high) = (SealTarget::of(sealed), high.as_mut().map(SealTarget::of));
        Some(Sealing { spec, page_len: *page_len, exact, scratch, sealed, high, means })
    }

    /// Copies a bf16 page, all layers.
    pub(super) fn copy_page(&mut self, from: ExactSlot, to: ExactSlot) {
        let slot_len = self.spec.geometry.layers * self.spec.geometry.kv_heads * self.page_len;
        let start = from.index() * slot_len;
        self.exact.copy_within(start..start + slot_len, to.index() * slot_len);
    }
}

enum Pool {
    Exact,
    Scratch,
}

/// The pool of a bf16 slot, and the index of a head's page in it.
fn place(spec: &CacheSpec, layer: usize, slot: Option<ExactSlot>, head: usize) -> (Pool, usize) {
    let (heads, slot) = (spec.geometry.kv_heads, ExactSlot::table_entry(slot) as usize);
    match slot.checked_sub(spec.slots) {
        Some(scratch) => (Pool::Scratch, scratch * heads + head),
        None => (Pool::Exact, (slot * spec.geometry.layers + layer) * heads + head),
    }
}

/// Sizes multiplied; what does not fit is more memory than there is.
fn product(factors: [usize; 4]) -> usize {
    factors.into_iter().try_fold(1usize, usize::checked_mul).unwrap_or(usize::MAX)
}

/// The bf16 pages of one layer, written by several threads.
pub(super) struct PageWriter<'a> {
    spec: &'a CacheSpec,
    layer: usize,
    page_len: usize,
    exact: DisjointSlice<'a, u16>,
    scratch: DisjointSlice<'a, u16>,
    /// What rows go through before they are written, if pages are to be sealed.
    pub(super) sealer: Option<&'a Sealer>,
}

impl PageWriter<'_> {
    /// The keys or the values of one page.
    ///
    /// # Safety
    /// Nobody else may hold the same side of the page, or the page, at the same time.
    #[allow(clippy::mut_from_ref)]
    pub(super) unsafe fn side(&self, slot: ExactSlot, head: usize, side: Side) -> &mut [u16] {
        let half = self.page_len / 2;
        let start = match side {
            Side::Key => 0,
            Side::Value => half,
        };
        let (pages, first) = self.place(slot, head);
        // SAFETY: sides of a page are its halves, otherwise as in `page`.
        unsafe { pages.part(first + start..first + start + half) }
    }

    /// The bytes of one page.
    ///
    /// # Safety
    /// Nobody else may hold the same page at the same time.
    #[allow(clippy::mut_from_ref)]
    pub(super) unsafe fn page(&self, slot: ExactSlot, head: usize) -> &mut [u16] {
        let (pages, first) = self.place(slot, head);
        // SAFETY: different (slot, head) pairs give disjoint ranges; the caller promises the rest.
        unsafe { pages.part(first..first + self.page_len) }
    }

    /// The pool of a page, and where it begins there.
    fn place(&self, slot: ExactSlot, head: usize) -> (&DisjointSlice<'_, u16>, usize) {
        let (pool, index) = place(self.spec, self.layer, Some(slot), head);
        let pages = match pool {
            Pool::Exact => &self.exact,
            Pool::Scratch => &self.scratch,
        };
        (pages, index * self.page_len)
    }
}

/// The pools while pages are being sealed by several threads.
pub(super) struct Sealing<'a> {
    spec: &'a CacheSpec,
    page_len: usize,
    exact: &'a [u16],
    scratch: &'a [u16],
    sealed: SealTarget<'a>,
    high: Option<SealTarget<'a>>,
    means: &'a PageMeanTable,
}

/// A pool of sealed pages that are being written.
pub(super) struct SealTarget<'a> {
    pub(super) sealer: &'a Sealer,
    first: usize,
    bytes: DisjointSlice<'a, u8>,
}

impl SealTarget<'_> {
    fn of(pool: &mut SealedPool) -> SealTarget<'_> {
        let SealedPool { sealer, first, bytes, .. } = pool;
        SealTarget { sealer, first: *first, bytes: DisjointSlice::new(bytes) }
    }

    /// The sealed page of one head.
    ///
    /// # Safety
    /// Nobody else may hold the same page at the same time.
    #[allow(clippy::mut_from_ref)]
    pub(super) unsafe fn page(&self, head: HeadIndex, slot: SealedSlot) -> &mut [u8] {
        let place = Places::of(self.sealer.codec(), head.layer, self.first).range(head.head, Some(slot));
        // SAFETY: different (slot, layer, head) triples give disjoint ranges; the caller promises the rest.
        unsafe { self.bytes.part(place) }
    }
}

impl<'a> Sealing<'a> {
    /// The pool of a sealed slot.
    pub(super) fn target(&self, slot: SealedSlot) -> &SealTarget<'a> {
        self.high.as_ref().filter(|high| slot.index() >= high.first).unwrap_or(&self.sealed)
    }

    /// What the keys of a page are centred by, if that is anything; `page` is its number in its sequence.
    pub(super) fn page_mean(&self, head: HeadIndex, page: usize) -> Option<&[u16]> {
        let of_layer = self.means.of_layer(head.layer, self.spec.geometry)?;
        Some(of_layer(page, head.head))
    }

    /// The bf16 page to be sealed.
    pub(super) fn exact_page(&self, head: HeadIndex, slot: ExactSlot) -> &[u16] {
        let (pool, index) = place(self.spec, head.layer, Some(slot), head.head);
        let pages = match pool {
            Pool::Exact => self.exact,
            Pool::Scratch => self.scratch,
        };
        &pages[index * self.page_len..(index + 1) * self.page_len]
    }
}
