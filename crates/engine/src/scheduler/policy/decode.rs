//! One more token for every running answer: its pages, who loses theirs for it, and what comes after it.

use oscar_kernels::backend::{SealedRows, SequenceRows};
use oscar_kv::{Append, PoolKind, Sequence, Tier};

use super::super::plan::{AnswerId, Decision, DecodePlan, DecodeRow, FirstTokens, Next};
use super::Policy;
use super::publication::{AfterPublication, seal_page};
use super::request::{Order, Running, Starting};
use crate::error::EngineError;

impl Policy {
    /// Reserves the pages for one more token of every running answer. When pages are short, younger requests give theirs
    /// to older ones. False if pages must be sealed before this can go on.
    pub(super) fn reserve_tokens(&mut self) -> bool {
        let mut index = 0;
        while let Some(running) = self.running.get_mut(index) {
            if running.append.is_some() {
                index += 1;
                continue;
            }
            #[cfg(test)]
            if let Some(end) = self.forced_demotions.get(&(running.answer(), running.sequence.len()))
                && running.sequence.sealed_until() < *end
            {
                let end = *end;
                return !self.demote_running(index, end);
            }
            match self.ledger.append(&mut running.sequence, running.next) {
                Ok(append) => running.append = Some(append),
                Err(shortage) => {
                    let order = running.order();
                    if self.demote_for(&shortage) {
                        return false;
                    }
                    if !self.preempt_younger_than(order, shortage.pool) {
                        // It is the youngest itself of those that have such pages.
                        let running = self.running.remove(index);
                        if self.running.is_empty() && self.prefill.is_none() {
                            self.fail_running(running, EngineError::Shortage(shortage));
                        } else {
                            self.preempt(running);
                        }
                    }
                    if !self.publications.is_empty() {
                        return false;
                    }
                }
            }
        }
        true
    }

    /// Takes the pages of the youngest request that has some of a pool, if it is younger than `order`; false if there is none.
    pub(super) fn preempt_younger_than(&mut self, order: Order, pool: PoolKind) -> bool {
        let youngest = self.running.iter().rposition(|running| may_hold(&running.sequence, pool));
        let youngest = youngest.map(|index| (self.running[index].order(), index));
        let running = youngest.filter(|&(youngest, _)| youngest > order);
        let prefill = self.prefill.as_ref().filter(|prefill| may_hold(&prefill.sequence, pool));
        let prefill = prefill.map(|prefill| prefill.request.order()).filter(|&prefill| prefill > order);
        match running {
            Some((running, index)) if Some(running) > prefill => {
                let running = self.running.remove(index);
                self.preempt(running);
            }
            _ => {
                let Some(prefill) = prefill.and_then(|_| self.prefill.take()) else { return false };
                self.preempt_prompt(prefill);
            }
        }
        true
    }

    /// Takes the pages of a running answer, which will be computed again.
    fn preempt(&mut self, running: Running) {
        debug_assert!(
            running.append.is_none(),
            "pages are reserved for the oldest first and taken from the youngest"
        );
        self.count_preemption(running.answer(), running.sequence.len());
        let (waiting, sequence) = running.into_waiting();
        self.wait(waiting);
        self.publish(sequence, true, AfterPublication::Close);
    }

    pub(super) fn count_preemption(&mut self, answer: AnswerId, tokens: usize) {
        self.preemptions += 1;
        self.memory_short = true;
        self.decisions.push(Decision::Preempted { answer, tokens });
    }

    /// The plan of a step that takes every running answer one token further.
    pub(super) fn decode_plan(&self) -> DecodePlan<'_> {
        let full = self.memory_short || self.running.len() >= self.rules.max_running;
        let nobody_joins = self.prefill.is_none() && (self.waiting.is_empty() || full);
        DecodePlan { rows: self.decode_rows(), goes_on: nobody_joins }
    }

    fn decode_rows(&self) -> Vec<DecodeRow<'_>> {
        let mut rows = Vec::with_capacity(self.running.len());
        for running in &self.running {
            let sequence = &running.sequence;
            let (copy, seal) = match &running.append {
                Some(Append { copy, seal }) => (copy.as_ref(), seal.as_ref()),
                None => (None, None),
            };
            rows.push(DecodeRow {
                answer: running.answer(),
                token: running.next,
                rows: self.sequence_rows(sequence, sequence.len() - 1, 1, usize::MAX),
                copy: copy.copied(),
                seal: seal.map(seal_page),
            });
        }
        rows
    }

    /// Rows of a sequence in the form that a device reads.
    pub(super) fn sequence_rows<'a>(
        &self,
        sequence: &'a Sequence,
        start: usize,
        len: usize,
        exact_from: usize,
    ) -> SequenceRows<'a> {
        let exact_from = if sequence.tier() == Tier::Exact { 0 } else { exact_from };
        let sealed = self.ledger.options().sealed.map(|_| SealedRows {
            pages: sequence.sealed_slots(),
            exact_from,
            sealed_until: sequence.sealed_until(),
        });
        SequenceRows { start, len, pages: sequence.exact_slots(), sealed }
    }

    /// A decode step is done: what becomes of each of its rows, in order.
    pub(crate) fn decoded(&mut self, outcomes: Vec<Next>) {
        debug_assert_eq!(outcomes.len(), self.running.len(), "one outcome for each running answer");
        for (mut running, next) in std::mem::take(&mut self.running).into_iter().zip(outcomes) {
            if let Some(append) = running.append.take()
                && !matches!(next, Next::Failed(_))
            {
                self.ledger.finish_append(&mut running.sequence, append);
            }
            self.go_on(running, next);
        }
    }

    /// The answers that are about to begin.
    pub(super) fn first_tokens(&self) -> FirstTokens {
        let answers = self.starting.iter().flat_map(Starting::answers).collect();
        FirstTokens { answers, rows: self.starting.iter().map(|starting| starting.row).collect() }
    }

    /// First tokens were sampled: what becomes of each answer, in order.
    pub(crate) fn started(&mut self, outcomes: Vec<Next>) {
        let mut outcomes = outcomes.into_iter();
        for Starting { id, arrival, choices, segments, sequence, demote, .. } in
            std::mem::take(&mut self.starting)
        {
            let forks: Vec<Sequence> = (1..choices).map(|_| self.ledger.fork(&sequence)).collect();
            for (choice, sequence) in std::iter::once(sequence).chain(forks).enumerate() {
                let segments = segments.clone();
                let running =
                    Running { id, arrival, choice, sequence, segments, demote, next: 0, append: None };
                let next = outcomes.next().unwrap_or(Next::Failed(EngineError::Stopped));
                self.go_on(running, next);
            }
        }
    }

    fn go_on(&mut self, mut running: Running, next: Next) {
        match next {
            Next::Continue(token) => {
                running.next = token;
                self.join(running);
            }
            Next::Finished => self.finish(running),
            Next::Failed(error) => self.fail_running(running, error),
        }
    }

    /// Adds an answer to those that run, in its place.
    pub(super) fn join(&mut self, running: Running) {
        let place = self.running.partition_point(|other| other.order() < running.order());
        self.running.insert(place, running);
    }

    /// An answer is complete or was broken off: the tree gets what was computed.
    pub(super) fn finish(&mut self, running: Running) {
        debug_assert!(running.append.is_none(), "an answer ends between steps");
        let then = AfterPublication::End { first: running.answer(), choices: 1 };
        self.publish(running.sequence, true, then);
    }

    pub(super) fn fail_running(&mut self, running: Running, error: EngineError) {
        let answer = running.answer();
        self.ledger.close(running.sequence);
        self.fail(answer, 1, error);
    }
}

/// Whether a sequence that gives its pages back may bring some of a pool. Each tier has sealed pages of its own pool.
fn may_hold(sequence: &Sequence, pool: PoolKind) -> bool {
    match pool {
        PoolKind::Exact | PoolKind::Scratch => true,
        PoolKind::High => sequence.tier() == Tier::High,
        PoolKind::Sealed => sequence.tier() != Tier::High,
    }
}
