//! `turboquant`: random rotation, norm, and eight Lloyd–Max levels per channel (TurboQuant, arXiv 2504.19874).
//!
//! Choices: three bits; the variant that minimises squared error, without the 1-bit QJL residual for unbiased inner
//! products (users found it harmful); keys and values alike; a dense random rotation, the orthonormalisation of a
//! seeded Gaussian matrix, the same for all heads; the norm of the row in f16; levels of the Gaussian that a
//! coordinate of a random unit vector approaches (variance `1/d`), which is within a percent of the exact sphere
//! density from d=64 on.

use super::line::{pack, unpack};
use super::{check_head_dim, count_rows};
use crate::cache_codec::{CacheCodec, HeadIndex, Side};
use crate::error::{CodecError, check_finite};
use crate::matrix::SquareMatrix;
use crate::rule::ScaleType;

const BITS: usize = 3;

/// The positive half of the 8-level Lloyd–Max quantiser of a unit Gaussian; thresholds are the middles.
const LEVELS: [f32; 4] = [0.245_094, 0.756_005, 1.343_909, 2.151_946];

/// Three bits by random rotation and a fixed codebook.
#[derive(Clone, Debug)]
pub struct TurboQuant {
    head_dim: usize,
    rotation: Vec<f32>,
    transposed: Vec<f32>,
}

impl TurboQuant {
    /// The seed used unless another is given.
    pub const DEFAULT_SEED: u64 = 20_250_428;

    /// For heads of `head_dim` channels, with the rotation that `seed` gives.
    pub fn new(head_dim: usize, seed: u64) -> Result<Self, CodecError> {
        check_head_dim(head_dim)?;
        if head_dim > 1024 {
            return Err(CodecError::HeadDim {
                head_dim,
                reason: "a dense random rotation needs at most 1024",
            });
        }
        let rotation = random_rotation(head_dim, seed);
        Ok(TurboQuant { head_dim, rotation: rotation.to_f32(), transposed: rotation.transpose().to_f32() })
    }

    fn row_bytes(head_dim: usize) -> usize {
        (head_dim * BITS).div_ceil(8) + 2
    }

    fn store(&self, row: &[f32], bytes: &mut Vec<u8>) {
        // In f64: squares of large finite f32 overflow f32.
        let norm = row.iter().map(|&x| f64::from(x) * f64::from(x)).sum::<f64>().sqrt();
        let inverse = if norm > 0.0 { (self.head_dim as f64).sqrt() / norm } else { 0.0 };
        let unit: Vec<f32> = row.iter().map(|&x| (f64::from(x) * inverse) as f32).collect();
        let codes: Vec<u8> = multiply(&unit, &self.rotation).into_iter().map(nearest_level).collect();
        pack(&codes, BITS, bytes);
        bytes.extend(ScaleType::F16.to_bits(norm as f32).to_le_bytes());
    }

    fn load(&self, bytes: &[u8], row: &mut [f32]) {
        let (codes, norm) = bytes.split_at(bytes.len() - 2);
        let norm = ScaleType::F16.to_f32(u16::from_le_bytes([norm[0], norm[1]]));
        let scale = norm / (self.head_dim as f32).sqrt();
        let levels: Vec<f32> = unpack(codes, BITS, self.head_dim).into_iter().map(level).collect();
        for (x, y) in row.iter_mut().zip(multiply(&levels, &self.transposed)) {
            *x = y * scale;
        }
    }
}

/// Code of the nearest level: 0 is the most negative.
fn nearest_level(x: f32) -> u8 {
    let above = LEVELS.windows(2).filter(|pair| x.abs() > (pair[0] + pair[1]) / 2.0).count() as u8;
    if x < 0.0 { 3 - above } else { 4 + above }
}

fn level(code: u8) -> f32 {
    if code < 4 { -LEVELS[3 - usize::from(code)] } else { LEVELS[usize::from(code) - 4] }
}

fn multiply(row: &[f32], matrix: &[f32]) -> Vec<f32> {
    let mut out = vec![0.0; row.len()];
    for (&x, weights) in row.iter().zip(matrix.chunks_exact(row.len())) {
        out.iter_mut().zip(weights).for_each(|(out, weight)| *out += x * weight);
    }
    out
}

/// Rows of Gaussians made orthonormal one after the other (twice, for accuracy): uniform over rotations.
fn random_rotation(dim: usize, seed: u64) -> SquareMatrix {
    let mut state = seed;
    let mut uniform = move || {
        // SplitMix64.
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut bits = state;
        bits = (bits ^ bits >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ bits >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((bits ^ bits >> 31) >> 11) as f64 / (1_u64 << 53) as f64
    };
    // Box–Muller; 1 - u is never zero.
    let mut gaussian =
        move || (-2.0 * (1.0 - uniform()).ln()).sqrt() * (std::f64::consts::TAU * uniform()).cos();
    let mut rows: Vec<Vec<f64>> = Vec::with_capacity(dim);
    while rows.len() < dim {
        let mut row: Vec<f64> = (0..dim).map(|_| gaussian()).collect();
        for _ in 0..2 {
            for earlier in &rows {
                let along: f64 = row.iter().zip(earlier).map(|(a, b)| a * b).sum();
                row.iter_mut().zip(earlier).for_each(|(x, e)| *x -= along * e);
            }
        }
        let norm = row.iter().map(|x| x * x).sum::<f64>().sqrt();
        // A row that lies in the span of the others is drawn again.
        if norm > 1e-6 {
            rows.push(row.into_iter().map(|x| x / norm).collect());
        }
    }
    SquareMatrix::from_fn(dim, |i, j| rows[i][j])
}

impl CacheCodec for TurboQuant {
    fn name(&self) -> &str {
        "turboquant"
    }

    fn round_trip(&self, _: HeadIndex, _: Side, _: usize, rows: &mut [f32]) -> Result<(), CodecError> {
        count_rows(rows, self.head_dim)?;
        let mut bytes = Vec::new();
        for (index, row) in rows.chunks_exact(self.head_dim).enumerate() {
            check_finite(row, index)?;
            self.store(row, &mut bytes);
        }
        let row_bytes = Self::row_bytes(self.head_dim);
        for (row, bytes) in rows.chunks_exact_mut(self.head_dim).zip(bytes.chunks_exact(row_bytes)) {
            self.load(bytes, row);
        }
        Ok(())
    }

    fn token_bytes(&self, head_dim: usize) -> f64 {
        2.0 * Self::row_bytes(head_dim) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each level must be the mean of the Gaussian over its cell: checked by integrating the density.
    #[test]
    fn the_levels_are_centroids_of_a_gaussian() {
        let density = |x: f64| (-0.5 * x * x).exp();
        for i in 0..4 {
            let edge = |i: usize| f64::from(LEVELS[i - 1] + LEVELS[i]) / 2.0;
            let low = if i == 0 { 0.0 } else { edge(i) };
            let high = if i == 3 { 12.0 } else { edge(i + 1) };
            let steps = 200_000;
            let width = (high - low) / f64::from(steps);
            let (mut mass, mut moment) = (0.0, 0.0);
            for step in 0..steps {
                let x = low + (f64::from(step) + 0.5) * width;
                mass += density(x);
                moment += x * density(x);
            }
            assert!((moment / mass - f64::from(LEVELS[i])).abs() < 2e-4, "level {i}: {}", moment / mass);
        }
    }

    #[test]
    fn codes_are_nearest_levels() {
        for step in -400..=400 {
            let x = step as f32 / 100.0 + 0.001;
            let nearest = (0..8).min_by(|&a, &b| (level(a) - x).abs().total_cmp(&(level(b) - x).abs()));
            assert_eq!(Some(nearest_level(x)), nearest, "{x}");
        }
        assert!((0..7).all(|code| level(code) < level(code + 1)));
    }

    #[test]
    fn rotations_are_orthonormal_and_seeded() {
        let a = random_rotation(64, 1);
        assert!(a.orthogonality_error() < 1e-12);
        assert_eq!(a, random_rotation(64, 1));
        assert_ne!(a, random_rotation(64, 2));
        // No preferred channel: entries look like Gaussians of variance 1/d.
        let variance = a.values().iter().map(|x| x * x).sum::<f64>() / 4096.0;
        assert!((variance - 1.0 / 64.0).abs() < 1e-12);
        assert!(a.values().iter().all(|x| x.abs() < 0.7));
    }
}
