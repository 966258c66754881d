//! Fits the rotations of one layer, chooses how each of its heads is rounded, and certifies the choice.

use oscar_codec::{BandLayout, CodecError, HeadTransform, Rule, SquareMatrix};
use oscar_kernels::Inspect;
use oscar_kernels::cpu::isa::Isa;
use oscar_model::LoadedModel;
use oscar_rotations::PAPER_RULES;
use oscar_rotations::certificate::{HeadCertificate, SpectrumShares};
use oscar_rotations::rotation::{LayerRotations, SideRotations};
use rayon::prelude::*;

use super::CalibrateError;
use super::bands;
use super::fit::{mean, rotation};
use super::observed::ObservedLayer;
use super::select::{CANDIDATES, HeldOut, KeyCodes, RuleTrial};
use super::settings::{Calibration, ValueTarget};

/// W_oᵀW_o of each query head's slice of the output projection.
pub(super) fn output_metrics<B: Inspect>(
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

/// What calibration makes of one layer.
pub(super) struct FittedLayer {
    pub(super) per_head: LayerRotations,
    pub(super) per_layer: LayerRotations,
    pub(super) certificates: Vec<HeadCertificate>,
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
    unturned_mean: Vec<f32>,
    values: (SquareMatrix, Vec<f64>),
    key_rule: Rule,
    value_rule: Rule,
    key_mean: Vec<f32>,
    value_mean: Vec<f32>,
    key_metric: SquareMatrix,
    value_metric: SquareMatrix,
    certificate: HeadCertificate,
}

/// Fits the rotations of a layer to what was observed there.
pub(super) fn fit_layer<B: Inspect>(
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
            first: observed.first_held_out,
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
        let bands = match BandLayout::int2(heads.dim) {
            Ok(_) => Some(bands::choose(isa, &choosing, own, &chosen.transform, failed)?),
            Err(_) => None,
        };
        let (served_transform, page_means, codes) = match &bands {
            Some(served) => (&served.transform, Some(&served.page_means), KeyCodes::Bands),
            None => (&key_transform, None, KeyCodes::Scalar(chosen.key_rule)),
        };
        let choice = RuleTrial::new(isa, &certifying, served_transform, &chosen.transform)
            .map(|trial| trial.with_page_means(page_means))
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
            bands: bands.map(|chosen| chosen.bands),
            unturned_mean: own.unturned_key_mean(),
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
            unturned_means: None,
            rules: vec![PAPER_RULES.0],
        },
        values: SideRotations {
            rotations: vec![shared_values.0],
            eigenvalues: vec![shared_values.1],
            means: Some(value_means.clone()),
            metrics: None,
            bands: None,
            unturned_means: None,
            rules: vec![PAPER_RULES.1],
        },
    };
    let mut keys = SideRotations {
        rotations: Vec::new(),
        eigenvalues: Vec::new(),
        means: Some(key_means),
        metrics: Some(Vec::new()),
        bands: None,
        unturned_means: None,
        rules: Vec::new(),
    };
    let mut values = SideRotations { means: Some(value_means), ..keys.clone() };
    let mut certificates = Vec::new();
    keys.bands = fitted.iter().map(|head| head.bands.clone()).collect();
    if keys.bands.is_some() {
        keys.unturned_means = Some(fitted.iter().map(|head| head.unturned_mean.clone()).collect());
    }
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
