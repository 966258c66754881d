//! Demotion: a sequence whose history is in bf16 gives up the oldest part of it for sealed pages.
//!
//! Pages are sealed from bf16 and only then lose it. The prefix tree lets go of them and of what follows them: it may
//! keep for [`Tier::Exact`] only what was computed from bf16.

use crate::PAGE_TOKENS;
use crate::error::{PoolKind, Shortage};
use crate::extension::SealWork;
use crate::key::Tier;
use crate::ledger::Ledger;
use crate::sequence::Sequence;

impl Ledger {
    /// How far a sequence would have to be [demoted](Self::demote) so that `pages` bf16 pages can be had, or as many as
    /// there are; `None` if that would bring none. Pages that other sequences hold too do not count.
    pub fn demotion_for(&self, sequence: &Sequence, pages: usize) -> Option<usize> {
        if sequence.tier() != Tier::Exact || !self.has_sealed() {
            return None;
        }
        let (start, last) = (self.first_exact(sequence), sequence.len().saturating_sub(1) / PAGE_TOKENS);
        let end = last.saturating_sub(self.options.windows.recent);
        let end = end.min(start.saturating_add(self.available(PoolKind::Sealed)));
        let (mut gained, mut demoted) = (0, None);
        for page in start..end {
            if gained >= pages {
                break;
            }
            let Some(exact) = sequence.exact[page] else { break };
            if self.pools.exact.owners(exact) == 1 + u32::from(self.tree.owns_exact(exact)) {
                gained += 1;
                demoted = Some(page + 1);
            }
        }
        demoted
    }

    /// Takes sealed pages for the history of a sequence of [`Tier::Exact`] below page `end`, all or none. To be carried
    /// out and [finished](Self::finish_demotion) before anything else; if that fails, the sequence must be closed.
    pub fn demote(&mut self, sequence: &mut Sequence, end: usize) -> Result<Vec<SealWork>, Shortage> {
        debug_assert_eq!(sequence.tier(), Tier::Exact);
        debug_assert!(end <= sequence.settled_tokens() / PAGE_TOKENS, "a page that is not full");
        let pages = self.first_exact(sequence)..end;
        self.check_pool(PoolKind::Sealed, pages.len())?;
        let mut work = Vec::with_capacity(pages.len());
        for page in pages {
            let from = sequence.exact[page].expect("history that is not demoted is in bf16");
            let to = self.allocate_sealed(sequence.tier());
            self.set_entry(sequence, page, Some(from), Some(to));
            work.push(SealWork { page, from, to });
        }
        Ok(work)
    }

    /// To be called when the pages of a demotion are sealed. Releases their bf16; rows that are computed from now on read
    /// them sealed.
    pub fn finish_demotion(&mut self, sequence: &mut Sequence, end: usize) {
        for page in self.first_exact(sequence)..end {
            let exact = sequence.exact[page];
            if let Some(exact) = exact {
                self.tree.forget(&mut self.pools, exact);
            }
            self.set_entry(sequence, page, None, sequence.sealed[page]);
            self.release_exact(exact);
        }
        sequence.sealed_until = sequence.sealed_until.max(end);
    }

    /// The first page of the history that is in bf16.
    fn first_exact(&self, sequence: &Sequence) -> usize {
        self.options.windows.sink.max(sequence.sealed_until)
    }
}
