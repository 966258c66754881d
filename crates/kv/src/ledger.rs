//! Opening, forking and closing sequences: who owns which page of a cache.

use oscar_codec::{ExactSlot, PageWindows, SealedSlot};

use crate::PAGE_TOKENS;
use crate::counters::Counters;
use crate::error::{KvError, PoolKind};
use crate::host::{HostPools, HostStore};
use crate::key::{PrefixKey, Tier};
use crate::pools::{Pools, sealed_kind};
use crate::reuse::{PrefixReuse, TailPolicy, reuse};
use crate::sequence::Sequence;
use crate::tree::{CacheEvent, Tree, TreeEntry};

/// The pools and rules of a cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LedgerOptions {
    /// The pages that are read in bf16 at both ends of a sequence.
    pub windows: PageWindows,
    /// bf16 pages, each with all layers.
    pub exact_pages: usize,
    /// The pools of sealed pages; with `None` every page is and stays bf16.
    pub sealed: Option<SealedPools>,
    /// Whether prompts and answers are kept for later requests.
    pub prefix_tree: bool,
    /// What a prefix hit does about a window that is not there in bf16.
    pub tail: TailPolicy,
    /// Room in the host's memory for pages that the prefix tree has to give up.
    pub host: HostPools,
}

/// The pools of a cache with sealed pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SealedPools {
    /// Sealed pages, each with all layers.
    pub pages: usize,
    /// Sealed pages of [`Tier::High`], each with all layers; 0 where there is no such tier.
    pub high_pages: usize,
    /// bf16 pages of one layer, for prompts on their way to sealed pages.
    pub scratch_pages: usize,
}

/// Slots that a backend must provide, the dummy of each pool included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolSlots {
    /// bf16 pages, each with all layers.
    pub exact: usize,
    /// Sealed pages, each with all layers.
    pub sealed: usize,
    /// Sealed pages of [`Tier::High`], each with all layers; tables name slot `i` as `sealed + i`. 0 without that tier.
    pub high: usize,
    /// bf16 pages of one layer; tables name slot `i` as `exact + i`.
    pub scratch: usize,
}

/// Pages with which a sequence that is alone can always be computed, whatever the prefix tree holds by then and however
/// its tokens are divided into prompts and answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageNeed {
    /// bf16 pages, each with all layers.
    pub exact: usize,
    /// Sealed pages, each with all layers.
    pub sealed: usize,
    /// bf16 pages of one layer.
    pub scratch: usize,
}

impl PageNeed {
    /// The pages that a sequence of `tokens` tokens needs; `seals` says whether its history is sealed.
    pub fn of(tokens: usize, windows: PageWindows, seals: bool, prefix_tree: bool) -> PageNeed {
        let pages = tokens.div_ceil(PAGE_TOKENS);
        if !seals {
            return PageNeed { exact: pages, sealed: 0, scratch: 0 };
        }
        // A sequence that is extended beyond its window holds the old window while the new one is computed.
        let window = windows.recent.saturating_add(1);
        let exact = window.saturating_mul(2).saturating_add(windows.sink).min(pages);
        let (_, history) = windows.pages(tokens);
        // For the tree the window is sealed early, and the tree may have a page of it that the sequence seals again.
        let early = if prefix_tree && history > 0 { 2 * window } else { 0 };
        PageNeed { exact, sealed: history + early, scratch: history }
    }
}

/// Who owns which page. Pure bookkeeping: it says what is to be copied, sealed and read, and a backend does it.
#[derive(Debug)]
pub struct Ledger {
    pub(crate) options: LedgerOptions,
    pub(crate) pools: Pools,
    pub(crate) tree: Tree,
    pub(crate) host: HostStore,
    pub(crate) counters: Counters,
}

impl Ledger {
    /// A ledger of empty pools.
    pub fn new(options: LedgerOptions) -> Result<Ledger, KvError> {
        let sealed = options.sealed.unwrap_or(SealedPools { pages: 0, high_pages: 0, scratch_pages: 0 });
        if options.exact_pages == 0 {
            return Err(KvError::EmptyPool(PoolKind::Exact));
        }
        if options.sealed.is_some() && sealed.pages == 0 {
            return Err(KvError::EmptyPool(PoolKind::Sealed));
        }
        // Exact and scratch slots share one space of numbers, with a dummy each; a tree may have a node per page.
        let pages = [sealed.pages, sealed.high_pages, sealed.scratch_pages]
            .into_iter()
            .fold(options.exact_pages, usize::saturating_add);
        let pages = pages.max(options.host.exact_pages).max(options.host.sealed_pages);
        if pages > u32::MAX as usize - 8 {
            return Err(KvError::TooManyPages(pages));
        }
        let pools = Pools::new(options.exact_pages, sealed.pages, sealed.high_pages, sealed.scratch_pages);
        let tree = Tree::new(&pools, options.sealed.is_some());
        let host = HostStore::new(options.host);
        Ok(Ledger { options, pools, tree, host, counters: Counters::default() })
    }

    /// The options that the ledger was made with.
    pub fn options(&self) -> &LedgerOptions {
        &self.options
    }

    /// Slots that a backend must provide.
    pub fn slots(&self) -> PoolSlots {
        PoolSlots {
            exact: self.pools.exact.slots(),
            sealed: self.pools.sealed.slots(),
            high: if self.pools.high.pages() > 0 { self.pools.high.slots() } else { 0 },
            scratch: self.pools.scratch.slots(),
        }
    }

    /// Begins a sequence with what the prefix tree has of `prompt`: at most all but its last token, whose logits are
    /// wanted. Allocates nothing. `key` keeps sequences apart that must not share; a number is a salt.
    pub fn open(&mut self, key: impl Into<PrefixKey>, prompt: &[u32]) -> Sequence {
        self.open_by(self.options.tail, key.into(), prompt, prompt.len().saturating_sub(1), |_| true)
    }

    /// Begins a sequence that was computed before and lost its pages, with what the prefix tree has of `tokens` up to a place
    /// from which the rest can be computed as it was: the window before it is there in bf16 (or it lies in the sink), and
    /// `can_resume_at` this length. `tail` of the options has no say.
    pub fn reopen(
        &mut self,
        key: impl Into<PrefixKey>,
        tokens: &[u32],
        can_resume_at: impl Fn(usize) -> bool,
    ) -> Sequence {
        // Without sealed pages everybody reads everything in bf16.
        let has_sealed = self.has_sealed();
        let can_resume_at = |length| !has_sealed || can_resume_at(length);
        self.open_by(TailPolicy::Exact, key.into(), tokens, tokens.len(), can_resume_at)
    }

    /// Begins a sequence with at most `usable` tokens of `prompt`.
    fn open_by(
        &mut self,
        policy: TailPolicy,
        key: PrefixKey,
        prompt: &[u32],
        usable: usize,
        can_resume_at: impl Fn(usize) -> bool,
    ) -> Sequence {
        let mut sequence = Sequence::new(key);
        self.counters.sequences += 1;
        if !self.options.prefix_tree {
            return sequence;
        }
        let found = self.tree.find(key, prompt, usable / PAGE_TOKENS);
        let matched = found.nodes.len();
        let rest = &prompt[matched * PAGE_TOKENS..usable.min((matched + 1) * PAGE_TOKENS)];
        let tail = self.tree.find_tail(key, &found.nodes, rest);
        let tail = tail.filter(|(_, common)| can_resume_at(matched * PAGE_TOKENS + common));
        let can_resume_at =
            |pages: usize| (pages == matched && tail.is_some()) || can_resume_at(pages * PAGE_TOKENS);
        let reuse = if self.seals(key.tier) {
            let warm = |page: usize| self.tree.slots(found.nodes[page]).0.is_some();
            reuse(policy, self.options.windows, matched, warm, can_resume_at)
        } else {
            let pages = (1..=matched).rev().find(|&pages| can_resume_at(pages)).unwrap_or(0);
            PrefixReuse { pages, warm_from: 0, sealed_until: 0 }
        };
        let mut length = reuse.pages * PAGE_TOKENS;
        let tail = tail.filter(|_| reuse.pages == matched);
        let now = self.tree.tick();
        for &node in &found.nodes {
            self.tree.touch(node, now);
        }
        for (page, &node) in found.nodes[..reuse.pages].iter().enumerate() {
            let (exact, sealed) = self.tree.slots(node);
            let exact = exact.filter(|_| sealed.is_none() || page >= reuse.warm_from);
            if exact.is_some() {
                self.tree.touch_warm(node, now);
            }
            self.share_entry(&mut sequence, exact, sealed);
        }
        if let Some((node, common)) = tail {
            self.tree.touch(node, now);
            self.tree.touch_warm(node, now);
            let (exact, _) = self.tree.slots(node);
            self.share_entry(&mut sequence, exact, None);
            length += common;
        }
        sequence.tokens.extend_from_slice(&prompt[..length]);
        sequence.hashes.extend_from_slice(&found.hashes[..reuse.pages]);
        sequence.cached_tokens = length;
        sequence.sealed_until = reuse.sealed_until;
        self.counters.filling += usize::from(!length.is_multiple_of(PAGE_TOKENS));
        self.counters.lookups += 1;
        self.counters.hits += u64::from(length > 0);
        self.counters.prompt_tokens += prompt.len() as u64;
        self.counters.cached_tokens += length as u64;
        sequence
    }

    /// A second sequence with the same tokens that shares every page; whoever writes to a shared page first gets a copy
    /// of it. What is in flight in `sequence` is not shared.
    ///
    /// Pages of the window that are not sealed yet will be sealed once per fork, so [`plan_insert`](Self::plan_insert)
    /// should come first.
    pub fn fork(&mut self, sequence: &Sequence) -> Sequence {
        let mut fork = Sequence::new(sequence.key);
        let length = sequence.settled_tokens();
        for page in 0..length.div_ceil(PAGE_TOKENS) {
            let exact = match &sequence.in_flight {
                Some(in_flight) => match in_flight.copied {
                    Some((copied, before)) if copied == page => Some(before),
                    _ => sequence.exact[page],
                },
                None => sequence.exact[page],
            };
            self.share_entry(&mut fork, exact, sequence.settled_sealed(page));
        }
        fork.tokens.extend_from_slice(&sequence.tokens[..length]);
        let hashes = sequence.hashes.len().min(length / PAGE_TOKENS);
        fork.hashes.extend_from_slice(&sequence.hashes[..hashes]);
        fork.cached_tokens = sequence.cached_tokens;
        fork.sealed_until = sequence.sealed_until;
        self.counters.sequences += 1;
        self.counters.filling += usize::from(!length.is_multiple_of(PAGE_TOKENS));
        fork
    }

    /// Releases everything a sequence holds, what is in flight too.
    pub fn close(&mut self, mut sequence: Sequence) {
        if let Some((_, before)) = sequence.in_flight.take().and_then(|in_flight| in_flight.copied) {
            self.release_exact(Some(before));
        }
        self.counters.filling -= usize::from(!sequence.len().is_multiple_of(PAGE_TOKENS));
        // The deepest first: a node of the tree becomes free for eviction after those below it.
        while !sequence.exact.is_empty() {
            self.drop_last_entry(&mut sequence);
        }
        self.counters.sequences -= 1;
        sequence.closed = true;
    }

    /// Empties the prefix tree and forgets the host's pages. What open sequences hold stays theirs.
    pub fn flush(&mut self) {
        self.tree.clear(&mut self.pools, None);
        self.host.clear();
    }

    /// Empties the prefix tree. The host keeps its pages.
    pub fn clear_tree(&mut self) {
        self.tree.clear(&mut self.pools, Some(&mut self.host));
    }

    /// Records what changes in the prefix tree from now on, and returns what it has, beginning with
    /// [`CacheEvent::Cleared`]. Whoever watches should [take](Self::take_events) what happened after every few operations.
    pub fn watch(&mut self) -> Vec<CacheEvent> {
        self.tree.watch()
    }

    /// What has changed in the prefix tree since it was last asked, in order; nothing if nobody watches.
    pub fn take_events(&mut self) -> Vec<CacheEvent> {
        self.tree.take_events()
    }

    /// Stops recording changes of the prefix tree.
    pub fn unwatch(&mut self) {
        self.tree.unwatch();
    }

    /// Whether the pools cover the [`PageNeed`] of a sequence of `tokens` tokens in a tier.
    pub fn could_ever_fit(&self, tier: Tier, tokens: usize) -> bool {
        let LedgerOptions { windows, prefix_tree, .. } = self.options;
        let need = PageNeed::of(tokens, windows, self.seals(tier), prefix_tree);
        need.exact <= self.pools.exact.pages()
            && need.sealed <= self.pages(sealed_kind(tier))
            && need.scratch <= self.pools.scratch.pages()
    }

    /// Pages of a pool, in use or not.
    pub(crate) fn pages(&self, pool: PoolKind) -> usize {
        match pool {
            PoolKind::Exact => self.pools.exact.pages(),
            PoolKind::Sealed => self.pools.sealed.pages(),
            PoolKind::High => self.pools.high.pages(),
            PoolKind::Scratch => self.pools.scratch.pages(),
        }
    }

    /// Every page of the prefix tree, for inspection.
    pub fn tree_entries(&self) -> Vec<TreeEntry<'_>> {
        self.tree.entries()
    }

    pub(crate) fn has_sealed(&self) -> bool {
        self.options.sealed.is_some()
    }

    /// Whether pages of sequences of a tier are sealed when they leave the window.
    pub(crate) fn seals(&self, tier: Tier) -> bool {
        self.has_sealed() && tier != Tier::Exact
    }

    /// Appends a page that others own too.
    pub(crate) fn share_entry(
        &mut self,
        sequence: &mut Sequence,
        exact: Option<ExactSlot>,
        sealed: Option<SealedSlot>,
    ) {
        if let Some(exact) = exact {
            self.pools.exact.share(exact);
            self.tree.exact_changed(&self.pools, exact);
        }
        if let Some(sealed) = sealed {
            self.pools.share_sealed(sealed);
            self.tree.sealed_changed(&self.pools, sealed);
        }
        self.push_entry(sequence, exact, sealed);
    }

    /// Appends a page that the sequence is counted as an owner of.
    pub(crate) fn push_entry(
        &mut self,
        sequence: &mut Sequence,
        exact: Option<ExactSlot>,
        sealed: Option<SealedSlot>,
    ) {
        sequence.exact.push(exact);
        sequence.sealed.push(sealed);
        self.counters.counter_of(exact, sealed).into_iter().for_each(|count| *count += 1);
    }

    /// Changes which slots a page has; ownership is the caller's business.
    pub(crate) fn set_entry(
        &mut self,
        sequence: &mut Sequence,
        page: usize,
        exact: Option<ExactSlot>,
        sealed: Option<SealedSlot>,
    ) {
        let was = (
            std::mem::replace(&mut sequence.exact[page], exact),
            std::mem::replace(&mut sequence.sealed[page], sealed),
        );
        self.counters.counter_of(was.0, was.1).into_iter().for_each(|count| *count -= 1);
        self.counters.counter_of(exact, sealed).into_iter().for_each(|count| *count += 1);
    }

    /// Removes the last page and releases it.
    pub(crate) fn drop_last_entry(&mut self, sequence: &mut Sequence) {
        let (Some(exact), Some(sealed)) = (sequence.exact.pop(), sequence.sealed.pop()) else { return };
        self.counters.counter_of(exact, sealed).into_iter().for_each(|count| *count -= 1);
        self.release_exact(exact);
        self.release_sealed(sealed);
    }

    /// Releases a bf16 or scratch slot, if there is one.
    pub(crate) fn release_exact(&mut self, slot: Option<ExactSlot>) {
        let Some(slot) = slot else { return };
        match self.pools.scratch_page(slot) {
            Some(page) => self.pools.scratch.release(page),
            None => {
                self.pools.exact.release(slot);
                self.tree.exact_changed(&self.pools, slot);
            }
        }
    }

    /// Releases a sealed slot, if there is one.
    pub(crate) fn release_sealed(&mut self, slot: Option<SealedSlot>) {
        if let Some(slot) = slot {
            self.pools.release_sealed(slot);
            self.tree.sealed_changed(&self.pools, slot);
        }
    }
}
