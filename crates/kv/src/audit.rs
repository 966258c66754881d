//! Checks of invariants: every count that is kept up to date is computed anew and compared.

use crate::PAGE_TOKENS;
use crate::key::Tier;
use crate::ledger::Ledger;
use crate::pool::{PagePool, PageSlot};
use crate::sequence::Sequence;

impl Ledger {
    /// Counts the owners of every page from the tree and from `sequences`, which must be all that are open, and
    /// compares them with what the pools and counters say. For tests: it walks everything.
    pub fn audit(&self, sequences: &[&Sequence]) -> Result<(), String> {
        let mut exact = vec![0_u32; self.pools.exact.slots() + self.pools.scratch.slots()];
        let mut sealed = vec![0_u32; self.pools.sealed_slots()];
        let (mut filling, mut states) = (0, [0_usize; 4]);
        for sequence in sequences {
            if sequence.exact.len() != sequence.len().div_ceil(PAGE_TOKENS)
                || sequence.sealed.len() != sequence.exact.len()
            {
                return Err(format!("{} pages for {} tokens", sequence.exact.len(), sequence.len()));
            }
            filling += usize::from(!sequence.len().is_multiple_of(PAGE_TOKENS));
            for (&bf16, &codes) in sequence.exact.iter().zip(&sequence.sealed) {
                bf16.into_iter().for_each(|slot| exact[slot.index()] += 1);
                codes.into_iter().for_each(|slot| sealed[slot.index()] += 1);
                let high = codes.is_some_and(|slot| slot.index() >= self.pools.sealed.slots());
                if codes.is_some() && high != (sequence.tier() == Tier::High) {
                    return Err(format!("a page of tier {} is sealed in another", sequence.tier()));
                }
                states[usize::from(bf16.is_some()) + 2 * usize::from(codes.is_some())] += 1;
            }
            if let Some((_, before)) = sequence.in_flight.as_ref().and_then(|in_flight| in_flight.copied) {
                exact[before.index()] += 1;
            }
        }
        for entry in self.tree_entries() {
            entry.exact.into_iter().for_each(|slot| exact[slot.index()] += 1);
            entry.sealed.into_iter().for_each(|slot| sealed[slot.index()] += 1);
        }
        let (exact, scratch) = exact.split_at(self.pools.exact.slots());
        compare("bf16", &self.pools.exact, exact)?;
        compare("scratch", &self.pools.scratch, scratch)?;
        compare("sealed", &self.pools.sealed, &sealed)?;
        compare("high", &self.pools.high, &sealed)?;
        let counters = &self.counters;
        let kept =
            (counters.sequences, counters.filling, [0, counters.exact, counters.sealed, counters.both]);
        if kept != (sequences.len(), filling, states) {
            return Err(format!("counted {:?}, kept {kept:?}", (sequences.len(), filling, states)));
        }
        self.host.audit()?;
        self.tree.audit(&self.pools)
    }
}

fn compare<P: PageSlot>(name: &str, pool: &PagePool<P>, owners: &[u32]) -> Result<(), String> {
    let mut free = 0;
    for (slot, kept) in pool.all() {
        let (slot, counted) = (slot.index(), owners[slot.index()]);
        if kept != counted {
            return Err(format!("{name} page {slot} has {counted} owners, the pool says {kept}"));
        }
        free += usize::from(counted == 0);
    }
    if free != pool.free_pages() {
        return Err(format!("{free} {name} pages are free, the pool says {}", pool.free_pages()));
    }
    Ok(())
}
