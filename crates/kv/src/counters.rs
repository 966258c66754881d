//! Counts that the ledger keeps while sequences open, grow and close.

use oscar_codec::{ExactSlot, SealedSlot};

/// Counts that neither the pools nor the tree keep.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Counters {
    pub(crate) sequences: usize,
    pub(crate) filling: usize,
    pub(crate) exact: usize,
    pub(crate) both: usize,
    pub(crate) sealed: usize,
    pub(crate) lookups: u64,
    pub(crate) hits: u64,
    pub(crate) prompt_tokens: u64,
    pub(crate) cached_tokens: u64,
}

impl Counters {
    /// The counter of a table entry, `None` for an entry without a page.
    pub(crate) fn counter_of(
        &mut self,
        exact: Option<ExactSlot>,
        sealed: Option<SealedSlot>,
    ) -> Option<&mut usize> {
        match (exact, sealed) {
            (None, None) => None,
            (Some(_), None) => Some(&mut self.exact),
            (None, Some(_)) => Some(&mut self.sealed),
            (Some(_), Some(_)) => Some(&mut self.both),
        }
    }
}
