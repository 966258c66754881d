//! The pages of one sequence: token ids and two slot tables in the form a backend reads.
//!
//! Entry `p` of a table is the slot of the page with positions `[64p, 64p + 64)`, if there is one. A page with a
//! bf16 slot only is being filled or in a window, one with both is in the window and sealed already, one with a sealed
//! slot only is history. The tables change entry by entry, never as a whole.

use oscar_codec::{ExactSlot, SealedSlot};

use crate::PAGE_TOKENS;
use crate::block_hash::BlockHash;
use crate::key::{PrefixKey, Tier};

/// A sequence that holds pages of a [`Ledger`](crate::Ledger). It must be given back with `Ledger::close`.
#[derive(Debug)]
#[must_use = "a sequence holds pages until it is closed"]
pub struct Sequence {
    pub(crate) key: PrefixKey,
    pub(crate) tokens: Vec<u32>,
    pub(crate) exact: Vec<Option<ExactSlot>>,
    pub(crate) sealed: Vec<Option<SealedSlot>>,
    /// Hashes of the full pages, as far as they were needed.
    pub(crate) hashes: Vec<BlockHash>,
    pub(crate) cached_tokens: usize,
    pub(crate) sealed_until: usize,
    pub(crate) in_flight: Option<InFlight>,
    pub(crate) closed: bool,
}

/// An extension or append that has its pages but whose rows are not written yet.
#[derive(Debug)]
pub(crate) struct InFlight {
    /// True for an extension of many tokens, false for an append of one.
    pub(crate) is_extension: bool,
    /// Tokens that the sequence had before.
    pub(crate) start: usize,
    /// Index of a shared page that was replaced by a copy because it is written to, and its slot before. That slot is still
    /// held, so that it can be copied from and put back.
    pub(crate) copied: Option<(usize, ExactSlot)>,
    /// Pages that the sequence had before and that are being sealed now.
    pub(crate) sealing: Vec<usize>,
    /// Pages that the sequence had before and whose bf16 nobody reads afterwards.
    pub(crate) leaving: Vec<usize>,
    /// New pages whose table entries are scratch slots.
    pub(crate) scratch: std::ops::Range<usize>,
}

impl Sequence {
    pub(crate) fn new(key: PrefixKey) -> Sequence {
        Sequence {
            key,
            tokens: Vec::new(),
            exact: Vec::new(),
            sealed: Vec::new(),
            hashes: Vec::new(),
            cached_tokens: 0,
            sealed_until: 0,
            in_flight: None,
            closed: false,
        }
    }

    /// Token ids that have, or in this step get, their keys and values in the cache.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// The number of tokens of the sequence.
    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Whether there is no token yet.
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    /// Sequences of different keys share no pages.
    pub fn key(&self) -> PrefixKey {
        self.key
    }

    /// How exactly the history is kept.
    pub fn tier(&self) -> Tier {
        self.key.tier
    }

    /// Tokens whose pages came from the prefix tree when the sequence was opened.
    pub fn cached_tokens(&self) -> usize {
        self.cached_tokens
    }

    /// bf16 slot of each page that has one. During an extension also scratch slots, numbered after the bf16 pool.
    pub fn exact_slots(&self) -> &[Option<ExactSlot>] {
        &self.exact
    }

    /// Sealed slot of each page that has one.
    pub fn sealed_slots(&self) -> &[Option<SealedSlot>] {
        &self.sealed
    }

    /// Pages below this (sinks excepted) can only be read sealed, even by a window that reaches so far: the window of a
    /// prefix hit was gone, or a sequence of [`Tier::Exact`] was demoted.
    pub fn sealed_until(&self) -> usize {
        self.sealed_until
    }

    /// Number of full pages.
    pub(crate) fn full_pages(&self) -> usize {
        self.tokens.len() / PAGE_TOKENS
    }

    /// Tokens whose rows are written for certain.
    pub(crate) fn settled_tokens(&self) -> usize {
        self.in_flight.as_ref().map_or(self.tokens.len(), |in_flight| in_flight.start)
    }

    /// Full pages whose rows are written for certain and are what every sequence with this key and these tokens would
    /// have: behind its sink a demoted sequence has others.
    pub(crate) fn sharable_pages(&self, sink: usize) -> usize {
        let pages = self.settled_tokens() / PAGE_TOKENS;
        if self.is_demoted() { pages.min(sink) } else { pages }
    }

    /// Whether part of a history that was to be kept in bf16 is sealed.
    pub(crate) fn is_demoted(&self) -> bool {
        self.tier() == Tier::Exact && self.sealed_until > 0
    }

    /// The sealed slot of a page if its bytes are written for certain.
    pub(crate) fn settled_sealed(&self, page: usize) -> Option<SealedSlot> {
        match &self.in_flight {
            Some(in_flight) if in_flight.sealing.contains(&page) => None,
            _ => self.sealed[page],
        }
    }

    /// The hash of full page `page`, computed if it is the next unknown one.
    pub(crate) fn next_hash(&self, page: usize, previous: Option<BlockHash>) -> BlockHash {
        self.hashes.get(page).copied().unwrap_or_else(|| {
            BlockHash::chain(previous, &self.tokens[page * PAGE_TOKENS..(page + 1) * PAGE_TOKENS])
        })
    }
}

impl Drop for Sequence {
    fn drop(&mut self) {
        debug_assert!(
            self.closed || std::thread::panicking(),
            "a sequence of {} tokens was dropped without being closed",
            self.tokens.len()
        );
    }
}
