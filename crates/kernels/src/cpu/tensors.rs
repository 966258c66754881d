//! Weights in their stored type, and matrices of activations.

use std::ops::Range;

use super::memory::AlignedBuffer;
use crate::backend::{KernelError, StoredMatrix};
use crate::dtype::DType;
use crate::quant::{self, fp8::BlockScales};

/// A weight. Matrices stay in the bytes they came from; vectors (norms, biases) are small and widened once.
pub struct Weight {
    stored: StoredMatrix,
    row_bytes: usize,
    vector: Option<Box<[f32]>>,
}

impl Weight {
    pub(super) fn new(stored: &StoredMatrix) -> Result<Weight, KernelError> {
        let data = stored.data()?;
        if (stored.dtype == DType::F8E4M3) != stored.scales.is_some() {
            let problem =
                format!("a matrix of {} numbers: FP8 needs scales, and nothing else has them", stored.dtype);
            return Err(KernelError::BadSetting(problem));
        }
        let vector = (stored.rows == 1).then(|| {
            let mut values = vec![0.0; stored.cols].into_boxed_slice();
            quant::dequantise(stored.dtype, data, &mut values);
            if let Some(scales) = &stored.scales {
                scales.apply(0, 0..stored.cols, &mut values);
            }
            values
        });
        let row_bytes = data.len() / stored.rows.max(1);
        Ok(Weight { stored: stored.clone(), row_bytes, vector })
    }

    /// Some rows as floats, one after the other.
    pub fn dequantise_rows(&self, rows: Range<usize>, out: &mut [f32]) {
        assert_eq!(out.len(), rows.len() * self.cols(), "room for {} rows", rows.len());
        quant::dequantise(self.dtype(), self.row_data(rows.clone()), out);
        for (row, out) in rows.zip(out.chunks_exact_mut(self.cols().max(1))) {
            self.scale_row(row, out);
        }
    }

    /// Multiplies a row that was dequantised with its scales, if it has any.
    pub(super) fn scale_row(&self, row: usize, values: &mut [f32]) {
        if let Some(scales) = self.scales() {
            scales.apply(row, 0..self.cols(), values);
        }
    }

    /// The scales of FP8 elements.
    pub(super) fn scales(&self) -> Option<&BlockScales> {
        self.stored.scales.as_deref()
    }

    /// Output channels.
    pub fn rows(&self) -> usize {
        self.stored.rows
    }

    /// Input channels.
    pub fn cols(&self) -> usize {
        self.stored.cols
    }

    /// Stored type.
    pub fn dtype(&self) -> DType {
        self.stored.dtype
    }

    pub(super) fn row_data(&self, rows: Range<usize>) -> &[u8] {
        let all: &[u8] = (*self.stored.bytes).as_ref();
        &all[self.stored.offset + rows.start * self.row_bytes..self.stored.offset + rows.end * self.row_bytes]
    }

    pub(super) fn vector(&self, what: &'static str, len: usize) -> Result<&[f32], KernelError> {
        match &self.vector {
            Some(vector) if vector.len() == len => Ok(vector),
            _ => Err(KernelError::Shape { what, expected: len, got: self.rows() * self.cols() }),
        }
    }
}

/// A matrix of `f32` activations.
pub struct Matrix {
    rows: usize,
    cols: usize,
    values: AlignedBuffer<f32>,
}

impl Matrix {
    pub(super) fn zeroed(rows: usize, cols: usize) -> Result<Matrix, KernelError> {
        let len = rows.saturating_mul(cols);
        Ok(Matrix { rows, cols, values: AlignedBuffer::zeroed(len, "activations")? })
    }

    /// Columns.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Rows there is room for.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// The values of the first `rows` rows; `what` names them in the error if there are fewer.
    pub fn first_rows(&self, what: &'static str, rows: usize) -> Result<&[f32], KernelError> {
        self.values.get(..rows * self.cols).ok_or(KernelError::Shape { what, expected: rows, got: self.rows })
    }

    /// [`Self::first_rows`], to be written.
    pub fn first_rows_mut(&mut self, what: &'static str, rows: usize) -> Result<&mut [f32], KernelError> {
        let got = self.rows;
        self.values.get_mut(..rows * self.cols).ok_or(KernelError::Shape { what, expected: rows, got })
    }
}
