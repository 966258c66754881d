//! Projections `x · Wᵀ` over the worker pool.
//!
//! Few rows (decode) go through dot products straight on the stored blocks: the weights are read once and nothing
//! is unpacked to memory. Many rows (prefill) go through panels: a few dozen weight rows are unpacked into a
//! buffer that fits the core's cache and multiplied with all activations.

use super::activation::QuantisedRows;
use super::dot::Dot;
use super::gemm::{self, PackedActivations, PanelScratch};
use super::isa::Isa;
use super::memory::DisjointSlice;
use super::per_thread::PerThread;
use super::pool::Pool;
use super::tensors::Weight;
use crate::backend::KernelError;

/// From this many rows on, unpacking a panel costs less than repeating dot products.
const PANEL_MIN_ROWS: usize = 6;

/// Smallest useful number of weight rows per task of the dot path, and what all but the last are multiples of: kernels sum four rows
/// together, and a row's rounding must not depend on the number of threads.
const DOT_ROWS: usize = 8;

/// Tasks per thread: enough to even out a core that somebody else uses for a while.
const TASKS_PER_THREAD: usize = 12;

/// What happens to a result.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Mode {
    /// Overwrite the output.
    Store,
    /// Add to the output.
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
        let Input { rows, cols, fill } = x;
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
        let panels = rows >= PANEL_MIN_ROWS && !self.fixed;
        let chunk = if panels {
            self.scratch.packed.pack_with(self.isa, self.pool, rows, cols, fill);
            gemm::panel_rows(total, self.pool.threads())
        } else {
            let ProjectScratch { rows: x, quantised, .. } = &mut *self.scratch;
            x.resize(rows * cols, 0.0);
            x.chunks_exact_mut(cols.max(1)).enumerate().for_each(|(row, out)| fill(row, out));
            if projections.iter().any(|projection| !projection.weight.dtype().is_float()) {
                self.dot.quantise(x, rows, cols, quantised);
            }
            let even = total.div_ceil(self.pool.threads() * TASKS_PER_THREAD);
            even.next_multiple_of(DOT_ROWS)
        };
        let tasks: usize = projections.iter().map(|p| p.weight.rows().div_ceil(chunk)).sum();
        let target = DisjointSlice::new(out);
        let ProjectScratch { rows: x, quantised, packed } = &*self.scratch;
        self.pool.for_each_worker(tasks, |worker, index| {
            let task = Task::new(projections, chunk, index);
            let Projection { weight, bias } = projections[task.projection];
            let count = task.rows.len();
            let data = weight.row_data(task.rows.clone());
            let bias = bias.map(|bias| &bias[task.rows.clone()]);
            let mut scratch = self.workers.of(worker);
            let WorkerScratch { tile, panel } = &mut *scratch;
            let mut product = |values: &mut [f32]| {
                if panels {
                    gemm::panel(self.isa, weight.dtype(), data, cols, packed, panel, values);
                } else if weight.dtype().is_float() {
                    self.dot.float_rows(weight.dtype(), data, x, rows, values);
                } else {
                    self.dot.quantised_rows(weight.dtype(), data, quantised, values);
                }
                for values in values.chunks_exact_mut(count) {
                    if let Some(bias) = bias {
                        values.iter_mut().zip(bias).for_each(|(value, bias)| *value += bias);
                    }
                }
            };
            // SAFETY: tasks cover different columns, so no two threads touch the same element.
            let target = |row: usize| unsafe {
                target.part(row * out_cols + task.first_col..row * out_cols + task.first_col + count)
            };
            if rows == 1 && mode == Mode::Store {
                return product(target(0));
            }
            tile.resize(rows * count, 0.0);
            product(tile);
            for (row, values) in tile.chunks_exact(count).enumerate() {
                let target = target(row);
                match mode {
                    Mode::Store => target.copy_from_slice(values),
                    Mode::Add => target.iter_mut().zip(values).for_each(|(target, value)| *target += value),
                }
            }
        });
        Ok(())
    }
}

/// Some rows of one projection.
struct Task {
    projection: usize,
    rows: std::ops::Range<usize>,
    first_col: usize,
}

impl Task {
    /// Task `index`, counted through all projections, where one has `chunk` rows or what is left of a weight.
    fn new(projections: &[Projection<'_>], chunk: usize, index: usize) -> Task {
        let (mut before, mut first_col) = (0, 0);
        for (projection, Projection { weight, .. }) in projections.iter().enumerate() {
            let tasks = weight.rows().div_ceil(chunk);
            if index < before + tasks {
                let start = (index - before) * chunk;
                let rows = start..(start + chunk).min(weight.rows());
                return Task { projection, rows, first_col: first_col + start };
            }
            before += tasks;
            first_col += weight.rows();
        }
        unreachable!("task {index} of {before}")
    }
}
