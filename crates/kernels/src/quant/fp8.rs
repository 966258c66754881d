//! FP8 weights: a byte per element, with scales that are stored beside the matrix.
//!
//! E4M3 is a sign, four bits of exponent (bias 7) and three of mantissa. There are no infinities; all ones is NaN, and the
//! largest number is 448.

use std::ops::Range;

use crate::error::KernelError;

/// The number that a byte stands for.
pub fn e4m3(byte: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(byte >> 3 & 15), f32::from(byte & 7));
    let magnitude = match (exponent, byte & 7) {
        (15, 7) => f32::NAN,
        (0, _) => mantissa * 2f32.powi(-9),
        _ => (8.0 + mantissa) * 2f32.powi(exponent - 10),
    };
    if byte & 0x80 == 0 { magnitude } else { -magnitude }
}

/// The numbers of all bytes.
pub(crate) static E4M3: [f32; 256] = table();

const fn table() -> [f32; 256] {
    let mut table = [0.0; 256];
    let mut byte = 0;
    while byte < 256 {
        let (exponent, mantissa) = ((byte >> 3 & 15) as u32, (byte & 7) as u32);
        // Numbers below the smallest normal one are their mantissa, in steps of 2⁻⁹.
        let magnitude = match (exponent, mantissa) {
            (15, 7) => f32::NAN,
            (0, _) => mantissa as f32 * f32::from_bits((127 - 9) << 23),
            _ => f32::from_bits((exponent + 127 - 7) << 23 | mantissa << 20),
        };
        table[byte] = if byte & 0x80 == 0 { magnitude } else { -magnitude };
        byte += 1;
    }
    table
}

/// Scales of a matrix: one for each block of some rows and columns. Blocks at the end may be cut off.
#[derive(Clone, Debug, PartialEq)]
pub struct BlockScales {
    values: Box<[f32]>,
    block_rows: usize,
    block_cols: usize,
    /// Blocks side by side.
    across: usize,
}

impl BlockScales {
    /// Scales of a `rows` x `cols` matrix in blocks of `block_rows` x `block_cols`, row by row of blocks.
    pub fn new(
        values: Vec<f32>,
        [rows, cols]: [usize; 2],
        [block_rows, block_cols]: [usize; 2],
    ) -> Result<BlockScales, KernelError> {
        if block_rows == 0 || block_cols == 0 {
            return Err(KernelError::BadSetting(format!("blocks of {block_rows}x{block_cols} hold nothing")));
        }
        let across = cols.div_ceil(block_cols);
        let expected = rows.div_ceil(block_rows).saturating_mul(across);
        if expected != values.len() {
            return Err(KernelError::Shape { what: "scales of a matrix", expected, got: values.len() });
        }
        if let Some(index) = values.iter().position(|scale| !(scale.is_finite() && *scale >= 0.0)) {
            return Err(KernelError::NotFinite { what: "scales of a matrix", index });
        }
        Ok(BlockScales { values: values.into(), block_rows, block_cols, across })
    }

    /// Columns of a block.
    pub fn block_cols(&self) -> usize {
        self.block_cols
    }

    /// The scales of a row, one per block of columns.
    pub fn of_row(&self, row: usize) -> &[f32] {
        &self.values[row / self.block_rows * self.across..][..self.across]
    }

    /// Multiplies some columns of a row with their scales.
    pub(crate) fn apply(&self, row: usize, cols: Range<usize>, values: &mut [f32]) {
        let scales = self.of_row(row);
        let mut at = cols.start;
        let mut rest = values;
        while at < cols.end {
            let block = at / self.block_cols;
            let end = ((block + 1) * self.block_cols).min(cols.end);
            let part = rest.split_off_mut(..end - at).unwrap_or_default();
            part.iter_mut().for_each(|value| *value *= scales[block]);
            at = end;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_what_the_format_says() {
        for (byte, value) in [
            (0x00, 0.0),
            (0x01, 0.001953125),
            (0x07, 0.013671875),
            (0x08, 0.015625),
            (0x38, 1.0),
            (0x39, 1.125),
            (0x7e, 448.0),
            (0xb8, -1.0),
            (0xfe, -448.0),
        ] {
            assert_eq!(e4m3(byte), value, "{byte:#x}");
        }
        for byte in 0..=255u8 {
            let value = e4m3(byte);
            assert_eq!(value.is_nan(), byte & 0x7f == 0x7f, "{byte:#x}");
            assert_eq!(value.is_sign_negative(), byte & 0x80 != 0, "{byte:#x}");
            let listed = E4M3[usize::from(byte)];
            assert!(listed.to_bits() == value.to_bits() || value.is_nan() && listed.is_nan(), "{byte:#x}");
        }
    }

    #[test]
    fn blocks_at_the_end_are_cut_off() {
        let scales = BlockScales::new((1..=6).map(|x| x as f32).collect(), [5, 7], [4, 3]).unwrap();
        assert_eq!((scales.of_row(3), scales.of_row(4)), (&[1.0, 2.0, 3.0][..], &[4.0, 5.0, 6.0][..]));
        let mut values = [1.0; 5];
        scales.apply(4, 2..7, &mut values);
        assert_eq!(values, [4.0, 5.0, 5.0, 5.0, 6.0]);
    }

    #[test]
    fn scales_that_do_not_fit_or_are_no_numbers_are_refused() {
        let new = |values: &[f32], block| BlockScales::new(values.to_vec(), [5, 7], block);
        assert!(new(&[1.0; 6], [4, 3]).is_ok());
        assert!(matches!(new(&[1.0; 5], [4, 3]), Err(KernelError::Shape { expected: 6, got: 5, .. })));
        assert!(new(&[1.0; 6], [0, 3]).is_err());
        assert!(new(&[1.0; 6], [4, 0]).is_err());
        for bad in [f32::NAN, f32::INFINITY, -1.0] {
            let error = new(&[1.0, 1.0, bad, 1.0, 1.0, 1.0], [4, 3]).unwrap_err();
            assert!(matches!(error, KernelError::NotFinite { index: 2, .. }), "{error}");
        }
    }
}
