//! A whole calibration, one layer after the other.

use std::ops::ControlFlow;

use oscar_codec::Windows;
use oscar_kernels::Inspect;
use oscar_model::LoadedModel;
use oscar_rotations::certificate::Certificate;
use oscar_rotations::rotation::RotationFile;

use super::CalibrateError;
use super::checkpoint::Checkpoint;
use super::corpus::Corpus;
use super::layer::{fit_layer, output_metrics};
use super::observe::Observer;
use super::observed::observe_layer;
use super::settings::Calibration;
use super::state::CalibrationState;

/// Tokens a held-out sequence must have behind its windows for errors to mean anything.
const LEAST_HISTORY: usize = 64;

/// Calibrates a model on a corpus. Key channels of the result are in the order of the model's own file.
///
/// `progress` gets the number of layers that are done and may break off; with a checkpoint the work so far is kept.
pub fn calibrate<B: Inspect>(
    model: &LoadedModel<B>,
    corpus: &Corpus,
    calibration: &Calibration,
    checkpoint: Option<&Checkpoint>,
    mut progress: impl FnMut(usize) -> ControlFlow<()>,
) -> Result<(RotationFile, Certificate), CalibrateError> {
    let Windows { sink, recent } = calibration.windows;
    let needed = sink.saturating_add(recent).saturating_add(LEAST_HISTORY);
    if corpus.held_out.len() < needed {
        return Err(CalibrateError::NoHistory { tokens: corpus.held_out.len(), needed });
    }
    let sequences: Vec<&[u32]> =
        corpus.sequences.iter().chain([&corpus.held_out]).map(Vec::as_slice).collect();
    let mut observer = Observer::new(model, &sequences)?;
    let mut state = CalibrationState::new(calibration, corpus);
    let mut first = 0;
    if let Some(checkpoint) = checkpoint {
        first = checkpoint.resume(&mut state, &mut observer)?;
    }
    let layers = model.config().layers;
    for layer in first..layers {
        if progress(layer).is_break() {
            if let Some(checkpoint) = checkpoint.filter(|_| layer > first && !state.heads.is_empty()) {
                checkpoint.save_now(&state, &observer, layer)?;
            }
            return Err(CalibrateError::Interrupted);
        }
        // A layer with a window keeps no history, so there is nothing to fit.
        if model.config().window(layer).is_some() {
            observer.run_layer(layer, |_, _| ())?;
            continue;
        }
        let observed = observe_layer(&mut observer, layer, corpus)?;
        let metrics = output_metrics(model, layer)?;
        let fitted = fit_layer(model, &observed, &metrics, layer, calibration)?;
        state.push(layer, fitted);
        if let Some(checkpoint) = checkpoint.filter(|_| layer + 1 < layers) {
            checkpoint.save(&state, &observer, layer + 1)?;
        }
    }
    let _ = progress(layers);
    Ok(state.finish(calibration, corpus))
}
