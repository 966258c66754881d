//! One more token of every running answer, in one batch.

use oscar_codec::ExactSlot;
use oscar_kernels::backend::{Batch, Sampled, SealPage, SequenceRows};
use oscar_kernels::{Backend, KernelError};

use super::super::answers::Answers;
use super::super::plan::{AnswerId, DecodePlan, DecodeRow};
use super::{Executor, LayerRules, fail_all};
use crate::error::EngineError;

impl<B: Backend> Executor<B> {
    /// Computes and samples the next token of some answers, in their order. What fails for one fails for that one alone if
    /// it can be found out which.
    pub(in super::super) fn decode(
        &mut self,
        plan: &DecodePlan<'_>,
        answers: &mut Answers,
    ) -> Vec<Result<Sampled, EngineError>> {
        let rows = &plan.rows;
        let copies: Vec<(ExactSlot, ExactSlot)> = rows.iter().filter_map(|row| row.copy).collect();
        if let Err(error) = self.copy_pages(&copies) {
            // A slot that does not exist is an error in the bookkeeping; nobody's pages can be trusted.
            if !error.is_fatal() {
                tracing::error!(%error, "pages cannot be copied; every running answer fails");
            }
            return fail_all(error, rows.len()).collect();
        }
        let failed = match self.seal_for(rows) {
            Ok(failed) => failed,
            Err(fatal) => return fail_all(fatal, rows.len()).collect(),
        };
        let is_live = |(index, row)| failed.iter().all(|&(other, _)| other != index).then_some(row);
        let live: Vec<&DecodeRow<'_>> = rows.iter().enumerate().filter_map(is_live).collect();
        let mut sampled = self.compute(&live, plan.goes_on, answers).into_iter();
        let mut outcomes: Vec<Result<Sampled, EngineError>> = Vec::with_capacity(rows.len());
        let mut failed = failed.into_iter().peekable();
        for row in 0..rows.len() {
            outcomes.extend(match failed.next_if(|&(other, _)| other == row) {
                Some((_, error)) => Some(Err(error.into())),
                None => sampled.next(),
            });
        }
        outcomes
    }

    /// Seals the pages that leave the windows of some answers. Returns whose could not be sealed, in order; an error is one
    /// after which the device is of no use.
    fn seal_for(&mut self, rows: &[DecodeRow<'_>]) -> Result<Vec<(usize, KernelError)>, KernelError> {
        let mut work: Vec<(usize, SealPage)> =
            rows.iter().enumerate().filter_map(|(index, row)| Some((index, row.seal?))).collect();
        let mut failed: Vec<(usize, KernelError)> = Vec::new();
        while !work.is_empty() {
            let pages: Vec<SealPage> = work.iter().map(|&(_, page)| page).collect();
            let Err(error) = self.seal(&pages) else { break };
            if error.is_fatal() {
                return Err(error);
            }
            // An error that names no page is held against the first one, so that this comes to an end.
            let culprit = match error {
                KernelError::Seal { page, .. } if page < work.len() => page,
                _ => 0,
            };
            let (row, _) = work.remove(culprit);
            failed.push((row, error));
        }
        failed.sort_by_key(|&(row, _)| row);
        Ok(failed)
    }

    /// Computes and samples some rows: together, or one by one if that fails and the device goes on.
    fn compute(
        &mut self,
        rows: &[&DecodeRow<'_>],
        goes_on: bool,
        answers: &mut Answers,
    ) -> Vec<Result<Sampled, EngineError>> {
        if rows.is_empty() {
            return Vec::new();
        }
        match self.take_ahead(rows, goes_on, answers) {
            Ok(Some(drawn)) => {
                return drawn.into_iter().map(|draw| draw.sampled.map_err(EngineError::from)).collect();
            }
            Ok(None) => {}
            Err(fatal) => return fail_all(fatal, rows.len()).collect(),
        }
        let ids: Vec<AnswerId> = rows.iter().map(|row| row.answer).collect();
        let next_after = if goes_on { rows } else { &[] };
        match self.forward(rows) {
            Ok(()) => self.sample(&ids, next_after, answers),
            Err(error) if error.is_fatal() => fail_all(error, rows.len()).collect(),
            Err(error) => {
                tracing::debug!(%error, rows = rows.len(), "a decode batch failed; its rows are computed one by one");
                let mut outcomes = Vec::with_capacity(rows.len());
                for (row, id) in rows.iter().zip(ids) {
                    match self.forward(&[*row]) {
                        Ok(()) => outcomes.append(&mut self.sample(&[id], &[], answers)),
                        Err(error) => outcomes.push(Err(error.into())),
                    }
                    // The others fail with it.
                    if matches!(outcomes.last(), Some(Err(error)) if error.is_fatal()) {
                        break;
                    }
                }
                outcomes
            }
        }
    }

    /// Runs the tokens of some rows through the model; the logits are in their order.
    fn forward(&mut self, rows: &[&DecodeRow<'_>]) -> Result<(), KernelError> {
        let tokens: Vec<u32> = rows.iter().map(|row| row.token).collect();
        let sequences: Vec<SequenceRows<'_>> = rows.iter().map(|row| row.rows).collect();
        let batch = Batch { tokens: &tokens, sequences: &sequences };
        if self.attention.is_some() {
            let logit_rows: Vec<usize> = (0..tokens.len()).collect();
            self.run_layers(&batch, LayerRules::default())?;
            return self.model.model().logits(&logit_rows, &mut self.activations);
        }
        self.model.model().decode(&batch, &mut self.cache, &mut self.activations)
    }
}
