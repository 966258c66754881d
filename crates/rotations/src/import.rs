//! Conversion between published `.pt` pairs and our own rotation file.

use std::collections::BTreeMap;
use std::path::Path;

use oscar_codec::{Composition, Rule};

use super::codec::PAPER_RULES;
use super::error::RotationError;
use super::pt::{PtFile, PtFormat, PtLayer};
use super::rotation::{LayerRotations, RotationFile, RotationHeader, RotationSet, Scope, SideRotations};

/// Objectives of key rotations.
const KEY_OBJECTIVES: [&str; 2] = ["qqt", "ktk"];
/// Objectives of value rotations.
const VALUE_OBJECTIVES: [&str; 3] = ["sst", "cs", "vtv"];

/// `qqt_r_h_pbr` → (`qqt`, r_h_pbr); a word without a composition is all objective.
pub(crate) fn split_objective(text: &str) -> (String, Option<Composition>) {
    match text.split_once('_').map(|(objective, composition)| (objective, composition.parse())) {
        Some((objective, Ok(composition))) => (objective.to_owned(), Some(composition)),
        _ => (text.to_owned(), None),
    }
}

/// The side an objective is for.
pub(crate) fn side_of(objective: &str) -> Option<&'static str> {
    let side = |objectives: &[&str], side| objectives.contains(&objective).then_some(side);
    side(&KEY_OBJECTIVES, "keys").or(side(&VALUE_OBJECTIVES, "values"))
}

/// Says so if the objectives are those of the other side.
pub(crate) fn swapped(keys: &PtFile, values: &PtFile) -> Option<String> {
    let objective = |file: &PtFile| file.objective.as_deref().map(|text| split_objective(text).0);
    let keys = objective(keys).filter(|objective| side_of(objective) == Some("values"));
    let values = objective(values).filter(|objective| side_of(objective) == Some("keys"));
    match (keys, values) {
        (Some(keys), Some(values)) => {
            Some(format!("the key file was fitted to values ({keys}), the value file to keys ({values})"))
        }
        (Some(keys), None) => Some(format!("the key file was fitted to values ({keys})")),
        (None, Some(values)) => Some(format!("the value file was fitted to keys ({values})")),
        (None, None) => None,
    }
}

/// One file from a published pair. Everything is checked; `model` is a name for people.
pub fn from_pt(keys: &PtFile, values: &PtFile, model: &str) -> Result<RotationFile, RotationError> {
    let file = from_pt_unverified(keys, values, model)?;
    if let Some(evidence) = swapped(keys, values) {
        return Err(RotationError::Swapped { path: keys.path.clone(), evidence });
    }
    file.check_shapes(&keys.path)?;
    file.check_orthogonal(&keys.path)?;
    Ok(file)
}

/// As [`from_pt`]; the two files must have the same shape, nothing else is checked.
pub fn from_pt_unverified(
    keys: &PtFile,
    values: &PtFile,
    model: &str,
) -> Result<RotationFile, RotationError> {
    let pair = |problem: String| RotationError::Pair {
        keys: keys.path.clone(),
        values: values.path.clone(),
        problem,
    };
    if (keys.head_dim, keys.heads) != (values.head_dim, values.heads) {
        let shape = |file: &PtFile| match file.heads {
            Some(heads) => format!("{heads} heads of {} channels", file.head_dim),
            None => format!("one rotation a layer of {} channels", file.head_dim),
        };
        return Err(pair(format!("{} and {}", shape(keys), shape(values))));
    }
    let missing = |file: &PtFile, other: &PtFile| {
        let layer = other.layers.keys().find(|layer| !file.layers.contains_key(layer))?;
        let reason = format!("{} has them", other.path.display());
        Some(RotationError::MissingLayer { path: file.path.clone(), layer: *layer, reason })
    };
    if let Some(error) = missing(keys, values).or_else(|| missing(values, keys)) {
        return Err(error);
    }
    let set: RotationSet = keys
        .layers
        .iter()
        .zip(values.layers.values())
        .map(|((&layer, keys), values)| {
            let (key_rule, value_rule) = PAPER_RULES;
            (layer, LayerRotations { keys: side(keys, key_rule), values: side(values, value_rule) })
        })
        .collect();
    let objective = |file: &PtFile| split_objective(file.objective.as_deref().unwrap_or_default());
    let ((key_objective, composition), (value_objective, value_composition)) =
        (objective(keys), objective(values));
    if composition != value_composition {
        return Err(pair("their rotations are composed in different ways".to_owned()));
    }
    let header = RotationHeader {
        model: model.to_owned(),
        key_objective,
        value_objective,
        composition,
        kv_heads: keys.heads.unwrap_or(0),
        head_dim: keys.head_dim,
        ..RotationHeader::default()
    };
    let (heads, layers) = if keys.heads.is_some() { (Some(set), None) } else { (None, Some(set)) };
    Ok(RotationFile { header, heads, layers, ..RotationFile::default() })
}

pub(crate) fn side(layer: &PtLayer, rule: Rule) -> SideRotations {
    SideRotations {
        rotations: layer.rotations.clone(),
        eigenvalues: layer.eigenvalues.clone().unwrap_or_default(),
        means: None,
        metrics: None,
        bands: None,
        unturned_means: None,
        rules: vec![rule; layer.rotations.len()],
    }
}

/// The key and the value file of a published pair, ready to be written with [`super::pt::write`]. `path`
/// names the file the rotations come from.
pub fn to_pt(path: &Path, file: &RotationFile, format: PtFormat) -> Result<[PtFile; 2], RotationError> {
    let (scope, wanted, fix) = match format {
        PtFormat::PerLayer => {
            (Scope::Layer, "per-layer", "export the rotations of each head with --format 2")
        }
        PtFormat::PerHead => (Scope::Head, "per-head", "export the rotations of each layer with --format 1"),
    };
    let Some(set) = file.set(scope) else {
        return Err(RotationError::NoScope { path: path.to_owned(), wanted, fix });
    };
    let header = &file.header;
    let value_objective = match (&header.layer_value_objective, format) {
        (Some(objective), PtFormat::PerLayer) => objective,
        _ => &header.value_objective,
    };
    let objective = |objective: &str| match header.composition {
        Some(composition) => format!("{objective}_{composition}"),
        None => objective.to_owned(),
    };
    let layers = |side: fn(&LayerRotations) -> &SideRotations| -> BTreeMap<usize, PtLayer> {
        set.iter()
            .map(|(&layer, rotations)| {
                let side = side(rotations);
                let eigenvalues = (!side.eigenvalues.is_empty()).then(|| side.eigenvalues.clone());
                (layer, PtLayer { rotations: side.rotations.clone(), eigenvalues })
            })
            .collect()
    };
    let pt = |letter: &str, objective: String, layers| PtFile {
        path: format!("{letter}_rotation_{objective}.pt").into(),
        format_version: format.version().to_string(),
        objective: Some(objective),
        layers,
        head_dim: header.head_dim,
        heads: (format == PtFormat::PerHead).then_some(header.kv_heads),
    };
    Ok([
        pt("k", objective(&header.key_objective), layers(|layer| &layer.keys)),
        pt("v", objective(value_objective), layers(|layer| &layer.values)),
    ])
}
