//! What a block adds to the residual stream: its last projection, and the norm that some families put after it.

use super::elementwise::rms_norm_in_place;
use super::isa::Isa;
use super::project::{Input, Mode, Projection, Projector};
use super::tensors::{Matrix, Weight};
use crate::backend::{Backend, KernelError, Linear, RmsNorm};

/// A projection of a model as the projector takes it.
pub(super) fn projection<B: Backend<Weight = Weight>>(
    linear: &Linear<B>,
) -> Result<Projection<'_>, KernelError> {
    let bias = linear.bias.as_ref().map(|bias| bias.vector("a bias", linear.weight.rows())).transpose()?;
    Ok(Projection { weight: &linear.weight, bias })
}

/// Writes the projection of the first rows of a matrix to `out`, or adds it.
pub(super) fn linear_into<B: Backend<Weight = Weight>>(
    projector: &mut Projector<'_>,
    x: &Matrix,
    rows: usize,
    linear: &Linear<B>,
    out: &mut [f32],
    mode: Mode,
) -> Result<(), KernelError> {
    let cols = x.cols();
    let x = x.first_rows("input rows", rows)?;
    let fill = |row: usize, out: &mut [f32]| out.copy_from_slice(&x[row * cols..(row + 1) * cols]);
    let input = Input { rows, cols, fill: &fill };
    projector.run(input, &[projection(linear)?], out, mode)
}

/// Norms each row of `rows` and adds it to that of `hidden`.
pub(super) fn norm_add<B: Backend<Weight = Weight>>(
    isa: Isa,
    norm: &RmsNorm<B>,
    rows: &mut [f32],
    cols: usize,
    hidden: &mut [f32],
) -> Result<(), KernelError> {
    let weight = norm.weight.vector("a norm", cols)?;
    for (row, hidden) in rows.chunks_exact_mut(cols.max(1)).zip(hidden.chunks_exact_mut(cols.max(1))) {
        rms_norm_in_place(isa, row, weight, norm.eps);
        hidden.iter_mut().zip(&*row).for_each(|(hidden, value)| *hidden += value);
    }
    Ok(())
}
