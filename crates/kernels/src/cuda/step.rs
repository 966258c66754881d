//! The tables of one step on the card.

use std::sync::Mutex;

use cudarc::driver::CudaSlice;
use oscar_codec::{ExactSlot, PAGE_TOKENS};

use super::attention::DevicePlan;
use super::cache::CudaCache;
use super::device::Device;
use super::error::CudaError;
use super::plan::{DecodeSequence, Split};
use super::prefill::PrefillPlan;
use super::write::{RowTarget, StepRows};
use crate::backend::{Batch, KernelError, Rope};
use crate::sequence::{StepSequence, step_sequences};

/// The tables of one step.
pub struct CudaStep {
    pub(super) rows: usize,
    /// The largest token of the step.
    pub(super) largest_token: u32,
    pub(super) tokens: CudaSlice<u32>,
    pub(super) targets: StepRows,
    pub(super) attention: StepAttention,
    pub(super) sequences: Vec<StepSequence>,
}

/// How the rows of a step attend.
pub(super) enum StepAttention {
    /// One row of every sequence.
    Decode(Mutex<DevicePlan>),
    /// Several rows of some.
    Prefill(PrefillPlan),
}

impl CudaStep {
    pub(super) fn new(
        device: &Device,
        batch: &Batch<'_>,
        rope: &Rope,
        cache: &CudaCache,
        split: Split,
    ) -> Result<CudaStep, KernelError> {
        let sequences = step_sequences(batch, rope, cache.spec())?;
        let attention = match decode_sequences(&sequences, cache.spec.slots) {
            Some(rows) => StepAttention::Decode(Mutex::new(cache.decode.plan(split, &rows)?)),
            None => {
                let end = |sequence: &StepSequence, position| sequence.history(position).end * PAGE_TOKENS;
                StepAttention::Prefill(cache.prefill.plan(&sequences, &end)?)
            }
        };
        let mut tokens = batch.tokens.to_vec();
        let (rows, largest_token) = (tokens.len(), tokens.iter().copied().max().unwrap_or(0));
        // An empty slice has no address.
        tokens.push(0);
        Ok(CudaStep {
            rows,
            largest_token,
            tokens: device.stream().clone_htod(&tokens).map_err(CudaError::Driver)?,
            targets: cache.writer.step(&row_targets(&sequences), rope)?,
            attention,
            sequences,
        })
    }
}

/// Where the rows of a step go, in order.
fn row_targets(sequences: &[StepSequence]) -> Vec<RowTarget> {
    let rows = |sequence: &'_ StepSequence| {
        let (start, pages) = (sequence.start, sequence.pages.clone());
        (start..start + sequence.len)
            .map(move |position| RowTarget { slot: pages[position / PAGE_TOKENS], position })
    };
    sequences.iter().flat_map(rows).collect()
}

/// The rows of a step as the decode kernel takes them, if it can: one row of every sequence that has any, and no page that
/// holds one layer only.
fn decode_sequences(sequences: &[StepSequence], slots: usize) -> Option<Vec<DecodeSequence<'_>>> {
    let mut rows = Vec::with_capacity(sequences.len());
    for sequence in sequences.iter().filter(|sequence| sequence.len > 0) {
        let scratch = |slot: &ExactSlot| slot.index() >= slots;
        if sequence.len > 1 || sequence.pages.iter().flatten().any(scratch) {
            return None;
        }
        let history = sequence.history(sequence.start);
        rows.push(DecodeSequence {
            tokens: sequence.start + 1,
            sink_pages: history.start,
            history_end: history.end,
            exact: &sequence.pages,
            sealed: sequence.all_sealed_slots(),
        });
    }
    Some(rows)
}
