//! What a block adds to the residual stream: its last projection, and the norm that some families put after it.

use super::backend::CpuBackend;
use super::elementwise::rms_norm_in_place;
use super::project::{Input, Mode, ProjectScratch, Projection};
use super::tensors::Matrix;
use crate::backend::{KernelError, Linear, RmsNorm};

pub(super) fn projection(linear: &Linear<CpuBackend>) -> Result<Projection<'_>, KernelError> {
    let bias = linear.bias.as_ref().map(|bias| bias.vector("a bias", linear.weight.rows())).transpose()?;
    Ok(Projection { weight: &linear.weight, bias })
}

impl CpuBackend {
    /// The projection of the first rows of a matrix.
    pub(super) fn linear(
        &self,
        x: &Matrix,
        rows: usize,
        linear: &Linear<CpuBackend>,
        out: &mut [f32],
        scratch: &mut ProjectScratch,
        mode: Mode,
    ) -> Result<(), KernelError> {
        let cols = x.cols();
        let x = x.first_rows("input rows", rows)?;
        let fill = |row: usize, out: &mut [f32]| out.copy_from_slice(&x[row * cols..(row + 1) * cols]);
        let input = Input { rows, cols, fill: &fill };
        self.projector(scratch).run(input, &[projection(linear)?], out, mode)
    }

    /// Norms each row of `rows` and adds it to that of `hidden`.
    pub(super) fn norm_add(
        &self,
        norm: &RmsNorm<CpuBackend>,
        rows: &mut [f32],
        cols: usize,
        hidden: &mut [f32],
    ) -> Result<(), KernelError> {
        let weight = norm.weight.vector("a norm", cols)?;
        for (row, hidden) in rows.chunks_exact_mut(cols.max(1)).zip(hidden.chunks_exact_mut(cols.max(1))) {
            rms_norm_in_place(self.isa, row, weight, norm.eps);
            hidden.iter_mut().zip(&*row).for_each(|(hidden, value)| *hidden += value);
        }
        Ok(())
    }
}
