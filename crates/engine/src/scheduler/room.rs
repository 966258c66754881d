//! Making room: who gives up pages for whom.
//!
//! The oldest request always gets on: pages are taken from the youngest. What a
//! request that loses its pages has computed stays in the prefix tree as long as there is room. An answer that is taken up
//! again finds it there if its window is still in bf16, and is computed again otherwise.

use oscar_kernels::Backend;
use oscar_kv::Sequence;

use super::Scheduler;
use super::decode::seal_page;
use super::job::{Job, Order, Running};

impl<B: Backend> Scheduler<B> {
    /// Frees some pages for the request at `order`; `false` if nothing may be taken from anybody.
    pub(super) fn make_room(&mut self, order: Order) -> bool {
        let youngest = self.running.last().map(Running::order).filter(|&youngest| youngest > order);
        let prefill =
            self.prefill.as_ref().map(|prefill| prefill.job.order()).filter(|&prefill| prefill > order);
        match (youngest, prefill) {
            (None, None) => false,
            (Some(youngest), prefill) if prefill.is_none_or(|prefill| prefill < youngest) => {
                if let Some(running) = self.running.pop() {
                    self.preempt(running);
                }
                true
            }
            _ => {
                if let Some(prefill) = self.prefill.take() {
                    let (job, sequence) = self.abandon(prefill);
                    self.requeue(job, sequence);
                }
                true
            }
        }
    }

    /// Closes a sequence; the tree keeps what it can.
    pub(super) fn retire(&mut self, mut sequence: Sequence) {
        self.insert(&mut sequence, true);
        self.ledger.close(sequence);
    }

    /// Takes the pages of an answer in progress; it goes on later.
    pub(super) fn preempt(&mut self, mut running: Running) {
        if let Some(append) = running.append.take() {
            self.ledger.abandon_append(&mut running.sequence, append);
        }
        self.insert(&mut running.sequence, true);
        let (mut tokens, segments) = running.history();
        tokens.pop();
        let Running { id, arrival, sink, mut output, sequence, next, .. } = running;
        output.preemptions += 1;
        let salt = sequence.salt();
        self.ledger.close(sequence);
        self.counters.preemptions += 1;
        self.crowded = true;
        let job = Job {
            id,
            arrival,
            salt,
            sink,
            output,
            choices: 1,
            tokens,
            segments,
            next: Some(next),
            counted: false,
            alone: false,
        };
        self.wait(job);
    }

    /// Takes the pages of a prompt in progress; it begins again later.
    pub(super) fn requeue(&mut self, mut job: Job, mut sequence: Sequence) {
        self.insert(&mut sequence, false);
        self.ledger.close(sequence);
        job.output.preemptions += 1;
        self.counters.preemptions += 1;
        self.crowded = true;
        self.wait(job);
    }

    /// Puts a request back in its place of the queue.
    pub(super) fn wait(&mut self, job: Job) {
        let place = self.waiting.partition_point(|other| other.order() < job.order());
        self.waiting.insert(place, job);
    }

    /// Gives the tree what a sequence has computed; `false` if that showed that its pages are not sound.
    pub(super) fn insert(&mut self, sequence: &mut Sequence, finished: bool) -> bool {
        let work = self.ledger.plan_insert(sequence);
        let pages: Vec<_> = work.iter().map(seal_page).collect();
        let layers = self.model.config().layers;
        let sound =
            pages.is_empty() || self.model.model().backend().seal(0..layers, &pages, &mut self.cache).is_ok();
        if sound {
            self.ledger.insert(sequence, finished);
        }
        sound
    }
}
