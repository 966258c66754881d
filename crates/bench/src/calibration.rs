//! Calibration of some layers of a shape, so that the time for all of them can be told.

use std::ops::ControlFlow;
use std::time::Instant;

use oscar_kernels::Inspect;
use oscar_lab::calibrate::{CalibrateError, Calibration, Corpus, calibrate};
use oscar_model::LoadedModel;
use oscar_rotations::RotationHeader;
use serde::Serialize;

use crate::model::synthetic_tokens;

/// The time that a calibration takes, by layer.
#[derive(Clone, Debug, Serialize)]
pub struct CalibrationRow {
    /// Tokens that moments were summed over.
    pub tokens: usize,
    /// Layers that were calibrated.
    pub layers: usize,
    /// Time of a layer: its forward pass, moments, rotations, rules and certificate.
    pub s_per_layer: f64,
    /// How many layers the whole model has.
    pub all_layers: usize,
    /// What all layers would take.
    pub s_for_all: f64,
}

/// Calibrates a model that has some of the `all_layers` layers of a shape on `tokens` tokens.
pub fn calibration<B: Inspect>(
    model: &LoadedModel<B>,
    tokens: usize,
    all_layers: usize,
) -> Result<CalibrationRow, CalibrateError> {
    let config = model.config();
    let text = synthetic_tokens(Corpus::needed(tokens, config.max_context), config.vocab_size);
    let corpus = Corpus::of(text, tokens, config.max_context)?;
    let (kv_heads, head_dim) = (config.kv_heads, config.head_dim);
    let header = RotationHeader { kv_heads, head_dim, ..RotationHeader::default() };
    let began = Instant::now();
    calibrate(model, &corpus, &Calibration::new(header), None, |_| ControlFlow::Continue(()))?;
    let s_per_layer = began.elapsed().as_secs_f64() / config.layers.max(1) as f64;
    Ok(CalibrationRow {
        tokens: corpus.tokens(),
        layers: config.layers,
        s_per_layer,
        all_layers,
        s_for_all: s_per_layer * all_layers as f64,
    })
}
