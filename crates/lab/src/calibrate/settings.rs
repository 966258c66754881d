//! What a calibration makes, and for which model.

use oscar_codec::{Composition, Windows};
use oscar_rotations::rotation::RotationHeader;

/// What value rotations are fitted to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ValueTarget {
    /// VᵀSᵀSV from real attention, as in the paper.
    #[default]
    Attention,
    /// The published code's proxy: values weighted with the energy of their keys.
    Proxy,
}

impl ValueTarget {
    /// The name in files.
    pub fn name(self) -> &'static str {
        match self {
            ValueTarget::Attention => "cs",
            ValueTarget::Proxy => "sst",
        }
    }
}

/// Settings of a calibration.
#[derive(Clone, Debug)]
pub struct Calibration {
    /// How eigenvectors, Hadamard and permutation are multiplied.
    pub composition: Composition,
    /// Target of the per-head value rotations. Per-layer ones are always the published recipe.
    pub value_target: ValueTarget,
    /// Windows that rules are chosen and errors measured with.
    pub windows: Windows,
    /// Header of the rotation file: which model is calibrated.
    pub header: RotationHeader,
}

impl Calibration {
    /// The default recipe for a model described by `header`.
    pub fn new(header: RotationHeader) -> Calibration {
        Calibration {
            composition: Composition::RHPbr,
            value_target: ValueTarget::default(),
            windows: Windows::default(),
            header,
        }
    }
}
