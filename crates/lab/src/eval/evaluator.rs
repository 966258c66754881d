//! Runs one sequence of a model with an exact prefix and a cache seen through a codec.
//!
//! The prefix is computed once and serves every codec of a table: what a codec changes is how the tokens after it
//! read their history.

use std::sync::Arc;

use oscar_kernels::backend::{Batch, SequenceRows};
use oscar_kernels::{Inspect, KernelError};
use oscar_kv::{ExactSlot, PAGE_TOKENS};
use oscar_model::{Activations, LoadedModel, PagedAttention};

use super::EvalError;
use super::history::{HistoryAttention, Reading};

/// Tokens computed in one pass.
pub(super) const STEP_TOKENS: usize = 512;

/// Rows whose logits are computed at once.
pub(super) const LOGIT_ROWS: usize = 16;

/// A model with an exact cache of one sequence, and a second one as a codec gives it back.
pub struct Evaluator<B: Inspect> {
    model: Arc<LoadedModel<B>>,
    exact: B::Cache,
    history: B::Cache,
    /// Per layer, how many positions of the history are filled.
    filled: Vec<usize>,
    pages: Vec<Option<ExactSlot>>,
    activations: Activations<B>,
    /// Tokens of the exact prefix.
    prefix: usize,
    /// Tokens of the prefix and what came after it.
    tokens: usize,
}

impl<B: Inspect> Evaluator<B> {
    /// An evaluator of sequences of up to `capacity` tokens. Memory becomes resident as it is used.
    pub fn new(model: Arc<LoadedModel<B>>, capacity: usize) -> Result<Evaluator<B>, EvalError> {
        let most = model.config().max_context;
        if capacity == 0 || capacity > most {
            return Err(EvalError::Context { tokens: capacity, most });
        }
        let slots = capacity.div_ceil(PAGE_TOKENS) + 1;
        let cache = || model.model().cache(slots);
        Ok(Evaluator {
            exact: cache()?,
            history: cache()?,
            filled: vec![0; model.config().layers],
            pages: ExactSlot::first(slots - 1),
            activations: model.model().activations(STEP_TOKENS.min(capacity), LOGIT_ROWS)?,
            prefix: 0,
            tokens: 0,
            model,
        })
    }

    /// The model that is evaluated.
    pub fn model(&self) -> &Arc<LoadedModel<B>> {
        &self.model
    }

    /// Computes a prefix exactly, in place of what was there. `progress` gets the number of tokens that are done.
    pub fn prefill(&mut self, ids: &[u32], mut progress: impl FnMut(usize)) -> Result<(), EvalError> {
        (self.prefix, self.tokens) = (0, 0);
        self.run(ids, None, |_, _, done| {
            progress(done);
            Ok(())
        })?;
        self.prefix = ids.len();
        Ok(())
    }

    /// Goes back to the end of the prefix and drops what a codec made of it.
    pub fn rewind(&mut self) {
        self.tokens = self.prefix;
        self.filled.fill(0);
    }

    /// Appends tokens, which read their history as `reading` says, or exactly. After each pass `visit` gets the
    /// model, its activations (the hidden states of the pass) and how many of `ids` are done.
    pub(super) fn run(
        &mut self,
        ids: &[u32],
        reading: Option<Reading<'_>>,
        mut visit: impl FnMut(&LoadedModel<B>, &mut Activations<B>, usize) -> Result<(), EvalError>,
    ) -> Result<(), EvalError> {
        let needed = self.tokens + ids.len();
        let most = self.pages.len() * PAGE_TOKENS;
        if needed > most {
            return Err(EvalError::Context { tokens: needed, most });
        }
        let mut done = 0;
        for chunk in ids.chunks(self.activations.max_rows()) {
            self.step(chunk, reading)?;
            done += chunk.len();
            visit(&self.model, &mut self.activations, done)?;
        }
        Ok(())
    }

    fn step(&mut self, ids: &[u32], reading: Option<Reading<'_>>) -> Result<(), KernelError> {
        let model = self.model.model();
        let rows = SequenceRows::exact(self.tokens, ids.len(), &self.pages);
        let batch = Batch { tokens: ids, sequences: &[rows] };
        let step = model.begin_step(&batch, &self.exact)?;
        model.embed(&batch, &step, &mut self.activations)?;
        let layers = 0..self.model.config().layers;
        match reading {
            None => model.run_layers(
                layers,
                &step,
                &mut PagedAttention(&mut self.exact),
                &mut self.activations,
            )?,
            Some(reading) => {
                let mut attention = HistoryAttention {
                    exact: &mut self.exact,
                    history: &mut self.history,
                    pages: &self.pages,
                    filled: &mut self.filled,
                    reading,
                    end: self.tokens + ids.len(),
                    exact_until: 0,
                };
                model.run_layers(layers, &step, &mut attention, &mut self.activations)?;
            }
        }
        self.tokens += ids.len();
        Ok(())
    }

    /// Greedy answer to `question` after the prefix, up to an end token or `max_tokens`. Starts from the end of the
    /// prefix, whatever was run before.
    pub fn answer(
        &mut self,
        question: &[u32],
        reading: Option<Reading<'_>>,
        max_tokens: usize,
    ) -> Result<Vec<u32>, EvalError> {
        self.rewind();
        let mut answer: Vec<u32> = Vec::new();
        let mut next: Vec<u32> = question.to_vec();
        while answer.len() < max_tokens && !next.is_empty() {
            let token = arg_max(&self.logits_after(&next, reading)?);
            if self.model.is_end(token) {
                break;
            }
            answer.push(token);
            next = vec![token];
        }
        Ok(answer)
    }

    /// The mean log-probability of the tokens of `answer` after the prefix and `question`, each after those before it.
    /// Starts from the end of the prefix, whatever was run before.
    pub fn log_probability(
        &mut self,
        question: &[u32],
        answer: &[u32],
        reading: Option<Reading<'_>>,
    ) -> Result<f64, EvalError> {
        self.rewind();
        self.score(question, answer, reading)
    }

    /// [`Self::log_probability`] of several pairs of question and answer. What a codec makes of the prefix is made once.
    pub fn log_probabilities<'a>(
        &mut self,
        pairs: impl IntoIterator<Item = (&'a [u32], &'a [u32])>,
        reading: Option<Reading<'_>>,
    ) -> Result<Vec<f64>, EvalError> {
        self.rewind();
        let mut scores = Vec::new();
        for (question, answer) in pairs {
            self.tokens = self.prefix;
            // A codec's view of the prefix holds for every question; of what came after it, for none.
            let kept = reading.map_or(0, |reading| reading.history_end(self.prefix.saturating_sub(1)));
            self.filled.iter_mut().for_each(|filled| *filled = kept.min(*filled));
            scores.push(self.score(question, answer, reading)?);
        }
        Ok(scores)
    }

    /// Appends `question` and `answer`, and gives the mean log-probability of the tokens of `answer`.
    fn score(
        &mut self,
        question: &[u32],
        answer: &[u32],
        reading: Option<Reading<'_>>,
    ) -> Result<f64, EvalError> {
        let mut score = AnswerScore::new(question, answer);
        self.run(&score.tokens(), reading, |model, activations, done| score.visit(model, activations, done))?;
        Ok(score.mean())
    }

    /// Appends tokens and gives the logits after the last of them.
    fn logits_after(&mut self, ids: &[u32], reading: Option<Reading<'_>>) -> Result<Vec<f32>, EvalError> {
        let row = (ids.len() - 1) % self.activations.max_rows();
        self.run(ids, reading, |_, _, _| Ok(()))?;
        Ok(logits_of(&self.model, &mut self.activations, &[row])?.swap_remove(0))
    }
}

/// The log-probability of the tokens of an answer after a question, while both are read.
pub(super) struct AnswerScore<'a> {
    question: &'a [u32],
    answer: &'a [u32],
    /// Tokens that earlier passes have read.
    before: usize,
    sum: f64,
}

impl<'a> AnswerScore<'a> {
    pub(super) fn new(question: &'a [u32], answer: &'a [u32]) -> AnswerScore<'a> {
        AnswerScore { question, answer, before: 0, sum: 0.0 }
    }

    /// The tokens to read: the last one of the answer is only predicted.
    pub(super) fn tokens(&self) -> Vec<u32> {
        [self.question, &self.answer[..self.answer.len().saturating_sub(1)]].concat()
    }

    /// Scores the rows of a pass, after which `done` tokens are read.
    pub(super) fn visit<B: Inspect>(
        &mut self,
        model: &LoadedModel<B>,
        activations: &mut Activations<B>,
        done: usize,
    ) -> Result<(), EvalError> {
        let AnswerScore { question, answer, before, .. } = *self;
        let first = (question.len() - 1).max(before);
        let rows: Vec<usize> = (first..done).map(|index| index - before).collect();
        for rows in rows.chunks(LOGIT_ROWS) {
            let logits = logits_of(model, activations, rows)?;
            for (row, logits) in rows.iter().zip(&logits) {
                self.sum += log_probability(logits, answer[before + row + 1 - question.len()]);
            }
        }
        self.before = done;
        Ok(())
    }

    /// The mean over the tokens of the answer.
    pub(super) fn mean(&self) -> f64 {
        self.sum / self.answer.len() as f64
    }
}

/// The logits of some rows of the last pass, without those that the tokenizer has no token for.
fn logits_of<B: Inspect>(
    model: &LoadedModel<B>,
    activations: &mut Activations<B>,
    rows: &[usize],
) -> Result<Vec<Vec<f32>>, EvalError> {
    model.model().logits(rows, activations)?;
    let logits = model.model().backend().read(activations.logits(), 0..rows.len())?;
    let tokens = model.tokenizer().vocab_size();
    let width = model.config().vocab_size;
    Ok(logits.chunks_exact(width).map(|row| row[..tokens.min(width)].to_vec()).collect())
}

/// The logarithm of the probability of a token.
fn log_probability(logits: &[f32], token: u32) -> f64 {
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|&logit| f64::from(logit - largest).exp()).sum();
    let logit = logits.get(token as usize).copied().unwrap_or(f32::NEG_INFINITY);
    f64::from(logit - largest) - sum.ln()
}

/// The index of the largest value, the first of equal ones; NaN is never the largest.
pub(super) fn arg_max(values: &[f32]) -> u32 {
    let mut best = 0;
    for (index, &value) in values.iter().enumerate() {
        if value > values[best] || values[best].is_nan() && !value.is_nan() {
            best = index;
        }
    }
    best as u32
}

#[cfg(test)]
mod tests {
    use super::{arg_max, log_probability};

    #[test]
    fn the_first_largest_wins() {
        assert_eq!(arg_max(&[f32::NAN, 1.0, 3.0, 3.0, -1.0]), 2);
        assert_eq!(arg_max(&[f32::NAN]), 0);
    }

    #[test]
    fn probabilities_add_up_to_one() {
        let logits = [1000.0, 999.0, 990.0, 1001.5];
        let sum: f64 = (0..4).map(|token| log_probability(&logits, token).exp()).sum();
        assert!((sum - 1.0).abs() < 1e-12);
        assert!((log_probability(&logits, 0) - log_probability(&logits, 1) - 1.0).abs() < 1e-12);
        assert_eq!(log_probability(&logits, 9), f64::NEG_INFINITY);
    }
}
