//! The pages: a hash for every stored row, and for every sealed page the hash of what it was sealed from.

use std::ops::Range;
use std::sync::Arc;

use oscar_codec::{ExactSlot, HostCopy, PAGE_TOKENS, PageCodec, PageWindows, SealedSlot};
use oscar_kernels::KernelError;
use oscar_kernels::backend::{CacheSpec, SealPage, SealedSpec};

use super::mix;

/// The page pools of a device that hashes.
#[derive(Debug)]
pub struct HashCache {
    layers: usize,
    /// bf16 slots that hold all layers; scratch slots follow them in number.
    slots: usize,
    /// `[slot][layer]`, then one page for each scratch slot, whatever the layer.
    pages: Vec<Page>,
    /// `[slot][layer]`; 0 until something is sealed there.
    sealed: Vec<u64>,
    /// Slots of the cache's own codec; those of the other follow them in number.
    own_slots: usize,
    sealed_slots: usize,
    /// The same in the host's memory, one entry for each slot.
    host_pages: Vec<Vec<Page>>,
    host_sealed: Vec<Vec<u64>>,
    pub(super) windows: Option<PageWindows>,
    codec: Option<Arc<PageCodec>>,
}

/// The rows of one page and their sum, so that a full page costs one operation.
#[derive(Clone, Copy, Debug)]
struct Page {
    rows: [u64; PAGE_TOKENS],
    sum: u64,
}

impl Page {
    /// A page with the same hash in every row.
    fn filled(row: u64) -> Page {
        let sum = (0..PAGE_TOKENS).fold(0, |sum: u64, offset| sum.wrapping_add(term(row, offset)));
        Page { rows: [row; PAGE_TOKENS], sum }
    }
}

/// What one row adds to the sum of its page.
fn term(row: u64, offset: usize) -> u64 {
    mix(row, offset as u64 + 1)
}

impl HashCache {
    pub(super) fn new(spec: &CacheSpec) -> HashCache {
        let layers = spec.geometry.layers;
        let own_slots = spec.sealed.as_ref().map_or(0, |sealed| sealed.slots);
        let sealed_slots = spec.sealed.as_ref().map_or(0, SealedSpec::all_slots);
        HashCache {
            layers,
            slots: spec.slots,
            pages: vec![Page::filled(0); spec.slots * layers + spec.scratch_slots],
            sealed: vec![0; sealed_slots * layers],
            own_slots,
            sealed_slots,
            host_pages: vec![Vec::new(); spec.host.exact],
            host_sealed: vec![Vec::new(); spec.host.sealed],
            windows: spec.sealed.as_ref().map(|sealed| sealed.windows),
            codec: spec.sealed.as_ref().map(|sealed| Arc::clone(&sealed.codec)),
        }
    }

    pub(super) fn exact_slots(&self) -> usize {
        self.slots + self.pages.len() - self.slots * self.layers
    }

    pub(super) fn sealed_slots(&self) -> usize {
        self.sealed_slots
    }

    fn index(&self, layer: usize, slot: ExactSlot) -> usize {
        match slot.index().checked_sub(self.slots) {
            Some(scratch) => self.slots * self.layers + scratch,
            None => slot.index() * self.layers + layer,
        }
    }

    pub(super) fn store(&mut self, layer: usize, slot: ExactSlot, offset: usize, row: u64) {
        let index = self.index(layer, slot);
        let page = &mut self.pages[index];
        page.sum = page.sum.wrapping_sub(term(page.rows[offset], offset)).wrapping_add(term(row, offset));
        page.rows[offset] = row;
    }

    /// The first `rows` rows of a bf16 page.
    pub(super) fn exact(&self, layer: usize, slot: ExactSlot, rows: usize) -> u64 {
        self.exact_rows(layer, slot, 0..rows)
    }

    /// Some rows of a bf16 page.
    pub(super) fn exact_rows(&self, layer: usize, slot: ExactSlot, rows: Range<usize>) -> u64 {
        let page = &self.pages[self.index(layer, slot)];
        if rows == (0..PAGE_TOKENS) {
            return page.sum;
        }
        rows.fold(0, |sum, offset| sum.wrapping_add(term(page.rows[offset], offset)))
    }

    /// The hash that a sealed page holds.
    pub(super) fn sealed(&self, layer: usize, slot: SealedSlot) -> u64 {
        self.sealed[slot.index() * self.layers + layer]
    }

    pub(super) fn seal(&mut self, layer: usize, page: SealPage) -> Result<(), KernelError> {
        check_slot(page.exact.number(), self.exact_slots())?;
        check_slot(page.sealed.number(), self.sealed_slots)?;
        let rows = self.exact(layer, page.exact, PAGE_TOKENS);
        self.sealed[page.sealed.index() * self.layers + layer] = match &self.codec {
            // Nobody may read it.
            Some(codec) if !codec.has_history(layer) => 0,
            // A copy is as good as what it was made from.
            Some(codec) if codec.layout(layer).is_bf16() => rows,
            _ if page.sealed.index() >= self.own_slots => mix(9, rows),
            _ => mix(6, rows),
        };
        Ok(())
    }

    pub(super) fn copy(&mut self, from: ExactSlot, to: ExactSlot) -> Result<(), KernelError> {
        check_slot(from.number(), self.slots)?;
        check_slot(to.number(), self.slots)?;
        for layer in 0..self.layers {
            let (from, to) = (self.index(layer, from), self.index(layer, to));
            self.pages[to] = self.pages[from];
        }
        Ok(())
    }

    /// Copies a page to the host or back; one that was never copied there holds nothing.
    pub(super) fn copy_host_page(&mut self, copy: HostCopy) -> Result<(), KernelError> {
        let layers = self.layers;
        let host = match copy {
            HostCopy::ExactOut { to, .. } | HostCopy::SealedOut { to, .. } => to,
            HostCopy::ExactIn { from, .. } | HostCopy::SealedIn { from, .. } => from,
        };
        match copy {
            HostCopy::ExactOut { from: page, .. } | HostCopy::ExactIn { to: page, .. } => {
                check_slot(page.number(), self.slots)?;
                check_slot(host.number(), self.host_pages.len())?;
                let pages = &mut self.pages[page.index() * layers..(page.index() + 1) * layers];
                match copy {
                    HostCopy::ExactOut { .. } => self.host_pages[host.index()] = pages.to_vec(),
                    _ => pages.copy_from_slice(&self.host_pages[host.index()]),
                }
            }
            HostCopy::SealedOut { from: page, .. } | HostCopy::SealedIn { to: page, .. } => {
                check_slot(page.number(), self.sealed_slots)?;
                check_slot(host.number(), self.host_sealed.len())?;
                let sealed = &mut self.sealed[page.index() * layers..(page.index() + 1) * layers];
                match copy {
                    HostCopy::SealedOut { .. } => self.host_sealed[host.index()] = sealed.to_vec(),
                    _ => sealed.copy_from_slice(&self.host_sealed[host.index()]),
                }
            }
        }
        Ok(())
    }

    /// Nobody may read what scratch pages hold until they are written again.
    pub(super) fn forget_scratch(&mut self) {
        let first = self.slots * self.layers;
        self.pages[first..].fill(Page::filled(u64::MAX));
    }
}

/// A slot that is read or written must be inside its pool.
pub(super) fn check_slot(slot: u32, slots: usize) -> Result<(), KernelError> {
    if slot as usize >= slots { Err(KernelError::PageOutOfRange { slot, slots }) } else { Ok(()) }
}
