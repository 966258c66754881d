//! Tables that hold for a whole step, checked against the cache once.

use super::attend::PlanCell;
use super::cache::Cache;
use crate::backend::{Batch, KernelError, Rope, RopeLayout};
use crate::sequence::{StepSequence, step_sequences};

/// Tables that hold for a whole step.
pub struct Step {
    pub(super) tokens: Vec<u32>,
    pub(super) sequences: Vec<StepSequence>,
    /// Rotary pairs per head.
    pub(super) pairs: usize,
    pub(super) layout: RopeLayout,
    /// Cosines and sines, `pairs` per row.
    pub(super) cos: Vec<f32>,
    pub(super) sin: Vec<f32>,
    /// How attention is cut.
    pub(super) plan: PlanCell,
}

impl Step {
    pub(super) fn new(batch: &Batch<'_>, rope: &Rope, cache: &Cache) -> Result<Step, KernelError> {
        let sequences = step_sequences(batch, rope, cache.spec())?;
        let (rows, pairs) = (batch.tokens.len(), rope.inverse_frequencies.len());
        let mut step = Step {
            tokens: batch.tokens.to_vec(),
            pairs,
            layout: rope.layout,
            cos: Vec::with_capacity(rows * pairs),
            sin: Vec::with_capacity(rows * pairs),
            plan: PlanCell::default(),
            sequences,
        };
        for position in batch.sequences.iter().flat_map(|rows| rows.start..rows.start + rows.len) {
            for frequency in &rope.inverse_frequencies {
                let (sin, cos) = (position as f32 * frequency).sin_cos();
                step.cos.push(cos * rope.magnitude);
                step.sin.push(sin * rope.magnitude);
            }
        }
        let slots = cache.spec().slots;
        let exact = step.sequences.iter().flat_map(|sequence| sequence.pages.iter().flatten());
        let exact = exact.map(|slot| slot.index() + 1).filter(|&end| end <= slots);
        let sealed = step.sequences.iter().flat_map(|sequence| sequence.all_sealed_slots().iter().flatten());
        let sealed = sealed.map(|slot| slot.index() + 1);
        cache.settle(exact.max().unwrap_or(0), sealed.max().unwrap_or(0));
        Ok(step)
    }

    pub(super) fn rows(&self) -> usize {
        self.tokens.len()
    }
}
