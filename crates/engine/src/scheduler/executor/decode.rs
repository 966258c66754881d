//! One more token of every running answer, in one batch.

use oscar_codec::ExactSlot;
use oscar_kernels::backend::{Batch, Sampled, SealPage, SequenceRows};
use oscar_kernels::{Backend, KernelError};
use oscar_model::PagedAttention;

use super::super::answers::Answers;
use super::super::plan::{AnswerId, DecodeRow};
use super::{Executor, LayerRules, fail_all};
use crate::error::EngineError;

impl<B: Backend> Executor<B> {
    /// Computes and samples the next token of some answers, in their order. What fails for one fails for that one alone if
    /// it can be found out which.
    pub(in super::super) fn decode(
        &mut self,
        rows: &[DecodeRow<'_>],
        answers: &mut Answers,
    ) -> Vec<Result<Sampled, EngineError>> {
        let copies: Vec<(ExactSlot, ExactSlot)> = rows.iter().filter_map(|row| row.copy).collect();
        if let Err(error) = self.copy_pages(&copies) {
            // A slot that does not exist is an error in the bookkeeping; nobody's pages can be trusted.
            tracing::error!(%error, "pages cannot be copied; every running answer fails");
            return fail_all(error, rows.len()).collect();
        }
        let failed = self.seal_for(rows);
        let live: Vec<usize> =
            (0..rows.len()).filter(|row| !failed.iter().any(|(other, _)| other == row)).collect();
        let mut sampled = self.compute(rows, &live, answers).into_iter();
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

    /// Seals the pages that leave the windows of some answers. Returns whose could not be sealed, in order.
    fn seal_for(&mut self, rows: &[DecodeRow<'_>]) -> Vec<(usize, KernelError)> {
        let mut work: Vec<(usize, SealPage)> =
            rows.iter().enumerate().filter_map(|(index, row)| Some((index, row.seal?))).collect();
        let mut failed: Vec<(usize, KernelError)> = Vec::new();
        while !work.is_empty() {
            let pages: Vec<SealPage> = work.iter().map(|&(_, page)| page).collect();
            let Err(error) = self.seal(&pages) else { break };
            // An error that names no page is held against the first one, so that this comes to an end.
            let culprit = match error {
                KernelError::Seal { page, .. } if page < work.len() => page,
                _ => 0,
            };
            let (row, _) = work.remove(culprit);
            failed.push((row, error));
        }
        failed.sort_by_key(|&(row, _)| row);
        failed
    }

    /// Computes and samples the rows at some indices: together, or one by one if that fails.
    fn compute(
        &mut self,
        rows: &[DecodeRow<'_>],
        live: &[usize],
        answers: &mut Answers,
    ) -> Vec<Result<Sampled, EngineError>> {
        if live.is_empty() {
            return Vec::new();
        }
        let id = |&index: &usize| rows[index].answer;
        match self.forward(rows, live) {
            Ok(()) => self.sample(&live.iter().map(id).collect::<Vec<AnswerId>>(), answers),
            Err(error) => {
                tracing::debug!(%error, rows = live.len(), "a decode batch failed; its rows are computed one by one");
                let mut outcomes = Vec::with_capacity(live.len());
                for index in live {
                    match self.forward(rows, &[*index]) {
                        Ok(()) => outcomes.append(&mut self.sample(&[id(index)], answers)),
                        Err(error) => outcomes.push(Err(error.into())),
                    }
                }
                outcomes
            }
        }
    }

    /// Runs the tokens of some rows through the model; the logits are in their order.
    fn forward(&mut self, rows: &[DecodeRow<'_>], indices: &[usize]) -> Result<(), KernelError> {
        let tokens: Vec<u32> = indices.iter().map(|&index| rows[index].token).collect();
        let sequences: Vec<SequenceRows<'_>> = indices.iter().map(|&index| rows[index].rows).collect();
        let batch = Batch { tokens: &tokens, sequences: &sequences };
        let logit_rows: Vec<usize> = (0..tokens.len()).collect();
        if self.attention.is_some() {
            self.run_layers(&batch, LayerRules::default())?;
            return self.model.model().logits(&logit_rows, &mut self.activations);
        }
        let model = self.model.model();
        let step = model.begin_step(&batch, &self.cache)?;
        let (cache, activations) = (&mut self.cache, &mut self.activations);
        model.backend().record(&step, &mut || {
            model.embed(&batch, &step, activations)?;
            model.run_layers(0..model.config().layers, &step, &mut PagedAttention(cache), activations)?;
            model.logits(&logit_rows, activations)
        })
    }
}
