//! The three pools of a cache.

use oscar_codec::{ExactSlot, SealedSlot};

use crate::pool::{PagePool, PageSlot, ScratchPage};

/// bf16 pages, sealed pages, and the scratch that prompts pass through on their way from one to the other.
#[derive(Debug)]
pub(crate) struct Pools {
    pub(crate) exact: PagePool<ExactSlot>,
    pub(crate) sealed: PagePool<SealedSlot>,
    pub(crate) scratch: PagePool<ScratchPage>,
}

impl Pools {
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
