//! Small square matrices in f64: rotations, second moments and metrics of one head.
//!
//! Vectors are rows and a rotation is applied as `row · M`, so "columns are directions" everywhere.

use crate::error::{CodecError, check_length};

/// A `dim x dim` matrix, row-major.
#[derive(Clone, Debug, PartialEq)]
pub struct SquareMatrix {
    dim: usize,
    values: Vec<f64>,
}

impl SquareMatrix {
    /// A matrix from its row-major values.
    pub fn new(dim: usize, values: Vec<f64>) -> Result<Self, CodecError> {
        let expected =
            dim.checked_mul(dim).ok_or(CodecError::HeadDim { head_dim: dim, reason: "is far too large" })?;
        check_length("values of a square matrix", expected, values.len())?;
        Ok(SquareMatrix { dim, values })
    }

    /// A matrix from row-major f32 values.
    pub fn from_f32(dim: usize, values: &[f32]) -> Result<Self, CodecError> {
        Self::new(dim, values.iter().map(|&value| f64::from(value)).collect())
    }

    /// A matrix from a function of (row, column).
    pub fn from_fn(dim: usize, value: impl Fn(usize, usize) -> f64) -> Self {
        let value = &value;
        let values = (0..dim).flat_map(|i| (0..dim).map(move |j| value(i, j))).collect();
        SquareMatrix { dim, values }
    }

    /// The identity.
    pub fn identity(dim: usize) -> Self {
        Self::from_fn(dim, |i, j| f64::from(u8::from(i == j)))
    }

    /// Rows, which is also columns.
    pub fn dim(&self) -> usize {
        self.dim
    }

    /// All values, row-major.
    pub fn values(&self) -> &[f64] {
        &self.values
    }

    /// The value in row `i`, column `j`.
    pub fn get(&self, i: usize, j: usize) -> f64 {
        assert!(i < self.dim && j < self.dim, "({i}, {j}) is outside a {0} x {0} matrix", self.dim);
        self.values[i * self.dim + j]
    }

    /// The values of row `i`.
    pub fn row(&self, i: usize) -> &[f64] {
        &self.values[i * self.dim..(i + 1) * self.dim]
    }

    /// The product `self · right`.
    ///
    /// # Panics
    /// Panics when the matrices differ in size.
    pub fn multiply(&self, right: &Self) -> Self {
        assert_eq!(self.dim, right.dim, "a product needs matrices of one size");
        let mut values = vec![0.0; self.values.len()];
        for (i, out) in values.chunks_exact_mut(self.dim.max(1)).enumerate() {
            for (k, &left) in self.row(i).iter().enumerate() {
                for (out, &right) in out.iter_mut().zip(right.row(k)) {
                    *out += left * right;
                }
            }
        }
        SquareMatrix { dim: self.dim, values }
    }

    /// The transpose.
    pub fn transpose(&self) -> Self {
        Self::from_fn(self.dim, |i, j| self.get(j, i))
    }

    /// All values rounded to f32, row-major.
    pub fn to_f32(&self) -> Vec<f32> {
        self.values.iter().map(|&value| value as f32).collect()
    }

    /// `max |MᵀM - I|`: zero for a perfect rotation; NaN when an entry is NaN.
    pub fn orthogonality_error(&self) -> f64 {
        let gram = self.transpose().multiply(self);
        let mut worst = 0.0;
        for i in 0..self.dim {
            for j in 0..self.dim {
                let error = (gram.get(i, j) - f64::from(u8::from(i == j))).abs();
                // NaN must win: `max` would swallow it and call a broken matrix a rotation.
                if error.is_nan() {
                    return f64::NAN;
                }
                worst = f64::max(worst, error);
            }
        }
        worst
    }

    /// The rotation nearest to a matrix that is almost one, such as a rotation that was rounded to 16 bits.
    ///
    /// A Newton step `X (3 I - XᵀX) / 2` takes an orthogonality error `e` to the order of `e²`, and two of them take
    /// 1e-3 below what f32 can tell. A matrix that is no rotation stays none.
    pub fn orthonormalised(&self) -> Self {
        let step = |matrix: &Self| {
            let gram = matrix.transpose().multiply(matrix);
            let factor =
                Self::from_fn(gram.dim, |i, j| 0.5 * (3.0 * f64::from(u8::from(i == j)) - gram.get(i, j)));
            matrix.multiply(&factor)
        };
        step(&step(self))
    }

    /// Row `i` of the result is row `order[i]` of this matrix.
    ///
    /// # Panics
    /// When `order` is not a permutation of `0..dim`.
    pub fn permute_rows(&self, order: &[usize]) -> Self {
        assert_permutation(order, self.dim);
        Self::from_fn(self.dim, |i, j| self.get(order[i], j))
    }

    /// Column `j` of the result is column `order[j]` of this matrix.
    ///
    /// # Panics
    /// When `order` is not a permutation of `0..dim`.
    pub fn permute_columns(&self, order: &[usize]) -> Self {
        assert_permutation(order, self.dim);
        Self::from_fn(self.dim, |i, j| self.get(i, order[j]))
    }

    /// Rows and columns re-ordered together, as a metric over re-ordered channels needs.
    ///
    /// # Panics
    /// When `order` is not a permutation of `0..dim`.
    pub fn permute_both(&self, order: &[usize]) -> Self {
        assert_permutation(order, self.dim);
        Self::from_fn(self.dim, |i, j| self.get(order[i], order[j]))
    }

    /// The inverse, by Gaussian elimination with row pivots; `None` if the matrix is singular or nearly so.
    pub fn inverse(&self) -> Option<Self> {
        let dim = self.dim;
        let mut left = self.values.clone();
        let mut right = Self::identity(dim).values;
        let largest = self.values.iter().fold(0.0_f64, |largest, value| largest.max(value.abs()));
        for column in 0..dim {
            let magnitude = |row: &usize| left[row * dim + column].abs();
            let pivot = (column..dim).max_by(|a, b| magnitude(a).total_cmp(&magnitude(b)))?;
            let size = left[pivot * dim + column].abs();
            // Below this nothing but rounding errors is left of a pivot.
            if size.is_nan() || size <= 1e-13 * largest {
                return None;
            }
            for matrix in [&mut left, &mut right] {
                for j in 0..dim {
                    matrix.swap(pivot * dim + j, column * dim + j);
                }
            }
            let scale = 1.0 / left[column * dim + column];
            for matrix in [&mut left, &mut right] {
                matrix[column * dim..][..dim].iter_mut().for_each(|value| *value *= scale);
            }
            for row in (0..dim).filter(|&row| row != column) {
                let factor = left[row * dim + column];
                for matrix in [&mut left, &mut right] {
                    for j in 0..dim {
                        matrix[row * dim + j] -= factor * matrix[column * dim + j];
                    }
                }
            }
        }
        Some(SquareMatrix { dim, values: right })
    }

    /// The sum of the diagonal.
    pub fn trace(&self) -> f64 {
        self.diagonal().iter().sum()
    }

    /// The diagonal.
    pub fn diagonal(&self) -> Vec<f64> {
        (0..self.dim).map(|i| self.get(i, i)).collect()
    }

    /// `row · self` in f64.
    ///
    /// # Panics
    /// When the row has another length.
    pub fn apply_to_row(&self, row: &[f64]) -> Vec<f64> {
        assert_eq!(row.len(), self.dim, "a row must have as many channels as the matrix has rows");
        let mut out = vec![0.0; self.dim];
        for (i, &x) in row.iter().enumerate() {
            for (out, &m) in out.iter_mut().zip(self.row(i)) {
                *out += x * m;
            }
        }
        out
    }
}

fn assert_permutation(order: &[usize], dim: usize) {
    let mut seen = vec![false; dim];
    assert_eq!(order.len(), dim, "a permutation of {dim} channels needs as many entries");
    for &index in order {
        assert!(index < dim && !seen[index], "{index} is outside 0..{dim} or occurs twice");
        seen[index] = true;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbered(dim: usize) -> SquareMatrix {
        SquareMatrix::from_fn(dim, |i, j| (i * dim + j) as f64)
    }

    #[test]
    fn inverses_undo_and_singular_matrices_have_none() {
        for dim in [1, 2, 7, 48] {
            // Strong and weak columns, as transforms of keys have them.
            let matrix = SquareMatrix::from_fn(dim, |i, j| {
                (((i * 37 + j * 61) % 97) as f64 / 48.5 - 1.0 + f64::from(u8::from(i == j)) * 3.0)
                    * 0.9_f64.powi(j as i32)
            });
            let product = matrix.multiply(&matrix.inverse().expect("an inverse"));
            for i in 0..dim {
                for j in 0..dim {
                    let expected = f64::from(u8::from(i == j));
                    assert!((product.get(i, j) - expected).abs() < 1e-9, "d={dim} {i} {j}");
                }
            }
        }
        assert_eq!(numbered(3).inverse(), None);
        assert_eq!(SquareMatrix::from_fn(2, |_, _| f64::NAN).inverse(), None);
        assert_eq!(SquareMatrix::from_fn(2, |_, _| 0.0).inverse(), None);
    }

    #[test]
    fn products_and_transposes_match_hand_arithmetic() {
        let a = SquareMatrix::new(2, vec![1.0, 2.0, 3.0, 4.0]).unwrap();
        let b = SquareMatrix::new(2, vec![5.0, 6.0, 7.0, 8.0]).unwrap();
        assert_eq!(a.multiply(&b).values(), [19.0, 22.0, 43.0, 50.0]);
        assert_eq!(a.transpose().values(), [1.0, 3.0, 2.0, 4.0]);
        assert_eq!(a.trace(), 5.0);
        assert_eq!(a.apply_to_row(&[1.0, -1.0]), [-2.0, -2.0]);
        assert_eq!(a.multiply(&SquareMatrix::identity(2)), a);
    }

    #[test]
    fn a_rounded_rotation_is_made_orthonormal_again() {
        let exact = crate::hadamard::matrix(64);
        let turned = SquareMatrix::from_fn(64, |i, j| {
            let (sine, cosine) = (0.1 * (i / 2) as f64).sin_cos();
            let (even, odd) = (exact.get(i & !1, j), exact.get(i | 1, j));
            if i % 2 == 0 { cosine * even - sine * odd } else { sine * even + cosine * odd }
        });
        let rounded = SquareMatrix::from_fn(64, |i, j| half::f16::from_f64(turned.get(i, j)).to_f64());
        assert!(turned.orthogonality_error() < 1e-12 && rounded.orthogonality_error() > 1e-6);
        let mended = rounded.orthonormalised();
        assert!(mended.orthogonality_error() < 1e-10, "{}", mended.orthogonality_error());
        let moved = mended.values().iter().zip(turned.values()).map(|(a, b)| (a - b).abs());
        assert!(moved.fold(0.0, f64::max) < 2e-4);
        // A matrix that is far from a rotation must not be taken for one.
        let projection = SquareMatrix::from_fn(4, |i, j| f64::from(u8::from(i == j && i < 2)));
        assert!(projection.orthonormalised().orthogonality_error() > 0.5);
    }

    #[test]
    fn wrong_lengths_are_refused() {
        assert_eq!(
            SquareMatrix::new(3, vec![0.0; 8]),
            Err(CodecError::Shape { what: "values of a square matrix", expected: 9, got: 8 })
        );
        assert!(SquareMatrix::new(usize::MAX, Vec::new()).is_err());
    }

    #[test]
    fn orthogonality_error_sees_scaling_shear_and_nan() {
        assert_eq!(SquareMatrix::identity(4).orthogonality_error(), 0.0);
        let scaled = SquareMatrix::from_fn(4, |i, j| if i == j { 1.1 } else { 0.0 });
        assert!((scaled.orthogonality_error() - 0.21).abs() < 1e-12);
        let sheared = SquareMatrix::from_fn(2, |i, j| if i == j { 1.0 } else { 0.5 * i as f64 });
        assert!(sheared.orthogonality_error() > 0.2);
        let mut values = vec![0.0; 4];
        values[1] = f64::NAN;
        assert!(SquareMatrix::new(2, values).unwrap().orthogonality_error().is_nan());
    }

    #[test]
    fn permutations_move_what_they_say() {
        let m = numbered(3);
        let order = [2, 0, 1];
        assert_eq!(m.permute_rows(&order).row(0), m.row(2));
        assert_eq!(m.permute_columns(&order).get(1, 0), m.get(1, 2));
        assert_eq!(m.permute_both(&order).get(0, 1), m.get(2, 0));
    }

    #[test]
    #[should_panic(expected = "occurs twice")]
    fn a_repeated_index_is_no_permutation() {
        numbered(3).permute_rows(&[0, 0, 1]);
    }
}
