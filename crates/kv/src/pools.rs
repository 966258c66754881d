//! The three pools of a cache.

use crate::pool::{ExactPage, PagePool, PageSlot, ScratchPage, SealedPage};

/// bf16 pages, sealed pages, and the scratch that prompts pass through on their way from one to the other.
#[derive(Debug)]
pub(crate) struct Pools {
    pub(crate) exact: PagePool<ExactPage>,
    pub(crate) sealed: PagePool<SealedPage>,
    pub(crate) scratch: PagePool<ScratchPage>,
}

impl Pools {
    /// The bf16 page of a slot that a table or node names.
    pub(crate) fn exact_page(slot: u32) -> ExactPage {
        ExactPage::from_slot(slot)
    }

    /// The sealed page of a slot that a table or node names.
    pub(crate) fn sealed_page(slot: u32) -> SealedPage {
        SealedPage::from_slot(slot)
    }

    /// Owners of a bf16 slot.
    pub(crate) fn exact_owners(&self, slot: u32) -> u32 {
        self.exact.owners(Self::exact_page(slot))
    }

    /// Owners of a sealed slot.
    pub(crate) fn sealed_owners(&self, slot: u32) -> u32 {
        self.sealed.owners(Self::sealed_page(slot))
    }
}
