//! The bit-reversal permutation, which spreads neighbouring channels over the groups of a row.
//!
//! The published permutation sorts directions by eigenvalue, largest first, and puts the `i`-th at position
//! `br(i)`. With eigenvalues ascending, as an eigensolver returns them, that is `perm[j] = d - 1 - br(j)`: fixed
//! and independent of the data. With one group per row it changes no stored value, only their order.
//!
//! **Other sizes.** For `d` not a power of two we take the bit-reversed order of the next power of two and leave
//! out what is not below `d` (d=6: 0 4 2 1 5 3). For powers of two that is the usual bit reversal.

/// Position `j` holds the bit-reversal of `j` (for other sizes see the module text).
pub(crate) fn bit_reversal(dim: usize) -> Vec<usize> {
    if dim <= 1 {
        return (0..dim).collect();
    }
    let bits = dim.next_power_of_two().trailing_zeros();
    (0..1_usize << bits).map(|i| i.reverse_bits() >> (usize::BITS - bits)).filter(|&i| i < dim).collect()
}

/// The published balancing permutation for eigenvalues in ascending order: `(M·P)[:, j] = M[:, balanced[j]]`.
pub(crate) fn balanced(dim: usize) -> Vec<usize> {
    bit_reversal(dim).into_iter().map(|reversed| dim - 1 - reversed).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_published_vectors() {
        assert_eq!(bit_reversal(8), [0, 4, 2, 6, 1, 5, 3, 7]);
        assert_eq!(balanced(8), [7, 3, 5, 1, 6, 2, 4, 0]);
        assert_eq!(balanced(16), [15, 7, 11, 3, 13, 5, 9, 1, 14, 6, 10, 2, 12, 4, 8, 0]);
    }

    #[test]
    fn every_size_gives_a_permutation() {
        for dim in (0..200).chain([256, 512]) {
            let mut sorted = balanced(dim);
            sorted.sort_unstable();
            assert!(sorted.into_iter().eq(0..dim), "d={dim}");
        }
        assert_eq!(bit_reversal(6), [0, 4, 2, 1, 5, 3]);
    }

    /// The definition by sorting, which the closed form must equal: `perm[br(i)] = i-th largest`.
    #[test]
    fn the_closed_form_is_the_sorted_definition() {
        for dim in [8, 16, 64, 128, 256] {
            let mut largest_first: Vec<usize> = (0..dim).collect();
            largest_first.sort_by(|a, b| b.cmp(a));
            let reversed = bit_reversal(dim);
            let mut perm = vec![0; dim];
            for i in 0..dim {
                perm[reversed[i]] = largest_first[i];
            }
            assert_eq!(balanced(dim), perm);
        }
    }

    #[test]
    fn groups_share_the_spectrum_evenly() {
        // Four groups of 24 of 96 channels: each must hold about a quarter of the large half.
        for group in balanced(96).chunks(24) {
            let large = group.iter().filter(|&&i| i >= 48).count();
            assert!((10..=14).contains(&large), "{large} of 24");
        }
    }
}
