//! Page slots of one pool with reference counts.
//!
//! The pools of a cache have different page sizes, so their slots are different types: a sealed page cannot be given
//! back to the bf16 pool.

use std::num::NonZeroU32;

use oscar_codec::{ExactSlot, HostSlot, SealedSlot};

/// A slot of some pool. Slot 0 is a dummy for padded rows and is never handed out.
pub(crate) trait PageSlot: Copy {
    /// The slot of this number; `None` for the dummy.
    fn new(number: u32) -> Option<Self>;

    /// Slot number in the backend's pool, as an index.
    fn index(self) -> usize;
}

impl PageSlot for ExactSlot {
    fn new(number: u32) -> Option<ExactSlot> {
        ExactSlot::new(number)
    }

    fn index(self) -> usize {
        self.index()
    }
}

impl PageSlot for SealedSlot {
    fn new(number: u32) -> Option<SealedSlot> {
        SealedSlot::new(number)
    }

    fn index(self) -> usize {
        self.index()
    }
}

impl PageSlot for HostSlot {
    fn new(number: u32) -> Option<HostSlot> {
        HostSlot::new(number)
    }

    fn index(self) -> usize {
        self.index()
    }
}

/// A bf16 page of one layer: what a prompt's page is written to before it is sealed. The numbers of the scratch pool
/// begin anew; a backend knows the page as the [`ExactSlot`] so many slots after the last of the bf16 pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct ScratchPage(NonZeroU32);

impl PageSlot for ScratchPage {
    fn new(number: u32) -> Option<ScratchPage> {
        NonZeroU32::new(number).map(ScratchPage)
    }

    fn index(self) -> usize {
        self.0.get() as usize
    }
}

/// A pool has no free page left.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("all {pages} pages of the KV cache are in use")]
pub(crate) struct PoolExhausted {
    /// Pages in the pool.
    pub(crate) pages: usize,
}

/// Reference-counted pages. A page is free again when its last owner releases it.
#[derive(Debug)]
pub(crate) struct PagePool<P = ExactSlot> {
    /// The number of the first slot, which is a dummy.
    first: usize,
    /// Owners per slot; index 0 is the dummy.
    owners: Vec<u32>,
    /// Free slots, the next one last. Low slots go first, so a short run touches little memory.
    free: Vec<P>,
}

impl<P: PageSlot> PagePool<P> {
    /// A pool of `pages` usable pages.
    pub(crate) fn new(pages: usize) -> PagePool<P> {
        PagePool::numbered_after(0, pages)
    }

    /// A pool of `pages` usable pages that shares the numbers of its slots with one of `slots` slots.
    pub(crate) fn numbered_after(slots: usize, pages: usize) -> PagePool<P> {
        let number = |number: usize| u32::try_from(number).expect("fewer than 2^32 pages");
        let free = (number(slots + 1)..=number(slots + pages)).rev().filter_map(P::new).collect();
        PagePool { first: slots, owners: vec![0; pages + 1], free }
    }

    /// The number of pages that can be handed out.
    pub(crate) fn pages(&self) -> usize {
        self.owners.len() - 1
    }

    /// Slots a backend must provide: the usable pages and the dummy.
    pub(crate) fn slots(&self) -> usize {
        self.owners.len()
    }

    /// Pages that nobody owns.
    pub(crate) fn free_pages(&self) -> usize {
        self.free.len()
    }

    /// Every page with its owners, in order of slots.
    pub(crate) fn all(&self) -> impl Iterator<Item = (P, u32)> {
        let numbered = (self.first as u32..).zip(&self.owners).skip(1);
        numbered.filter_map(|(number, &owners)| Some((P::new(number)?, owners)))
    }

    /// Number of owners of a page.
    pub(crate) fn owners(&self, page: P) -> u32 {
        self.owners[page.index() - self.first]
    }

    /// Allocates a page; the caller is its one owner.
    pub(crate) fn allocate(&mut self) -> Result<P, PoolExhausted> {
        let slot = self.free.pop().ok_or(PoolExhausted { pages: self.pages() })?;
        self.owners[slot.index() - self.first] = 1;
        Ok(slot)
    }

    /// Adds an owner to a page in use.
    pub(crate) fn share(&mut self, page: P) {
        let owners = &mut self.owners[page.index() - self.first];
        assert!(*owners > 0, "page {} is shared while free", page.index());
        *owners += 1;
    }

    /// Removes one owner of a page, which is free when none is left.
    pub(crate) fn release(&mut self, page: P) {
        let owners = &mut self.owners[page.index() - self.first];
        assert!(*owners > 0, "page {} is released while free", page.index());
        *owners -= 1;
        if *owners == 0 {
            self.free.push(page);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_dummy_is_never_handed_out() {
        let mut pool = PagePool::<ExactSlot>::new(3);
        let pages: Vec<_> = (0..3).map(|_| pool.allocate().unwrap().number()).collect();
        assert_eq!(pages, [1, 2, 3]);
        assert_eq!(pool.allocate(), Err(PoolExhausted { pages: 3 }));
    }

    #[test]
    fn pools_may_share_their_numbers() {
        let mut pool = PagePool::<SealedSlot>::numbered_after(4, 2);
        let pages: Vec<_> = (0..2).map(|_| pool.allocate().unwrap().number()).collect();
        assert_eq!(pages, [5, 6]);
        let slot = SealedSlot::new(6).unwrap();
        pool.share(slot);
        assert_eq!((pool.owners(slot), pool.pages(), pool.slots()), (2, 2, 3));
        assert_eq!(
            pool.all().map(|(slot, owners)| (slot.number(), owners)).collect::<Vec<_>>(),
            [(5, 1), (6, 2)]
        );
        pool.release(SealedSlot::new(5).unwrap());
        assert_eq!(pool.free_pages(), 1);
    }

    #[test]
    fn a_shared_page_is_free_after_its_last_owner() {
        let mut pool = PagePool::<ExactSlot>::new(1);
        let page = pool.allocate().unwrap();
        pool.share(page);
        pool.release(page);
        assert!(pool.allocate().is_err());
        pool.release(page);
        assert_eq!(pool.allocate(), Ok(page));
    }

    #[test]
    #[should_panic(expected = "released while free")]
    fn a_double_release_is_caught() {
        let mut pool = PagePool::<ExactSlot>::new(1);
        let page = pool.allocate().unwrap();
        pool.release(page);
        pool.release(page);
    }

    proptest! {
        /// Random operations against a plain list of owners.
        #[test]
        fn agrees_with_a_naive_model(operations in prop::collection::vec((0u8..3, any::<u16>()), 0..400)) {
            let mut pool = PagePool::<ExactSlot>::new(8);
            let mut owned: Vec<ExactSlot> = Vec::new();
            for (kind, pick) in operations {
                match kind {
                    0 => match pool.allocate() {
                        Ok(page) => {
                            prop_assert!(!owned.contains(&page));
                            owned.push(page);
                        }
                        Err(_) => {
                            let mut distinct = owned.clone();
                            distinct.sort_unstable();
                            distinct.dedup();
                            prop_assert_eq!(distinct.len(), 8);
                        }
                    },
                    1 if !owned.is_empty() => {
                        let page = owned[usize::from(pick) % owned.len()];
                        pool.share(page);
                        owned.push(page);
                    }
                    2 if !owned.is_empty() => {
                        let page = owned.swap_remove(usize::from(pick) % owned.len());
                        pool.release(page);
                    }
                    _ => {}
                }
                let mut distinct = owned.clone();
                distinct.sort_unstable();
                distinct.dedup();
                prop_assert_eq!(pool.free_pages(), 8 - distinct.len());
            }
        }
    }
}
