//! `tiles.cu`: tiles of sixteen rows and 64 columns of a weight, of each kind. Inside a tile, rows follow one another here: codes
//! or numbers of the first row, of the second, and so on, then the scales of each row in that order.

use half::{bf16, f16};
use oscar_codec::fp8::e4m3_to_f32;

use crate::memory::{Access, Fault};

pub(super) const ROWS: usize = 16;
pub(super) const COLUMNS: usize = 64;

/// Scales are stored so many times as large, so that small ones keep their bits.
const SCALE_UNIT: f32 = 256.0;

/// What a tile holds, with the numbers of `tiles.cu`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Kind {
    Floats = 0,
    Nibbles = 1,
    Eights = 2,
    Sixteens = 3,
    Fp8 = 4,
    Mxfp4 = 5,
}

impl Kind {
    pub(super) fn of(number: i32) -> Result<Kind, Fault> {
        let kinds = [Kind::Floats, Kind::Nibbles, Kind::Eights, Kind::Sixteens, Kind::Fp8, Kind::Mxfp4];
        kinds.into_iter().find(|kind| *kind as i32 == number).ok_or_else(|| format!("tiles of kind {number}"))
    }

    /// Bytes of the numbers or codes of a row.
    pub(super) fn row_bytes(self) -> usize {
        match self {
            Kind::Floats => 2 * COLUMNS,
            Kind::Nibbles | Kind::Mxfp4 => COLUMNS / 2,
            Kind::Eights | Kind::Sixteens | Kind::Fp8 => COLUMNS,
        }
    }

    /// Bytes of the scales of a row.
    pub(super) fn scale_bytes(self) -> usize {
        match self {
            Kind::Floats => 0,
            Kind::Nibbles | Kind::Eights => 8,
            Kind::Sixteens => 16,
            Kind::Fp8 => 4,
            Kind::Mxfp4 => 2,
        }
    }

    pub(super) fn tile_bytes(self) -> usize {
        ROWS * (self.row_bytes() + self.scale_bytes())
    }
}

/// A scale and an offset as they are stored.
pub(super) fn stored_pair(scale: f32, offset: f32) -> [u8; 4] {
    let [s, o] = [scale, offset].map(|x| f16::from_f32(x * SCALE_UNIT).to_le_bytes());
    [s[0], s[1], o[0], o[1]]
}

/// The numbers of a row of a tile.
pub(super) fn row_of(kind: Kind, tile: &[u8], row: usize, out: &mut [f32]) {
    let numbers = &tile[row * kind.row_bytes()..(row + 1) * kind.row_bytes()];
    let scales = &tile[ROWS * kind.row_bytes() + row * kind.scale_bytes()..][..kind.scale_bytes()];
    let nibble = |column: usize| numbers[column / 2] >> (4 * (column % 2)) & 15;
    match kind {
        Kind::Floats => {
            for (x, bytes) in out.iter_mut().zip(numbers.as_chunks::<2>().0) {
                *x = bf16::from_le_bytes(*bytes).to_f32();
            }
        }
        Kind::Fp8 => {
            let scale = f32::from_le_bytes([scales[0], scales[1], scales[2], scales[3]]);
            out.iter_mut().zip(numbers).for_each(|(x, &byte)| *x = e4m3_to_f32(byte) * scale);
        }
        Kind::Mxfp4 => {
            const MAGNITUDES: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
            for (column, x) in out.iter_mut().enumerate() {
                let (code, exponent) = (nibble(column), scales[column / 32]);
                let power = if exponent == 255 { f32::NAN } else { 2.0_f32.powi(i32::from(exponent) - 127) };
                let magnitude = MAGNITUDES[usize::from(code & 7)] * power;
                *x = if code & 8 == 0 { magnitude } else { -magnitude };
            }
        }
        Kind::Nibbles | Kind::Eights | Kind::Sixteens => {
            let group = COLUMNS / (kind.scale_bytes() / 4);
            for (column, x) in out.iter_mut().enumerate() {
                let pair = &scales[column / group * 4..][..4];
                let half = |at: usize| f16::from_le_bytes([pair[at], pair[at + 1]]).to_f32() / SCALE_UNIT;
                let code = if kind == Kind::Nibbles {
                    f32::from(nibble(column))
                } else {
                    f32::from(numbers[column] as i8)
                };
                *x = half(0) * code - half(2);
            }
        }
    }
}

/// The rows of a row of tiles, `steps` of them side by side: `[row][64 * steps]`.
pub(super) fn tile_row(memory: &Access, kind: Kind, at: u64, steps: usize) -> Result<Vec<f32>, Fault> {
    let bytes = memory.view::<u8>(at, steps * kind.tile_bytes())?;
    let columns = steps * COLUMNS;
    let mut rows = vec![0.0; ROWS * columns];
    for (step, tile) in bytes.chunks_exact(kind.tile_bytes()).enumerate() {
        for row in 0..ROWS {
            row_of(kind, tile, row, &mut rows[row * columns + step * COLUMNS..][..COLUMNS]);
        }
    }
    Ok(rows)
}
