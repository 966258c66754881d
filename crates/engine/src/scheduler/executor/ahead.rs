//! Decode steps that begin before the tokens they compute are known to the host.
//!
//! A device that draws tokens itself can go on with them at once. While it computes step `n + 1`, the host reads the tokens
//! of step `n`, makes text of them and plans:
//!
//! ```text
//!   device  | step n        | step n + 1     | step n + 2     |
//!   host    | n + 1 begins  | reads tokens n, text, policy, n + 2 begins | reads tokens n + 1 ...
//! ```
//!
//! Such a step supposes that every answer goes on and that its pages stay what they are. So none begins where a row is the
//! first of a page, or where how it is sampled depends on the tokens before it; and its tokens are taken only if the policy
//! asks for the same rows over the same pages. Otherwise they are forgotten and the step is computed as any other: it
//! writes the same places again, which nobody has read.

use oscar_codec::{ExactSlot, PAGE_TOKENS, SealedSlot};
use oscar_kernels::backend::{Batch, Draw, Sampling, SealedRows, SequenceRows};
use oscar_kernels::{Backend, KernelError};

use super::super::answers::Answers;
use super::super::plan::{AnswerId, DecodeRow};
use super::Executor;

/// A decode step that was begun ahead.
pub(super) struct Ahead<B: Backend> {
    rows: Vec<AheadRow>,
    settings: Vec<Sampling<'static>>,
    draws: B::Draws,
    /// Which of the two places for logits holds those that tokens are drawn from.
    place: usize,
}

/// A row that was computed ahead, and the pages that it was computed with.
struct AheadRow {
    answer: AnswerId,
    position: usize,
    exact: Vec<Option<ExactSlot>>,
    sealed: Option<SealedPages>,
}

/// The sealed side of the page table of a row.
#[derive(PartialEq)]
struct SealedPages {
    pages: Vec<Option<SealedSlot>>,
    exact_from: usize,
    sealed_until: usize,
}

impl SealedPages {
    fn of(rows: &SealedRows<'_>) -> SealedPages {
        let SealedRows { pages, exact_from, sealed_until } = *rows;
        SealedPages { pages: pages.to_vec(), exact_from, sealed_until }
    }
}

impl AheadRow {
    fn after(row: &DecodeRow<'_>) -> AheadRow {
        AheadRow {
            answer: row.answer,
            position: row.rows.start + 1,
            exact: row.rows.pages.to_vec(),
            sealed: row.rows.sealed.as_ref().map(SealedPages::of),
        }
    }

    /// Whether this is the row that is asked for now.
    fn is(&self, row: &DecodeRow<'_>) -> bool {
        let SequenceRows { start, pages, ref sealed, .. } = row.rows;
        // A page that has left the window may have lost its bf16 copy meanwhile, which the row does not read.
        let same = |(then, now): (&Option<ExactSlot>, &Option<ExactSlot>)| now == then || now.is_none();
        (self.answer, self.position) == (row.answer, start)
            && row.copy.is_none()
            && row.seal.is_none()
            && self.exact.len() == pages.len()
            && self.exact.iter().zip(pages).all(same)
            && self.sealed == sealed.as_ref().map(SealedPages::of)
    }
}

impl<B: Backend> Executor<B> {
    /// Begins the step after one whose tokens are being drawn, if that can be done ahead. An error is one after which the
    /// device is of no use.
    pub(super) fn begin_ahead(
        &mut self,
        draws: &B::Draws,
        rows: &[&DecodeRow<'_>],
        answers: &Answers,
    ) -> Result<Option<Ahead<B>>, KernelError> {
        let model = self.model.model();
        let begins_page = |row: &&DecodeRow<'_>| (row.rows.start + 1).is_multiple_of(PAGE_TOKENS);
        if !model.backend().computes_ahead() || self.attention.is_some() || rows.iter().any(begins_page) {
            return Ok(None);
        }
        let settings = rows.iter().map(|row| answers.sampling_after_next(row.answer));
        let Some(settings) = settings.collect::<Option<Vec<Sampling<'static>>>>() else { return Ok(None) };
        let sequences: Vec<SequenceRows<'_>> =
            rows.iter().map(|row| SequenceRows { start: row.rows.start + 1, ..row.rows }).collect();
        let batch = Batch { tokens: &vec![0; rows.len()], sequences: &sequences };
        let begun =
            model.decode_draws(draws, &batch, &mut self.cache, &mut self.activations).and_then(|computed| {
                match computed {
                    true => model.backend().begin_draws(self.activations.logits(), &settings).map(Some),
                    false => Ok(None),
                }
            });
        let draws = match begun {
            Ok(Some(draws)) => draws,
            Ok(None) => return Ok(None),
            Err(fatal) if fatal.is_fatal() => return Err(fatal),
            Err(error) => {
                // It is computed again when it is asked for, and fails then if it fails at all.
                tracing::debug!(%error, rows = rows.len(), "a decode step that was begun ahead failed");
                return Ok(None);
            }
        };
        let rows = rows.iter().map(|row| AheadRow::after(row)).collect();
        Ok(Some(Ahead { rows, settings, draws, place: self.activations.place_of_logits() }))
    }

    /// The tokens of some rows, if they are being computed already; the step after them begins if it may. An error is one
    /// after which the device is of no use.
    pub(super) fn take_ahead(
        &mut self,
        rows: &[&DecodeRow<'_>],
        goes_on: bool,
        answers: &Answers,
    ) -> Result<Option<Vec<Draw>>, KernelError> {
        let Some(Ahead { rows: computed, settings, draws, place }) = self.ahead.take() else {
            return Ok(None);
        };
        // Both are in the order in which the requests came; some may have ended.
        let mut wanted = rows.iter().peekable();
        let taken: Vec<bool> =
            computed.iter().map(|row| wanted.next_if(|wanted| row.is(wanted)).is_some()).collect();
        if wanted.peek().is_some() {
            return Ok(None);
        }
        if goes_on && rows.len() == computed.len() {
            self.ahead = self.begin_ahead(&draws, rows, answers)?;
        }
        let backend = self.model.model().backend();
        match backend.finish_draws(draws, self.activations.logits_at(place), &settings) {
            Ok(drawn) => {
                self.forget_unless_passed_on(&drawn);
                #[cfg(test)]
                (self.taken_ahead += 1);
                let drawn = drawn.into_iter().zip(taken);
                Ok(Some(drawn.filter_map(|(draw, taken)| taken.then_some(draw)).collect()))
            }
            Err(fatal) if fatal.is_fatal() => Err(fatal),
            Err(error) => {
                tracing::debug!(%error, rows = rows.len(), "tokens that were drawn ahead are lost");
                self.ahead = None;
                Ok(None)
            }
        }
    }

    /// A step ahead that has other tokens than were drawn is worthless.
    pub(super) fn forget_unless_passed_on(&mut self, drawn: &[Draw]) {
        if drawn.iter().any(|draw| !draw.passed_on) {
            self.ahead = None;
        }
    }
}
