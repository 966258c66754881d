//! `activations.cu` and `pack.cu`: rows before a product with weights. Packed rows follow one another here, each as long as all of
//! its steps of 64 inputs.

use half::{bf16, f16};

use super::norm::inverse_norm;
use super::tiles::COLUMNS;
use crate::call::{Call, Record};
use crate::memory::{Access, Fault};

const NORMED: i32 = 0;
const GATED: i32 = 1;
const GELU_TANH: i32 = 1;
const CLAMPED: i32 = 2;

/// The activated gate times `up`.
pub(super) fn gated(activation: i32, gate: f32, up: f32) -> f32 {
    let u = 0.797_884_6 * (gate + 0.044_715 * gate * gate * gate);
    gate / (1.0 + (if activation == GELU_TANH { -2.0 * u } else { -gate }).exp()) * up
}

/// The same for experts, some of which clamp both.
pub(super) fn activated(activation: i32, alpha: f32, limit: f32, gate: f32, up: f32) -> f32 {
    if activation != CLAMPED {
        return gated(activation, gate, up);
    }
    let gate = if gate > limit { limit } else { gate };
    let up = if up > limit {
        limit
    } else if up < -limit {
        -limit
    } else {
        up
    };
    gate / (1.0 + (-alpha * gate).exp()) * (up + 1.0)
}

/// The power of two that brings numbers up to `largest` below 2^15.
pub(super) fn power_below(largest: f32) -> f32 {
    let exponent = largest.to_bits() >> 23;
    if exponent > 15 && exponent < 254 { f32::from_bits((127 + 127 + 14 - exponent) << 23) } else { 1.0 }
}

/// Numbers rounded to bf16.
pub(super) fn to_bf16(row: &mut [f32]) {
    row.iter_mut().for_each(|x| *x = bf16::from_f32(*x).to_f32());
}

/// Numbers times a power of two, rounded to f16; what results are multiplied with.
pub(super) fn to_f16(row: &mut [f32]) -> f32 {
    let power = power_below(row.iter().fold(0.0_f32, |most, x| most.max(x.abs())));
    row.iter_mut().for_each(|x| *x = f16::from_f32(*x * power).to_f32());
    1.0 / power
}

/// A row as its source says: normed, gated, or as it is. `source` is the path of the struct, with a dot behind it.
pub(super) fn source_row(
    a: &Record<'_>,
    source: &str,
    memory: &Access,
    row: usize,
) -> Result<Vec<f32>, Fault> {
    let name = |field: &str| format!("{source}{field}");
    let (columns, stride) = (a.count(&name("columns"))?, a.count(&name("stride"))?);
    let row = match a.optional(&name("rows"))? {
        Some(rows) => memory.get::<u32>(rows + 4 * row as u64)? as usize,
        None => row,
    };
    let at = a.pointer(&name("x"))? + (4 * row * stride) as u64;
    let mut x = memory.read::<f32>(at, columns)?;
    match a.int(&name("kind"))? {
        NORMED => {
            let gains = memory.view::<f32>(a.pointer(&name("gain"))?, columns)?;
            let inverse = inverse_norm(&x, a.float(&name("epsilon"))?);
            x.iter_mut().zip(gains).for_each(|(x, gain)| *x = *x * gain * inverse);
        }
        GATED => {
            let activation = a.int(&name("activation"))?;
            let ups = memory.view::<f32>(at + 4 * columns as u64, columns)?;
            x.iter_mut().zip(ups).for_each(|(x, up)| *x = gated(activation, *x, *up));
        }
        _ => {}
    }
    Ok(x)
}

const BF16_OPERANDS: i32 = 0;
const F16_OPERANDS: i32 = 1;

pub(super) fn pack(call: &Call<'_>) -> Result<(), Fault> {
    let a = &call.arguments;
    let (format, steps) = (a.int("format")?, a.count("steps")?);
    let row_bytes = (steps * COLUMNS * 2) as u64;
    // Rows in column tiles have room for eight at a time.
    let room = a.count("column_tiles")? * 8;
    if room > 0 && call.grid[0] > room {
        return Err(format!("{} rows in column tiles of {room}", call.grid[0]));
    }
    for row in 0..call.grid[0] {
        let mut x = source_row(a, "source.", call.memory, row)?;
        x.resize(steps * COLUMNS, 0.0);
        let to = a.pointer("out")? + row as u64 * row_bytes;
        match format {
            BF16_OPERANDS => {
                let bits: Vec<u16> = x.iter().map(|&x| bf16::from_f32(x).to_bits()).collect();
                call.memory.write(to, &bits)?;
            }
            F16_OPERANDS => {
                let factor = to_f16(&mut x);
                let bits: Vec<u16> = x.iter().map(|&x| f16::from_f32(x).to_bits()).collect();
                call.memory.write(to, &bits)?;
                call.memory.write(a.pointer("factors")? + 4 * row as u64, &[factor])?;
            }
            other => return Err(format!("rows packed in format {other}, for cuBLASLt, which is not there")),
        }
    }
    Ok(())
}

/// A packed row, as numbers.
pub(super) fn packed_row(
    memory: &Access,
    at: u64,
    row: usize,
    steps: usize,
    wide: bool,
) -> Result<Vec<f32>, Fault> {
    let bits = memory.view::<u16>(at + (row * steps * COLUMNS * 2) as u64, steps * COLUMNS)?;
    Ok(match wide {
        true => bits.iter().map(|&bits| bf16::from_bits(bits).to_f32()).collect(),
        false => bits.iter().map(|&bits| f16::from_bits(bits).to_f32()).collect(),
    })
}
