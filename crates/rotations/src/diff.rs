//! How two rotation files differ, head by head.
//!
//! Two calibrations of one model never give the same matrices: eigenvectors have arbitrary signs, and
//! directions with nearly equal eigenvalues turn freely among themselves. What should agree is the space of
//! the directions that matter most, so that is compared, after the part of the composition that both share is
//! taken off.

use std::collections::BTreeSet;

use oscar_codec::{Composition, KeyWidths, Rule, SquareMatrix};
use rayon::prelude::*;

use super::basis::eigenbasis;
use super::rotation::{RotationFile, RotationHeader, RotationName, Scope, SideRotations};

/// Number of directions that are compared: those with the largest eigenvalues.
const TOP: usize = 8;

/// How one rotation differs from its counterpart.
#[derive(Clone, Debug, PartialEq)]
pub struct RotationDifference {
    /// The rotation that is compared.
    pub name: RotationName,
    /// Largest difference of two entries; 0 for equal matrices.
    pub rotation: f64,
    /// Share of the space of the eight most important directions that both have in common, 0 to 1; `None` if
    /// a rotation was not composed of eigenvectors.
    pub alignment: Option<f64>,
    /// Share of the spectrum, as it is spread over directions, that moved: 0 to 1.
    pub eigenvalues: Option<f64>,
    /// Distance of the means relative to the longer one. 1 if only one file has a mean.
    pub mean: Option<f64>,
    /// The largest distance of what makes bands of keys, relative to the larger one. 1 if only one file has it.
    pub bands: Option<f64>,
    /// The rules, if they differ.
    pub rules: Option<(Rule, Rule)>,
}

impl RotationDifference {
    /// Whether the two are equal in every number.
    pub fn is_none(&self) -> bool {
        let zero = |value: Option<f64>| value.is_none_or(|value| value == 0.0);
        let numbers = [self.eigenvalues, self.mean, self.bands];
        self.rotation == 0.0 && numbers.into_iter().all(zero) && self.rules.is_none()
    }
}

/// What two files have in common and what not.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RotationComparison {
    /// Fields of the header that differ: name, first file, second file.
    pub header: Vec<(&'static str, String, String)>,
    /// How the rotations differ that both files have.
    pub differences: Vec<RotationDifference>,
    /// Layers that only the first file has, by scope.
    pub only_first: Vec<(Scope, usize)>,
    /// Layers that only the second file has.
    pub only_second: Vec<(Scope, usize)>,
    /// Layers whose keys have other bits: layer, bits of the bands in the first file, in the second.
    pub widths: Vec<(usize, KeyWidths, KeyWidths)>,
}

impl RotationComparison {
    /// Whether the files are equal in every number.
    pub fn is_equal(&self) -> bool {
        self.header.is_empty()
            && self.only_first.is_empty()
            && self.only_second.is_empty()
            && self.widths.is_empty()
            && self.differences.iter().all(RotationDifference::is_none)
    }
}

/// Compares two files. Rotations of heads with different numbers of channels cannot be compared; the header
/// then says so.
pub fn diff(first: &RotationFile, second: &RotationFile) -> RotationComparison {
    let mut comparison = RotationComparison {
        header: compare_headers(&first.header, &second.header),
        widths: compare_widths(first, second),
        ..RotationComparison::default()
    };
    let same_dim = first.header.head_dim == second.header.head_dim;
    let compositions = (first.header.composition, second.header.composition);
    let mut pairs = Vec::new();
    for scope in Scope::ALL {
        let layers = |file: &RotationFile| file.set(scope).map(|set| set.keys().copied().collect::<Vec<_>>());
        let (ours, theirs) = (layers(first).unwrap_or_default(), layers(second).unwrap_or_default());
        let only = |a: &[usize], b: &[usize]| {
            a.iter().filter(|layer| !b.contains(layer)).map(|&layer| (scope, layer)).collect::<Vec<_>>()
        };
        comparison.only_first.extend(only(&ours, &theirs));
        comparison.only_second.extend(only(&theirs, &ours));
        let (Some(ours), Some(theirs)) = (first.set(scope), second.set(scope)) else { continue };
        for (&layer, a) in ours.iter().filter(|_| same_dim) {
            let Some(b) = theirs.get(&layer) else { continue };
            for ((side, a), (_, b)) in a.sides().into_iter().zip(b.sides()) {
                let heads = a.rotations.len().min(b.rotations.len());
                pairs.extend((0..heads).map(|head| (RotationName { scope, layer, side, head }, a, b)));
            }
        }
    }
    comparison.differences =
        pairs.into_par_iter().map(|(name, a, b)| compare(name, a, b, compositions)).collect();
    comparison
}

fn compare(
    name: RotationName,
    a: &SideRotations,
    b: &SideRotations,
    compositions: (Option<Composition>, Option<Composition>),
) -> RotationDifference {
    let head = name.head;
    let (first, second) = (&a.rotations[head], &b.rotations[head]);
    let entries = first.values().iter().zip(second.values()).map(|(a, b)| (a - b).abs());
    let basis = |composition: Option<Composition>, rotation| eigenbasis(composition?, rotation);
    let alignment = match (basis(compositions.0, first), basis(compositions.1, second)) {
        (Some(first), Some(second)) => Some(subspace_alignment(&first, &second)),
        _ => None,
    };
    let mean = |side: &SideRotations| match name.scope {
        Scope::Head => Some(side.means.as_ref()?.get(head)?.clone()),
        // One rotation may go with the means of several heads.
        Scope::Layer => side.means.as_ref().map(|means| means.concat()),
    };
    let rules = (a.rules.get(head).copied(), b.rules.get(head).copied());
    RotationDifference {
        name,
        rotation: entries.fold(0.0, f64::max),
        alignment,
        eigenvalues: a
            .eigenvalues
            .get(head)
            .zip(b.eigenvalues.get(head))
            .map(|(a, b)| spectrum_distance(a, b)),
        mean: optional_distance(mean(a), mean(b)),
        bands: band_distance(a, b, head),
        rules: match rules {
            (Some(a), Some(b)) if a != b => Some((a, b)),
            _ => None,
        },
    }
}

/// `‖Aᵀ B‖² / k` over the last `k` columns: 1 if they span the same space, about `k/d` if unrelated.
fn subspace_alignment(a: &SquareMatrix, b: &SquareMatrix) -> f64 {
    let dim = a.dim();
    let top = TOP.min(dim);
    let mut sum = 0.0;
    for i in dim - top..dim {
        for j in dim - top..dim {
            let cosine: f64 = (0..dim).map(|row| a.get(row, i) * b.get(row, j)).sum();
            sum += cosine * cosine;
        }
    }
    sum / top as f64
}

/// Half the sum of the differences of two spectra, each scaled to sum to 1.
fn spectrum_distance(a: &[f64], b: &[f64]) -> f64 {
    let total = |values: &[f64]| values.iter().sum::<f64>().max(f64::MIN_POSITIVE);
    let (ours, theirs) = (total(a), total(b));
    a.iter().zip(b).map(|(a, b)| (a / ours - b / theirs).abs()).sum::<f64>() / 2.0
}

fn relative_distance(a: &[f32], b: &[f32]) -> f64 {
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|value| value * value).sum::<f64>().sqrt();
    let length = |values: &[f32]| norm(&mut values.iter().map(|&value| f64::from(value)));
    let distance = norm(&mut a.iter().zip(b).map(|(&a, &b)| f64::from(a) - f64::from(b)));
    if distance == 0.0 { 0.0 } else { distance / length(a).max(length(b)) }
}

/// The distance of two lists of numbers that files may have; 1 if only one of them has it.
fn optional_distance(a: Option<Vec<f32>>, b: Option<Vec<f32>>) -> Option<f64> {
    match (a, b) {
        (None, None) => None,
        (Some(a), Some(b)) if a.len() == b.len() => Some(relative_distance(&a, &b)),
        _ => Some(1.0),
    }
}

/// The largest distance of what makes bands of the keys of a head.
fn band_distance(a: &SideRotations, b: &SideRotations, head: usize) -> Option<f64> {
    let bands = |side: &SideRotations| Some(side.bands.as_ref()?.get(head)?.to_f32());
    let unturned = |side: &SideRotations| side.unturned_means.as_ref()?.get(head).cloned();
    let distances = [optional_distance(bands(a), bands(b)), optional_distance(unturned(a), unturned(b))];
    distances.into_iter().flatten().reduce(f64::max)
}

/// A layer that a file says nothing about has the default.
fn compare_widths(first: &RotationFile, second: &RotationFile) -> Vec<(usize, KeyWidths, KeyWidths)> {
    let layers: BTreeSet<usize> = first.widths.keys().chain(second.widths.keys()).copied().collect();
    let of = |file: &RotationFile, layer| file.widths.get(&layer).copied().unwrap_or_default();
    let pairs = layers.into_iter().map(|layer| (layer, of(first, layer), of(second, layer)));
    pairs.filter(|(_, first, second)| first != second).collect()
}

fn compare_headers(a: &RotationHeader, b: &RotationHeader) -> Vec<(&'static str, String, String)> {
    let text = |value: &Option<String>| value.clone().unwrap_or_else(|| "-".to_owned());
    let fields = |header: &RotationHeader| {
        [
            ("version", header.version.to_string()),
            ("model", header.model.clone()),
            ("model fingerprint", text(&header.model_fingerprint)),
            ("weight fingerprint", text(&header.weight_fingerprint)),
            ("tokens", header.tokens.to_string()),
            ("corpus", text(&header.corpus)),
            ("key objective", header.key_objective.clone()),
            ("value objective", header.value_objective.clone()),
            ("composition", text(&header.composition.map(|composition| composition.to_string()))),
            ("KV heads", header.kv_heads.to_string()),
            ("head dim", header.head_dim.to_string()),
            ("seed", text(&header.seed.map(|seed| seed.to_string()))),
            ("written by", header.created_by.clone()),
        ]
    };
    let pairs = fields(a).into_iter().zip(fields(b));
    pairs.filter(|(a, b)| a.1 != b.1).map(|((name, a), (_, b))| (name, a, b)).collect()
}
