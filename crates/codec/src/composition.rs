//! The nine ways the reference composes eigenbasis, Hadamard and permutation into one rotation.

use std::fmt;
use std::str::FromStr;

use crate::error::CodecError;
use crate::matrix::SquareMatrix;
use crate::{hadamard, permutation};

/// A product of R (eigenvectors, columns ascending), H (Hadamard) and P (balancing permutation), left to right.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Composition {
    /// The calibrated rotation alone: R.
    Plain,
    /// The permutation alone: P.
    Pbr,
    /// The rotation, then the permutation: R·P.
    Br,
    /// The rotation, the permutation, then Hadamard: R·P·H.
    BrH,
    /// The rotation, then Hadamard: R·H.
    RH,
    /// Hadamard, then the permutation: H·P.
    HPbr,
    /// Hadamard, the rotation, then the permutation: H·R·P.
    HRPbr,
    /// Hadamard, the permutation, then the rotation: H·P·R.
    HPbrR,
    /// R·H·P, what the published rotations are.
    #[default]
    RHPbr,
}

impl Composition {
    /// All of them, in the reference's order.
    pub const ALL: [Composition; 9] = [
        Composition::Plain,
        Composition::Pbr,
        Composition::Br,
        Composition::BrH,
        Composition::RH,
        Composition::HPbr,
        Composition::HRPbr,
        Composition::HPbrR,
        Composition::RHPbr,
    ];

    /// The reference's name, as it appears in rotation files.
    pub fn name(self) -> &'static str {
        match self {
            Composition::Plain => "plain",
            Composition::Pbr => "pbr",
            Composition::Br => "br",
            Composition::BrH => "br_h128",
            Composition::RH => "r_h",
            Composition::HPbr => "h_pbr",
            Composition::HRPbr => "h_r_pbr",
            Composition::HPbrR => "h_pbr_r",
            Composition::RHPbr => "r_h_pbr",
        }
    }

    /// The rotation made from an eigenbasis whose columns are in ascending order of eigenvalue.
    pub fn compose(self, eigenbasis: &SquareMatrix) -> SquareMatrix {
        let dim = eigenbasis.dim();
        if dim == 0 {
            return eigenbasis.clone();
        }
        let order = permutation::balanced(dim);
        let h = hadamard::matrix(dim);
        match self {
            Composition::Plain => eigenbasis.clone(),
            Composition::Pbr => SquareMatrix::identity(dim).permute_columns(&order),
            Composition::Br => eigenbasis.permute_columns(&order),
            Composition::BrH => eigenbasis.permute_columns(&order).multiply(&h),
            Composition::RH => eigenbasis.multiply(&h),
            Composition::HPbr => h.permute_columns(&order),
            Composition::HRPbr => h.multiply(eigenbasis).permute_columns(&order),
            Composition::HPbrR => h.permute_columns(&order).multiply(eigenbasis),
            Composition::RHPbr => eigenbasis.multiply(&h).permute_columns(&order),
        }
    }
}

impl fmt::Display for Composition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Composition {
    type Err = CodecError;

    fn from_str(name: &str) -> Result<Self, CodecError> {
        Composition::ALL.into_iter().find(|composition| composition.name() == name).ok_or_else(|| {
            CodecError::UnknownName {
                what: "composition",
                name: name.to_owned(),
                known: "plain, pbr, br, br_h128, r_h, h_pbr, h_r_pbr, h_pbr_r, r_h_pbr",
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A rotation that is neither symmetric nor a permutation: plane rotations of neighbours, twice.
    fn some_rotation(dim: usize) -> SquareMatrix {
        let mut m = SquareMatrix::identity(dim);
        for step in 0..2 * dim {
            let (a, b) = (step % dim, (step * 5 + 3) % dim);
            if a == b {
                continue;
            }
            let (sin, cos) = (0.3 + step as f64).sin_cos();
            let plane = SquareMatrix::from_fn(dim, |i, j| match (i, j) {
                _ if (i, j) == (a, a) || (i, j) == (b, b) => cos,
                _ if (i, j) == (a, b) => sin,
                _ if (i, j) == (b, a) => -sin,
                _ => f64::from(u8::from(i == j)),
            });
            m = m.multiply(&plane);
        }
        m
    }

    #[test]
    fn names_round_trip_and_strangers_are_refused() {
        for composition in Composition::ALL {
            assert_eq!(composition.to_string().parse(), Ok(composition));
        }
        assert_eq!(Composition::default().name(), "r_h_pbr");
        assert!("R_H_PBR".parse::<Composition>().unwrap_err().to_string().contains("r_h_pbr"));
    }

    #[test]
    fn every_composition_is_the_product_its_name_says() {
        for dim in [8, 48, 64] {
            let r = some_rotation(dim);
            let h = hadamard::matrix(dim);
            let order = permutation::balanced(dim);
            // P as a real matrix: P[order[j]][j] = 1.
            let p = SquareMatrix::from_fn(dim, |i, j| f64::from(u8::from(order[j] == i)));
            let products: [(Composition, Vec<&SquareMatrix>); 9] = [
                (Composition::Plain, vec![&r]),
                (Composition::Pbr, vec![&p]),
                (Composition::Br, vec![&r, &p]),
                (Composition::BrH, vec![&r, &p, &h]),
                (Composition::RH, vec![&r, &h]),
                (Composition::HPbr, vec![&h, &p]),
                (Composition::HRPbr, vec![&h, &r, &p]),
                (Composition::HPbrR, vec![&h, &p, &r]),
                (Composition::RHPbr, vec![&r, &h, &p]),
            ];
            for (composition, factors) in products {
                let expected =
                    factors.iter().fold(SquareMatrix::identity(dim), |product, m| product.multiply(m));
                let got = composition.compose(&r);
                let worst = got.values().iter().zip(expected.values()).map(|(a, b)| (a - b).abs());
                assert!(worst.fold(0.0, f64::max) < 1e-12, "{composition} at d={dim}");
                assert!(got.orthogonality_error() < 1e-12, "{composition} at d={dim}");
            }
        }
    }
}
