//! Giving up history in bf16 for sealed pages, by requests that allow it, before anybody loses all pages.
//!
//! A demotion happens between steps: the pages are sealed from bf16, and then their bf16 is given back. Where in a sequence
//! it happened is noted in its segments, so that a request that is preempted later is computed again with the same
//! demotions.

use oscar_kernels::KernelError;
use oscar_kernels::backend::SealPage;
use oscar_kv::{PoolKind, SealWork, Shortage};

use super::super::plan::{AnswerId, Decision};
use super::super::segment::demote;
use super::Policy;
use super::prefill::Prefill;
use super::publication::seal_page;

/// Pages of a sequence that are to be sealed before anything else happens.
#[derive(Debug)]
pub(super) struct Demotion {
    /// The running answer that they belong to; `None` for the prompt in progress, which is computed again.
    answer: Option<AnswerId>,
    /// History below this page is read sealed afterwards.
    end: usize,
    pages: Vec<SealPage>,
}

impl Demotion {
    fn new(answer: Option<AnswerId>, end: usize, work: &[SealWork]) -> Demotion {
        Demotion { answer, end, pages: work.iter().map(seal_page).collect() }
    }
}

impl Policy {
    /// Begins a demotion of the youngest running answer that allows it and that has pages which help. False if there is
    /// none.
    pub(super) fn demote_for(&mut self, shortage: &Shortage) -> bool {
        if shortage.pool != PoolKind::Exact {
            return false;
        }
        let missing = shortage.needed - shortage.available;
        let youngest_first = self.running.iter().enumerate().rev().filter(|(_, running)| running.demote);
        let found = youngest_first
            .filter_map(|(index, running)| {
                Some((index, self.ledger.demotion_for(&running.sequence, missing)?))
            })
            .next();
        found.is_some_and(|(index, end)| self.demote_running(index, end))
    }

    /// Begins to demote a running answer below page `end`; false if there are no sealed pages for it.
    pub(super) fn demote_running(&mut self, index: usize, end: usize) -> bool {
        let running = &mut self.running[index];
        let Ok(work) = self.ledger.demote(&mut running.sequence, end) else { return false };
        self.demotion = Some(Demotion::new(Some(running.answer()), end, &work));
        true
    }

    /// Begins the demotion that comes before the next tokens of a prompt, if it is computed again and had one there.
    pub(super) fn repeat_demotion(&mut self, prefill: &mut Prefill) -> Result<bool, Shortage> {
        if !prefill.demotion_is_due() {
            return Ok(false);
        }
        let end = prefill.demoted_until();
        let work = self.ledger.demote(&mut prefill.sequence, end)?;
        prefill.begun = true;
        self.demotion = Some(Demotion::new(None, end, &work));
        Ok(true)
    }

    /// The pages to seal for a demotion.
    pub(super) fn pages_to_demote(&self) -> &[SealPage] {
        self.demotion.as_ref().map(|demotion| demotion.pages.as_slice()).unwrap_or_default()
    }

    /// The pages of a demotion were sealed, or could not be: then their request fails.
    pub(crate) fn demoted(&mut self, outcome: Result<(), KernelError>) {
        let Some(Demotion { answer, end, pages }) = self.demotion.take() else { return };
        let Some(answer) = answer else {
            let Some(mut prefill) = self.prefill.take() else { return };
            match outcome {
                Ok(()) => {
                    self.ledger.finish_demotion(&mut prefill.sequence, end);
                    self.prefill = Some(prefill);
                }
                Err(error) => self.fail_prefill(prefill, error.into()),
            }
            return;
        };
        let Some(index) = self.running.iter().position(|running| running.answer() == answer) else { return };
        if let Err(error) = outcome {
            let running = self.running.remove(index);
            return self.fail_running(running, error.into());
        }
        let running = &mut self.running[index];
        self.ledger.finish_demotion(&mut running.sequence, end);
        // A token whose pages are reserved is computed after this.
        let at = running.sequence.len() - usize::from(running.append.is_some());
        demote(&mut running.segments, at, end);
        self.demoted_pages += pages.len() as u64;
        self.decisions.push(Decision::Demoted { answer, at, pages: pages.len(), end });
    }
}
