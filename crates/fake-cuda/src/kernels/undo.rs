//! `undo.cu`: outputs of attention back to the basis of values, less the share of learned sinks.

use super::{add_multiple, dot};
use crate::call::Call;
use crate::memory::Fault;

/// Rows of a block.
const VECTORS: usize = 16;

pub(super) fn undo(call: &Call<'_>) -> Result<(), Fault> {
    let (a, memory, d) = (&call.arguments, call.memory, call.number("HEAD_DIM")?);
    let (group, rows, kv_heads) = (a.count("group")?, a.count("row_count")?, call.grid[1]);
    let heads = kv_heads * group;
    for head in 0..kv_heads {
        let of_head = |at: u64, size: usize| memory.view::<f32>(at + (4 * head * size) as u64, size);
        let matrix = a.optional("matrices")?.map(|at| of_head(at, d * d)).transpose()?;
        let mean = a.optional("means")?.map(|at| of_head(at, d)).transpose()?;
        for vector in 0..(rows * group).min(call.grid[0] * VECTORS) {
            let (row, query_head) = (vector / group, head * group + vector % group);
            let share = share_of_values(call, row, head, query_head, heads)?;
            let at = a.pointer("rows")? + (4 * (row * heads + query_head) * d) as u64;
            let mut x = memory.read::<f32>(at, d)?;
            x.iter_mut().for_each(|x| *x *= share);
            let mut out: Vec<f32> =
                (0..d).map(|channel| mean.map_or(0.0, |mean| mean[channel]) * share).collect();
            match matrix {
                None => out.iter_mut().zip(&x).for_each(|(out, x)| *out += x),
                Some(matrix) => {
                    for (x, weights) in x.iter().zip(matrix.chunks_exact(d)) {
                        add_multiple(&mut out, *x, weights);
                    }
                }
            }
            memory.write(at, &out)?;
        }
    }
    Ok(())
}

/// What the weights of a row's values add up to.
fn share_of_values(
    call: &Call<'_>,
    row: usize,
    head: usize,
    query_head: usize,
    heads: usize,
) -> Result<f32, Fault> {
    let (a, memory, d) = (&call.arguments, call.memory, call.number("HEAD_DIM")?);
    let Some(totals) = a.optional("totals")? else { return Ok(1.0) };
    let mut missing = 0.0;
    if let Some(means) = a.optional("mean_keys")? {
        let at = row * a.count("query_stride")? + query_head * d;
        let query = memory.view::<f32>(a.pointer("queries")? + 4 * at as u64, d)?;
        missing = dot(query, memory.view::<f32>(means + (4 * head * d) as u64, d)?);
    }
    let sink = memory.get::<f32>(a.pointer("sinks")? + 4 * query_head as u64)?;
    let total = memory.get::<f32>(totals + (4 * (row * heads + query_head)) as u64)?;
    let sink = (sink - missing * a.float("scale")?) * std::f32::consts::LOG2_E;
    Ok(1.0 / (1.0 + (sink - total).min(126.0).exp2()))
}
