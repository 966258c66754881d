//! Whether a rotation file can be trusted, without the model it was made for.

mod bands;
mod metrics;

use std::collections::BTreeMap;
use std::fmt::Write;

use oscar_codec::{Composition, SquareMatrix};
use rayon::prelude::*;

use super::codec::PAPER_RULES;
use super::import;
use super::limits::ORTHOGONALITY_LIMIT;
use super::pt::PtFile;
use super::rotation::{RotationFile, RotationSet, Scope, SideRotations};

/// Relative slack of eigenvalues that went through float32.
const EIGENVALUE_SLACK: f64 = 1e-4;

const NOT_CENTRED: &str = "no key mean: keys are not centred, and models with a large constant in their keys \
                           (Qwen2.5) do not survive that at 2 bits";

/// How bad a finding is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Severity {
    /// The file can be used; this is worth knowing.
    Note,
    /// The file works, but not as well as it could.
    Warning,
    /// The file must not be used.
    Error,
}

impl Severity {
    /// The severity in one word.
    pub fn name(self) -> &'static str {
        match self {
            Severity::Note => "note",
            Severity::Warning => "warning",
            Severity::Error => "error",
        }
    }
}

/// One thing that was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// How bad it is.
    pub severity: Severity,
    /// The part of the file that it is about.
    pub place: String,
    /// What was found, in one sentence.
    pub message: String,
}

/// How far the rotations of a layer are from orthonormal.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerOrthogonality {
    /// Whether heads share a rotation.
    pub scope: Scope,
    /// Layer id.
    pub layer: usize,
    /// `keys` or `values`.
    pub side: &'static str,
    /// Largest entry of `|MᵀM - I|` over the heads of the layer.
    pub orthogonality: f64,
}

/// What verification found.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Findings {
    /// All findings, the worst first.
    pub findings: Vec<Finding>,
    /// Orthogonality errors, layer by layer.
    pub layers: Vec<LayerOrthogonality>,
    /// What could not be checked, and why.
    pub not_checked: Vec<String>,
}

impl Findings {
    /// Whether nothing forbids using the file.
    pub fn is_sound(&self) -> bool {
        self.findings.iter().all(|finding| finding.severity != Severity::Error)
    }

    /// The worst orthogonality error of the file.
    pub fn orthogonality(&self) -> f64 {
        let errors = self.layers.iter().map(|layer| layer.orthogonality);
        errors.fold(0.0, |worst, error| if error.is_nan() || error > worst { error } else { worst })
    }

    /// Adds a finding.
    pub fn add(&mut self, severity: Severity, place: impl Into<String>, message: impl Into<String>) {
        self.findings.push(Finding { severity, place: place.into(), message: message.into() });
    }

    fn sorted(mut self) -> Findings {
        self.sort();
        self
    }

    /// Puts the worst first, as they are after verification.
    pub fn sort(&mut self) {
        self.findings.sort_by_key(|finding| std::cmp::Reverse(finding.severity));
    }
}

/// Checks a file of ours. Its shapes were checked when it was read.
pub fn verify(file: &RotationFile) -> Findings {
    let mut findings = Findings::default();
    for (scope, set) in file.sets() {
        for (index, side) in ["keys", "values"].into_iter().enumerate() {
            let rotations: Sides<'_> =
                set.iter().map(|(&layer, both)| (layer, both.sides()[index].1)).collect();
            check_side(&mut findings, scope, side, &rotations, file.header.composition);
        }
        metrics::check(&mut findings, scope, set, file.heads.as_ref(), &file.header);
        check_sequence(&mut findings, &format!("{scope} rotations"), set.keys().copied());
        check_means(&mut findings, scope, set);
    }
    bands::check(&mut findings, file);
    if let (Some(heads), Some(layers)) = (&file.heads, &file.layers)
        && !heads.keys().eq(layers.keys())
    {
        findings.add(Severity::Error, "the file", "heads and layers have rotations for different layers");
    }
    if file.header.model_fingerprint.is_none() {
        findings.not_checked.push("which model they are for: the file has no fingerprint".to_owned());
    }
    findings.sorted()
}

/// Checks one published file.
pub fn verify_pt(file: &PtFile) -> Findings {
    let mut findings = Findings::default();
    let (objective, composition) = import::split_objective(file.objective.as_deref().unwrap_or_default());
    let side = import::side_of(&objective);
    check_pt_side(&mut findings, side.unwrap_or("rotations"), file, composition);
    match side {
        Some(side) => {
            let letter =
                file.path.file_name().and_then(|name| name.to_str()).and_then(|name| name.chars().next());
            if matches!((letter, side), (Some('k'), "values") | (Some('v'), "keys")) {
                let message =
                    format!("it is named as the other side, but its objective {objective} is for {side}");
                findings.add(Severity::Error, "the file", message);
            }
        }
        None => {
            findings.not_checked.push(format!("whether it is for keys or values: objective {objective:?}"))
        }
    }
    check_sequence(&mut findings, "rotations", file.layers.keys().copied());
    note_published(&mut findings, file.heads.is_none(), side != Some("values"));
    findings.sorted()
}

/// Checks a published pair.
pub fn verify_pt_pair(keys: &PtFile, values: &PtFile) -> Findings {
    let mut findings = Findings::default();
    if let Some(evidence) = import::swapped(keys, values) {
        findings.add(Severity::Error, "the pair", format!("keys and values are swapped: {evidence}"));
    }
    if let Err(error) = import::from_pt_unverified(keys, values, "") {
        findings.add(Severity::Error, "the pair", error.to_string());
    }
    for (side, file) in [("keys", keys), ("values", values)] {
        let composition = import::split_objective(file.objective.as_deref().unwrap_or_default()).1;
        check_pt_side(&mut findings, side, file, composition);
        check_sequence(&mut findings, side, file.layers.keys().copied());
        if file.objective.is_none() {
            findings
                .not_checked
                .push(format!("whether the {side} file is for {side}: it names no objective"));
        }
    }
    note_published(&mut findings, keys.heads.is_none(), true);
    findings.sorted()
}

fn note_published(findings: &mut Findings, per_layer: bool, with_keys: bool) {
    if with_keys {
        let format = if per_layer { "format 1" } else { "a .pt file" };
        let message = format!("{format} carries {NOT_CENTRED}; `oscar calibrate` estimates it");
        findings.add(Severity::Warning, "keys", message);
    }
    findings.not_checked.push("which model they are for: .pt files have no fingerprint".to_owned());
    findings.not_checked.push("rotations against their metric: .pt files have none".to_owned());
}

/// Rotations of one side by layer.
type Sides<'a> = BTreeMap<usize, &'a SideRotations>;

fn check_pt_side(
    findings: &mut Findings,
    side: &'static str,
    file: &PtFile,
    composition: Option<Composition>,
) {
    let scope = if file.heads.is_some() { Scope::Head } else { Scope::Layer };
    let owned: BTreeMap<usize, SideRotations> = file
        .layers
        .iter()
        .map(|(&layer, rotations)| (layer, import::side(rotations, PAPER_RULES.0)))
        .collect();
    let sides = owned.iter().map(|(&layer, rotations)| (layer, rotations)).collect();
    check_side(findings, scope, side, &sides, composition);
}

/// What holds for keys and values alike.
fn check_side(
    findings: &mut Findings,
    scope: Scope,
    side: &'static str,
    sides: &Sides<'_>,
    composition: Option<Composition>,
) {
    let place = |layers: &[usize]| format!("{side} per {scope}, {}", layer_list(layers));
    let errors: Vec<LayerOrthogonality> = sides
        .par_iter()
        .map(|(&layer, rotations)| {
            let errors = rotations.rotations.iter().map(SquareMatrix::orthogonality_error);
            let worst =
                errors.fold(0.0, |worst, error| if error.is_nan() || error > worst { error } else { worst });
            LayerOrthogonality { scope, layer, side, orthogonality: worst }
        })
        .collect();
    let bad = |error: &&LayerOrthogonality| {
        error.orthogonality.is_nan() || error.orthogonality > ORTHOGONALITY_LIMIT
    };
    let layers: Vec<usize> = errors.iter().filter(bad).map(|error| error.layer).collect();
    if !layers.is_empty() {
        let worst = errors.iter().map(|error| error.orthogonality).fold(0.0, f64::max);
        let message =
            format!("not rotations: {worst:.1e} from orthonormal, at most {ORTHOGONALITY_LIMIT:.0e}");
        findings.add(Severity::Error, place(&layers), message);
    }
    findings.layers.extend(errors);

    let layers_where = |test: &dyn Fn(&SideRotations) -> bool| -> Vec<usize> {
        sides.iter().filter(|(_, rotations)| test(rotations)).map(|(&layer, _)| layer).collect()
    };
    let none = layers_where(&|rotations| rotations.eigenvalues.is_empty());
    if !none.is_empty() {
        findings.not_checked.push(format!("eigenvalues of {}: the file has none", place(&none)));
    }
    let unordered = layers_where(&|rotations| !rotations.eigenvalues.iter().all(|values| ascending(values)));
    if !unordered.is_empty() {
        findings.add(Severity::Error, place(&unordered), "eigenvalues are not in ascending order");
    }
    let negative = layers_where(&|rotations| {
        rotations
            .eigenvalues
            .iter()
            .any(|values| values.iter().any(|&value| value < -EIGENVALUE_SLACK * largest(values)))
    });
    if !negative.is_empty() {
        let message = "eigenvalues below zero, which no second moment has";
        findings.add(Severity::Error, place(&negative), message);
    }
    for (kind, message) in [
        (DataFree::Permutation, "these only reorder channels (identity or permutation): nothing is rotated"),
        (
            DataFree::Hadamard,
            "these are a Hadamard matrix, the same for every model: nothing was learnt from data",
        ),
    ] {
        let layers =
            layers_where(&|rotations| rotations.rotations.iter().all(|m| data_free(m) == Some(kind)));
        if !layers.is_empty() {
            let expected = matches!(composition, Some(Composition::Pbr | Composition::HPbr));
            let severity = if expected { Severity::Note } else { Severity::Warning };
            findings.add(severity, place(&layers), message);
        }
    }
}

fn ascending(values: &[f64]) -> bool {
    let slack = EIGENVALUE_SLACK * largest(values);
    values.windows(2).all(|pair| pair[1] >= pair[0] - slack)
}

fn largest(values: &[f64]) -> f64 {
    values.iter().fold(0.0, |largest, value| largest.max(value.abs()))
}

/// A rotation that was made without data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum DataFree {
    Permutation,
    Hadamard,
}

/// Rotations whose entries are all 0 or of one magnitude: permutations, and Hadamard matrices whole or in
/// blocks.
fn data_free(matrix: &SquareMatrix) -> Option<DataFree> {
    let magnitude = matrix.values().iter().fold(0.0, |largest: f64, value| largest.max(value.abs()));
    let close = |value: &f64| value.abs() < 1e-5 || (value.abs() - magnitude).abs() < 1e-5;
    if !matrix.values().iter().all(close) {
        return None;
    }
    Some(if magnitude > 0.999 { DataFree::Permutation } else { DataFree::Hadamard })
}

/// Layer ids should follow one rule: all of them, or every so many.
fn check_sequence(findings: &mut Findings, place: &str, ids: impl Iterator<Item = usize>) {
    let ids: Vec<usize> = ids.collect();
    let steps: Vec<usize> = ids.windows(2).map(|pair| pair[1] - pair[0]).collect();
    let (first, last) = (ids.first().copied().unwrap_or(0), ids.last().copied().unwrap_or(0));
    let Some(&step) = steps.iter().min() else { return };
    if steps.iter().all(|&other| other == step) {
        if step > 1 {
            let message =
                format!("layers {first} to {last}, every {step}th: a model with other layers in between");
            findings.add(Severity::Note, place, message);
        } else if first > 0 {
            findings.add(
                Severity::Warning,
                place,
                format!(
                    "the first layer is {first}: {} may be missing",
                    layer_list(&(0..first).collect::<Vec<_>>())
                ),
            );
        }
        return;
    }
    let missing: Vec<usize> = (first..=last).step_by(step).filter(|id| !ids.contains(id)).collect();
    findings.add(Severity::Error, place, format!("{} missing in the sequence", layer_list(&missing)));
}

fn check_means(findings: &mut Findings, scope: Scope, set: &RotationSet) {
    // Rotations of whole layers are there for the published encoder, which does not centre.
    let without: Vec<usize> =
        set.iter().filter(|(_, both)| both.keys.means.is_none()).map(|(&layer, _)| layer).collect();
    if without.is_empty() {
        return;
    }
    let severity = if scope == Scope::Head { Severity::Warning } else { Severity::Note };
    findings.add(severity, format!("keys per {scope}, {}", layer_list(&without)), NOT_CENTRED);
}

/// `layers 0-3, 7`.
pub fn layer_list(layers: &[usize]) -> String {
    let mut text = String::new();
    let mut rest = layers;
    while let Some(&first) = rest.first() {
        let run = rest.iter().enumerate().take_while(|(index, layer)| **layer == first + index).count();
        if !text.is_empty() {
            text.push_str(", ");
        }
        let _ = match run {
            1 => write!(text, "{first}"),
            _ => write!(text, "{first}-{}", first + run - 1),
        };
        rest = &rest[run..];
    }
    format!("{} {text}", if layers.len() == 1 { "layer" } else { "layers" })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_of_layers_are_written_short() {
        assert_eq!(layer_list(&[0, 1, 2, 3, 7, 9, 10]), "layers 0-3, 7, 9-10");
        assert_eq!(layer_list(&[5]), "layer 5");
    }

    #[test]
    fn data_free_rotations_are_recognised() {
        assert_eq!(data_free(&SquareMatrix::identity(8)), Some(DataFree::Permutation));
        for dim in [8, 48] {
            assert_eq!(data_free(&oscar_codec::hadamard::matrix(dim)), Some(DataFree::Hadamard));
            let composed = Composition::HPbr.compose(&SquareMatrix::identity(dim));
            assert_eq!(data_free(&composed), Some(DataFree::Hadamard));
        }
        let (sin, cos) = 0.3f64.sin_cos();
        assert_eq!(data_free(&SquareMatrix::new(2, vec![cos, sin, -sin, cos]).expect("2x2")), None);
    }

    #[test]
    fn gaps_are_found_and_sparse_models_are_not_gaps() {
        let findings = |ids: &[usize]| {
            let mut findings = Findings::default();
            check_sequence(&mut findings, "x", ids.iter().copied());
            findings.findings
        };
        assert!(findings(&[0, 1, 2, 3]).is_empty() && findings(&[5]).is_empty());
        assert_eq!(findings(&[3, 7, 11])[0].severity, Severity::Note);
        let gap = &findings(&[0, 1, 3])[0];
        assert_eq!(
            (gap.severity, gap.message.as_str()),
            (Severity::Error, "layer 2 missing in the sequence")
        );
        assert_eq!(findings(&[3, 7, 15])[0].message, "layer 11 missing in the sequence");
        assert_eq!(findings(&[1, 2])[0].severity, Severity::Warning);
    }
}
