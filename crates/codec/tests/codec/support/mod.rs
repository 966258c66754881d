//! Rotations and errors shared by the tests.

use oscar_codec::SquareMatrix;
use oscar_random::Random;

/// A product of random reflections: orthonormal to rounding.
#[allow(dead_code)]
pub(crate) fn random_rotation(dim: usize, seed: u64) -> SquareMatrix {
    let mut random = Random::new(seed);
    let mut rotation = SquareMatrix::identity(dim);
    for _ in 0..8 {
        let v: Vec<f64> = (0..dim).map(|_| random.normal()).collect();
        let norm: f64 = v.iter().map(|x| x * x).sum();
        let reflection =
            SquareMatrix::from_fn(dim, |i, j| f64::from(u8::from(i == j)) - 2.0 * v[i] * v[j] / norm);
        rotation = rotation.multiply(&reflection);
    }
    rotation
}

/// Mean squared difference over mean square.
#[allow(dead_code)]
pub(crate) fn relative_error(exact: &[f32], approximate: &[f32]) -> f64 {
    assert_eq!(exact.len(), approximate.len());
    let error: f64 = exact.iter().zip(approximate).map(|(a, b)| f64::from(a - b).powi(2)).sum();
    error / exact.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>()
}
