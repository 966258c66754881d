//! `norm.cu`: norms that are launches of their own, and a factor.

use crate::call::Call;
use crate::memory::Fault;

/// Threads of a block, which the grid of `scale` is counted in.
const THREADS: usize = 256;

/// What numbers are multiplied with, but for the gain.
pub(super) fn inverse_norm(x: &[f32], epsilon: f32) -> f32 {
    let squares: f32 = x.iter().map(|x| x * x).sum();
    1.0 / (squares / x.len() as f32 + epsilon).sqrt()
}

/// Calls `f` for every row with where it is and its normed columns.
fn each_row(call: &Call<'_>, mut f: impl FnMut(usize, Vec<f32>) -> Result<(), Fault>) -> Result<(), Fault> {
    let a = &call.arguments;
    let (columns, first) = (a.count("columns")?, a.count("first_column")?);
    let gains = call.memory.view::<f32>(a.pointer("gain")?, columns)?;
    for row in 0..call.grid[0] {
        let at = row * a.count("stride")? + first;
        let mut x = call.memory.read::<f32>(a.pointer("x")? + 4 * at as u64, columns)?;
        let inverse = inverse_norm(&x, a.float("epsilon")?);
        x.iter_mut().zip(gains).for_each(|(x, gain)| *x = *x * inverse * gain);
        f(at, x)?;
    }
    Ok(())
}

pub(super) fn norm_columns(call: &Call<'_>) -> Result<(), Fault> {
    let x = call.arguments.pointer("x")?;
    each_row(call, |at, normed| call.memory.write(x + 4 * at as u64, &normed))
}

pub(super) fn add_normed(call: &Call<'_>) -> Result<(), Fault> {
    let sum = call.arguments.pointer("sum")?;
    each_row(call, |at, normed| {
        let mut row = call.memory.read::<f32>(sum + 4 * at as u64, normed.len())?;
        row.iter_mut().zip(&normed).for_each(|(sum, x)| *sum += x);
        call.memory.write(sum + 4 * at as u64, &row)
    })
}

pub(super) fn scale(call: &Call<'_>) -> Result<(), Fault> {
    let a = &call.arguments;
    let count = a.count("stride")?.min(call.grid[0] * THREADS);
    let (at, factor) = (a.pointer("x")?, a.float("epsilon")?);
    let mut x = call.memory.read::<f32>(at, count)?;
    x.iter_mut().for_each(|x| *x *= factor);
    call.memory.write(at, &x)
}
