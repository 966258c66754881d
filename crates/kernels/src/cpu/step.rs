//! Tables that hold for a whole step, checked against the cache once.

use oscar_codec::ExactSlot;

use super::attend::PlanCell;
use super::cache::Cache;
use super::sequence::StepSequence;
use crate::backend::{Batch, KernelError, Rope, RopeLayout};

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
        let geometry = cache.spec().geometry;
        let rows: usize = batch.sequences.iter().map(|sequence| sequence.len).sum();
        if rows != batch.tokens.len() {
            return Err(KernelError::Shape {
                what: "tokens of a batch",
                expected: rows,
                got: batch.tokens.len(),
            });
        }
        let pairs = rope.inverse_frequencies.len();
        if 2 * pairs > geometry.head_dim {
            return Err(KernelError::Shape {
                what: "rotary channels, at most the head",
                expected: geometry.head_dim,
                got: 2 * pairs,
            });
        }
        let mut step = Step {
            tokens: batch.tokens.to_vec(),
            sequences: Vec::with_capacity(batch.sequences.len()),
            pairs,
            layout: rope.layout,
            cos: Vec::with_capacity(rows * pairs),
            sin: Vec::with_capacity(rows * pairs),
            plan: PlanCell::default(),
        };
        let mut written: Vec<ExactSlot> = Vec::new();
        let mut first_row = 0;
        for rows in batch.sequences {
            let sequence = StepSequence::new(rows, first_row, cache)?;
            for position in rows.start..rows.start + rows.len {
                for frequency in &rope.inverse_frequencies {
                    let (sin, cos) = (position as f32 * frequency).sin_cos();
                    step.cos.push(cos * rope.magnitude);
                    step.sin.push(sin * rope.magnitude);
                }
            }
            first_row += rows.len;
            let slots = &sequence.pages[sequence.written_pages()];
            written.extend(slots.iter().flatten());
            step.sequences.push(sequence);
        }
        written.sort_unstable();
        if let Some(pair) = written.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(KernelError::PageWrittenTwice { slot: pair[0].number() });
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

#[cfg(test)]
mod tests {
    use oscar_codec::KvGeometry;

    use super::*;
    use crate::backend::{CacheSpec, RopeLayout, SequenceRows};
    use crate::cpu::isa::Isa;

    #[test]
    fn a_page_is_written_by_one_sequence_and_by_none_without_rows() {
        let geometry = KvGeometry { layers: 1, kv_heads: 1, head_dim: 4 };
        let spec = CacheSpec { geometry, slots: 3, scratch_slots: 0, sealed: None };
        let cache = Cache::new(Isa::Scalar, &spec).unwrap();
        let rope = Rope { inverse_frequencies: vec![1.0; 2], magnitude: 1.0, layout: RopeLayout::Halves };
        for (len, fits) in [(0, true), (1, false)] {
            let pages = ExactSlot::first(1);
            let other = SequenceRows::exact(6, 1, &pages);
            let sequences = [SequenceRows::exact(5, len, &pages), other];
            let batch = Batch { tokens: &vec![0; len + 1], sequences: &sequences };
            assert_eq!(Step::new(&batch, &rope, &cache).is_ok(), fits, "{len} rows");
        }
    }
}
