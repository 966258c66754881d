//! Mean keys for rotations that came without: published files carry none, and some models collapse uncentred.

use oscar_kernels::cpu::CpuBackend;
use oscar_model::LoadedModel;

use super::CalibrateError;
use super::observe::Observer;
use crate::eval::text::prose;
use crate::zoo::RotationFile;

/// Tokens the means are taken over. A mean settles far sooner than a covariance.
pub const MEAN_TOKENS: usize = 1024;

/// The mean keys of every layer and KV head over generated prose, channels in the order of the model's own file.
pub fn mean_keys(model: &LoadedModel<CpuBackend>) -> Result<Vec<Vec<Vec<f32>>>, CalibrateError> {
    let ids = model.tokenizer().encode(&prose(1, 8 * MEAN_TOKENS), true)?;
    let tokens = ids.len().min(MEAN_TOKENS).min(model.config().max_context);
    let mut observer = Observer::new(model, &[&ids[..tokens]])?;
    let heads = observer.heads();
    let layers = (0..model.config().layers).map(|layer| {
        observer.run_layer(layer, |_, _| {})?;
        Ok((0..heads.kv).map(|head| mean(&observer.keys_values(0, head).0, heads.dim)).collect())
    });
    layers.collect()
}

/// Fills in the mean keys of a file that has none. `file` has key channels in the order of the model's own file.
pub fn estimate_key_means(
    model: &LoadedModel<CpuBackend>,
    file: &mut RotationFile,
) -> Result<(), CalibrateError> {
    for (layer, means) in mean_keys(model)?.into_iter().enumerate() {
        for set in [&mut file.heads, &mut file.layers].into_iter().flatten() {
            if let Some(rotations) = set.get_mut(&layer).filter(|rotations| rotations.keys.means.is_none()) {
                rotations.keys.means = Some(means.clone());
            }
        }
    }
    Ok(())
}

fn mean(rows: &[f32], dim: usize) -> Vec<f32> {
    let mut sums = vec![0.0f64; dim];
    for row in rows.chunks_exact(dim) {
        sums.iter_mut().zip(row).for_each(|(sum, &x)| *sum += f64::from(x));
    }
    let count = (rows.len() / dim).max(1) as f64;
    sums.into_iter().map(|sum| (sum / count) as f32).collect()
}
