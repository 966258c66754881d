//! Mean keys for rotations that came without: published files carry none, and some models collapse uncentred.

use oscar_codec::{ExactSlot, PAGE_TOKENS};
use oscar_kernels::Inspect;
use oscar_kernels::backend::{Batch, SequenceRows};
use oscar_kernels::inspect::KvRows;
use oscar_model::{LoadedModel, PagedAttention};

use crate::error::RotationError;
use crate::rotation::RotationFile;

/// Tokens the means are taken over. A mean settles far sooner than a covariance.
pub const MEAN_TOKENS: usize = 1024;

/// What the model reads: generated prose, enough of it for [`MEAN_TOKENS`] tokens of any tokenizer.
pub const PROSE: &str = include_str!("means.txt");

/// The mean keys of every layer and KV head over [`PROSE`], channels in the order of the model's own file.
pub fn estimate_mean_keys<B: Inspect>(model: &LoadedModel<B>) -> Result<Vec<Vec<Vec<f32>>>, RotationError> {
    let ids = model.tokenizer().encode(PROSE, true)?;
    let tokens = ids.len().min(MEAN_TOKENS).min(model.config().max_context);
    let (model, config) = (model.model(), model.config());
    let pages = ExactSlot::first(tokens.div_ceil(PAGE_TOKENS));
    let mut cache = model.cache(pages.len() + 1)?;
    let mut activations = model.activations(tokens, 1)?;
    let rows = SequenceRows::exact(0, tokens, &pages);
    let batch = Batch { tokens: &ids[..tokens], sequences: &[rows] };
    let step = model.begin_step(&batch, &cache)?;
    model.embed(&batch, &step, &mut activations)?;
    model.run_layers(0..config.layers, &step, &mut PagedAttention(&mut cache), &mut activations)?;
    let mean_key = |layer: usize, head: usize| -> Result<Vec<f32>, RotationError> {
        let rows = KvRows { layer, head, pages: &pages };
        let (keys, _) = model.backend().read_kv(&cache, rows, 0..tokens)?;
        Ok(mean(&keys, config.head_dim))
    };
    (0..config.layers).map(|layer| (0..config.kv_heads).map(|head| mean_key(layer, head)).collect()).collect()
}

/// Fills in the mean keys of a file that has none. `file` has key channels in the order of the model's own file.
pub fn fill_mean_keys<B: Inspect>(
    model: &LoadedModel<B>,
    file: &mut RotationFile,
) -> Result<(), RotationError> {
    for (layer, means) in estimate_mean_keys(model)?.into_iter().enumerate() {
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
