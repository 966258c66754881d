//! Growing a sequence: the pages that new tokens need, what is sealed for them, and what is given back afterwards.
//!
//! An extension takes all its pages or none. Between `extend` and `finish_extension` (or `abandon_extension`) the
//! sequence's tables name what the step reads and writes; nothing that it held before is let go until the step is
//! known to be done, so abandoning restores it exactly.

use oscar_codec::{ExactSlot, SealedSlot};

use crate::PAGE_TOKENS;
use crate::error::{PoolKind, Shortage};
use crate::key::Tier;
use crate::ledger::Ledger;
use crate::pools::sealed_kind;
use crate::sequence::{InFlight, Sequence};

/// How the tokens of a prompt read each other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PrefillMode {
    /// They read each other in bf16, however far apart they are; the prompt is computed layer by layer.
    #[default]
    Exact,
    /// They read each other as decoded tokens would, so pages depend on the tokens alone. A prefix hit counts only with
    /// its whole window.
    Uniform,
}

/// A page that is to be sealed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SealWork {
    /// Index of the page in its sequence.
    pub page: usize,
    /// The bf16 or scratch slot that is encoded.
    pub from: ExactSlot,
    /// The sealed slot that the codes are written to.
    pub to: SealedSlot,
}

/// What the backend must do for an extension by [`Ledger::extend`]. The pages belong to the sequence already, so dropping
/// this value leaks nothing.
#[derive(Debug)]
#[must_use = "an extension is to be finished or abandoned"]
pub struct Extension {
    /// Pages to copy before anything is written, all layers: (from, to).
    pub copies: Vec<(ExactSlot, ExactSlot)>,
    /// Pages to seal, in order of position. Page `p` must be sealed before rows of a later page read it sealed: those
    /// below `exact_from` before rows of page `p + R + 1` attend, the others when the layer is done.
    pub seal: Vec<SealWork>,
    /// First page whose rows are read in bf16 by all rows of this extension; `usize::MAX` in uniform mode.
    pub exact_from: usize,
    /// Position of the first new token.
    pub start: usize,
    /// Number of new tokens.
    pub len: usize,
}

/// What the backend must do before the step of one decoded token.
#[derive(Debug)]
#[must_use = "an append is to be finished"]
pub struct Append {
    /// A page to copy, all layers: (from, to).
    pub copy: Option<(ExactSlot, ExactSlot)>,
    /// A page to seal, all layers, after the copy.
    pub seal: Option<SealWork>,
}

/// Pages that an operation allocates, by pool.
struct PagesToTake {
    exact: usize,
    sealed: usize,
    scratch: usize,
}

/// What the backend must do before new tokens are computed.
struct GrowthWork {
    copy: Option<(ExactSlot, ExactSlot)>,
    seal: Vec<SealWork>,
}

impl Ledger {
    /// Allocates the pages that `tokens` need after what the sequence has, all of them or none. Evicts from the prefix
    /// tree when a pool is short.
    ///
    /// The keys and values of the tokens are valid when [`finish_extension`](Self::finish_extension) is called.
    pub fn extend(
        &mut self,
        sequence: &mut Sequence,
        tokens: &[u32],
        mode: PrefillMode,
    ) -> Result<Extension, Shortage> {
        let start = sequence.len();
        let GrowthWork { copy, seal } = self.begin(sequence, tokens, true)?;
        let exact_from = match mode {
            PrefillMode::Exact => start / PAGE_TOKENS,
            PrefillMode::Uniform => usize::MAX,
        };
        Ok(Extension { copies: Vec::from_iter(copy), seal, exact_from, start, len: tokens.len() })
    }

    /// To be called when all layers of an extension are computed and sealed. Releases the scratch pages, and the bf16
    /// pages that left the window.
    pub fn finish_extension(&mut self, sequence: &mut Sequence, extension: Extension) {
        debug_assert!(in_flight_from(sequence, extension.start), "an extension of another sequence");
        self.settle(sequence);
    }

    /// To be called when an extension was cancelled or failed. The sequence is as it was before.
    pub fn abandon_extension(&mut self, sequence: &mut Sequence, extension: Extension) {
        debug_assert!(in_flight_from(sequence, extension.start), "an extension of another sequence");
        self.undo(sequence);
    }

    /// Prepares the page for one decoded token. Allocates only when the token begins a page or its page is shared.
    pub fn append(&mut self, sequence: &mut Sequence, token: u32) -> Result<Append, Shortage> {
        let GrowthWork { copy, seal } = self.begin(sequence, &[token], false)?;
        debug_assert!(seal.len() <= 1, "one page at most leaves the window when a page begins");
        Ok(Append { copy, seal: seal.into_iter().next() })
    }

    /// To be called when the step of an append is done. Releases the bf16 page that left the window.
    pub fn finish_append(&mut self, sequence: &mut Sequence, append: Append) {
        let Append { .. } = append;
        self.settle(sequence);
    }

    /// To be called when the step of an append is not going to happen. The sequence is as it was before.
    pub fn abandon_append(&mut self, sequence: &mut Sequence, append: Append) {
        let Append { .. } = append;
        self.undo(sequence);
    }

    /// Allocates and enters everything that `tokens` need, and notes how to undo it.
    fn begin(
        &mut self,
        sequence: &mut Sequence,
        tokens: &[u32],
        is_extension: bool,
    ) -> Result<GrowthWork, Shortage> {
        debug_assert!(
            sequence.in_flight.as_ref().is_none_or(|in_flight| !in_flight.is_extension),
            "a sequence grows while an extension is in flight"
        );
        // A next token can only be known when the step before it is done.
        self.settle(sequence);
        let start = sequence.len();
        let old_pages = sequence.exact.len();
        let partial = !start.is_multiple_of(PAGE_TOKENS);
        let last = (start + tokens.len()).saturating_sub(1) / PAGE_TOKENS;
        let windows = self.options.windows;
        // What the last token reads sealed, and what the token before the first new one does.
        let seals = self.seals(sequence.tier());
        let history = if seals { windows.history(last, usize::MAX, 0) } else { 0..0 };
        let before = windows.history(start.saturating_sub(1) / PAGE_TOKENS, usize::MAX, 0);
        let leaving: Vec<usize> =
            (before.end..history.end.min(old_pages)).filter(|&page| sequence.exact[page].is_some()).collect();
        let sealing: Vec<usize> =
            leaving.iter().copied().filter(|&page| sequence.sealed[page].is_none()).collect();
        let new_pages = (start + tokens.len()).div_ceil(PAGE_TOKENS) - old_pages;
        let scratch_from = old_pages.max(history.start);
        let scratch = scratch_from..history.end.max(scratch_from);
        let written = if partial && !tokens.is_empty() { sequence.exact[old_pages - 1] } else { None };
        let mut copy = written.filter(|&slot| self.pools.exact.owners(slot) > 1);

        let mut need = PagesToTake {
            exact: new_pages - scratch.len() + usize::from(copy.is_some()),
            sealed: scratch.len() + sealing.len(),
            scratch: scratch.len(),
        };
        // When no page is free for a copy, the tree's own tail is evicted and its page becomes the sequence's.
        let short = need.exact > self.pools.exact.free_pages();
        let take_over = copy.filter(|&slot| short && self.tree.shares_tail(&self.pools, slot));
        if take_over.is_some() {
            need.exact -= 1;
            copy = None;
        }
        if let Err(shortage) = self.check(&need, sequence.tier()) {
            if !self.replace_duplicates(sequence) {
                return Err(shortage);
            }
            self.check(&need, sequence.tier())?;
        }
        if let Some(slot) = take_over {
            self.tree.evict_tail(&mut self.pools, slot);
        }

        self.counters.filling -= usize::from(partial);
        let (mut copied, mut work) = (None, GrowthWork { copy: None, seal: Vec::with_capacity(need.sealed) });
        if let Some(before) = copy {
            let page = old_pages - 1;
            let own = self.allocate_exact();
            self.set_entry(sequence, page, Some(own), sequence.sealed[page]);
            copied = Some((page, before));
            work.copy = Some((before, own));
        }
        for &page in &sealing {
            let from = sequence.exact[page].expect("a page that leaves the window is there in bf16");
            let to = self.allocate_sealed(sequence.tier());
            self.set_entry(sequence, page, Some(from), Some(to));
            work.seal.push(SealWork { page, from, to });
        }
        for page in old_pages..old_pages + new_pages {
            if scratch.contains(&page) {
                let from = self.allocate_scratch();
                let to = self.allocate_sealed(sequence.tier());
                self.push_entry(sequence, Some(from), Some(to));
                work.seal.push(SealWork { page, from, to });
            } else {
                let own = self.allocate_exact();
                self.push_entry(sequence, Some(own), None);
            }
        }
        sequence.tokens.extend_from_slice(tokens);
        self.counters.filling += usize::from(!sequence.len().is_multiple_of(PAGE_TOKENS));
        sequence.in_flight = Some(InFlight { is_extension, start, copied, sealing, leaving, scratch });
        Ok(work)
    }

    /// Makes what is in flight final and releases what nobody reads afterwards.
    fn settle(&mut self, sequence: &mut Sequence) {
        let Some(in_flight) = sequence.in_flight.take() else { return };
        if let Some((_, before)) = in_flight.copied {
            self.release_exact(Some(before));
        }
        for page in in_flight.leaving.into_iter().chain(in_flight.scratch) {
            let exact = sequence.exact[page];
            self.set_entry(sequence, page, None, sequence.sealed[page]);
            self.release_exact(exact);
        }
    }

    /// Takes back what is in flight.
    fn undo(&mut self, sequence: &mut Sequence) {
        let Some(in_flight) = sequence.in_flight.take() else { return };
        self.counters.filling -= usize::from(!sequence.len().is_multiple_of(PAGE_TOKENS));
        while sequence.exact.len() > in_flight.start.div_ceil(PAGE_TOKENS) {
            self.drop_last_entry(sequence);
        }
        for page in in_flight.sealing {
            let sealed = sequence.sealed[page];
            self.set_entry(sequence, page, sequence.exact[page], None);
            self.release_sealed(sealed);
        }
        if let Some((page, before)) = in_flight.copied {
            let own = sequence.exact[page];
            self.set_entry(sequence, page, Some(before), sequence.sealed[page]);
            self.release_exact(own);
        }
        sequence.tokens.truncate(in_flight.start);
        debug_assert!(sequence.hashes.len() <= in_flight.start / PAGE_TOKENS, "only settled pages are named");
        self.counters.filling += usize::from(!sequence.len().is_multiple_of(PAGE_TOKENS));
    }

    /// Pages of a pool that can be allocated now: free ones, and those that only the prefix tree holds.
    pub fn available(&self, pool: PoolKind) -> usize {
        match pool {
            PoolKind::Exact => self.pools.exact.free_pages() + self.tree.evictable_exact(),
            PoolKind::Sealed => self.pools.sealed.free_pages() + self.tree.evictable_sealed(Tier::Sealed),
            PoolKind::High => self.pools.high.free_pages() + self.tree.evictable_sealed(Tier::High),
            PoolKind::Scratch => self.pools.scratch.free_pages(),
        }
    }

    /// Refuses an operation of a sequence of some tier that needs more pages than are available.
    fn check(&self, need: &PagesToTake, tier: Tier) -> Result<(), Shortage> {
        self.check_pool(PoolKind::Exact, need.exact)?;
        self.check_pool(sealed_kind(tier), need.sealed)?;
        self.check_pool(PoolKind::Scratch, need.scratch)
    }

    /// Refuses an operation that needs more pages of a pool than are available.
    pub(crate) fn check_pool(&self, pool: PoolKind, needed: usize) -> Result<(), Shortage> {
        let available = self.available(pool);
        if needed > available {
            return Err(Shortage { pool, needed, available, pages: self.pages(pool) });
        }
        Ok(())
    }

    pub(crate) fn allocate_exact(&mut self) -> ExactSlot {
        if self.pools.exact.free_pages() == 0 {
            self.tree.evict_exact(&mut self.pools, &mut self.host);
        }
        self.pools.exact.allocate().expect("checked that there are enough pages")
    }

    pub(crate) fn allocate_sealed(&mut self, tier: Tier) -> SealedSlot {
        self.try_allocate_sealed(tier).expect("checked that there are enough pages")
    }

    /// A page to seal one of a tier to, if one is free or can be evicted.
    pub(crate) fn try_allocate_sealed(&mut self, tier: Tier) -> Option<SealedSlot> {
        if self.pools.sealed_of(tier).free_pages() == 0 {
            self.tree.evict_sealed(&mut self.pools, &mut self.host, tier);
        }
        self.pools.sealed_of(tier).allocate().ok()
    }

    /// A scratch page, named by the slot under which a backend knows it.
    fn allocate_scratch(&mut self) -> ExactSlot {
        let page = self.pools.scratch.allocate().expect("checked that there are enough pages");
        self.pools.scratch_slot(page)
    }
}

fn in_flight_from(sequence: &Sequence, start: usize) -> bool {
    sequence.in_flight.as_ref().is_some_and(|in_flight| in_flight.start == start)
}
