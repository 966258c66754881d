//! Seeded numbers and rotations shared by the tests.

use oscar_codec::SquareMatrix;

/// A small seeded generator.
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Random(seed)
    }

    pub(crate) fn uniform(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut bits = self.0;
        bits = (bits ^ bits >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ bits >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((bits ^ bits >> 31) >> 11) as f64 / (1_u64 << 53) as f64
    }

    pub(crate) fn gaussian(&mut self) -> f64 {
        (-2.0 * (1.0 - self.uniform()).ln()).sqrt() * (std::f64::consts::TAU * self.uniform()).cos()
    }

    pub(crate) fn gaussians(&mut self, count: usize) -> Vec<f32> {
        (0..count).map(|_| self.gaussian() as f32).collect()
    }
}

/// A product of random reflections: orthonormal to rounding.
#[allow(dead_code)]
pub(crate) fn random_rotation(dim: usize, seed: u64) -> SquareMatrix {
    let mut random = Random::new(seed);
    let mut rotation = SquareMatrix::identity(dim);
    for _ in 0..8 {
        let v: Vec<f64> = (0..dim).map(|_| random.gaussian()).collect();
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
