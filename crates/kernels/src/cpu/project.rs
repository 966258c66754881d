//! Projections `x · Wᵀ` over the worker pool.
//!
//! Few rows (decode) go through dot products straight on the stored blocks: the weights are read once and nothing
//! is unpacked to memory. Many rows (prefill) go through panels: a few dozen weight rows are unpacked into a
//! buffer that fits the core's cache and multiplied with all activations.

mod groups;
#[cfg(test)]
mod tests;

pub(super) use groups::Group;
use groups::GroupScratch;

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use super::activation::QuantisedRows;
use super::dot::Dot;
use super::dot::stripes::{self, PREFETCH_AHEAD, STRIPES, Stripe};
use super::gemm::{self, PackedActivations, PanelScratch, PanelWeights};
use super::handover::Handover;
use super::isa::Isa;
use super::memory::{self, DisjointSlice};
use super::per_thread::PerThread;
use super::pool::Pool;
use super::tensors::Weight;
use crate::backend::KernelError;

/// From this many rows on, unpacking a panel costs less than repeating dot products.
const PANEL_MIN_ROWS: usize = 6;

/// Smallest useful number of passes per task of the dot path.
const FEWEST_PASSES: usize = 2;

/// Bytes of each stripe that the thread prefetches which computes the activations first: more would keep it from that.
const FIRST_BYTES_OF_MAKER: usize = 512;

/// Bytes of a cache line.
const LINE: usize = 64;

/// Tasks per thread: enough to even out a core that somebody else uses for a while.
const TASKS_PER_THREAD: usize = 8;

/// What happens to a result.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Mode {
    /// The products replace what is in the output.
    Store,
    /// The products are added to what is in the output.
    Add,
}

/// A weight and its bias.
#[derive(Clone, Copy)]
pub(super) struct Projection<'a> {
    pub(super) weight: &'a Weight,
    pub(super) bias: Option<&'a [f32]>,
}

/// Buffers that are kept between calls.
#[derive(Default)]
pub(super) struct ProjectScratch {
    rows: Vec<f32>,
    quantised: QuantisedRows,
    packed: PackedActivations,
    groups: GroupScratch,
}

/// Buffers of one thread.
#[derive(Default)]
pub(super) struct WorkerScratch {
    tile: Vec<f32>,
    panel: PanelScratch,
}

/// Activations as they are computed: `fill(row, out)` writes a row of `cols` values. A norm or an activation function
/// thus runs while its result is packed, and saves a trip through memory.
#[derive(Clone, Copy)]
pub(super) struct Input<'a> {
    pub(super) rows: usize,
    pub(super) cols: usize,
    pub(super) fill: &'a (dyn Fn(usize, &mut [f32]) + Sync),
}

/// Rows of activations, as floats and, where weights need it, in fixed point.
#[derive(Clone, Copy)]
struct Rows<'a> {
    x: &'a [f32],
    quantised: &'a QuantisedRows,
    rows: usize,
}

/// Runs projections of the same activations; see [`Projector::run`].
pub(super) struct Projector<'a> {
    pub(super) isa: Isa,
    /// Dot products for any number of rows, so that a row's result does not depend on their number.
    pub(super) fixed: bool,
    pub(super) dot: &'a Dot,
    pub(super) pool: &'a Pool,
    pub(super) workers: &'a PerThread<WorkerScratch>,
    pub(super) scratch: &'a mut ProjectScratch,
}

impl Projector<'_> {
    /// `out = [p₀(x) | p₁(x) | ...]`, with as many rows in `out` as in `x`.
    pub(super) fn run(
        &mut self,
        x: Input<'_>,
        projections: &[Projection<'_>],
        out: &mut [f32],
        mode: Mode,
    ) -> Result<(), KernelError> {
        let Input { rows, cols, .. } = x;
        if rows == 0 {
            return Ok(());
        }
        let out_cols = out.len() / rows;
        let total: usize = projections.iter().map(|projection| projection.weight.rows()).sum();
        if total != out_cols {
            return Err(KernelError::Shape {
                what: "columns of a projection",
                expected: total,
                got: out_cols,
            });
        }
        for Projection { weight, bias } in projections {
            if weight.cols() != cols {
                return Err(KernelError::Shape {
                    what: "inputs of a projection",
                    expected: weight.cols(),
                    got: cols,
                });
            }
            if let Some(bias) = bias.filter(|bias| bias.len() != weight.rows()) {
                return Err(KernelError::Shape { what: "a bias", expected: weight.rows(), got: bias.len() });
            }
        }
        if rows >= PANEL_MIN_ROWS && !self.fixed {
            self.panels(x, projections, out, mode);
        } else {
            self.dots(x, projections, out, mode);
        }
        Ok(())
    }

    /// Dot products with few rows of activations.
    fn dots(&mut self, x: Input<'_>, projections: &[Projection<'_>], out: &mut [f32], mode: Mode) {
        let Input { rows, cols, fill } = x;
        let ProjectScratch { rows: x, quantised, .. } = &mut *self.scratch;
        let buffers = Mutex::new((std::mem::take(x), std::mem::take(quantised)));
        // The calling thread computes the activations; meanwhile the first weights of all threads are on their way.
        let activations = Handover::new();
        let compute = || {
            let (mut x, mut quantised) =
                std::mem::take(&mut *buffers.lock().unwrap_or_else(PoisonError::into_inner));
            x.resize(rows * cols, 0.0);
            x.chunks_exact_mut(cols.max(1)).enumerate().for_each(|(row, out)| fill(row, out));
            if projections.iter().any(|projection| projection.weight.dtype().is_blocked()) {
                self.dot.quantise(&x, rows, cols, &mut quantised);
            }
            (x, quantised)
        };
        let passes = |weight: &Weight| stripes::passes(weight.rows());
        let total: usize = projections.iter().map(|projection| passes(projection.weight)).sum();
        let chunk = total.div_ceil(self.pool.threads() * TASKS_PER_THREAD).max(FEWEST_PASSES);
        let out_cols = out.len() / rows;
        let target = DisjointSlice::new(out);
        let (tasks, threads) = (Task::count(projections, passes, chunk), self.pool.threads());
        let body = |worker: usize, index: usize| {
            let task = Task::new(projections, passes, chunk, index);
            let weight = projections[task.projection].weight;
            let parts = stripes::cut(weight.rows(), task.range);
            let ready = activations.get().or_else(|| {
                if worker > 0 {
                    prefetch_first(weight, &parts, PREFETCH_AHEAD);
                    return activations.wait();
                }
                Some(activations.make(|| {
                    prefetch_first(weight, &parts, FIRST_BYTES_OF_MAKER);
                    compute()
                }))
            });
            // Without activations there is a panic to report.
            let Some((x, quantised)) = ready else { return };
            // SAFETY: tasks cover different columns, so no two threads touch the same element.
            let target = |row: usize, part: &Range<usize>| unsafe {
                let first = row * out_cols + task.first_col;
                target.part(first + part.start..first + part.end)
            };
            self.dot_part(
                worker,
                projections[task.projection],
                &parts,
                Rows { x, quantised, rows },
                target,
                mode,
            );
        };
        let end = |thread: usize| tasks * (thread + 1) / threads;
        // Others may have taken all tasks, and wait.
        let after = |worker: usize| {
            if worker == 0 {
                activations.make(compute);
            }
        };
        self.pool.for_each_in_ranges(tasks, end, body, after);
        if let Some((x, quantised)) = activations.into_inner() {
            (self.scratch.rows, self.scratch.quantised) = (x, quantised);
        }
    }

    /// Dot products of some rows of a weight, `parts`, with all rows of activations; `target(row, part)` is where those of an
    /// activation row go.
    fn dot_part<'a>(
        &self,
        worker: usize,
        projection: Projection<'_>,
        parts: &[Range<usize>; STRIPES],
        activations: Rows<'_>,
        target: impl Fn(usize, &Range<usize>) -> &'a mut [f32],
        mode: Mode,
    ) {
        let Projection { weight, bias } = projection;
        let Rows { x, quantised, rows } = activations;
        let first_rows = parts.each_ref().map(|part| part.start.min(weight.rows().saturating_sub(1)));
        let product = |outs: [&mut [f32]; STRIPES]| {
            let mut outs = outs.into_iter();
            let parts = parts
                .clone()
                .map(|part| Stripe { weights: weight.row_data(part), out: outs.next().unwrap_or_default() });
            match weight.scales() {
                Some(scales) => self.dot.fp8_rows(parts, first_rows, scales, x, rows),
                None if weight.dtype().is_float() => self.dot.float_rows(weight.dtype(), parts, x, rows),
                None => self.dot.quantised_rows(weight.dtype(), parts, quantised),
            }
        };
        if rows == 1 && mode == Mode::Store && bias.is_none() {
            return product(parts.each_ref().map(|part| target(0, part)));
        }
        let mut scratch = self.workers.of(worker);
        let tile = &mut scratch.tile;
        tile.resize(rows * parts.iter().map(Range::len).sum::<usize>(), 0.0);
        let mut rest = tile.as_mut_slice();
        product(parts.each_ref().map(|part| rest.split_off_mut(..rows * part.len()).unwrap_or_default()));
        let mut rest = tile.as_slice();
        for part in parts {
            let bias = bias.map(|bias| &bias[part.clone()]);
            let values = rest.split_off(..rows * part.len()).unwrap_or_default();
            for (row, values) in values.chunks_exact(part.len().max(1)).enumerate() {
                write(values, bias, target(row, part), mode);
            }
        }
    }

    /// Products of panels of weights with many rows of activations.
    fn panels(&mut self, x: Input<'_>, projections: &[Projection<'_>], out: &mut [f32], mode: Mode) {
        let Input { rows, cols, fill } = x;
        self.scratch.packed.pack_with(self.isa, self.pool, rows, cols, fill);
        let packed = &self.scratch.packed;
        let out_cols = out.len() / rows;
        let chunk = gemm::panel_rows(out_cols, self.pool.threads());
        let target = DisjointSlice::new(out);
        self.pool.for_each_worker(Task::count(projections, Weight::rows, chunk), |worker, index| {
            let task = Task::new(projections, Weight::rows, chunk, index);
            let Projection { weight, bias } = projections[task.projection];
            let count = task.range.len();
            let data = weight.row_data(task.range.clone());
            let bias = bias.map(|bias| &bias[task.range.clone()]);
            let mut scratch = self.workers.of(worker);
            let WorkerScratch { tile, panel } = &mut *scratch;
            tile.resize(rows * count, 0.0);
            let weights = PanelWeights {
                dtype: weight.dtype(),
                bytes: data,
                first_row: task.range.start,
                scales: weight.scales(),
            };
            gemm::panel(self.isa, weights, cols, packed, panel, tile);
            for (row, values) in tile.chunks_exact(count).enumerate() {
                let first = row * out_cols + task.first_col + task.range.start;
                // SAFETY: tasks cover different columns, so no two threads touch the same element.
                write(values, bias, unsafe { target.part(first..first + count) }, mode);
            }
        });
    }
}

/// Prefetches the first bytes of each stripe, in the order in which they are read.
fn prefetch_first(weight: &Weight, parts: &[Range<usize>; STRIPES], bytes: usize) {
    let parts = parts.each_ref().map(|part| weight.row_data(part.clone()));
    for at in (0..bytes).step_by(LINE) {
        parts.iter().filter_map(|part| part.get(at..at + 1)).for_each(memory::prefetch);
    }
}

/// Brings results to their place.
fn write(values: &[f32], bias: Option<&[f32]>, target: &mut [f32], mode: Mode) {
    match (mode, bias) {
        (Mode::Store, None) => target.copy_from_slice(values),
        (Mode::Add, None) => target.iter_mut().zip(values).for_each(|(target, value)| *target += value),
        (Mode::Store, Some(bias)) => {
            target
                .iter_mut()
                .zip(values)
                .zip(bias)
                .for_each(|((target, value), bias)| *target = value + bias);
        }
        (Mode::Add, Some(bias)) => {
            target
                .iter_mut()
                .zip(values)
                .zip(bias)
                .for_each(|((target, value), bias)| *target += value + bias);
        }
    }
}

/// A part of one projection that a thread computes.
struct Task {
    projection: usize,
    /// Which of its rows, or of the passes over them.
    range: Range<usize>,
    /// Where the columns of the projection begin.
    first_col: usize,
}

impl Task {
    /// The number of tasks where one has `chunk` of the `size` of a weight, or what is left of it.
    fn count(projections: &[Projection<'_>], size: impl Fn(&Weight) -> usize, chunk: usize) -> usize {
        projections.iter().map(|projection| size(projection.weight).div_ceil(chunk)).sum()
    }

    /// Task `index`, counted through all projections.
    fn new(
        projections: &[Projection<'_>],
        size: impl Fn(&Weight) -> usize,
        chunk: usize,
        index: usize,
    ) -> Task {
        let (mut before, mut first_col) = (0, 0);
        for (projection, Projection { weight, .. }) in projections.iter().enumerate() {
            let tasks = size(weight).div_ceil(chunk);
            if index < before + tasks {
                let start = (index - before) * chunk;
                return Task { projection, range: start..(start + chunk).min(size(weight)), first_col };
            }
            before += tasks;
            first_col += weight.rows();
        }
        unreachable!("task {index} of {before}")
    }
}
