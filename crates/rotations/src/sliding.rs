//! Layers that see a sliding window keep no history, so rotation files leave them out.

use oscar_codec::SquareMatrix;

use crate::rotation::{LayerRotations, RotationFile, RotationSet, SideRotations};

impl RotationFile {
    /// Lets rows of `layers` stay as they are where the file has no rotations for them, so that whoever builds a codec finds
    /// every layer of the model.
    pub fn fill_sliding_layers(&mut self, layers: &[usize]) {
        for set in [&mut self.heads, &mut self.layers].into_iter().flatten() {
            fill(set, layers);
        }
    }
}

fn fill(set: &mut RotationSet, layers: &[usize]) {
    let Some(like) = set.values().next() else { return };
    let unchanged = LayerRotations { keys: unchanged(&like.keys), values: unchanged(&like.values) };
    for &layer in layers {
        set.entry(layer).or_insert_with(|| unchanged.clone());
    }
}

/// Rotations that change nothing, as many as a side of another layer has.
fn unchanged(like: &SideRotations) -> SideRotations {
    let identity = |matrix: &SquareMatrix| SquareMatrix::identity(matrix.dim());
    let zeros = |means: &Option<Vec<Vec<f32>>>| -> Option<Vec<Vec<f32>>> {
        Some(means.as_ref()?.iter().map(|mean| vec![0.0; mean.len()]).collect())
    };
    SideRotations {
        rotations: like.rotations.iter().map(identity).collect(),
        eigenvalues: Vec::new(),
        means: zeros(&like.means),
        metrics: None,
        bands: like.bands.as_ref().map(|bands| bands.iter().map(identity).collect()),
        unturned_means: zeros(&like.unturned_means),
        rules: like.rules.clone(),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use oscar_codec::{KeyTurning, KvGeometry, RopeLayout};

    use crate::codec::{Int2Encoder, Int2Options, int2_codec};
    use crate::hadamard::hadamard_rotations;

    #[test]
    fn a_file_without_sliding_layers_makes_a_codec_of_all_layers() {
        let geometry = KvGeometry { layers: 4, kv_heads: 2, head_dim: 64 };
        let whole = hadamard_rotations("model", geometry);
        let mut file = whole.clone();
        file.heads.as_mut().expect("heads").retain(|&layer, _| layer == 2);
        for encoder in [Int2Encoder::Band, Int2Encoder::Scalar] {
            let still = Arc::new(KeyTurning::new(Vec::new(), RopeLayout::Halves));
            let options = Int2Options { encoder, turnings: vec![still; 4], ..Int2Options::default() };
            assert!(int2_codec("int2", &file, geometry, &options).is_err());
            let mut filled = file.clone();
            filled.fill_sliding_layers(&[0, 1, 3]);
            let codec = int2_codec("int2", &filled, geometry, &options).expect("a codec");
            let codec = codec.without_history(&[0, 1, 3]).expect("layers of the codec");
            assert_eq!(codec.page_bytes(), 2 * codec.head_bytes(2));
            // What the file has stays.
            assert_eq!(filled.heads.as_ref().expect("heads")[&2], whole.heads.as_ref().expect("heads")[&2]);
        }
    }
}
