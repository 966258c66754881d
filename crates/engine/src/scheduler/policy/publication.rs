//! Giving the prefix tree what a sequence has computed.
//!
//! The pages of a recent window must be sealed before the tree can own them, and a device has to do that. So a sequence
//! waits here between the decision and its outcome.

use oscar_kernels::KernelError;
use oscar_kernels::backend::SealPage;
use oscar_kv::{SealWork, Sequence};

use super::super::plan::{AnswerId, Decision};
use super::super::segment::split_at;
use super::Policy;
use super::request::{Running, Starting, Waiting};
use crate::error::EngineError;

/// A sequence on its way into the prefix tree.
#[derive(Debug)]
pub(super) struct Publication {
    sequence: Sequence,
    /// The tree gets the partly filled last page too.
    finished: bool,
    /// The pages to seal first, once they are known.
    pages: Option<Vec<SealPage>>,
    then: AfterPublication,
}

/// What becomes of a sequence that was published.
#[derive(Debug)]
pub(super) enum AfterPublication {
    /// Its request waits to be computed again, or nobody needs it any more.
    Close,
    /// The answers of the sequence have ended.
    End { first: AnswerId, choices: usize },
    /// Its prompt is complete: the answers begin. `row` is the row of the batch that has the logits.
    Start { prompt: Waiting, row: Option<usize> },
}

impl Policy {
    /// Gives the tree what a sequence has computed; what follows happens when that is done.
    pub(super) fn publish(&mut self, sequence: Sequence, finished: bool, then: AfterPublication) {
        self.publications.push_back(Publication { sequence, finished, pages: None, then });
        self.settle_publications();
    }

    /// Settles publications for which nothing is to be sealed; true if there are pages to seal for the first of the others.
    pub(super) fn has_seals_to_do(&mut self) -> bool {
        self.settle_publications();
        !self.publications.is_empty()
    }

    fn settle_publications(&mut self) {
        while let Some(publication) = self.publications.front_mut() {
            if publication.pages.is_none() {
                // Planned when its turn comes, because the tree may have got the same pages before.
                let work = self.ledger.plan_insert(&mut publication.sequence);
                publication.pages = Some(work.iter().map(seal_page).collect());
            }
            if publication.pages.as_ref().is_some_and(|pages| !pages.is_empty()) {
                return;
            }
            if let Some(publication) = self.publications.pop_front() {
                self.settle(publication, Ok(()));
            }
        }
    }

    /// The pages to seal for the first publication.
    pub(super) fn pages_to_seal(&self) -> &[SealPage] {
        self.publications.front().and_then(|publication| publication.pages.as_deref()).unwrap_or_default()
    }

    /// The pages of the first publication were sealed, or could not be: then the tree does not get them.
    pub(crate) fn sealed(&mut self, outcome: Result<(), KernelError>) {
        if let Some(publication) = self.publications.pop_front() {
            self.settle(publication, outcome);
        }
    }

    fn settle(&mut self, publication: Publication, outcome: Result<(), KernelError>) {
        match outcome {
            Ok(()) => {
                self.ledger.insert(&publication.sequence, publication.finished);
                let Publication { sequence, then, .. } = publication;
                match then {
                    AfterPublication::Close => self.ledger.close(sequence),
                    AfterPublication::End { first, choices } => {
                        self.ledger.close(sequence);
                        self.end(first, choices);
                    }
                    AfterPublication::Start { prompt, row } => self.start(prompt, sequence, row),
                }
            }
            Err(error) => {
                tracing::debug!(%error, "a sequence is not given to the prefix tree: its pages cannot be sealed");
                self.close_unpublished(publication, || EngineError::NotFinite);
            }
        }
    }

    /// Closes a sequence that the tree does not get. A prompt fails with it, because an answer would read those pages.
    pub(super) fn close_unpublished(
        &mut self,
        publication: Publication,
        error: impl FnOnce() -> EngineError,
    ) {
        self.ledger.close(publication.sequence);
        match publication.then {
            AfterPublication::Close => {}
            AfterPublication::End { first, choices } => self.end(first, choices),
            AfterPublication::Start { prompt, .. } => self.fail(prompt.answer(), prompt.choices, error()),
        }
    }

    /// A prompt is in the cache and in the tree: its answers begin, or go on where they were.
    fn start(&mut self, prompt: Waiting, sequence: Sequence, row: Option<usize>) {
        let answer = prompt.answer();
        let Waiting {
            id,
            arrival,
            choice,
            choices,
            tokens,
            mut segments,
            demote,
            next,
            cached,
            generates,
            ..
        } = prompt;
        if let Some(next) = next {
            self.join(Running { id, arrival, choice, sequence, segments, demote, next, append: None });
            return;
        }
        split_at(&mut segments, cached);
        self.decisions.push(Decision::PromptDone { request: id, tokens: tokens.len(), cached, choices });
        if generates {
            self.starting.push(Starting { id, arrival, choices, segments, sequence, demote, row });
        } else {
            self.publish(sequence, true, AfterPublication::End { first: answer, choices });
        }
    }
}

pub(super) fn seal_page(work: &SealWork) -> SealPage {
    SealPage { page: work.page, exact: work.from, sealed: work.to }
}
