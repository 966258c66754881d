//! Who runs next, who waits and who loses pages.
//!
//! Pure bookkeeping over token ids, counts and the page [`Ledger`]: no device, no clock, no channel. [`Policy::next_step`]
//! chooses what is to be done next, [`Policy::plan`] describes it, the caller has it done and reports the outcome, and the
//! policy goes on from there. What it
//! has decided about requests is read with [`Policy::take_decisions`].
//!
//! The oldest request always makes progress: pages are taken from the youngest. Prompts are computed in order of arrival,
//! short ones several at a time unless they could share pages, and each is given to the prefix tree when it is done, so that
//! requests that arrive together share what the first of them has computed.

mod admission;
mod decode;
mod demotion;
mod prefill;
mod publication;
mod request;

use std::collections::VecDeque;
use std::sync::Arc;

use oscar_kernels::KernelError;
use oscar_kv::{HostCopy, Ledger, PrefillMode, Sequence, Tier};

use super::plan::{AnswerId, Decision, StepPlan};
use super::segment::Segment;
use crate::error::EngineError;
use demotion::Demotion;
use prefill::Prefill;
use publication::{AfterPublication, Publication};
pub(crate) use request::{NewRequest, PromptWants};
use request::{Running, Starting, Waiting};

/// Limits that the policy keeps.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rules {
    /// Layers of the model.
    pub(crate) layers: usize,
    /// Rows of a chunk of a prompt.
    pub(crate) chunk_rows: usize,
    /// Answers that may run at a time.
    pub(crate) max_running: usize,
    /// How the tokens of a prompt read each other.
    pub(crate) prompt_mode: PrefillMode,
    /// Chunks run through all layers at once, unless a prompt is computed layer by layer.
    pub(crate) whole_chunks: bool,
}

/// The part of a turn that comes next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Decode,
    Prefill,
    Done,
}

/// A kind of work that is ready to be described by [`Policy::plan`].
#[derive(Clone, Copy, Debug)]
pub(crate) enum StepKind {
    Seal,
    Demote,
    Decode,
    StartExtension,
    Chunk,
    Batch,
    SampleFirst,
    Release,
}

/// What a search for prompt work led to.
enum Choice {
    Step(StepKind),
    /// Something changed: look again from the start.
    Again,
    Nothing,
}

/// The requests of an engine and the pages they hold.
pub(crate) struct Policy {
    ledger: Ledger,
    rules: Rules,
    /// The requests in the order in which they arrived.
    waiting: VecDeque<Waiting>,
    /// The prompt that is computed in chunks now.
    prefill: Option<Prefill>,
    /// Prompts that are computed in one pass.
    batch: Vec<Prefill>,
    /// Prompts that are in the cache and whose answers get their first token next.
    starting: Vec<Starting>,
    /// The requests in the order in which they arrived.
    running: Vec<Running>,
    /// Sequences that the prefix tree is about to get.
    publications: VecDeque<Publication>,
    /// Pages that are to be sealed before anything else happens.
    demotion: Option<Demotion>,
    phase: Phase,
    /// Rows times layers of prompt work that are left in this turn.
    allowance: usize,
    /// Rows times layers of prompts of several chunks that are left in this turn.
    long_allowance: usize,
    /// Rows times layers of such prompts that were computed in this turn.
    long_rows: usize,
    /// Somebody lost pages or found none: nobody is admitted beside running answers until one of them ends.
    memory_short: bool,
    /// Scratch pages were written since they were last given back.
    scratch_used: bool,
    /// Hidden states and scratch pages can be given back.
    release: bool,
    next_arrival: u64,
    decisions: Vec<Decision>,
    preemptions: u64,
    demoted_pages: u64,
    batched_prompts: u64,
    /// Demotions that happen whatever pages there are: after so many tokens of an answer, below this page.
    #[cfg(test)]
    pub(crate) forced_demotions: std::collections::HashMap<(AnswerId, usize), usize>,
}

impl Policy {
    pub(crate) fn new(ledger: Ledger, rules: Rules) -> Policy {
        Policy {
            ledger,
            rules,
            waiting: VecDeque::new(),
            prefill: None,
            batch: Vec::new(),
            starting: Vec::new(),
            running: Vec::new(),
            publications: VecDeque::new(),
            demotion: None,
            phase: Phase::Done,
            allowance: 0,
            long_allowance: 0,
            long_rows: 0,
            memory_short: false,
            scratch_used: false,
            release: false,
            next_arrival: 0,
            decisions: Vec::new(),
            preemptions: 0,
            demoted_pages: 0,
            batched_prompts: 0,
            #[cfg(test)]
            forced_demotions: std::collections::HashMap::new(),
        }
    }

    /// The pages, for statistics and those who follow the prefix tree.
    pub(crate) fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    /// The pages, to forget or to follow the prefix tree.
    pub(crate) fn ledger_mut(&mut self) -> &mut Ledger {
        &mut self.ledger
    }

    /// Requests that wait, whether a prompt is in progress, and answers that run.
    pub(crate) fn counts(&self) -> (usize, usize, usize) {
        (self.waiting.len(), usize::from(self.prefill.is_some()), self.running.len())
    }

    /// Times that a request lost its pages.
    pub(crate) fn preemptions(&self) -> u64 {
        self.preemptions
    }

    /// Pages of histories in bf16 that were sealed for want of pages.
    pub(crate) fn demoted_pages(&self) -> u64 {
        self.demoted_pages
    }

    /// Prompts that were computed in one pass with others.
    pub(crate) fn batched_prompts(&self) -> u64 {
        self.batched_prompts
    }

    /// The sequences of the prompt in progress and of the running answers.
    pub(crate) fn sequences(&self) -> impl Iterator<Item = (AnswerId, &Sequence)> {
        let prefill = self.prefill.iter().map(|prefill| (prefill.request.answer(), &prefill.sequence));
        prefill.chain(self.running.iter().map(|running| (running.answer(), &running.sequence)))
    }

    /// Whether there is anything to do.
    pub(crate) fn has_work(&self) -> bool {
        let requests = self.waiting.len() + self.running.len() + usize::from(self.prefill.is_some());
        requests + self.publications.len() + self.starting.len() > 0 || self.can_release()
    }

    /// What was decided since this was last called, in order.
    pub(crate) fn take_decisions(&mut self) -> Vec<Decision> {
        std::mem::take(&mut self.decisions)
    }

    /// Adds a request to those that wait.
    pub(crate) fn submit(&mut self, request: NewRequest) {
        let arrival = self.next_arrival;
        self.next_arrival += 1;
        // Where everything is read in bf16, both modes are the same, and a computation can be resumed anywhere.
        let mode = match request.key.tier {
            Tier::Sealed | Tier::High => self.rules.prompt_mode,
            Tier::Exact => PrefillMode::Uniform,
        };
        let segments = vec![Segment::new(request.tokens.len(), mode)];
        self.wait(Waiting::new(request, arrival, segments));
    }

    /// Breaks off whatever a request is doing. The prefix tree gets what was computed.
    pub(crate) fn cancel(&mut self, request: u64) {
        while let Some(place) = self.waiting.iter().position(|waiting| waiting.id == request) {
            if let Some(waiting) = self.waiting.remove(place) {
                self.decisions.push(Decision::Dequeued { was_queued: waiting.queued });
                self.end(waiting.answer(), waiting.choices);
            }
        }
        if let Some(prefill) = self.prefill.take_if(|prefill| prefill.request.id == request) {
            let (waiting, sequence) = self.abandon(prefill);
            let then = AfterPublication::End { first: waiting.answer(), choices: waiting.choices };
            self.publish(sequence, true, then);
        }
        while let Some(place) = self.running.iter().position(|running| running.id == request) {
            let running = self.running.remove(place);
            self.finish(running);
        }
    }

    /// Begins a turn: one decode step, and prompt work worth one chunk through all layers, but of prompts of several chunks at most
    /// `long` rows times layers, and what the last piece has more than that.
    pub(crate) fn begin_turn(&mut self, long: usize) {
        self.phase = Phase::Decode;
        self.allowance = self.rules.chunk_rows * self.rules.layers;
        (self.long_allowance, self.long_rows) = (long, 0);
    }

    /// Whether answers are in progress.
    pub(crate) fn has_running(&self) -> bool {
        !self.running.is_empty()
    }

    /// Rows times layers of prompts of several chunks, in the last turn.
    pub(crate) fn long_rows(&self) -> usize {
        self.long_rows
    }

    /// What is to be done next in this turn. It must be carried out and its outcome reported before this is called again.
    pub(crate) fn next_step(&mut self) -> Option<StepKind> {
        loop {
            if self.demotion.is_some() {
                return Some(StepKind::Demote);
            }
            if self.has_seals_to_do() {
                return Some(StepKind::Seal);
            }
            if self.can_release() {
                return Some(StepKind::Release);
            }
            if !self.starting.is_empty() {
                return Some(StepKind::SampleFirst);
            }
            match self.phase {
                Phase::Decode => {
                    if self.reserve_tokens() {
                        self.phase = Phase::Prefill;
                        if !self.running.is_empty() {
                            return Some(StepKind::Decode);
                        }
                    }
                }
                Phase::Prefill => match self.choose_prefill() {
                    Choice::Step(step) => return Some(step),
                    Choice::Again => {}
                    Choice::Nothing => self.phase = Phase::Done,
                },
                Phase::Done => return None,
            }
        }
    }

    /// The details of a step that [`Self::next_step`] has just chosen.
    pub(crate) fn plan(&self, step: StepKind) -> StepPlan<'_> {
        match step {
            StepKind::Seal => StepPlan::Seal(self.pages_to_seal()),
            StepKind::Demote => StepPlan::Demote(self.pages_to_demote()),
            StepKind::Decode => StepPlan::Decode(self.decode_plan()),
            StepKind::StartExtension => StepPlan::StartExtension(self.extension_plan()),
            StepKind::Chunk => StepPlan::PrefillChunk(self.chunk_plan()),
            StepKind::Batch => StepPlan::PrefillBatch(self.batch_plan()),
            StepKind::SampleFirst => StepPlan::SampleFirst(self.first_tokens()),
            StepKind::Release => StepPlan::ReleasePrefill,
        }
    }

    /// Whether hidden states and scratch pages are of no use any more.
    fn can_release(&self) -> bool {
        self.release && self.prefill.is_none()
    }

    /// Hidden states and scratch pages were given back.
    pub(crate) fn released(&mut self) {
        (self.release, self.scratch_used) = (false, false);
    }

    /// Copies between the device and the host that are due before the next step.
    pub(crate) fn take_host_copies(&mut self) -> Vec<HostCopy> {
        self.ledger.take_host_copies()
    }

    /// Copies between the device and the host failed, so that nobody knows what the pages hold: whatever is in progress
    /// fails, and the prefix tree begins anew.
    pub(crate) fn host_lost(&mut self, error: KernelError) {
        let error = Arc::new(EngineError::from(error));
        self.fail_all(&|| EngineError::Shared(Arc::clone(&error)));
        self.ledger.flush();
        self.ledger.forget_host_pages();
    }

    /// Closes every sequence and fails every request, because the engine stops.
    pub(crate) fn shut_down(&mut self) {
        self.fail_everything(&|| EngineError::Stopped);
    }

    /// Closes every sequence and fails every request, those that wait too.
    pub(crate) fn fail_everything(&mut self, error: &dyn Fn() -> EngineError) {
        self.fail_all(error);
        for waiting in std::mem::take(&mut self.waiting) {
            self.decisions.push(Decision::Dequeued { was_queued: waiting.queued });
            self.fail(waiting.answer(), waiting.choices, error());
        }
    }

    /// Closes every sequence and fails everything in progress.
    fn fail_all(&mut self, error: &dyn Fn() -> EngineError) {
        self.demotion = None;
        for publication in std::mem::take(&mut self.publications) {
            self.close_unpublished(publication, error);
        }
        for prefill in self.prefill.take().into_iter().chain(std::mem::take(&mut self.batch)) {
            self.fail_prefill(prefill, error());
        }
        for starting in std::mem::take(&mut self.starting) {
            let first = AnswerId { request: starting.id, choice: 0 };
            self.ledger.close(starting.sequence);
            self.fail(first, starting.choices, error());
        }
        for running in std::mem::take(&mut self.running) {
            self.fail_running(running, error());
        }
    }

    /// Notes that some answers have ended, which makes room for others.
    fn end(&mut self, first: AnswerId, choices: usize) {
        self.memory_short = false;
        self.decisions.push(Decision::Ended { first, choices });
    }

    /// Notes that some answers cannot be completed, which makes room for others.
    fn fail(&mut self, first: AnswerId, choices: usize, error: EngineError) {
        self.memory_short = false;
        self.decisions.push(Decision::Failed { first, choices, error });
    }
}
