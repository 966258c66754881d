//! From the queue to a prompt in progress: who may begin, and what happens when there are no pages.

use oscar_codec::PAGE_TOKENS;
use oscar_kv::Shortage;

use super::super::plan::Decision;
use super::super::segment::can_resume_at;
use super::Policy;
use super::prefill::Prefill;
use super::publication::AfterPublication;
use super::request::Waiting;
use crate::error::EngineError;

impl Policy {
    /// Puts a request in its place of the queue.
    pub(super) fn wait(&mut self, waiting: Waiting) {
        let place = self.waiting.partition_point(|other| other.order() < waiting.order());
        self.waiting.insert(place, waiting);
    }

    /// The next request whose prompt is computed, if one may begin.
    pub(super) fn admit(&mut self) -> Option<Prefill> {
        let choices = self.waiting.front()?.choices;
        let held_back = self.memory_short && !self.running.is_empty();
        if held_back || self.running.len() + choices > self.rules.max_running {
            return None;
        }
        let mut request = self.waiting.pop_front()?;
        let sequence = if request.next.is_some() {
            self.ledger
                .reopen(request.key, &request.tokens, |length| can_resume_at(&request.segments, length))
        } else {
            let reusable = request.wants.reusable(request.tokens.len());
            self.ledger.restore(request.key, &request.tokens[..reusable]);
            self.ledger.open(request.key, &request.tokens[..reusable])
        };
        // What a preempted request finds of itself was not there before it.
        let first_time = request.next.is_none() && !request.preempted;
        if first_time {
            request.cached = sequence.len();
        }
        self.decisions.push(Decision::Admitted {
            answer: request.answer(),
            cached: first_time.then_some(request.cached),
            was_queued: std::mem::take(&mut request.queued),
        });
        Some(Prefill::new(request, sequence))
    }

    /// Admits short prompts from the front of the queue as long as their rows fit into what is left of this turn. False if
    /// there are not at least two of them; one that was admitted is then the prompt in progress.
    ///
    /// Prompts that could share pages which are not computed yet are left to come one after the other.
    pub(super) fn gather_batch(&mut self) -> bool {
        let layers = self.rules.layers.max(1);
        let most_rows = self.allowance / layers;
        let mut batch: Vec<Prefill> = Vec::new();
        let mut rows = 0;
        while self.waiting.len() > 1 || !batch.is_empty() {
            let full = self.running.len() + batch.len() >= self.rules.max_running;
            // When pages were short, one at a time until somebody is done.
            if full || self.memory_short && !batch.is_empty() {
                break;
            }
            if !self.waiting.front().is_some_and(Waiting::can_be_batched) {
                break;
            }
            let Some(mut prefill) = self.admit() else { break };
            let length = match prefill.remaining() {
                Some((range, _)) if range.end == prefill.request.tokens.len() => range.len(),
                _ => usize::MAX,
            };
            let fits = rows + length.min(most_rows + 1) <= most_rows;
            if !fits || batch.iter().any(|other| will_share(&prefill, other)) {
                self.put_back(prefill);
                break;
            }
            if self.extend(&mut prefill).is_err() {
                // What it lacks is dealt with when it is tried alone.
                self.put_back(prefill);
                break;
            }
            rows += length;
            batch.push(prefill);
        }
        if batch.len() < 2 {
            self.prefill = batch.pop();
            return false;
        }
        self.allowance = self.allowance.saturating_sub(rows * layers);
        self.batch = batch;
        true
    }

    /// A prompt that was admitted waits again, as if nothing had been done.
    pub(super) fn put_back(&mut self, prefill: Prefill) {
        let (mut request, sequence) = self.abandon(prefill);
        self.ledger.close(sequence);
        request.queued = true;
        self.decisions.push(Decision::PutBack { request: request.id });
        self.wait(request);
    }

    /// A prompt needs pages that are not there. True if it is worth another try at once.
    pub(super) fn find_pages(&mut self, mut prefill: Prefill, shortage: Shortage) -> bool {
        let (order, begun) = (prefill.request.order(), prefill.begun);
        if begun && (self.demote_for(&shortage) || self.preempt_younger_than(order, shortage.pool)) {
            self.prefill = Some(prefill);
            return true;
        }
        if self.running.is_empty() {
            // Nobody will give anything back. What it shares with the tree may be in the way of what it needs.
            if !begun && !prefill.sequence.is_empty() {
                let fresh = self.ledger.open(prefill.request.key, &[]);
                self.ledger.close(std::mem::replace(&mut prefill.sequence, fresh));
                self.ledger.clear_tree();
                if prefill.request.next.is_none() {
                    prefill.request.cached = 0;
                    let answer = prefill.request.answer();
                    self.decisions.push(Decision::Admitted { answer, cached: Some(0), was_queued: false });
                }
                self.prefill = Some(prefill);
            } else {
                self.fail_prefill(prefill, EngineError::Shortage(shortage));
            }
            return true;
        }
        if begun {
            self.prefill = Some(prefill);
        } else {
            let (mut request, sequence) = self.abandon(prefill);
            request.queued = true;
            self.decisions.push(Decision::PutBack { request: request.id });
            self.wait(request);
            self.memory_short = true;
            self.publish(sequence, true, AfterPublication::Close);
        }
        false
    }
}

/// Whether a prompt would find at least one more page in the prefix tree if another were computed first.
fn will_share(prefill: &Prefill, other: &Prefill) -> bool {
    let next_page = (prefill.sequence.len() / PAGE_TOKENS + 1) * PAGE_TOKENS;
    let (tokens, others) = (&prefill.request.tokens, &other.request.tokens);
    prefill.request.key == other.request.key
        && tokens.len().min(others.len()) >= next_page
        && tokens[..next_page] == others[..next_page]
}
