//! The tables of one step on the card.
//!
//! Decode steps come one after the other and are alike, so their tables stay where they are: a step that is over gives them
//! back to its cache, and with them the recordings of its launches.

use std::sync::Mutex;

use oscar_codec::PAGE_TOKENS;

use super::cache::CudaCache;
use super::device::Device;
use super::plan::{DecodeSequence, Split};
use super::readings::{HIGH, OWN, Reading};
use super::row_blocks::PrefillSequence;
use super::step_tables::{DecodeTables, PrefillTables, SpareTables, StepTables, WindowTables, lock};
use super::write::RowTarget;
use crate::backend::{Batch, KernelError, Rope};
use crate::error::CudaError;
use crate::sequence::{StepSequence, step_sequences};

/// The tables of one step.
pub struct CudaStep {
    pub(super) rows: usize,
    /// The largest token of the step.
    pub(super) largest_token: u32,
    pub(super) sequences: Vec<StepSequence>,
    /// Taken only when the step ends.
    tables: Option<StepTables>,
    spare: SpareTables,
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
        let targets = row_targets(&sequences);
        let mut tokens = batch.tokens.to_vec();
        let (rows, largest_token) = (tokens.len(), tokens.iter().copied().max().unwrap_or(0));
        // An empty slice has no address.
        tokens.push(0);
        // One kernel for all rows where their bits must not depend on what else is computed.
        let every_row = matches!(split, Split::Fixed { .. });
        let tables = match decode_sequences(&sequences, every_row) {
            Some(decode) => {
                let spare = lock(&cache.spare_tables).pop();
                let tables = match spare {
                    Some(tables) => {
                        let mut inner = lock(&tables);
                        let DecodeTables { tokens: on_device, targets: rows, .. } = &mut *inner;
                        device.upload(&tokens, on_device)?;
                        cache.writer.update(rows, &targets, rope)?;
                        drop(inner);
                        tables
                    }
                    None => {
                        let tokens = device.stream().clone_htod(&tokens).map_err(CudaError::Driver)?;
                        Box::new(Mutex::new(DecodeTables::new(tokens, cache.writer.step(&targets, rope)?)))
                    }
                };
                let passes = cache.readings.all.iter().enumerate();
                let passes =
                    passes.map(|(reading, of)| (&cache.reader(reading).decode, decode[of.tier].as_slice()));
                lock(&tables).replan(split, passes)?;
                StepTables::Decode(tables)
            }
            None => {
                let end = |sequence: &StepSequence, position| sequence.history(position).end * PAGE_TOKENS;
                let rows = by_tier(&sequences, prefill_sequences(&sequences, &end));
                let plan = |(reading, of): (usize, &Reading)| match &rows[of.tier] {
                    rows if rows.is_empty() => Ok(None),
                    rows => cache.reader(reading).prefill.plan(rows, None).map(Some),
                };
                StepTables::Prefill(Box::new(PrefillTables {
                    tokens: device.stream().clone_htod(&tokens).map_err(CudaError::Driver)?,
                    targets: cache.writer.step(&targets, rope)?,
                    plans: cache
                        .readings
                        .all
                        .iter()
                        .enumerate()
                        .map(plan)
                        .collect::<Result<_, CudaError>>()?,
                    windows: None,
                }))
            }
        };
        let (tables, spare) = (Some(tables), cache.spare_tables.clone());
        Ok(CudaStep { rows, largest_token, sequences, tables, spare })
    }

    /// Adds what layers with a window read.
    pub(super) fn add_windows(
        &mut self,
        rope: &Rope,
        window: usize,
        cache: &CudaCache,
    ) -> Result<(), KernelError> {
        self.sequences.iter().try_for_each(|sequence| sequence.check_window(window))?;
        let targets = row_targets(&self.sequences);
        let mut rows = prefill_sequences(&self.sequences, &|_, _| 0);
        rows.iter_mut().for_each(|sequence| sequence.sealed = &[]);
        let add = |windows: &mut Option<WindowTables>| -> Result<(), CudaError> {
            match windows {
                Some(WindowTables { targets: on_device, plan }) => {
                    cache.writer.update(on_device, &targets, rope)?;
                    cache.exact_reader().prefill.replan(plan, &rows, Some(window))
                }
                None => {
                    let plan = cache.exact_reader().prefill.plan(&rows, Some(window))?;
                    *windows = Some(WindowTables { targets: cache.writer.step(&targets, rope)?, plan });
                    Ok(())
                }
            }
        };
        match &mut self.tables {
            Some(StepTables::Decode(tables)) => add(&mut lock(tables).windows)?,
            Some(StepTables::Prefill(tables)) => add(&mut tables.windows)?,
            None => {}
        }
        Ok(())
    }

    pub(super) fn tables(&self) -> &StepTables {
        self.tables.as_ref().expect("tables are there until the step ends")
    }
}

impl Drop for CudaStep {
    fn drop(&mut self) {
        if let Some(StepTables::Decode(tables)) = self.tables.take() {
            lock(&self.spare).push(tables);
        }
    }
}

/// Where the rows of a step go, in order.
fn row_targets(sequences: &[StepSequence]) -> Vec<RowTarget> {
    let mut targets = Vec::new();
    for sequence in sequences {
        targets.extend(
            (sequence.start..sequence.start + sequence.len)
                .map(|position| RowTarget { slot: sequence.pages[position / PAGE_TOKENS], position }),
        );
    }
    targets
}

/// The rows of a step as attention of many rows takes them; `end` says of a sequence and a position where its history ends.
pub(super) fn prefill_sequences<'a>(
    sequences: &'a [StepSequence],
    end: &dyn Fn(&StepSequence, usize) -> usize,
) -> Vec<PrefillSequence<'a>> {
    sequences
        .iter()
        .map(|sequence| PrefillSequence {
            first_row: sequence.first_row,
            start: sequence.start,
            exact: &sequence.pages,
            sealed: sequence.all_sealed_slots(),
            ends: (sequence.start..sequence.start + sequence.len).map(|at| end(sequence, at)).collect(),
        })
        .collect()
}

/// Sequences by their tier. Where only later rows of a sequence read sealed pages, all of them go with those; where none do, it
/// has none.
fn by_tier<'a>(sequences: &[StepSequence], rows: Vec<PrefillSequence<'a>>) -> [Vec<PrefillSequence<'a>>; 2] {
    let mut tiers = [(); 2].map(|()| Vec::new());
    for (sequence, mut rows) in sequences.iter().zip(rows).filter(|(sequence, _)| sequence.len > 0) {
        let last = sequence.start + sequence.len - 1;
        if sequence.history(last).is_empty() {
            rows.sealed = &[];
        }
        tiers[tier_of(sequence, last)].push(rows);
    }
    tiers
}

/// The tier of a row: what it reads alone decides, so that its kernel does not depend on rows beside it.
fn tier_of(sequence: &StepSequence, position: usize) -> usize {
    if sequence.reads_high(position) { HIGH } else { OWN }
}

/// The rows of a step as decode kernels take them, by tier: one row of every sequence that has any, or `every_row` of each.
fn decode_sequences(sequences: &[StepSequence], every_row: bool) -> Option<[Vec<DecodeSequence<'_>>; 2]> {
    let mut tiers = [(); 2].map(|()| Vec::new());
    for sequence in sequences.iter().filter(|sequence| sequence.len > 0) {
        if sequence.len > 1 && !every_row {
            return None;
        }
        for position in sequence.start..sequence.start + sequence.len {
            let history = sequence.history(position);
            tiers[tier_of(sequence, position)].push(DecodeSequence {
                row: sequence.first_row + position - sequence.start,
                tokens: position + 1,
                sink_pages: history.start,
                history_end: history.end,
                exact: &sequence.pages,
                sealed: sequence.all_sealed_slots(),
            });
        }
    }
    Some(tiers)
}

#[cfg(test)]
#[path = "step_tests.rs"]
mod tests;
