//! Projections of groups of rows, each group with weights of its own: the rows that chose the same expert.
//!
//! A weight is read once for all rows of its group. Large groups go one after the other, each over the whole pool; the dot
//! products of all small groups are one parallel region, because one of them alone is too little work for it.

use std::ops::Range;

use super::{FEWEST_PASSES, Input, Mode, PANEL_MIN_ROWS, Projection, Projector, Rows, TASKS_PER_THREAD};
use crate::backend::{KernelError, expect};
use crate::cpu::activation::QuantisedRows;
use crate::cpu::dot::stripes;
use crate::cpu::memory::DisjointSlice;
use crate::cpu::rows::PARALLEL_VALUES;

/// Neighbouring rows that are multiplied with the same weights.
pub(in crate::cpu) struct Group<'a> {
    /// The rows, counted among all of the step.
    pub(in crate::cpu) rows: Range<usize>,
    /// What they are multiplied with.
    pub(in crate::cpu) projections: Vec<Projection<'a>>,
}

/// Buffers that are kept between calls.
#[derive(Default)]
pub(super) struct GroupScratch(Vec<Prepared>);

/// The activations of a group.
#[derive(Default)]
struct Prepared {
    x: Vec<f32>,
    quantised: QuantisedRows,
}

/// Some passes over one weight of a group.
struct Task {
    group: usize,
    projection: usize,
    passes: Range<usize>,
    first_col: usize,
}

impl Projector<'_> {
    /// `out[row] = [p₀(x) | p₁(x) | ...]` with the projections of the row's group. Rows of no group are left as they are.
    pub(in crate::cpu) fn run_groups(
        &mut self,
        x: Input<'_>,
        groups: &[Group<'_>],
        out: &mut [f32],
    ) -> Result<(), KernelError> {
        if x.rows == 0 {
            return Ok(());
        }
        let out_cols = out.len() / x.rows;
        for group in groups {
            check(group, x.cols, out_cols)?;
        }
        let (large, small): (Vec<&Group<'_>>, Vec<&Group<'_>>) =
            groups.iter().partition(|group| group.rows.len() >= PANEL_MIN_ROWS);
        for group in large {
            let fill = |row: usize, out: &mut [f32]| (x.fill)(group.rows.start + row, out);
            let input = Input { rows: group.rows.len(), cols: x.cols, fill: &fill };
            let out = &mut out[group.rows.start * out_cols..group.rows.end * out_cols];
            self.run(input, &group.projections, out, Mode::Store)?;
        }
        if !small.is_empty() {
            self.small_groups(x, &small, out, out_cols);
        }
        Ok(())
    }

    fn small_groups(&mut self, x: Input<'_>, groups: &[&Group<'_>], out: &mut [f32], out_cols: usize) {
        let mut scratch = std::mem::take(&mut self.scratch.groups);
        if scratch.0.len() < groups.len() {
            scratch.0.resize_with(groups.len(), Prepared::default);
        }
        let prepared = &mut scratch.0[..groups.len()];
        self.prepare(x, groups, prepared);
        let prepared = &*prepared;

        let all = groups.iter().flat_map(|group| &group.projections);
        let passes = all.map(|projection| stripes::passes(projection.weight.rows()));
        let threads = self.pool.threads();
        let chunk = passes.sum::<usize>().div_ceil(threads * TASKS_PER_THREAD).max(FEWEST_PASSES);
        let tasks = tasks(groups, chunk);
        let target = DisjointSlice::new(out);
        self.pool.for_each_worker(tasks.len(), |worker, index| {
            let Task { group, projection, passes, first_col } = &tasks[index];
            let Prepared { x, quantised } = &prepared[*group];
            let group = groups[*group];
            let projection = group.projections[*projection];
            let parts = stripes::cut(projection.weight.rows(), passes.clone());
            // SAFETY: tasks cover different rows or columns, so no two threads touch the same element.
            let target = |row: usize, part: &Range<usize>| unsafe {
                let first = (group.rows.start + row) * out_cols + first_col;
                target.part(first + part.start..first + part.end)
            };
            let activations = Rows { x, quantised, rows: group.rows.len() };
            self.dot_part(worker, projection, &parts, activations, target, Mode::Store);
        });
        self.scratch.groups = scratch;
    }

    /// Computes the activations of each group.
    fn prepare(&self, x: Input<'_>, groups: &[&Group<'_>], prepared: &mut [Prepared]) {
        let prepare = |group: &Group<'_>, Prepared { x: values, quantised }: &mut Prepared| {
            let rows = group.rows.len();
            values.resize(rows * x.cols, 0.0);
            values
                .chunks_exact_mut(x.cols.max(1))
                .zip(group.rows.clone())
                .for_each(|(out, row)| (x.fill)(row, out));
            if group.projections.iter().any(|projection| projection.weight.dtype().is_blocked()) {
                self.dot.quantise(values, rows, x.cols, quantised);
            }
        };
        let values = groups.iter().map(|group| group.rows.len() * x.cols).sum::<usize>();
        if values < PARALLEL_VALUES {
            return groups.iter().zip(prepared).for_each(|(group, prepared)| prepare(group, prepared));
        }
        let prepared = DisjointSlice::new(prepared);
        self.pool.for_each(groups.len(), |index| {
            // SAFETY: each index runs once, and no two are the same element.
            let own = unsafe { prepared.part(index..index + 1) };
            own.iter_mut().for_each(|own| prepare(groups[index], own));
        });
    }
}

fn tasks(groups: &[&Group<'_>], chunk: usize) -> Vec<Task> {
    let mut tasks = Vec::new();
    for (index, group) in groups.iter().enumerate() {
        let mut first_col = 0;
        for (projection, Projection { weight, .. }) in group.projections.iter().enumerate() {
            let passes = stripes::passes(weight.rows());
            let starts = (0..passes).step_by(chunk);
            tasks.extend(starts.map(|start| Task {
                group: index,
                projection,
                passes: start..(start + chunk).min(passes),
                first_col,
            }));
            first_col += weight.rows();
        }
    }
    tasks
}

fn check(group: &Group<'_>, cols: usize, out_cols: usize) -> Result<(), KernelError> {
    let got: usize = group.projections.iter().map(|projection| projection.weight.rows()).sum();
    expect("outputs of an expert", out_cols, got)?;
    for Projection { weight, bias } in &group.projections {
        expect("inputs of an expert", weight.cols(), cols)?;
        expect("a bias of an expert", weight.rows(), bias.map_or(weight.rows(), <[f32]>::len))?;
    }
    Ok(())
}
