//! Fits rotations to moments: eigenvectors, then the composition with Hadamard and permutation.

use oscar_codec::{Composition, SquareMatrix};

use super::CalibrateError;
use super::eigen::{Eigen, symmetric_eigen};

/// Eigenvalues, ascending, and eigenvectors as columns in the same order.
#[derive(Clone, Debug)]
pub struct Spectrum {
    /// The eigenvalues, ascending.
    pub values: Vec<f64>,
    /// Column `i` belongs to value `i`; its largest component is positive, so that a fit is reproducible.
    pub vectors: SquareMatrix,
}

/// The eigenvectors of a symmetric matrix.
pub fn spectrum(matrix: &SquareMatrix) -> Result<Spectrum, CalibrateError> {
    let dim = matrix.dim();
    if let Some(index) = matrix.values().iter().position(|value| !value.is_finite()) {
        return Err(CalibrateError::Moment { row: index / dim, column: index % dim });
    }
    let Eigen { values, mut vectors } =
        symmetric_eigen(matrix.values(), dim).ok_or(CalibrateError::Eigenvectors)?;
    for vector in &mut vectors {
        let largest = vector.iter().copied().fold(0.0, |a: f64, b| if b.abs() > a.abs() { b } else { a });
        if largest < 0.0 {
            vector.iter_mut().for_each(|component| *component = -*component);
        }
    }
    Ok(Spectrum { values, vectors: SquareMatrix::from_fn(dim, |row, column| vectors[column][row]) })
}

/// The rotation for a target: its eigenbasis in a composition, and the eigenvalues.
pub fn rotation(
    target: &SquareMatrix,
    composition: Composition,
) -> Result<(SquareMatrix, Vec<f64>), CalibrateError> {
    let spectrum = spectrum(target)?;
    Ok((composition.compose(&spectrum.vectors), spectrum.values))
}

/// The mean of some matrices of one size.
pub fn mean(matrices: &[SquareMatrix]) -> SquareMatrix {
    let dim = matrices[0].dim();
    let mut sum = vec![0.0; dim * dim];
    for matrix in matrices {
        sum.iter_mut().zip(matrix.values()).for_each(|(sum, value)| *sum += value / matrices.len() as f64);
    }
    SquareMatrix::new(dim, sum).expect("dim · dim values")
}

#[cfg(test)]
pub(crate) mod tests {
    use oscar_random::Random;

    use super::*;

    /// A number in [-1, 1).
    fn signed(random: &mut Random) -> f64 {
        2.0 * random.fraction() - 1.0
    }

    /// A positive definite matrix with a steep spectrum, as queries have.
    pub(crate) fn covariance(dim: usize, seed: u64) -> SquareMatrix {
        let mut numbers = Random::new(seed);
        let mut sum = vec![0.0; dim * dim];
        for rank in 0..2 * dim {
            let row: Vec<f64> =
                (0..dim).map(|_| signed(&mut numbers) * 0.8f64.powi(rank as i32 / 2)).collect();
            for i in 0..dim {
                for j in 0..dim {
                    sum[i * dim + j] += row[i] * row[j];
                }
            }
        }
        SquareMatrix::new(dim, sum).unwrap()
    }

    /// A random rotation: the eigenvectors of a random symmetric matrix.
    fn random_rotation(dim: usize, seed: u64) -> SquareMatrix {
        let mut numbers = Random::new(seed);
        let mut values = vec![0.0; dim * dim];
        for i in 0..dim {
            for j in 0..=i {
                let value = signed(&mut numbers);
                (values[i * dim + j], values[j * dim + i]) = (value, value);
            }
        }
        spectrum(&SquareMatrix::new(dim, values).unwrap()).unwrap().vectors
    }

    pub(crate) fn conjugate(rotation: &SquareMatrix, matrix: &SquareMatrix) -> SquareMatrix {
        rotation.transpose().multiply(matrix).multiply(rotation)
    }

    #[test]
    fn eigenvectors_rebuild_the_matrix() {
        for dim in [8, 48, 64, 96, 128] {
            let matrix = covariance(dim, 5);
            let Spectrum { values, vectors } = spectrum(&matrix).unwrap();
            assert!(values.windows(2).all(|pair| pair[0] <= pair[1]));
            assert!(vectors.orthogonality_error() < 1e-10, "d={dim}");
            let diagonal = conjugate(&vectors, &matrix);
            for i in 0..dim {
                for j in 0..dim {
                    let want = if i == j { values[i] } else { 0.0 };
                    assert!((diagonal.get(i, j) - want).abs() < 1e-9 * matrix.trace(), "d={dim} {i} {j}");
                }
            }
        }
    }

    #[test]
    fn lemma_hadamard_after_the_eigenbasis_makes_every_channel_equally_important() {
        for dim in [64, 128] {
            let matrix = covariance(dim, 9);
            let (rotation, _) = rotation(&matrix, Composition::RHPbr).unwrap();
            let importance = conjugate(&rotation, &matrix).diagonal();
            let equal = matrix.trace() / dim as f64;
            for value in &importance {
                assert!((value - equal).abs() < 1e-9 * equal, "{value} for {equal}");
            }
            // Hadamard alone does not do that.
            let alone = conjugate(&oscar_codec::hadamard::matrix(dim), &matrix).diagonal();
            assert!(alone.iter().copied().fold(0.0, f64::max) > 1.1 * equal);
        }
    }

    #[test]
    fn theorem_the_eigenbasis_minimises_the_frozen_error_surrogate() {
        // tr(Rᵀ C R E) with E = diag(μ), μ ascending, is least when the largest eigenvalues of C meet the smallest
        // μ, which is the eigenbasis in descending order.
        let dim = 32;
        let matrix = covariance(dim, 3);
        let mut numbers = Random::new(77);
        let mut errors: Vec<f64> = (0..dim).map(|_| signed(&mut numbers).abs()).collect();
        errors.sort_by(f64::total_cmp);
        let surrogate = |rotation: &SquareMatrix| -> f64 {
            conjugate(rotation, &matrix).diagonal().iter().zip(&errors).map(|(c, mu)| c * mu).sum()
        };
        let basis = spectrum(&matrix).unwrap();
        let descending: Vec<f64> =
            (0..dim * dim).map(|index| basis.vectors.get(index / dim, dim - 1 - index % dim)).collect();
        let best = surrogate(&SquareMatrix::new(dim, descending).unwrap());
        assert!(best < surrogate(&basis.vectors), "ascending order is the wrong one");
        for seed in 0..200 {
            assert!(best <= surrogate(&random_rotation(dim, seed)), "seed {seed}");
        }
        // Also against small turns away from the optimum.
        let bound: f64 = basis.values.iter().rev().zip(&errors).map(|(value, mu)| value * mu).sum();
        assert!((best - bound).abs() < 1e-9 * bound);
    }

    #[test]
    fn what_is_not_a_number_is_an_error() {
        let matrix = SquareMatrix::new(2, vec![1.0, f64::NAN, f64::NAN, 1.0]).unwrap();
        assert!(matches!(spectrum(&matrix), Err(CalibrateError::Moment { row: 0, column: 1 })));
    }
}
