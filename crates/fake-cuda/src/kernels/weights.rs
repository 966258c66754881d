//! `repack.cu`: stored weights to tiles, and tiles back to numbers.

use half::bf16;
use oscar_kernels::DType;
use oscar_kernels::quant;
use oscar_kernels::quant::block::Unpacked;

use super::tiles::{self, COLUMNS, Kind, ROWS};
use crate::call::Call;
use crate::memory::Fault;

/// Warps of a block, each of which has a tile.
const WARPS: usize = 8;
/// Threads of a block, each of which has two numbers.
const THREADS: usize = 256;

/// A stored type by the number that kernels know it by.
fn stored_type(number: i32) -> Result<DType, Fault> {
    let index = usize::try_from(number).unwrap_or(usize::MAX);
    let types = DType::ALL.into_iter().chain([DType::F8E4M3]);
    types.into_iter().nth(index).ok_or_else(|| format!("weights of type {number}"))
}

pub(super) fn repack(call: &Call<'_>) -> Result<(), Fault> {
    let a = &call.arguments;
    let (dtype, kind) = (stored_type(a.int("type")?)?, Kind::of(a.int("kind")?)?);
    let (rows, columns, steps) = (a.count("rows")?, a.count("columns")?, a.count("steps")?);
    let (first_row, row_tiles, row_bytes) =
        (a.count("first_row")?, a.count("row_tiles")?, a.count("row_bytes")?);
    let tiles_here = (call.grid[0] * WARPS).min(row_tiles * steps);
    let mut tiles = vec![0_u8; tiles_here * kind.tile_bytes()];
    for row in 0..row_tiles * ROWS {
        if first_row + row >= rows {
            break;
        }
        let stored = call.memory.view::<u8>(a.pointer("stored")? + (row * row_bytes) as u64, row_bytes)?;
        let encoded = match kind {
            Kind::Floats => float_row(dtype, stored, columns),
            Kind::Fp8 => {
                let block = a.count("scale_columns")?;
                let across = columns.div_ceil(block.max(1));
                let scales = a.pointer("scales")? + (4 * row * across) as u64;
                fp8_row(stored, call.memory.view::<f32>(scales, across)?, block)
            }
            Kind::Mxfp4 => mxfp4_row(stored),
            Kind::Nibbles | Kind::Eights | Kind::Sixteens => code_row(dtype, kind, stored),
        };
        for (step, (numbers, scales)) in encoded.into_iter().enumerate().take(steps) {
            let tile = row / ROWS * steps + step;
            let Some(tile) = tiles.get_mut(tile * kind.tile_bytes()..(tile + 1) * kind.tile_bytes()) else {
                continue;
            };
            tile[row % ROWS * kind.row_bytes()..][..numbers.len()].copy_from_slice(&numbers);
            let scales_at = ROWS * kind.row_bytes() + row % ROWS * kind.scale_bytes();
            tile[scales_at..][..scales.len()].copy_from_slice(&scales);
        }
    }
    let target = a.pointer("tiles")? + (first_row / ROWS * steps * kind.tile_bytes()) as u64;
    call.memory.write(target, &tiles)
}

/// What a row of a tile holds: numbers or codes, and scales.
type TileRow = (Vec<u8>, Vec<u8>);

fn float_row(dtype: DType, stored: &[u8], columns: usize) -> Vec<TileRow> {
    let mut numbers = vec![0.0; columns];
    quant::dequantise(dtype, stored, &mut numbers);
    let bytes = |numbers: &[f32]| numbers.iter().flat_map(|&x| bf16::from_f32(x).to_le_bytes()).collect();
    numbers.chunks(COLUMNS).map(|numbers| (bytes(numbers), Vec::new())).collect()
}

fn fp8_row(stored: &[u8], scales: &[f32], block: usize) -> Vec<TileRow> {
    let scale = |step: usize| scales[step * COLUMNS / block].to_le_bytes().to_vec();
    stored.chunks(COLUMNS).enumerate().map(|(step, bytes)| (bytes.to_vec(), scale(step))).collect()
}

fn mxfp4_row(stored: &[u8]) -> Vec<TileRow> {
    // A block: its exponent, then sixteen bytes with elements 0 to 15 in their low nibbles.
    let blocks = stored.chunks_exact(17);
    let halves: Vec<(Vec<u8>, u8)> = blocks
        .map(|block| {
            let element = |i: usize| block[1 + i % 16] >> (4 * (i / 16)) & 15;
            ((0..16).map(|pair| element(2 * pair) | element(2 * pair + 1) << 4).collect(), block[0])
        })
        .collect();
    halves
        .chunks(2)
        .map(|halves| {
            let codes = halves.iter().flat_map(|(codes, _)| codes.clone()).collect();
            (codes, halves.iter().map(|(_, exponent)| *exponent).collect())
        })
        .collect()
}

fn code_row(dtype: DType, kind: Kind, stored: &[u8]) -> Vec<TileRow> {
    // Codes of four bits have no sign here.
    let above = if dtype == DType::Q4_0 { 8_i8 } else { 0 };
    let group = COLUMNS / (kind.scale_bytes() / 4);
    let (mut codes, mut pairs) = (Vec::new(), Vec::new());
    let mut unpacked = Unpacked::default();
    for block in stored.chunks_exact(dtype.block_bytes()) {
        quant::block::unpack(dtype, block, &mut unpacked);
        let length = dtype.block_len();
        codes.extend(unpacked.codes[..length].iter().map(|code| code + above));
        for at in (0..length).step_by(group) {
            let (scale, offset) = (unpacked.scales[at / quant::GROUP], unpacked.offsets[at / quant::GROUP]);
            let offset = if matches!(dtype, DType::Q4_1 | DType::Q5_1 | DType::Q4K | DType::Q5K) {
                offset
            } else {
                0.0
            };
            pairs.push(tiles::stored_pair(scale, f32::from(above) * scale - offset));
        }
    }
    let bytes = |codes: &[i8]| match kind {
        Kind::Nibbles => codes.chunks(2).map(|pair| pair[0] as u8 & 15 | (pair[1] as u8 & 15) << 4).collect(),
        _ => codes.iter().map(|&code| code as u8).collect(),
    };
    let scales = pairs.chunks(COLUMNS / group).map(<[[u8; 4]]>::concat);
    codes.chunks(COLUMNS).map(bytes).zip(scales).collect()
}

/// The numbers of some rows of a matrix in tiles.
fn matrix_row(call: &Call<'_>, row: usize) -> Result<Vec<f32>, Fault> {
    let a = &call.arguments;
    let (kind, steps, columns) = (Kind::of(a.int("kind")?)?, a.count("steps")?, a.count("columns")?);
    let at = a.pointer("tiles")? + (row / ROWS * steps * kind.tile_bytes()) as u64;
    let bytes = call.memory.view::<u8>(at, steps * kind.tile_bytes())?;
    let mut numbers = vec![0.0; steps * COLUMNS];
    for (tile, numbers) in bytes.chunks_exact(kind.tile_bytes()).zip(numbers.chunks_exact_mut(COLUMNS)) {
        tiles::row_of(kind, tile, row % ROWS, numbers);
    }
    numbers.truncate(columns);
    Ok(numbers)
}

pub(super) fn unpack_floats(call: &Call<'_>) -> Result<(), Fault> {
    let a = &call.arguments;
    let (rows, columns) = (a.count("rows")?, a.count("columns")?);
    // A thread has two numbers.
    let last = (call.grid[0] * THREADS * 2).min(rows * columns);
    for row in 0..rows {
        let numbers = matrix_row(call, row)?;
        let count = last.saturating_sub(row * columns).min(columns);
        call.memory.write(a.pointer("out")? + (4 * row * columns) as u64, &numbers[..count])?;
    }
    Ok(())
}

pub(super) fn embed(call: &Call<'_>) -> Result<(), Fault> {
    let a = &call.arguments;
    let (rows, columns) = (a.count("rows")?, a.count("columns")?);
    let tokens = call.memory.read::<u32>(a.pointer("tokens")?, call.grid[0])?;
    for (block, token) in tokens.into_iter().enumerate() {
        let token = (token as usize).min(rows.saturating_sub(1));
        call.memory.write(a.pointer("out")? + (4 * block * columns) as u64, &matrix_row(call, token)?)?;
    }
    Ok(())
}
