//! Back from a rotation to the eigenvectors it was composed of.

use oscar_codec::{Composition, SquareMatrix, hadamard};

/// The eigenvectors (columns, ascending) inside `rotation`; `None` for compositions that have none.
pub(crate) fn eigenbasis(composition: Composition, rotation: &SquareMatrix) -> Option<SquareMatrix> {
    let dim = rotation.dim();
    let identity = SquareMatrix::identity(dim);
    match composition {
        Composition::Pbr | Composition::HPbr => None,
        // R·F: F is what the composition makes of the identity.
        Composition::Plain | Composition::Br | Composition::BrH | Composition::RH | Composition::RHPbr => {
            Some(rotation.multiply(&composition.compose(&identity).transpose()))
        }
        // H·R·P
        Composition::HRPbr => {
            let permutation = Composition::Pbr.compose(&identity);
            Some(hadamard::matrix(dim).transpose().multiply(rotation).multiply(&permutation.transpose()))
        }
        // H·P·R
        Composition::HPbrR => Some(Composition::HPbr.compose(&identity).transpose().multiply(rotation)),
    }
}

/// `Rᵀ C R`: the metric as rotated channels see it.
pub(crate) fn conjugate(rotation: &SquareMatrix, metric: &SquareMatrix) -> SquareMatrix {
    rotation.transpose().multiply(metric).multiply(rotation)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_composition_is_undone() {
        for dim in [8, 48] {
            // A rotation that is not symmetric: a Hadamard with its columns moved and signs changed.
            let h = hadamard::matrix(dim);
            let basis = SquareMatrix::from_fn(dim, |i, j| {
                h.get(i, (j * 5 + 3) % dim) * if j % 3 == 0 { -1.0 } else { 1.0 }
            });
            for composition in Composition::ALL {
                let found = eigenbasis(composition, &composition.compose(&basis));
                match composition {
                    Composition::Pbr | Composition::HPbr => assert_eq!(found, None),
                    _ => {
                        let found = found.expect("a basis");
                        let worst = found.values().iter().zip(basis.values()).map(|(a, b)| (a - b).abs());
                        assert!(worst.fold(0.0, f64::max) < 1e-12, "{composition} at d={dim}");
                    }
                }
            }
        }
    }
}
