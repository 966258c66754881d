//! A whole calibration, one layer after the other.

use std::collections::BTreeMap;
use std::ops::ControlFlow;

use oscar_codec::{
    BandLayout, CodecError, Composition, HeadTransform, PageLayout, Rule, SquareMatrix, Windows,
};
use oscar_kernels::Inspect;
use oscar_kernels::cpu::isa::Isa;
use oscar_model::LoadedModel;
use oscar_rotations::PAPER_RULES;
use oscar_rotations::certificate::{Certificate, HeadCertificate, SpectrumShares, judge, mean_of, worst};
use oscar_rotations::rotation::{LayerRotations, RotationFile, RotationHeader, SideRotations};
use rayon::prelude::*;

use super::CalibrateError;
use super::bands;
use super::checkpoint::Checkpoint;
use super::corpus::Corpus;
use super::fit::{mean, rotation};
use super::moments::{HeadCounts, HeadMoments, ObservedRows};
use super::observe::Observer;
use super::select::{CANDIDATES, HeldOut, HeldOutQuery, KeyCodes, RuleTrial};

/// Held-out queries per query head.
const QUERIES: usize = 64;

/// Tokens a held-out sequence must have behind its windows for errors to mean anything.
const LEAST_HISTORY: usize = 64;

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

/// Rotations and certificates of the layers so far.
#[derive(Clone, Debug, PartialEq)]
pub struct CalibrationState {
    /// The rotation file with the layers so far.
    pub file: RotationFile,
    /// The certificates of the heads so far.
    pub heads: Vec<HeadCertificate>,
}

impl CalibrationState {
    fn new(calibration: &Calibration, corpus: &Corpus) -> CalibrationState {
        let header = RotationHeader {
            tokens: corpus.tokens(),
            corpus: Some(corpus.hash.clone()),
            key_objective: "qqt".into(),
            value_objective: calibration.value_target.name().into(),
            layer_value_objective: Some(ValueTarget::Proxy.name().into()),
            composition: Some(calibration.composition),
            ..calibration.header.clone()
        };
        let sets = || Some(BTreeMap::new());
        let file = RotationFile { header, heads: sets(), layers: sets(), widths: BTreeMap::new() };
        CalibrationState { file, heads: Vec::new() }
    }

    fn push(&mut self, layer: usize, fitted: FittedLayer) {
        self.file.heads.get_or_insert_default().insert(layer, fitted.per_head);
        self.file.layers.get_or_insert_default().insert(layer, fitted.per_layer);
        self.heads.extend(fitted.certificates);
    }

    fn finish(self, calibration: &Calibration, corpus: &Corpus) -> (RotationFile, Certificate) {
        let head_dim = self.file.header.head_dim;
        let (verdict, reason) = judge(&self.heads, None);
        let certificate = Certificate {
            model: self.file.header.model.clone(),
            format: "int2".into(),
            bits_per_element: PageLayout::banded(head_dim)
                .or(PageLayout::int2(head_dim, 1))
                .map_or(0.0, |layout| layout.bits_per_element()),
            tokens: corpus.tokens(),
            held_out_tokens: corpus.held_out.len(),
            sink: calibration.windows.sink,
            recent: calibration.windows.recent,
            verdict,
            reason,
            mean_output_error: mean_of(&self.heads, |head| head.output_error),
            mean_paper_output_error: mean_of(&self.heads, |head| head.paper_output_error),
            worst: worst(&self.heads),
            probe: None,
            heads: self.heads,
        };
        (self.file, certificate)
    }
}

/// Moments of all heads of a layer and what the held-out sequence computed there.
pub struct ObservedLayer {
    /// The moments of each KV head.
    pub moments: Vec<HeadMoments>,
    /// Keys and values of the held-out sequence, per KV head.
    held_out: Vec<(Vec<f32>, Vec<f32>)>,
    /// Some of its queries, per KV head: for choosing rules, and for certifying the choice.
    queries: Vec<(Vec<HeldOutQuery>, Vec<HeldOutQuery>)>,
    heads: HeadCounts,
}

/// Runs one layer and sums its moments. The last sequence of the observer is the held-out one.
pub fn observe_layer<B: Inspect>(
    observer: &mut Observer<'_, B>,
    layer: usize,
    corpus: &Corpus,
) -> Result<ObservedLayer, CalibrateError> {
    let heads = observer.heads();
    let held_out = corpus.sequences.len();
    let mut moments: Vec<HeadMoments> = (0..heads.kv).map(|_| HeadMoments::new(heads.dim)).collect();
    // Keys and values of each sequence and head.
    let mut stored: Vec<Vec<(Vec<f32>, Vec<f32>)>> = Vec::new();
    let mut queries = Vec::new();
    observer.run_layer(layer, |index, rows| {
        stored.push((0..heads.kv).into_par_iter().map(|head| rows.stored(head)).collect());
        if index < held_out {
            moments.par_iter_mut().enumerate().for_each(|(head, moments)| moments.add(&rows, head));
        } else {
            queries = (0..heads.kv).into_par_iter().map(|head| held_out_queries(&rows, head)).collect();
        }
    })?;
    let held_out = stored.pop().unwrap_or_default();
    moments.par_iter_mut().enumerate().for_each(|(head, moments)| {
        let sequences = || stored.iter().map(|heads| &heads[head]);
        sequences().for_each(|(keys, _)| moments.add_weighted_keys(keys));
        let keys: Vec<f32> = sequences().flat_map(|(keys, _)| keys.iter().copied()).collect();
        let values: Vec<f32> = sequences().flat_map(|(_, values)| values.iter().copied()).collect();
        moments.add_weighted_values(&keys, &values);
    });
    Ok(ObservedLayer { moments, held_out, queries, heads })
}

/// Queries spread over the second half of a sequence, for every member of the group, dealt out to two sets in turn.
fn held_out_queries(rows: &ObservedRows<'_>, head: usize) -> (Vec<HeldOutQuery>, Vec<HeldOutQuery>) {
    let group = rows.heads.group();
    let (mut even, mut odd) = (Vec::new(), Vec::new());
    for member in 0..group {
        let all: Vec<&[f32]> = rows.queries(head * group + member).collect();
        let first = all.len() / 2;
        let step = (all.len() - first).div_ceil(QUERIES).max(1);
        for (index, position) in (first..all.len()).step_by(step).enumerate() {
            let query = HeldOutQuery { position, member, row: all[position].to_vec() };
            if index % 2 == 0 { even.push(query) } else { odd.push(query) }
        }
    }
    (even, odd)
}

/// W_oᵀW_o of each query head's slice of the output projection.
fn output_metrics<B: Inspect>(
    model: &LoadedModel<B>,
    layer: usize,
) -> Result<Vec<SquareMatrix>, CalibrateError> {
    let config = model.config();
    let (dim, heads) = (config.head_dim, config.q_heads);
    let rows = model.model().backend().dequantise(&model.model().layer(layer).output.weight)?;
    let metrics = (0..heads)
        .into_par_iter()
        .map(|head| {
            let mut sum = vec![0.0; dim * dim];
            for row in rows.chunks_exact(heads * dim) {
                let slice = &row[head * dim..(head + 1) * dim];
                for (i, &a) in slice.iter().enumerate() {
                    let target = &mut sum[i * dim..(i + 1) * dim];
                    target.iter_mut().zip(slice).for_each(|(sum, &b)| *sum += f64::from(a) * f64::from(b));
                }
            }
            SquareMatrix::new(dim, sum).expect("dim · dim values")
        })
        .collect();
    Ok(metrics)
}

struct FittedLayer {
    per_head: LayerRotations,
    per_layer: LayerRotations,
    certificates: Vec<HeadCertificate>,
}

/// How the values of a head are encoded, and the rule that its keys would have without bands.
struct ChosenValues {
    transform: HeadTransform,
    key_rule: Rule,
    value_rule: Rule,
    error: f64,
}

/// One head's part of a [`FittedLayer`].
struct FittedHead {
    keys: (SquareMatrix, Vec<f64>),
    bands: Option<SquareMatrix>,
    values: (SquareMatrix, Vec<f64>),
    key_rule: Rule,
    value_rule: Rule,
    key_mean: Vec<f32>,
    value_mean: Vec<f32>,
    key_metric: SquareMatrix,
    value_metric: SquareMatrix,
    certificate: HeadCertificate,
}

fn fit_layer<B: Inspect>(
    model: &LoadedModel<B>,
    observed: &ObservedLayer,
    metrics: &[SquareMatrix],
    layer: usize,
    calibration: &Calibration,
) -> Result<FittedLayer, CalibrateError> {
    let (moments, heads, composition) = (&observed.moments, observed.heads, calibration.composition);
    let key_targets: Vec<SquareMatrix> = moments.iter().map(|head| head.queries.mean()).collect();
    let proxies: Vec<SquareMatrix> = moments.iter().map(|head| head.weighted_values.mean()).collect();
    let shared_keys = rotation(&mean(&key_targets), composition)?;
    let shared_values = rotation(&mean(&proxies), composition)?;
    let attention = &model.model().layer(layer).attention;
    let sinks = attention.sinks.as_ref().map(|sinks| model.model().backend().dequantise(sinks));
    let (scale, sinks) = (attention.scale, sinks.transpose()?.unwrap_or_default());

    let fit_head = |head: usize| -> Result<FittedHead, CalibrateError> {
        let own = &moments[head];
        let keys = rotation(&key_targets[head], composition)?;
        let values = match calibration.value_target {
            ValueTarget::Attention => rotation(&own.attended.mean(), composition)?,
            ValueTarget::Proxy => rotation(&proxies[head], composition)?,
        };
        let members = &metrics[head * heads.group()..(head + 1) * heads.group()];
        let (held_keys, held_values) = &observed.held_out[head];
        let (choosing, certifying) = &observed.queries[head];
        let held_out = |queries| HeldOut {
            keys: held_keys,
            values: held_values,
            queries,
            output_metrics: members,
            scale,
            sinks: sinks.chunks(heads.group()).nth(head).unwrap_or_default(),
            windows: calibration.windows,
        };
        // Rules are chosen with some queries and judged by others.
        let (choosing, certifying) = (held_out(choosing), held_out(certifying));
        let failed = |source| CalibrateError::Head { layer, head, source };
        // Codes are tried on the host, whatever the model runs on.
        let isa = Isa::detect();
        let key_mean = own.key_mean();
        let key_transform = HeadTransform::new(Some(key_mean.clone()), &keys.0).map_err(failed)?;
        let try_values = |value_mean: Vec<f32>| -> Result<ChosenValues, CodecError> {
            let transform = HeadTransform::new(Some(value_mean), &values.0)?;
            let trial = RuleTrial::new(isa, &choosing, &key_transform, &transform)?;
            let (key_rule, value_rule) = trial.choose(&CANDIDATES)?;
            let error = trial.value_error(value_rule)?;
            Ok(ChosenValues { transform, key_rule, value_rule, error })
        };
        // A head that looks at a token without a value, as many do, is better off when that stays zero.
        let (centred, plain) =
            rayon::join(|| try_values(own.value_mean()), || try_values(vec![0.0; heads.dim]));
        let (centred, plain) = (centred.map_err(failed)?, plain.map_err(failed)?);
        let chosen = if centred.error < plain.error { centred } else { plain };
        // Heads whose size has no bands keep scalar codes.
        let (bands, served_transform, codes) = match BandLayout::int2(heads.dim) {
            Ok(_) => {
                let (bands, transform) = bands::choose(isa, &choosing, own, &chosen.transform, failed)?;
                (Some(bands), transform, KeyCodes::Bands)
            }
            Err(_) => (None, key_transform, KeyCodes::Scalar(chosen.key_rule)),
        };
        let choice = RuleTrial::new(isa, &certifying, &served_transform, &chosen.transform)
            .and_then(|trial| trial.measure(codes, chosen.value_rule))
            .map_err(failed)?;
        let paper_keys = HeadTransform::published(&shared_keys.0).map_err(failed)?;
        let paper_values = HeadTransform::published(&shared_values.0).map_err(failed)?;
        let paper = RuleTrial::new(isa, &certifying, &paper_keys, &paper_values)
            .and_then(|trial| trial.measure(KeyCodes::Scalar(PAPER_RULES.0), PAPER_RULES.1))
            .map_err(failed)?;
        let (key_shares, value_shares) = (SpectrumShares::of(&keys.1), SpectrumShares::of(&values.1));
        let mean_energy: f64 = key_mean.iter().map(|&x| f64::from(x).powi(2)).sum();
        let certificate = HeadCertificate {
            layer,
            head,
            key_rule: choice.key.to_string(),
            value_rule: choice.value.to_string(),
            logit_error: choice.logit_error,
            key_error: choice.key_error,
            value_error: choice.value_error,
            output_error: choice.output_error,
            paper_output_error: paper.output_error,
            key_top1_share: key_shares.top1,
            key_top8_share: key_shares.top8,
            key_effective_rank: key_shares.effective_rank,
            value_top1_share: value_shares.top1,
            value_top8_share: value_shares.top8,
            value_effective_rank: value_shares.effective_rank,
            key_mean_share: mean_energy / own.keys.mean().trace().max(f64::MIN_POSITIVE),
        };
        Ok(FittedHead {
            keys,
            bands,
            values,
            key_rule: chosen.key_rule,
            value_rule: choice.value,
            key_mean,
            value_mean: chosen.transform.mean().unwrap_or_default().to_vec(),
            key_metric: key_targets[head].clone(),
            value_metric: sum(members),
            certificate,
        })
    };
    let fitted: Vec<FittedHead> = (0..heads.kv).into_par_iter().map(fit_head).collect::<Result<_, _>>()?;

    let key_means: Vec<Vec<f32>> = fitted.iter().map(|head| head.key_mean.clone()).collect();
    let value_means: Vec<Vec<f32>> = fitted.iter().map(|head| head.value_mean.clone()).collect();
    let per_layer = LayerRotations {
        keys: SideRotations {
            rotations: vec![shared_keys.0],
            eigenvalues: vec![shared_keys.1],
            means: Some(key_means.clone()),
            metrics: None,
            bands: None,
            rules: vec![PAPER_RULES.0],
        },
        values: SideRotations {
            rotations: vec![shared_values.0],
            eigenvalues: vec![shared_values.1],
            means: Some(value_means.clone()),
            metrics: None,
            bands: None,
            rules: vec![PAPER_RULES.1],
        },
    };
    let mut keys = SideRotations {
        rotations: Vec::new(),
        eigenvalues: Vec::new(),
        means: Some(key_means),
        metrics: Some(Vec::new()),
        bands: None,
        rules: Vec::new(),
    };
    let mut values = SideRotations { means: Some(value_means), ..keys.clone() };
    let mut certificates = Vec::new();
    keys.bands = fitted.iter().map(|head| head.bands.clone()).collect();
    for head in fitted {
        push(&mut keys, head.keys, head.key_metric, head.key_rule);
        push(&mut values, head.values, head.value_metric, head.value_rule);
        certificates.push(head.certificate);
    }
    Ok(FittedLayer { per_head: LayerRotations { keys, values }, per_layer, certificates })
}

/// Adds the rotation of one more head.
fn push(
    side: &mut SideRotations,
    (rotation, eigenvalues): (SquareMatrix, Vec<f64>),
    metric: SquareMatrix,
    rule: Rule,
) {
    side.rotations.push(rotation);
    side.eigenvalues.push(eigenvalues);
    side.metrics.get_or_insert_default().push(metric);
    side.rules.push(rule);
}

fn sum(matrices: &[SquareMatrix]) -> SquareMatrix {
    let mean = mean(matrices);
    let values = mean.values().iter().map(|value| value * matrices.len() as f64).collect();
    SquareMatrix::new(mean.dim(), values).expect("dim · dim values")
}
