//! The pages of one sequence, in order of position.

use crate::PAGE_TOKENS;
use crate::pool::{PageId, PagePool, PoolExhausted};

/// Page table of one sequence. Entry `p` holds positions `[64p, 64p + 64)`.
#[derive(Debug, Default)]
pub struct PageTable {
    pages: Vec<PageId>,
    /// The slots of `pages`, in the form a backend reads.
    slots: Vec<u32>,
}

impl PageTable {
    /// An empty table.
    pub fn new() -> PageTable {
        PageTable::default()
    }

    /// Tokens the pages have room for.
    pub fn capacity(&self) -> usize {
        self.pages.len() * PAGE_TOKENS
    }

    /// Slot numbers in order of position.
    pub fn slots(&self) -> &[u32] {
        &self.slots
    }

    /// Pages that must still be taken before the sequence can hold `tokens` tokens.
    pub fn missing_pages(&self, tokens: usize) -> usize {
        tokens.div_ceil(PAGE_TOKENS).saturating_sub(self.pages.len())
    }

    /// Takes pages until the sequence can hold `tokens` tokens. Takes nothing if there are not enough.
    pub fn reserve(&mut self, tokens: usize, pool: &mut PagePool) -> Result<(), PoolExhausted> {
        let missing = self.missing_pages(tokens);
        if missing > pool.free_pages() {
            return Err(PoolExhausted { pages: pool.pages() });
        }
        for _ in 0..missing {
            let page = pool.take()?;
            self.pages.push(page);
            self.slots.push(page.slot());
        }
        Ok(())
    }

    /// Gives back the pages that only hold positions at or after `tokens`.
    pub fn truncate(&mut self, tokens: usize, pool: &mut PagePool) {
        let keep = tokens.div_ceil(PAGE_TOKENS).min(self.pages.len());
        self.slots.truncate(keep);
        for page in self.pages.drain(keep..) {
            pool.release(page);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_taken_at_page_edges_only() {
        let mut pool = PagePool::new(4);
        let mut table = PageTable::new();
        for (tokens, pages) in [(0, 0), (1, 1), (63, 1), (64, 1), (65, 2), (128, 2), (129, 3)] {
            table.reserve(tokens, &mut pool).unwrap();
            assert_eq!(table.slots().len(), pages, "{tokens} tokens");
        }
        table.truncate(64, &mut pool);
        assert_eq!((table.slots().len(), pool.free_pages()), (1, 3));
        table.truncate(0, &mut pool);
        assert_eq!(pool.free_pages(), 4);
    }

    #[test]
    fn a_reservation_that_cannot_be_met_takes_nothing() {
        let mut pool = PagePool::new(2);
        let mut table = PageTable::new();
        table.reserve(64, &mut pool).unwrap();
        assert!(table.reserve(64 * 3, &mut pool).is_err());
        assert_eq!((table.slots().len(), pool.free_pages()), (1, 1));
    }
}
