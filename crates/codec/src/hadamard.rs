//! Walsh–Hadamard: the data-free rotation that spreads one large channel over all of them.
//!
//! Sylvester's construction, orthonormal: entry `(i, j)` is `(-1)^popcount(i & j) / sqrt(n)`. It exists for
//! powers of two only. For any other `d` we use the **block form**: the row is cut into blocks of the largest
//! power of two that divides `d` (48 = 3 x 16, 96 = 3 x 32) and each block is transformed on its own. That is
//! still symmetric, orthonormal and its own inverse, but it mixes within blocks only: an outlier is spread over
//! 16 channels of 48, and the equal-diagonal lemma holds block by block.

use crate::matrix::SquareMatrix;

/// The block in which channels are mixed: the largest power of two that divides `dim` (`dim` itself when it is
/// a power of two).
pub fn block_size(dim: usize) -> usize {
    assert!(dim > 0, "a head has at least one channel");
    1 << dim.trailing_zeros()
}

/// The orthonormal (block) Hadamard matrix of `dim` channels.
pub fn matrix(dim: usize) -> SquareMatrix {
    block_matrix(dim, block_size(dim))
}

/// A block-diagonal Hadamard matrix with blocks of `block` channels.
///
/// # Panics
/// When `block` is not a power of two or does not divide `dim`.
pub fn block_matrix(dim: usize, block: usize) -> SquareMatrix {
    assert_block(dim, block);
    let scale = 1.0 / (block as f64).sqrt();
    SquareMatrix::from_fn(dim, |i, j| {
        if i / block != j / block {
            0.0
        } else if (i & j & (block - 1)).count_ones().is_multiple_of(2) {
            scale
        } else {
            -scale
        }
    })
}

/// The fast transform of one row in place, equal to `row · matrix(row.len())` up to rounding.
pub fn transform(row: &mut [f32]) {
    transform_blocks(row, block_size(row.len()));
}

/// The fast transform of each `block` of a row in place.
///
/// Butterflies go from neighbours outwards, in f32, and the factor `1/sqrt(block)` is applied once at the end.
///
/// # Panics
/// When `block` is not a power of two or does not divide the row.
pub fn transform_blocks(row: &mut [f32], block: usize) {
    assert_block(row.len(), block);
    let scale = 1.0 / (block as f32).sqrt();
    for part in row.chunks_exact_mut(block) {
        let mut half = 1;
        while half < block {
            for pair in part.chunks_exact_mut(2 * half) {
                let (low, high) = pair.split_at_mut(half);
                for (a, b) in low.iter_mut().zip(high) {
                    (*a, *b) = (*a + *b, *a - *b);
                }
            }
            half *= 2;
        }
        part.iter_mut().for_each(|value| *value *= scale);
    }
}

fn assert_block(dim: usize, block: usize) {
    assert!(block.is_power_of_two(), "a Hadamard block of {block} channels is not a power of two");
    assert!(dim.is_multiple_of(block), "blocks of {block} do not divide {dim} channels");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_smallest_matrices_are_sylvesters() {
        let r = 0.5_f64.sqrt();
        assert_eq!(matrix(1).values(), [1.0]);
        for (value, expected) in matrix(2).values().iter().zip([r, r, r, -r]) {
            assert!((value - expected).abs() < 1e-15);
        }
        // H4 row 3 is + - - + (popcounts of 3 & j).
        assert_eq!(matrix(4).row(3), [0.5, -0.5, -0.5, 0.5]);
    }

    #[test]
    fn orthonormal_symmetric_and_self_inverse_for_every_size() {
        for dim in [1, 2, 16, 48, 64, 80, 96, 128, 192, 256] {
            let h = matrix(dim);
            assert!(h.orthogonality_error() < 1e-12, "d={dim}");
            assert_eq!(h.transpose(), h, "d={dim}");
        }
    }

    #[test]
    fn the_fast_transform_is_the_matrix() {
        for dim in [1, 2, 32, 48, 64, 96, 128, 256] {
            let row: Vec<f32> = (0..dim).map(|i| ((i * 37 % 101) as f32 - 50.0) / 7.0).collect();
            let expected = matrix(dim).apply_to_row(&row.iter().map(|&x| f64::from(x)).collect::<Vec<_>>());
            let mut fast = row.clone();
            transform(&mut fast);
            for (a, b) in fast.iter().zip(&expected) {
                assert!((f64::from(*a) - b).abs() < 2e-5, "d={dim}: {a} against {b}");
            }
            transform(&mut fast);
            for (a, b) in fast.iter().zip(&row) {
                assert!((a - b).abs() < 2e-5, "d={dim}: not its own inverse");
            }
        }
    }

    #[test]
    fn other_sizes_mix_inside_blocks_only() {
        assert_eq!(block_size(48), 16);
        assert_eq!(block_size(96), 32);
        assert_eq!(block_size(128), 128);
        let mut row = [0.0; 48];
        row[20] = 4.0;
        transform(&mut row);
        assert!(row[16..32].iter().all(|x| (x.abs() - 1.0).abs() < 1e-6));
        assert!(row[..16].iter().chain(&row[32..]).all(|&x| x == 0.0));
    }

    /// The paper's lemma: in the eigenbasis of a covariance a Hadamard makes every variance equal to tr(Λ)/d.
    #[test]
    fn a_hadamard_equalises_any_spectrum() {
        for dim in [16, 64, 128] {
            let eigenvalues: Vec<f64> = (0..dim).map(|i| (1.2_f64).powi(i as i32 % 40) + i as f64).collect();
            let lambda = SquareMatrix::from_fn(dim, |i, j| if i == j { eigenvalues[i] } else { 0.0 });
            let h = matrix(dim);
            let rotated = h.transpose().multiply(&lambda).multiply(&h);
            let mean = lambda.trace() / dim as f64;
            for value in rotated.diagonal() {
                assert!((value - mean).abs() < 1e-9 * mean, "d={dim}: {value} against {mean}");
            }
        }
        // Block form: equal inside each block of 16.
        let lambda = SquareMatrix::from_fn(48, |i, j| if i == j { (i * i) as f64 } else { 0.0 });
        let diagonal = matrix(48).multiply(&lambda).multiply(&matrix(48)).diagonal();
        for block in diagonal.chunks(16) {
            assert!(block.iter().all(|v| (v - block[0]).abs() < 1e-9 * block[0].max(1.0)));
        }
        assert!((diagonal[0] - diagonal[47]).abs() > 1.0);
    }

    #[test]
    #[should_panic(expected = "not a power of two")]
    fn blocks_must_be_powers_of_two() {
        transform_blocks(&mut [0.0; 48], 24);
    }
}
