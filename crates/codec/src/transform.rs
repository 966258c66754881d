//! What happens to a row before it is quantised: subtract a mean, multiply by a matrix, round to bf16.
//!
//! `y = bf16((x - mean) · M)`. Queries are multiplied by `M⁻ᵀ`, so that products with keys stay what they were, and sums of
//! values by `M⁻¹`. Most matrices are rotations, for which `M⁻ᵀ = M`; the one of banded keys is not. Each output channel is one chain of f32 fused multiply-adds over input channels
//! 0, 1, 2, …, starting from zero, so that a SIMD path that keeps output channels (or rows) in lanes gives the
//! same bits. The cache holds `y` in its bf16 windows too, which is why it is rounded before any code is chosen.
//!
//! The published system applies the rotation in bf16 ([`HeadTransform::published`]): matrix and input are rounded
//! to bf16 first and nothing is subtracted.

use std::sync::Arc;

use half::bf16;

use crate::error::{CodecError, check_length};
use crate::matrix::SquareMatrix;

/// The affine map of one head and side. Clones share the matrix.
#[derive(Clone, Debug)]
pub struct HeadTransform {
    dim: usize,
    mean: Option<Vec<f32>>,
    matrix: Arc<[f32]>,
    /// `M⁻ᵀ`; shared with the matrix if that is a rotation.
    query_matrix: Arc<[f32]>,
    inverse: Arc<[f32]>,
    /// The matrix is not the identity.
    rotates: bool,
    round_input: bool,
}

impl HeadTransform {
    /// `y = bf16((x - mean) · rotation)` with the rotation in f32.
    pub fn new(mean: Option<Vec<f32>>, rotation: &SquareMatrix) -> Result<Self, CodecError> {
        Self::build(rotation, rotation.to_f32(), false)?.with_mean(mean)
    }

    /// `y = bf16((x - mean) · matrix)` with any matrix that has an inverse, which is computed in f64.
    pub fn general(mean: Option<Vec<f32>>, matrix: &SquareMatrix) -> Result<Self, CodecError> {
        let transform = Self::build(matrix, matrix.to_f32(), false)?.with_mean(mean)?;
        let inverse = matrix.inverse().ok_or(CodecError::Singular)?;
        let query_matrix: Arc<[f32]> = inverse.transpose().to_f32().into();
        for (row, values) in query_matrix.chunks_exact(transform.dim).enumerate() {
            crate::error::check_finite(values, row)?;
        }
        Ok(HeadTransform { query_matrix, inverse: inverse.to_f32().into(), ..transform })
    }

    /// `y = bf16(bf16(x) · bf16(rotation))`: how the reference applies its rotations.
    pub fn published(rotation: &SquareMatrix) -> Result<Self, CodecError> {
        let rounded = rotation.to_f32().into_iter().map(round_to_bf16).collect();
        Self::build(rotation, rounded, true)
    }

    /// No mean and no rotation: `y = bf16(x)`.
    pub fn identity(dim: usize) -> Self {
        let matrix: Arc<[f32]> = SquareMatrix::identity(dim).to_f32().into();
        HeadTransform {
            dim,
            mean: None,
            matrix: matrix.clone(),
            query_matrix: matrix.clone(),
            inverse: matrix,
            rotates: false,
            round_input: false,
        }
    }

    /// The same rotation (shared, not copied) after subtracting another mean.
    pub fn with_mean(&self, mean: Option<Vec<f32>>) -> Result<Self, CodecError> {
        if let Some(mean) = &mean {
            check_length("channels of a key or value mean", self.dim, mean.len())?;
            crate::error::check_finite(mean, 0)?;
        }
        Ok(HeadTransform { mean, ..self.clone() })
    }

    fn build(rotation: &SquareMatrix, values: Vec<f32>, round_input: bool) -> Result<Self, CodecError> {
        let dim = rotation.dim();
        if dim == 0 {
            return Err(CodecError::HeadDim { head_dim: 0, reason: "a head has at least one channel" });
        }
        for (row, values) in values.chunks_exact(dim).enumerate() {
            crate::error::check_finite(values, row)?;
        }
        let rotates =
            values.iter().enumerate().any(|(at, &value)| value != f32::from(u8::from(at / dim == at % dim)));
        let mut transposed = vec![0.0; values.len()];
        for i in 0..dim {
            for j in 0..dim {
                transposed[j * dim + i] = values[i * dim + j];
            }
        }
        let (matrix, inverse): (Arc<[f32]>, Arc<[f32]>) = (values.into(), transposed.into());
        let query_matrix = matrix.clone();
        Ok(HeadTransform { dim, mean: None, matrix, query_matrix, inverse, rotates, round_input })
    }

    /// Channels of a row.
    pub fn dim(&self) -> usize {
        self.dim
    }

    /// What is subtracted before the rotation.
    pub fn mean(&self) -> Option<&[f32]> {
        self.mean.as_deref()
    }

    /// The matrix as it is applied, row-major: `y[j] = Σ_i x[i]·matrix[i·d + j]`.
    pub fn matrix(&self) -> &Arc<[f32]> {
        &self.matrix
    }

    /// What queries are multiplied with if keys are multiplied with the matrix, row-major: its inverse, transposed. A
    /// rotation is its own.
    pub fn query_matrix(&self) -> &Arc<[f32]> {
        &self.query_matrix
    }

    /// Whether the matrix is anything but the identity.
    pub fn rotates(&self) -> bool {
        self.rotates
    }

    /// Whether nothing happens to a row but the rounding: no mean and no rotation.
    pub fn is_identity(&self) -> bool {
        self.mean.is_none() && !self.rotates
    }

    /// Whether the input is rounded to bf16 first (published encoders only).
    pub fn rounds_input(&self) -> bool {
        self.round_input
    }

    /// `out = bf16((row - mean) · M)`.
    ///
    /// # Panics
    /// When a slice does not have [`HeadTransform::dim`] values.
    pub fn apply(&self, row: &[f32], out: &mut [f32]) {
        assert_eq!(row.len(), self.dim, "row length");
        assert_eq!(out.len(), self.dim, "output length");
        out.fill(0.0);
        for (i, (&x, weights)) in row.iter().zip(self.matrix.chunks_exact(self.dim)).enumerate() {
            let x = if self.round_input { round_to_bf16(x) } else { x };
            let x = self.mean.as_ref().map_or(x, |mean| x - mean[i]);
            for (out, &weight) in out.iter_mut().zip(weights) {
                *out = x.mul_add(weight, *out);
            }
        }
        out.iter_mut().for_each(|value| *value = round_to_bf16(*value));
    }

    /// The mean in the basis that rows are stored in, `mean · M`: what every stored row is less of.
    pub fn stored_mean(&self) -> Option<Vec<f32>> {
        let mean = self.mean.as_ref()?;
        let mut stored = vec![0.0_f64; self.dim];
        for (&x, weights) in mean.iter().zip(self.matrix.chunks_exact(self.dim)) {
            for (out, &weight) in stored.iter_mut().zip(weights) {
                *out += f64::from(x) * f64::from(weight);
            }
        }
        Some(stored.into_iter().map(|value| value as f32).collect())
    }

    /// `out = row · M⁻¹ + mean`, in f32 with separate products and sums: a reading aid of the lab, never stored.
    ///
    /// # Panics
    /// When a slice does not have [`HeadTransform::dim`] values.
    pub fn undo(&self, row: &[f32], out: &mut [f32]) {
        assert_eq!(row.len(), self.dim, "row length");
        assert_eq!(out.len(), self.dim, "output length");
        out.fill(0.0);
        for (&y, weights) in row.iter().zip(self.inverse.chunks_exact(self.dim)) {
            for (out, &weight) in out.iter_mut().zip(weights) {
                *out += y * weight;
            }
        }
        if let Some(mean) = &self.mean {
            out.iter_mut().zip(mean).for_each(|(out, mean)| *out += mean);
        }
    }
}

/// Nearest bf16, ties to even.
pub fn round_to_bf16(value: f32) -> f32 {
    bf16::from_f32(value).to_f32()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hadamard;

    fn row(dim: usize) -> Vec<f32> {
        (0..dim).map(|i| ((i * 29 % 31) as f32 - 15.0) / 3.0).collect()
    }

    #[test]
    fn apply_is_the_matrix_product_after_centring() {
        for dim in [16, 48, 64] {
            let mean: Vec<f32> = (0..dim).map(|i| i as f32 / 4.0).collect();
            let transform = HeadTransform::new(Some(mean.clone()), &hadamard::matrix(dim)).unwrap();
            let x = row(dim);
            let centred: Vec<f64> = x.iter().zip(&mean).map(|(x, m)| f64::from(x - m)).collect();
            let expected = hadamard::matrix(dim).apply_to_row(&centred);
            let mut y = vec![0.0; dim];
            transform.apply(&x, &mut y);
            for (y, expected) in y.iter().zip(&expected) {
                assert!((f64::from(*y) - expected).abs() <= expected.abs() / 256.0 + 1e-5, "{y} {expected}");
                assert_eq!(*y, round_to_bf16(*y));
            }
            let mut back = vec![0.0; dim];
            transform.undo(&y, &mut back);
            for (back, x) in back.iter().zip(&x) {
                assert!((back - x).abs() < 0.15, "{back} against {x}");
            }
        }
    }

    #[test]
    fn general_matrices_keep_products_and_are_undone() {
        for dim in [16, 48] {
            // Columns whose lengths differ by a factor of 20.
            let matrix = SquareMatrix::from_fn(dim, |i, j| {
                (hadamard::matrix(dim).get(i, j) + 0.2 * f64::from(u8::from(i == (j * 5) % dim)))
                    * 20.0_f64.powf(-(j as f64) / dim as f64)
            });
            let transform = HeadTransform::general(Some(vec![0.5; dim]), &matrix).unwrap();
            let (x, query) = (row(dim), row(dim).into_iter().rev().map(|x| x / 4.0).collect::<Vec<_>>());
            let mut y = vec![0.0; dim];
            transform.apply(&x, &mut y);
            let mut turned = vec![0.0; dim];
            for (q, weights) in query.iter().zip(transform.query_matrix().chunks_exact(dim)) {
                turned.iter_mut().zip(weights).for_each(|(sum, weight)| *sum += q * weight);
            }
            let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f32>();
            let centred: Vec<f32> = x.iter().map(|x| x - 0.5).collect();
            let (got, expected) = (dot(&turned, &y), dot(&query, &centred));
            assert!((got - expected).abs() < 0.01 * dot(&query, &query).max(1.0), "{got} for {expected}");
            let mut back = vec![0.0; dim];
            transform.undo(&y, &mut back);
            for (back, x) in back.iter().zip(&x) {
                assert!((back - x).abs() < 0.2, "{back} against {x}");
            }
        }
        let singular = SquareMatrix::from_fn(4, |i, _| i as f64);
        assert_eq!(HeadTransform::general(None, &singular).unwrap_err(), CodecError::Singular);
    }

    #[test]
    fn the_published_transform_rounds_matrix_and_input() {
        let rotation = hadamard::matrix(8);
        let transform = HeadTransform::published(&rotation).unwrap();
        assert!(transform.matrix().iter().all(|&m| m == round_to_bf16(m)));
        let x = [1.001_f32; 8];
        let mut y = [0.0; 8];
        transform.apply(&x, &mut y);
        let mut rounded = [0.0; 8];
        transform.apply(&[round_to_bf16(1.001); 8], &mut rounded);
        assert_eq!(y, rounded);
        assert!(transform.rounds_input());
    }

    #[test]
    fn identities_know_themselves_and_means_are_exchanged() {
        let identity = HeadTransform::new(None, &SquareMatrix::identity(8)).unwrap();
        assert!(identity.is_identity() && !identity.rotates() && HeadTransform::identity(8).is_identity());
        let centred = identity.with_mean(Some(vec![1.0; 8])).unwrap();
        assert!(!centred.is_identity() && !centred.rotates());
        assert!(Arc::ptr_eq(centred.matrix(), identity.matrix()));
        assert!(
            centred.with_mean(Some(vec![0.0; 7])).is_err() && centred.with_mean(None).unwrap().is_identity()
        );
        let rotated = HeadTransform::published(&hadamard::matrix(8)).unwrap();
        assert!(rotated.rotates() && !rotated.is_identity());
    }

    #[test]
    fn bad_means_and_matrices_are_refused() {
        let identity = SquareMatrix::identity(4);
        assert!(HeadTransform::new(Some(vec![0.0; 3]), &identity).is_err());
        assert!(HeadTransform::new(Some(vec![0.0, f32::NAN, 0.0, 0.0]), &identity).is_err());
        let broken = SquareMatrix::new(2, vec![1.0, f64::INFINITY, 0.0, 1.0]).unwrap();
        assert_eq!(
            HeadTransform::new(None, &broken).unwrap_err(),
            CodecError::NotFinite { row: 0, channel: 1 }
        );
        assert!(HeadTransform::published(&SquareMatrix::identity(0)).is_err());
    }
}
