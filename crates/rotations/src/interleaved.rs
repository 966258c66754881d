//! Conversion between the two orders of key channels.
//!
//! Files hold keys in the order of Hugging Face checkpoints: rotary pair `i` is channels `i` and `i +
//! rotary_dim / 2`. Llama GGUF files keep the pair in channels `2i` and `2i + 1`, so for such a model the
//! rows of key rotations and of bands, the key means and both sides of C_Q move. Channels that do not rotate stay where
//! they are, and so do values, which no position embedding touches.

use super::rotation::{RotationFile, RotationSet, SideRotations};

/// The same rotations for a model whose keys are interleaved.
///
/// # Panics
/// When `rotary_dim` is odd or larger than a head.
pub fn to_interleaved(file: &RotationFile, rotary_dim: usize) -> RotationFile {
    permuted(file, &interleaved_order(file.header.head_dim, rotary_dim))
}

/// The inverse: rotations found on an interleaved model in the order files have.
///
/// # Panics
/// When `rotary_dim` is odd or larger than a head.
pub fn from_interleaved(file: &RotationFile, rotary_dim: usize) -> RotationFile {
    let order = interleaved_order(file.header.head_dim, rotary_dim);
    let mut inverse = vec![0; order.len()];
    order.iter().enumerate().for_each(|(to, &from)| inverse[from] = to);
    permuted(file, &inverse)
}

/// For each channel of the interleaved order, the channel of the halves order that it is.
pub fn interleaved_order(head_dim: usize, rotary_dim: usize) -> Vec<usize> {
    assert!(
        rotary_dim <= head_dim && rotary_dim.is_multiple_of(2),
        "{rotary_dim} of {head_dim} channels rotate"
    );
    let half = rotary_dim / 2;
    (0..head_dim)
        .map(|channel| match channel {
            fixed if fixed >= rotary_dim => fixed,
            even if even.is_multiple_of(2) => even / 2,
            odd => half + odd / 2,
        })
        .collect()
}

fn permuted(file: &RotationFile, order: &[usize]) -> RotationFile {
    let set = |set: &RotationSet| -> RotationSet {
        set.iter()
            .map(|(&layer, rotations)| {
                let mut rotations = rotations.clone();
                rotations.keys = permuted_keys(&rotations.keys, order);
                (layer, rotations)
            })
            .collect()
    };
    RotationFile {
        header: file.header.clone(),
        heads: file.heads.as_ref().map(set),
        layers: file.layers.as_ref().map(set),
        widths: file.widths.clone(),
    }
}

fn permuted_keys(keys: &SideRotations, order: &[usize]) -> SideRotations {
    let mean = |mean: &Vec<f32>| order.iter().map(|&from| mean[from]).collect();
    SideRotations {
        rotations: keys.rotations.iter().map(|rotation| rotation.permute_rows(order)).collect(),
        eigenvalues: keys.eigenvalues.clone(),
        means: keys.means.as_ref().map(|means| means.iter().map(mean).collect()),
        metrics: keys
            .metrics
            .as_ref()
            .map(|all| all.iter().map(|metric| metric.permute_both(order)).collect()),
        bands: keys.bands.as_ref().map(|all| all.iter().map(|bands| bands.permute_rows(order)).collect()),
        unturned_means: keys.unturned_means.as_ref().map(|means| means.iter().map(mean).collect()),
        rules: keys.rules.clone(),
    }
}
