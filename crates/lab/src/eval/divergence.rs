//! How far a model with a codec is from the same model with an exact cache.

use std::sync::Arc;

use oscar_kernels::Inspect;
use oscar_model::{Activations, LoadedModel};
use rayon::prelude::*;

use super::EvalError;
use super::evaluator::{Evaluator, STEP_TOKENS, arg_max};
use super::history::Reading;
use super::paged::PagedCache;

/// Rows whose logits are in memory at once: a vocabulary is large.
const LOGIT_ROWS: usize = 256;

/// How far a codec moves a model: sums over the positions that were scored.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Divergence {
    /// Σ KL(exact ‖ codec), in nats.
    pub kl: f64,
    /// Σ −ln p(next token) with the codec.
    pub loss: f64,
    /// Σ −ln p(next token) with the exact cache.
    pub exact_loss: f64,
    /// Positions at which both find the same token most likely.
    pub agreements: usize,
    /// The number of positions that were scored.
    pub positions: usize,
}

impl Divergence {
    /// Compares the logits of one position, which `next` follows.
    pub fn of_row(exact: &[f32], approximate: &[f32], next: u32) -> Divergence {
        let log_sum = |logits: &[f32]| {
            let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let sum: f64 = logits.iter().map(|logit| f64::from((logit - max).exp())).sum();
            f64::from(max) + sum.ln()
        };
        let (exact_sum, sum) = (log_sum(exact), log_sum(approximate));
        let kl = exact
            .iter()
            .zip(approximate)
            .map(|(&a, &b)| {
                let log_p = f64::from(a) - exact_sum;
                f64::from((log_p as f32).exp()) * (log_p - (f64::from(b) - sum))
            })
            .sum();
        Divergence {
            kl,
            loss: sum - f64::from(approximate[next as usize]),
            exact_loss: exact_sum - f64::from(exact[next as usize]),
            agreements: usize::from(arg_max(exact) == arg_max(approximate)),
            positions: 1,
        }
    }

    /// Adds the sums of other positions.
    pub fn add(&mut self, other: &Divergence) {
        self.kl += other.kl;
        self.loss += other.loss;
        self.exact_loss += other.exact_loss;
        self.agreements += other.agreements;
        self.positions += other.positions;
    }

    fn mean(&self, sum: f64) -> f64 {
        sum / self.positions.max(1) as f64
    }

    /// Mean KL divergence in nats.
    pub fn mean_kl(&self) -> f64 {
        self.mean(self.kl)
    }

    /// Perplexity with the codec.
    pub fn perplexity(&self) -> f64 {
        self.mean(self.loss).exp()
    }

    /// Perplexity with the exact cache.
    pub fn exact_perplexity(&self) -> f64 {
        self.mean(self.exact_loss).exp()
    }

    /// Share of positions with the same most likely token.
    pub fn top1_agreement(&self) -> f64 {
        self.mean(self.agreements as f64)
    }
}

/// Compares codecs with the exact cache on a text, which is run exactly once.
pub struct CodecComparison<B: Inspect> {
    evaluator: Evaluator<B>,
    /// Buffers for the logits of the exact run.
    reference: Activations<B>,
    /// Buffers for the logits with the codec, of several rows.
    codec: Activations<B>,
    prefix: Vec<u32>,
    suffix: Vec<u32>,
    /// Hidden states of the exact run after the prefix.
    hidden: Vec<f32>,
    /// First position after the prefix that is scored.
    skip: usize,
}

impl<B: Inspect> CodecComparison<B> {
    /// A comparison of texts of up to `capacity` tokens.
    pub fn new(model: Arc<LoadedModel<B>>, capacity: usize) -> Result<CodecComparison<B>, EvalError> {
        let rows = STEP_TOKENS.min(capacity);
        let activations = || model.model().activations(rows, LOGIT_ROWS);
        Ok(CodecComparison {
            reference: activations()?,
            codec: activations()?,
            evaluator: Evaluator::new(model, capacity)?,
            prefix: Vec::new(),
            suffix: Vec::new(),
            hidden: Vec::new(),
            skip: 0,
        })
    }

    /// Runs a text exactly. The first `prefix` tokens are only context; of the others, those from the `skip`-th on
    /// are scored.
    pub fn set_text(
        &mut self,
        ids: &[u32],
        prefix: usize,
        skip: usize,
        mut progress: impl FnMut(usize),
    ) -> Result<(), EvalError> {
        let needed = prefix.saturating_add(skip).saturating_add(2);
        if ids.len() < needed {
            return Err(EvalError::TextTooShort { tokens: ids.len(), needed });
        }
        let (context, suffix) = ids.split_at(prefix);
        self.evaluator.prefill(context, &mut progress)?;
        (self.prefix, self.suffix) = (context.to_vec(), suffix.to_vec());
        self.skip = skip;
        self.hidden.clear();
        let hidden = &mut self.hidden;
        let mut before = 0;
        self.evaluator.run(suffix, None, |model, activations, done| {
            hidden.extend(model.model().backend().read(activations.hidden(), 0..done - before)?);
            before = done;
            progress(prefix + done);
            Ok(())
        })
    }

    /// Runs the text after the prefix again with a codec and compares every scored position.
    pub fn measure(
        &mut self,
        reading: Reading<'_>,
        progress: impl FnMut(usize),
    ) -> Result<Divergence, EvalError> {
        self.measure_parts(reading, usize::MAX, progress).map(|[all, _]| all)
    }

    /// As [`Self::measure`], with positions from `second` after the prefix on in a sum of their own.
    pub fn measure_parts(
        &mut self,
        reading: Reading<'_>,
        second: usize,
        mut progress: impl FnMut(usize),
    ) -> Result<[Divergence; 2], EvalError> {
        self.evaluator.rewind();
        let CodecComparison { evaluator, reference, codec, suffix, hidden, skip, .. } = self;
        let mut sums = PositionSums::new(suffix, hidden, *skip, second);
        evaluator.run(suffix, Some(reading), |model, activations, done| {
            sums.visit(model, activations, done, reference, codec)?;
            progress(done);
            Ok(())
        })?;
        Ok(sums.totals)
    }

    /// Runs the text again over a cache as it is served and compares every scored position. The prefix is read as a prompt of
    /// its own. `progress` gets the tokens of both that are done.
    pub fn measure_served(
        &mut self,
        cache: &mut PagedCache<B>,
        mut progress: impl FnMut(usize),
    ) -> Result<Divergence, EvalError> {
        let CodecComparison { reference, codec, prefix, suffix, hidden, skip, .. } = self;
        cache.rewind(0);
        cache.run(prefix, true, |_, _, done| {
            progress(done);
            Ok(())
        })?;
        let mut sums = PositionSums::new(suffix, hidden, *skip, usize::MAX);
        cache.run(suffix, false, |model, activations, done| {
            sums.visit(model, activations, done, reference, codec)?;
            progress(prefix.len() + done);
            Ok(())
        })?;
        Ok(sums.totals[0])
    }
}

/// The sums over scored positions, while a text is run.
struct PositionSums<'a> {
    suffix: &'a [u32],
    /// Hidden states of the exact run.
    hidden: &'a [f32],
    skip: usize,
    /// Positions from here on have a sum of their own.
    second: usize,
    /// Tokens of the suffix that earlier passes have run.
    before: usize,
    totals: [Divergence; 2],
}

impl<'a> PositionSums<'a> {
    fn new(suffix: &'a [u32], hidden: &'a [f32], skip: usize, second: usize) -> PositionSums<'a> {
        PositionSums { suffix, hidden, skip, second, before: 0, totals: [Divergence::default(); 2] }
    }

    /// Compares the rows of a pass, after which `done` tokens are run. `reference` and `codec` are buffers for logits.
    fn visit<B: Inspect>(
        &mut self,
        model: &LoadedModel<B>,
        activations: &Activations<B>,
        done: usize,
        reference: &mut Activations<B>,
        codec: &mut Activations<B>,
    ) -> Result<(), EvalError> {
        let PositionSums { suffix, hidden, skip, second, before, .. } = *self;
        let (count, width) = (done - before, model.config().hidden_size);
        let backend = model.model().backend();
        backend.write(&backend.read(activations.hidden(), 0..count)?, codec.hidden_mut())?;
        backend.write(&hidden[before * width..done * width], reference.hidden_mut())?;
        let scored: Vec<usize> =
            (0..count).filter(|row| before + row >= skip && before + row + 1 < suffix.len()).collect();
        let (first, later) = scored.split_at(scored.partition_point(|row| before + row < second));
        for (total, scored) in self.totals.iter_mut().zip([first, later]) {
            for rows in scored.chunks(LOGIT_ROWS) {
                let next: Vec<u32> = rows.iter().map(|row| suffix[before + row + 1]).collect();
                total.add(&compare(model, rows, &next, reference, codec)?);
            }
        }
        self.before = done;
        Ok(())
    }
}

fn compare<B: Inspect>(
    model: &LoadedModel<B>,
    rows: &[usize],
    next: &[u32],
    reference: &mut Activations<B>,
    codec: &mut Activations<B>,
) -> Result<Divergence, EvalError> {
    let vocabulary = model.tokenizer().vocab_size().min(model.config().vocab_size);
    let logits = |activations: &mut Activations<B>| {
        model.model().logits(rows, activations)?;
        model.model().backend().read(activations.logits(), 0..rows.len())
    };
    let (exact, approximate) = (logits(reference)?, logits(codec)?);
    let width = model.config().vocab_size;
    let parts: Vec<Divergence> = exact
        .par_chunks_exact(width)
        .zip(approximate.par_chunks_exact(width))
        .zip(next)
        .map(|((exact, approximate), &next)| {
            Divergence::of_row(&exact[..vocabulary], &approximate[..vocabulary], next)
        })
        .collect();
    let mut total = Divergence::default();
    parts.iter().for_each(|part| total.add(part));
    if !total.kl.is_finite() {
        return Err(EvalError::NotFinite);
    }
    Ok(total)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn divergence_of_two_distributions_by_hand() {
        // p = (1/2, 1/4, 1/4), q = (1/4, 1/4, 1/2).
        let p = [2f32.ln(), 0.0, 0.0];
        let q = [7.0, 7.0, 7.0 + 2f32.ln()];
        let got = Divergence::of_row(&p, &q, 2);
        assert!((got.kl - 0.25 * 2f64.ln()).abs() < 1e-6, "{got:?}");
        assert!((got.loss - 2f64.ln()).abs() < 1e-6);
        assert!((got.exact_loss - 4f64.ln()).abs() < 1e-6);
        assert_eq!(got.agreements, 0);
        let same = Divergence::of_row(&p, &p, 0);
        assert!(same.kl.abs() < 1e-7);
        assert_eq!(same.agreements, 1);
    }

    #[test]
    fn means_are_over_positions() {
        let mut total = Divergence::default();
        total.add(&Divergence { kl: 1.0, loss: 2.0, exact_loss: 0.0, agreements: 1, positions: 1 });
        total.add(&Divergence { kl: 0.0, loss: 0.0, exact_loss: 0.0, agreements: 0, positions: 1 });
        assert_eq!(total.mean_kl(), 0.5);
        assert!((total.perplexity() - 1f64.exp()).abs() < 1e-12);
        assert_eq!(total.top1_agreement(), 0.5);
    }
}
