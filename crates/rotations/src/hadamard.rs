//! A Hadamard rotation for every head: what a model without learned weights gets, so that its speed can be measured.

use std::collections::BTreeMap;

use oscar_codec::{KvGeometry, Rule, hadamard};

use crate::rotation::{LayerRotations, RotationFile, RotationHeader, SideRotations};

/// Rotations of a geometry that know nothing of a model.
pub(crate) fn hadamard_rotations(model: &str, geometry: KvGeometry) -> RotationFile {
    let KvGeometry { layers, kv_heads, head_dim } = geometry;
    let matrix = hadamard::matrix(head_dim);
    let side = |bands: bool| SideRotations {
        rotations: vec![matrix.clone(); kv_heads],
        eigenvalues: Vec::new(),
        means: Some(vec![vec![0.0; head_dim]; kv_heads]),
        metrics: None,
        bands: bands.then(|| vec![matrix.clone(); kv_heads]),
        unturned_means: bands.then(|| vec![vec![0.0; head_dim]; kv_heads]),
        rules: vec![Rule::Search; kv_heads],
    };
    let layer = LayerRotations { keys: side(true), values: side(false) };
    RotationFile {
        header: RotationHeader { model: model.to_owned(), kv_heads, head_dim, ..RotationHeader::default() },
        heads: Some((0..layers).map(|index| (index, layer.clone())).collect()),
        layers: None,
        widths: BTreeMap::new(),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use oscar_codec::{KeyTurning, RopeLayout};

    use super::*;
    use crate::codec::{Int2Encoder, Int2Options, int2_codec};

    #[test]
    fn every_encoder_takes_them() {
        for head_dim in [64, 128] {
            let geometry = KvGeometry { layers: 2, kv_heads: 3, head_dim };
            let file = hadamard_rotations("random", geometry);
            for encoder in [Int2Encoder::Auto, Int2Encoder::Band, Int2Encoder::Scalar] {
                let still = Arc::new(KeyTurning::new(Vec::new(), RopeLayout::Halves));
                let options = Int2Options { encoder, turnings: vec![still; 2], ..Int2Options::default() };
                assert!(int2_codec("int2", &file, geometry, &options).is_ok(), "{encoder:?}");
            }
        }
    }
}
