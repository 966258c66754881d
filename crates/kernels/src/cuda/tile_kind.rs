//! What tiles of weights hold, by the stored type of a matrix.

use crate::backend::StoredMatrix;
use crate::dtype::DType;
use crate::quant::fp8::BlockScales;

/// Rows and columns of a tile, as `tiles.cu` says.
pub(super) const TILE_ROWS: usize = 16;
pub(super) const TILE_COLUMNS: usize = 64;
/// What a tile holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum TileKind {
    /// Elements in bf16.
    Floats = 0,
    /// Codes of 4 bits, a scale and an offset for 32 columns.
    Nibbles = 1,
    /// Codes of up to 8 bits, a scale and an offset for 32 columns.
    Bytes = 2,
    /// Codes of up to 8 bits, a scale and an offset for 16 columns.
    Sixteens = 3,
    /// E4M3, a scale for each row.
    Fp8 = 4,
    /// E2M1, an exponent for 32 columns.
    Mxfp4 = 5,
}

impl TileKind {
    /// Every kind, by its number.
    #[cfg(test)]
    pub(super) const ALL: [TileKind; 6] = [
        TileKind::Floats,
        TileKind::Nibbles,
        TileKind::Bytes,
        TileKind::Sixteens,
        TileKind::Fp8,
        TileKind::Mxfp4,
    ];

    /// The kind in which a stored matrix is kept. FP8 whose scales change inside a tile becomes bf16.
    pub(super) fn of(stored: &StoredMatrix) -> TileKind {
        let scales = stored.scales.as_ref();
        let in_tiles = scales.is_some_and(|scales| scale_columns(scales, stored.cols).is_some());
        match TileKind::of_type(stored.dtype) {
            TileKind::Fp8 if !in_tiles => TileKind::Floats,
            kind => kind,
        }
    }

    /// The kind in which numbers of a stored type are kept wherever that is possible.
    pub(super) fn of_type(dtype: DType) -> TileKind {
        match dtype {
            DType::F32 | DType::F16 | DType::BF16 => TileKind::Floats,
            DType::Mxfp4 => TileKind::Mxfp4,
            DType::F8E4M3 => TileKind::Fp8,
            DType::Q4_0 | DType::Q4_1 | DType::Q4K => TileKind::Nibbles,
            DType::Q5_0 | DType::Q5_1 | DType::Q8_0 | DType::Q5K => TileKind::Bytes,
            DType::Q6K => TileKind::Sixteens,
        }
    }

    /// The name that errors call the kind by.
    pub(super) fn name(self) -> &'static str {
        match self {
            TileKind::Floats => "floats",
            TileKind::Nibbles => "nibbles",
            TileKind::Bytes => "bytes",
            TileKind::Sixteens => "sixteens",
            TileKind::Fp8 => "FP8",
            TileKind::Mxfp4 => "MXFP4",
        }
    }

    /// Whether one row of activations is multiplied by `spread.cu`.
    pub(super) fn spreads(self) -> bool {
        matches!(self, TileKind::Nibbles | TileKind::Bytes | TileKind::Sixteens | TileKind::Mxfp4)
    }

    /// Memory after the last tile: products fetch up to four tiles at a time, the last three perhaps in vain.
    pub(super) fn bytes_after(self) -> usize {
        3 * self.tile_bytes()
    }

    pub(super) fn tile_bytes(self) -> usize {
        match self {
            TileKind::Floats => 2048,
            TileKind::Nibbles => 640,
            TileKind::Bytes => 1152,
            TileKind::Sixteens => 1280,
            TileKind::Fp8 => 1088,
            TileKind::Mxfp4 => 544,
        }
    }
}

/// The number by which `repack.cu` knows a stored type. FP8 comes after all others.
pub(super) fn type_number(dtype: DType) -> i32 {
    DType::ALL.into_iter().take_while(|&other| other != dtype).count() as i32
}

/// Columns that share a scale, if that does not change inside a tile.
pub(super) fn scale_columns(scales: &BlockScales, cols: usize) -> Option<usize> {
    let columns = scales.block_cols();
    match columns >= cols {
        true => Some(cols.next_multiple_of(TILE_COLUMNS)),
        false => columns.is_multiple_of(TILE_COLUMNS).then_some(columns),
    }
}
