//! Whether the bands of keys, which `int2` stores by default, can be used as they are.

use oscar_codec::{BandLayout, KeyWidths, SquareMatrix};
use rayon::prelude::*;

use super::{Findings, Severity, layer_list};
use crate::basis::conjugate;
use crate::rotation::{RotationFile, SideRotations};

/// Largest condition of a matrix of bands, as [`condition`] counts it. Rows are transformed in f32, whose roundings are 6e-8:
/// beyond this they are all that is left of the weakest directions. Those of real models stay below a thousand.
const CONDITION_LIMIT: f64 = 1e7;

/// Least strength of a band over that of any band after it. Calibration ranks directions by what they are worth on held-out
/// text and not by strength alone, so bands of like strength may be in either order.
const FALL_LIMIT: f64 = 0.5;

/// Checks what the default cache is made of: bands, and the bits that they have in each layer.
pub(super) fn check(findings: &mut Findings, file: &RotationFile) {
    let place = |layers: &[usize]| format!("bands of keys, {}", layer_list(layers));
    let Some(heads) = &file.heads else {
        return check_widths(findings, file, false);
    };
    let (with, without): (Vec<_>, Vec<_>) = heads.iter().partition(|(_, layer)| layer.keys.bands.is_some());
    check_widths(findings, file, !with.is_empty());
    if with.is_empty() {
        let message = "there are none: `int2` has scalar codes; `oscar calibrate` makes bands";
        return findings.add(Severity::Note, "bands of keys", message);
    }
    if !without.is_empty() {
        let layers: Vec<usize> = without.iter().map(|(layer, _)| **layer).collect();
        let message = "missing, though other layers have them: `int2` would have scalar codes in all layers";
        findings.add(Severity::Error, place(&layers), message);
    }
    let layout = match BandLayout::int2(file.header.head_dim) {
        Ok(layout) => layout,
        Err(error) => return findings.add(Severity::Error, "bands of keys", error.to_string()),
    };
    let judged: Vec<(usize, LayerBands)> =
        with.par_iter().map(|(layer, both)| (**layer, LayerBands::of(&both.keys, &layout))).collect();
    let layers_where = |test: &dyn Fn(&LayerBands) -> bool| -> Vec<usize> {
        judged.iter().filter(|(_, bands)| test(bands)).map(|(layer, _)| *layer).collect()
    };
    let singular = layers_where(&|bands| bands.condition.is_none());
    if !singular.is_empty() {
        let message = "a matrix has no inverse, so queries cannot be made for its keys";
        findings.add(Severity::Error, place(&singular), message);
    }
    let bad = |condition: f64| condition.is_nan() || condition > CONDITION_LIMIT;
    let ill = layers_where(&|bands| bands.condition.is_some_and(bad));
    if !ill.is_empty() {
        let worst = judged.iter().filter_map(|(_, bands)| bands.condition).fold(0.0, f64::max);
        let message = format!(
            "a matrix can hardly be inverted: its condition is {worst:.0e}, at most {CONDITION_LIMIT:.0e}"
        );
        findings.add(Severity::Error, place(&ill), message);
    }
    let rising = layers_where(&|bands| bands.fall.is_some_and(|fall| fall < FALL_LIMIT));
    if !rising.is_empty() {
        let message =
            "a band is weaker than one that has fewer bits: channels are not in the order of their strength";
        findings.add(Severity::Warning, place(&rising), message);
    }
    let unknown = layers_where(&|bands| bands.condition.is_some() && bands.fall.is_none());
    if !unknown.is_empty() {
        findings.not_checked.push(format!("strength of {}: the file has no metric", place(&unknown)));
    }
}

/// The bits of bands in each layer, and that they are no more than the default's on average.
fn check_widths(findings: &mut Findings, file: &RotationFile, has_bands: bool) {
    let PlannedWidths { unknown, unfit, excess } = PlannedWidths::of(file);
    let place = |layers: &[usize]| format!("bits of keys, {}", layer_list(layers));
    if !unknown.is_empty() {
        findings.add(Severity::Error, place(&unknown), "the file has no rotations for these layers");
    }
    if !unfit.is_empty() {
        let message = format!("heads of {} channels cannot have these bits", file.header.head_dim);
        findings.add(Severity::Error, place(&unfit), message);
    }
    if !file.widths.is_empty() && !has_bands {
        findings.add(Severity::Warning, "bits of keys", "of no use: there are no bands that could have them");
    }
    if let Some(average) = excess {
        let message = format!(
            "{average:.3} bits a channel on average, {} with {} in every layer: the cache is larger than `int2` says",
            bits(KeyWidths::default()),
            KeyWidths::default()
        );
        findings.add(Severity::Warning, "bits of keys", message);
    }
}

/// What is wrong with the bits of layers.
struct PlannedWidths {
    /// Layers that the file does not have.
    unknown: Vec<usize>,
    /// Layers whose heads cannot have their bits.
    unfit: Vec<usize>,
    /// Bits of a channel on average, if that is more than the default's.
    excess: Option<f64>,
}

impl PlannedWidths {
    fn of(file: &RotationFile) -> PlannedWidths {
        let layers: Vec<usize> = file.heads.iter().flat_map(|set| set.keys().copied()).collect();
        let where_not = |test: &dyn Fn(usize, KeyWidths) -> bool| -> Vec<usize> {
            let failing = file.widths.iter().filter(|(layer, widths)| !test(**layer, **widths));
            failing.map(|(&layer, _)| layer).collect()
        };
        let of_layer = |layer: &usize| bits(file.widths.get(layer).copied().unwrap_or_default());
        let average = layers.iter().map(of_layer).sum::<f64>() / layers.len().max(1) as f64;
        PlannedWidths {
            unknown: where_not(&|layer, _| layers.contains(&layer)),
            unfit: where_not(&|_, widths| {
                KeyWidths::menu(file.header.head_dim).any(|possible| possible == widths)
            }),
            excess: Some(average).filter(|average| *average > bits(KeyWidths::default())),
        }
    }
}

/// Bits of one channel on average.
fn bits(widths: KeyWidths) -> f64 {
    f64::from(widths.sum()) / widths.quarters().len() as f64
}

/// What is known of the bands of a layer: the worst of its heads.
struct LayerBands {
    /// The largest condition; `None` if a matrix has no inverse.
    condition: Option<f64>,
    /// The least strength of a band over that of a later one; `None` without metrics.
    fall: Option<f64>,
}

impl LayerBands {
    fn of(keys: &SideRotations, layout: &BandLayout) -> LayerBands {
        let mut worst = LayerBands { condition: Some(1.0), fall: None };
        let metrics = keys.metrics.as_deref().unwrap_or_default();
        for (head, matrix) in keys.bands.iter().flatten().enumerate() {
            let Some(inverse) = matrix.inverse() else {
                return LayerBands { condition: None, ..worst };
            };
            let own = condition(matrix, &inverse);
            worst.condition = worst.condition.map(|other| if own.is_nan() { own } else { other.max(own) });
            if let Some(metric) = metrics.get(head) {
                let own = fall(&inverse, metric, layout);
                worst.fall = Some(worst.fall.map_or(own, |other| other.min(own)));
            }
        }
        worst
    }
}

/// How far a matrix is from a multiple of a rotation, which has 1: the lengths of the matrix and its inverse, multiplied.
fn condition(matrix: &SquareMatrix, inverse: &SquareMatrix) -> f64 {
    let length =
        |matrix: &SquareMatrix| matrix.values().iter().map(|value| value * value).sum::<f64>().sqrt();
    length(matrix) * length(inverse) / matrix.dim() as f64
}

/// The least strength of a band over that of any band after it. Keys have unit strength in every band, so what a channel adds
/// to logits is the strength of the queries that meet it, whose second moment is `metric`.
fn fall(inverse: &SquareMatrix, metric: &SquareMatrix, layout: &BandLayout) -> f64 {
    let met = conjugate(&inverse.transpose(), metric).diagonal();
    let strengths = layout.bands().iter().map(|band| {
        let channels = &met[band.range()];
        channels.iter().sum::<f64>() / channels.len() as f64
    });
    let (mut least, mut weakest_before) = (f64::INFINITY, f64::INFINITY);
    for strength in strengths {
        least = least.min(weakest_before / strength);
        weakest_before = weakest_before.min(strength);
    }
    least
}
