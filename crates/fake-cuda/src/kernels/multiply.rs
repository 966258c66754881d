//! `multiply.cu`: products of up to 64 rows with up to three matrices.

use super::activations::{gated, packed_row, source_row, to_bf16, to_f16};
use super::dot;
use super::tiles::{COLUMNS, Kind, ROWS, tile_row};
use crate::call::Call;
use crate::memory::Fault;

const ADD: i32 = 1;
const GATE: i32 = 2;
/// Where kinds of tiles have a number, that of several.
const MIXED: usize = 6;

/// Rows of activations in one of the two formats, and what results are multiplied with.
struct Activations {
    rows: Vec<Vec<f32>>,
    factors: Vec<f32>,
}

/// Makes or reads activations: bf16 for floats, f16 for codes.
fn activations(call: &Call<'_>, wide: bool) -> Result<Activations, Fault> {
    let a = &call.arguments;
    let (count, steps) = (a.count("rows")?, a.count("steps")?);
    let (mut rows, mut factors) = (Vec::new(), Vec::new());
    let fused = call.number("FUSED")? != 0;
    for row in 0..count {
        let mut factor = 1.0;
        let mut x;
        if fused {
            x = source_row(a, "source.", call.memory, row)?;
            x.resize(steps * COLUMNS, 0.0);
            if wide { to_bf16(&mut x) } else { factor = to_f16(&mut x) }
        } else {
            x = packed_row(call.memory, a.pointer(if wide { "bf16" } else { "f16" })?, row, steps, wide)?;
            if !wide {
                factor = call.memory.get::<f32>(a.pointer("factors")? + 4 * row as u64)?;
            }
        }
        rows.push(x);
        factors.push(factor);
    }
    Ok(Activations { rows, factors })
}

/// A matrix of the argument.
struct Matrix {
    tiles: u64,
    bias: Option<u64>,
    kind: Kind,
    rows: usize,
    first_column: usize,
    first_unit: usize,
}

pub(super) fn multiply(call: &Call<'_>) -> Result<(), Fault> {
    let a = &call.arguments;
    let (rows, steps, ends) = (a.count("rows")?, a.count("steps")?, a.int("ends")?);
    let most = if call.number("FUSED")? != 0 { 2 } else { 8 * call.number("COLUMN_TILES")? };
    if rows > most {
        return Err(format!("{rows} rows, of which this version takes {most}"));
    }
    let mut matrices = Vec::new();
    for index in 0..a.count("matrix_count")? {
        let name = |field: &str| format!("matrices[{index}].{field}");
        matrices.push(Matrix {
            tiles: a.pointer(&name("tiles"))?,
            bias: a.optional(&name("bias"))?,
            kind: Kind::of(a.int(&name("kind"))?)?,
            rows: a.count(&name("rows"))?,
            first_column: a.count(&name("first_column"))?,
            first_unit: a.count(&name("first_unit"))?,
        });
    }
    let of_kind = call.number("KIND")?;
    if of_kind != MIXED && matrices.iter().any(|matrix| matrix.kind as usize != of_kind) {
        return Err(format!("tiles of another kind than {of_kind}"));
    }
    let any = |wide: bool| matrices.iter().any(|matrix| (matrix.kind == Kind::Floats) == wide);
    let wide = if any(true) { Some(activations(call, true)?) } else { None };
    let codes = if any(false) { Some(activations(call, false)?) } else { None };
    let of_kind = |kind: Kind| if kind == Kind::Floats { &wide } else { &codes };
    // The products of a unit with a matrix: `[row][channel]`.
    let products = |matrix: &Matrix, tile: usize| -> Result<Vec<f32>, Fault> {
        let at = matrix.tiles + (tile * steps * matrix.kind.tile_bytes()) as u64;
        let weights = tile_row(call.memory, matrix.kind, at, steps)?;
        let Some(activations) = of_kind(matrix.kind) else { return Err("activations of no kind".to_owned()) };
        let mut results = Vec::with_capacity(rows * ROWS);
        for (x, factor) in activations.rows.iter().zip(&activations.factors) {
            for (channel, weights) in weights.chunks_exact(steps * COLUMNS).enumerate() {
                let output = tile * ROWS + channel;
                let bias = match matrix.bias.filter(|_| output < matrix.rows) {
                    Some(bias) => call.memory.get::<f32>(bias + 4 * output as u64)?,
                    None => 0.0,
                };
                results.push(dot(x, weights) * factor + bias);
            }
        }
        Ok(results)
    };
    for unit in 0..a.count("units")? {
        let last = matrices.iter().rposition(|matrix| ends != GATE && unit >= matrix.first_unit).unwrap_or(0);
        let matrix = &matrices[last];
        let tile = unit - if ends == GATE { 0 } else { matrix.first_unit };
        let mut results = products(matrix, tile)?;
        if ends == GATE {
            let activation = a.int("activation")?;
            let ups = products(&matrices[1], tile)?;
            results.iter_mut().zip(ups).for_each(|(gate, up)| *gate = gated(activation, *gate, up));
        }
        let here = ROWS.min(matrix.rows.saturating_sub(tile * ROWS));
        for (row, results) in results.chunks_exact_mut(ROWS).enumerate() {
            let column = row * a.count("out_stride")? + matrix.first_column + tile * ROWS;
            let to = a.pointer("out")? + 4 * column as u64;
            let results = &mut results[..here];
            if ends == ADD {
                let before = call.memory.view::<f32>(to, here)?;
                results.iter_mut().zip(before).for_each(|(result, before)| *result += before);
            }
            call.memory.write(to, results)?;
        }
    }
    Ok(())
}
