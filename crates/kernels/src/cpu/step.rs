//! Tables that hold for a whole step, checked against the cache once.

use super::attend::PlanCell;
use super::cache::Cache;
use crate::backend::{Batch, KernelError, Rope, RopeLayout};
use crate::sequence::{StepSequence, step_sequences};

/// Tables that hold for a whole step.
pub struct Step {
    pub(super) tokens: Vec<u32>,
    pub(super) sequences: Vec<StepSequence>,
    angles: Angles,
    /// Those of layers with a window, where they differ.
    window_angles: Option<Angles>,
    /// How attention is cut.
    pub(super) plan: PlanCell,
    /// How the attention of layers with a window is cut.
    pub(super) window_plan: PlanCell,
}

/// Rotary angles of the rows of a step.
pub(super) struct Angles {
    /// Rotary pairs per head.
    pairs: usize,
    pub(super) layout: RopeLayout,
    /// Cosines and sines, `pairs` per row.
    cos: Vec<f32>,
    sin: Vec<f32>,
}

impl Angles {
    fn new(positions: impl Iterator<Item = usize>, rope: &Rope) -> Angles {
        let pairs = rope.inverse_frequencies.len();
        let mut angles = Angles { pairs, layout: rope.layout, cos: Vec::new(), sin: Vec::new() };
        for position in positions {
            for frequency in &rope.inverse_frequencies {
                let (sin, cos) = (position as f32 * frequency).sin_cos();
                angles.cos.push(cos * rope.magnitude);
                angles.sin.push(sin * rope.magnitude);
            }
        }
        angles
    }

    /// Cosines and sines of a row.
    pub(super) fn of_row(&self, row: usize) -> (&[f32], &[f32]) {
        let range = row * self.pairs..(row + 1) * self.pairs;
        (&self.cos[range.clone()], &self.sin[range])
    }
}

impl Step {
    pub(super) fn new(batch: &Batch<'_>, rope: &Rope, cache: &Cache) -> Result<Step, KernelError> {
        let sequences = step_sequences(batch, rope, cache.spec())?;
        let angles = Angles::new(positions(&sequences), rope);
        let step = Step {
            tokens: batch.tokens.to_vec(),
            sequences,
            angles,
            window_angles: None,
            plan: PlanCell::default(),
            window_plan: PlanCell::default(),
        };
        let slots = cache.spec().slots;
        let exact = step.sequences.iter().flat_map(|sequence| sequence.pages.iter().flatten());
        let exact = exact.map(|slot| slot.index() + 1).filter(|&end| end <= slots);
        let sealed = step.sequences.iter().flat_map(|sequence| sequence.all_sealed_slots().iter().flatten());
        let first_high = cache.spec().sealed.as_ref().map_or(0, |sealed| sealed.slots);
        let (mut sealed_end, mut high_end) = (0, 0);
        for end in sealed.map(|slot| slot.index() + 1) {
            match end.checked_sub(first_high) {
                Some(end @ 1..) => high_end = high_end.max(end),
                _ => sealed_end = sealed_end.max(end),
            }
        }
        cache.settle(exact.max().unwrap_or(0), sealed_end, high_end);
        Ok(step)
    }

    pub(super) fn add_window_rope(&mut self, rope: &Rope) {
        self.window_angles = Some(Angles::new(positions(&self.sequences), rope));
    }

    /// The angles of a layer with or without a window.
    pub(super) fn angles(&self, has_window: bool) -> &Angles {
        self.window_angles.as_ref().filter(|_| has_window).unwrap_or(&self.angles)
    }

    pub(super) fn rows(&self) -> usize {
        self.tokens.len()
    }
}

/// The positions of the rows of a step.
fn positions(sequences: &[StepSequence]) -> impl Iterator<Item = usize> {
    sequences.iter().flat_map(|sequence| sequence.start..sequence.start + sequence.len)
}
