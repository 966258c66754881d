//! Whether rotations belong to the metrics stored beside them.

use oscar_codec::{Composition, SquareMatrix};
use rayon::prelude::*;

use super::{Findings, Severity, largest, layer_list};
use crate::basis::{conjugate, eigenbasis};
use crate::rotation::{RotationHeader, RotationSet, Scope, SideRotations};

/// Mixing between eigen-directions, relative to how far a metric is from a multiple of the identity: 0 for
/// its own eigenvectors, about 1 for unrelated ones.
const MIXING_LIMIT: f64 = 0.1;

/// Keys and C_Q belong together: inside the composition, a key rotation holds the eigenvectors of its metric.
/// Values were fitted to something else, so a file with its sides swapped shows.
///
/// C_Q of a layer is the mean of those of its heads, so `heads` serve rotations of layers without their own.
pub(super) fn check(
    findings: &mut Findings,
    scope: Scope,
    set: &RotationSet,
    heads: Option<&RotationSet>,
    header: &RotationHeader,
) {
    let place = |layers: &[usize]| format!("keys per {scope}, {}", layer_list(layers));
    let negative = |side: &SideRotations| {
        side.metrics.iter().flatten().any(|metric| metric.diagonal().iter().any(|&value| value < 0.0))
    };
    let layers: Vec<usize> = set
        .iter()
        .filter(|(_, both)| both.sides().iter().any(|(_, side)| negative(side)))
        .map(|(&layer, _)| layer)
        .collect();
    if !layers.is_empty() {
        let message = "a metric has a negative diagonal, which no sum of squares has";
        findings.add(Severity::Error, format!("{scope} rotations, {}", layer_list(&layers)), message);
    }
    let basis_known = header.composition.is_some_and(|c| !matches!(c, Composition::Pbr | Composition::HPbr));
    let composition = match header.composition {
        Some(composition) if basis_known && header.key_objective == "qqt" => composition,
        _ => {
            let reason = "only rotations fitted to queries (qqt) are eigenvectors of C_Q";
            findings.not_checked.push(format!("{scope} rotations of keys against their metric: {reason}"));
            return;
        }
    };
    let verdicts: Vec<(usize, Option<MetricMatch>)> = set
        .par_iter()
        .map(|(&layer, both)| {
            let of_heads = || mean(heads?.get(&layer)?.keys.metrics.as_ref()?).map(|metric| vec![metric]);
            let metrics = match scope {
                Scope::Layer => both.keys.metrics.clone().or_else(of_heads),
                Scope::Head => both.keys.metrics.clone(),
            };
            (layer, metrics.and_then(|metrics| verdict(composition, &metrics, &both.keys, &both.values)))
        })
        .collect();
    let layers_with = |wanted: Option<MetricMatch>| -> Vec<usize> {
        verdicts.iter().filter(|(_, verdict)| *verdict == wanted).map(|(layer, _)| *layer).collect()
    };
    let (swapped, foreign) =
        (layers_with(Some(MetricMatch::Swapped)), layers_with(Some(MetricMatch::Foreign)));
    let (scaled, unknown) = (layers_with(Some(MetricMatch::OtherEigenvalues)), layers_with(None));
    if !swapped.is_empty() {
        let message = "keys and values are swapped: the value rotations fit the metric of keys, the key rotations do not";
        findings.add(Severity::Error, place(&swapped), message);
    }
    if !foreign.is_empty() {
        let message =
            "rotations do not belong to their metric C_Q: they come from another model, layer or side";
        findings.add(Severity::Error, place(&foreign), message);
    }
    if !scaled.is_empty() {
        findings.add(Severity::Error, place(&scaled), "eigenvalues are not those of the metric C_Q");
    }
    if !unknown.is_empty() {
        let reason = "the file has no metric, or one that prefers no direction";
        findings.not_checked.push(format!("{} against their metric: {reason}", place(&unknown)));
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum MetricMatch {
    Fits,
    OtherEigenvalues,
    Swapped,
    Foreign,
}

/// The worst of the heads of a layer; `None` if there is nothing to compare with.
fn verdict(
    composition: Composition,
    metrics: &[SquareMatrix],
    keys: &SideRotations,
    values: &SideRotations,
) -> Option<MetricMatch> {
    let mut worst: Option<MetricMatch> = None;
    for (head, metric) in metrics.iter().enumerate() {
        let fits = |rotation: Option<&SquareMatrix>, metric: Option<&SquareMatrix>| {
            Some(mixing(composition, rotation?, metric?)? <= MIXING_LIMIT)
        };
        let Some(own) = fits(keys.rotations.get(head), Some(metric)) else { continue };
        let other = values.rotations.get(head);
        // The sides may have changed places with their metrics or without them.
        let value_metric = values.metrics.as_ref().and_then(|metrics| metrics.get(head));
        let found = if own {
            let basis = eigenbasis(composition, keys.rotations.get(head)?)?;
            let close = keys.eigenvalues.get(head).is_none_or(|values| {
                let slack = 1e-2 * largest(values).max(f64::MIN_POSITIVE);
                let measured = conjugate(&basis, metric).diagonal();
                measured.iter().zip(values).all(|(a, b)| (a - b).abs() <= slack)
            });
            if close { MetricMatch::Fits } else { MetricMatch::OtherEigenvalues }
        } else if fits(other, Some(metric)) == Some(true) || fits(other, value_metric) == Some(true) {
            MetricMatch::Swapped
        } else {
            MetricMatch::Foreign
        };
        worst = worst.filter(|worst| *worst as u8 >= found as u8).or(Some(found));
    }
    worst
}

fn mean(matrices: &[SquareMatrix]) -> Option<SquareMatrix> {
    let dim = matrices.first()?.dim();
    let count = matrices.len() as f64;
    Some(SquareMatrix::from_fn(dim, |i, j| {
        matrices.iter().map(|matrix| matrix.get(i, j)).sum::<f64>() / count
    }))
}

/// How far `rotation` is from holding the eigenvectors of `metric`; `None` if the metric prefers no
/// direction.
fn mixing(composition: Composition, rotation: &SquareMatrix, metric: &SquareMatrix) -> Option<f64> {
    let rotated = conjugate(&eigenbasis(composition, rotation)?, metric);
    let level = metric.trace() / metric.dim() as f64;
    let (mut off, mut total) = (0.0, 0.0);
    for i in 0..metric.dim() {
        for j in 0..metric.dim() {
            let value = rotated.get(i, j) - if i == j { level } else { 0.0 };
            total += value * value;
            off += if i == j { 0.0 } else { value * value };
        }
    }
    let scale = metric.dim() as f64 * level * level;
    (total > 1e-8 * scale && total.is_finite()).then(|| (off / total).sqrt())
}
