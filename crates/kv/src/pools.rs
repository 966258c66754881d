//! The pools of a cache.

use oscar_codec::{ExactSlot, SealedSlot};

use crate::error::PoolKind;
use crate::key::Tier;
use crate::pool::{PagePool, PageSlot, ScratchPage};

/// bf16 pages, sealed pages, and the scratch that prompts pass through on their way from one to the other.
#[derive(Debug)]
pub(crate) struct Pools {
    pub(crate) exact: PagePool<ExactSlot>,
    pub(crate) sealed: PagePool<SealedSlot>,
    /// Sealed pages of [`Tier::High`], whose slots are numbered after those of the sealed pool.
    pub(crate) high: PagePool<SealedSlot>,
    pub(crate) scratch: PagePool<ScratchPage>,
}

impl Pools {
    /// Empty pools of so many pages.
    pub(crate) fn new(exact: usize, sealed: usize, high: usize, scratch: usize) -> Pools {
        let sealed = PagePool::new(sealed);
        let high = PagePool::numbered_after(sealed.slots(), high);
        Pools { exact: PagePool::new(exact), sealed, high, scratch: PagePool::new(scratch) }
    }

    /// Slots of both pools of sealed pages.
    pub(crate) fn sealed_slots(&self) -> usize {
        self.sealed.slots() + self.high.slots()
    }

    /// The pool that pages of a tier are sealed to. Histories in bf16 are demoted to the cache's own type.
    pub(crate) fn sealed_of(&mut self, tier: Tier) -> &mut PagePool<SealedSlot> {
        match sealed_kind(tier) {
            PoolKind::High => &mut self.high,
            _ => &mut self.sealed,
        }
    }

    /// Adds an owner to a sealed page in use.
    pub(crate) fn share_sealed(&mut self, slot: SealedSlot) {
        self.pool_with(slot).share(slot);
    }

    /// Removes one owner of a sealed page.
    pub(crate) fn release_sealed(&mut self, slot: SealedSlot) {
        self.pool_with(slot).release(slot);
    }

    /// Number of owners of a sealed page.
    pub(crate) fn sealed_owners(&self, slot: SealedSlot) -> u32 {
        if self.is_high(slot) { self.high.owners(slot) } else { self.sealed.owners(slot) }
    }

    fn pool_with(&mut self, slot: SealedSlot) -> &mut PagePool<SealedSlot> {
        if self.is_high(slot) { &mut self.high } else { &mut self.sealed }
    }

    /// Whether a sealed page is one of [`Tier::High`].
    pub(crate) fn is_high(&self, slot: SealedSlot) -> bool {
        slot.index() >= self.sealed.slots()
    }

    /// The scratch page that a slot of a table names; `None` if the slot is one of the bf16 pool.
    pub(crate) fn scratch_page(&self, slot: ExactSlot) -> Option<ScratchPage> {
        ScratchPage::new(slot.number().checked_sub(self.exact.slots() as u32)?)
    }

    /// The slot under which tables and backends know a scratch page.
    pub(crate) fn scratch_slot(&self, page: ScratchPage) -> ExactSlot {
        ExactSlot::new((self.exact.slots() + page.index()) as u32)
            .expect("scratch slots follow the bf16 slots")
    }
}

/// The pool that pages of a tier are sealed to.
pub(crate) fn sealed_kind(tier: Tier) -> PoolKind {
    match tier {
        Tier::High => PoolKind::High,
        Tier::Sealed | Tier::Exact => PoolKind::Sealed,
    }
}
