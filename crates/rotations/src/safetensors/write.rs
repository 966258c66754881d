//! Writing rotation files: the same rotations give the same bytes.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;

use half::{bf16, f16};
use oscar_codec::{KeyWidths, Rule, SquareMatrix};
use safetensors::tensor::Dtype;
use serde_json::{Map, Value, json};

use super::{Contents, FORMAT_NAME, METADATA, StoredRules, WIDTHS, map};
use crate::atomic::write_atomically;
use crate::error::RotationError;
use crate::rotation::{FORMAT_VERSION, RotationFile, Scope, SideRotations};

/// Writes a file, whole or not at all, with matrices in 16 bits. What cannot be read back is not written.
pub fn write(path: &Path, file: &RotationFile) -> Result<(), RotationError> {
    write_as(path, file, Precision::Half)
}

/// [`write()`] with matrices in float32: for rotations that others have published, which are used as they are, and for work
/// that is interrupted and taken up again.
pub fn write_exact(path: &Path, file: &RotationFile) -> Result<(), RotationError> {
    write_as(path, file, Precision::Single)
}

/// Replaces the widths of keys in a file of ours, which otherwise stays as it is to the byte.
pub fn write_widths(path: &Path, widths: &BTreeMap<usize, KeyWidths>) -> Result<(), RotationError> {
    let mapped = map(path)?;
    let bytes = mapped.as_ref().as_ref();
    let Contents { data, .. } = Contents::open(path, bytes)?;
    let header = &bytes[8..bytes.len() - data.len()];
    let mut header: Map<String, Value> = serde_json::from_slice(header).map_err(|error| {
        RotationError::NotARotationFile { path: path.to_owned(), problem: format!("its header: {error}") }
    })?;
    if let Some(metadata) = header.get_mut(METADATA).and_then(Value::as_object_mut) {
        metadata.remove(WIDTHS);
        metadata.extend(widths_text(widths).map(|text| (WIDTHS.to_owned(), Value::String(text))));
    }
    let header = padded(Value::Object(header).to_string());
    write_atomically(path, |out| {
        out.write_all(&(header.len() as u64).to_le_bytes())?;
        out.write_all(header.as_bytes())?;
        out.write_all(data)
    })
}

/// The widths of keys as metadata has them; none if all layers have the default.
fn widths_text(widths: &BTreeMap<usize, KeyWidths>) -> Option<String> {
    let texts: BTreeMap<usize, String> =
        widths.iter().map(|(&layer, widths)| (layer, widths.to_string())).collect();
    (!texts.is_empty()).then(|| json!(texts).to_string())
}

/// How matrices are stored.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Precision {
    Half,
    Single,
}

fn write_as(path: &Path, file: &RotationFile, precision: Precision) -> Result<(), RotationError> {
    file.check_shapes(path)?;
    file.check_orthogonal(path)?;
    let tensors = tensors(file);
    let header = header_text(file, &tensors, precision);
    write_atomically(path, |out| {
        out.write_all(&(header.len() as u64).to_le_bytes())?;
        out.write_all(header.as_bytes())?;
        for (_, _, values) in &tensors {
            match values.dtype(precision) {
                Dtype::F16 => {
                    values.to_f32().try_for_each(|v| out.write_all(&f16::from_f32(v).to_le_bytes()))?
                }
                Dtype::BF16 => {
                    values.to_f32().try_for_each(|v| out.write_all(&bf16::from_f32(v).to_le_bytes()))?;
                }
                _ => values.to_f32().try_for_each(|v| out.write_all(&v.to_le_bytes()))?,
            }
        }
        Ok(())
    })
}

/// The data of a tensor, borrowed from where it is.
enum TensorData<'a> {
    Matrices(&'a [SquareMatrix]),
    Triangles(&'a [SquareMatrix]),
    Eigenvalues(&'a [Vec<f64>]),
    Means(&'a [Vec<f32>]),
}

impl TensorData<'_> {
    /// The type that the data is stored in.
    fn dtype(&self, precision: Precision) -> Dtype {
        match self {
            TensorData::Matrices(_) if precision == Precision::Half => Dtype::F16,
            TensorData::Triangles(_) if precision == Precision::Half => Dtype::BF16,
            _ => Dtype::F32,
        }
    }

    fn to_f32(&self) -> Box<dyn Iterator<Item = f32> + '_> {
        match self {
            TensorData::Matrices(matrices) => {
                Box::new(matrices.iter().flat_map(|matrix| matrix.values()).map(|&value| value as f32))
            }
            TensorData::Triangles(matrices) => Box::new(matrices.iter().flat_map(pack)),
            TensorData::Eigenvalues(rows) => Box::new(rows.iter().flatten().map(|&value| value as f32)),
            TensorData::Means(rows) => Box::new(rows.iter().flatten().copied()),
        }
    }
}

/// Name, shape and numbers of every tensor, in the order of the file.
fn tensors(file: &RotationFile) -> Vec<(String, Vec<usize>, TensorData<'_>)> {
    let d = file.header.head_dim;
    let mut tensors = Vec::new();
    for (scope, set) in file.sets() {
        for (layer, rotations) in set {
            for (side, rotations) in rotations.sides() {
                let name = |what: &str| format!("layers.{layer}.{side}.{scope}.{what}");
                let shape = |count: usize, tail: &[usize]| match scope {
                    Scope::Layer if count == 1 => tail.to_vec(),
                    _ => [&[count], tail].concat(),
                };
                let count = rotations.rotations.len();
                let matrices = TensorData::Matrices(&rotations.rotations);
                tensors.push((name("rotation"), shape(count, &[d, d]), matrices));
                if !rotations.eigenvalues.is_empty() {
                    let values = TensorData::Eigenvalues(&rotations.eigenvalues);
                    tensors.push((name("eigenvalues"), shape(count, &[d]), values));
                }
                if let Some(means) = &rotations.means {
                    tensors.push((name("mean"), shape(means.len(), &[d]), TensorData::Means(means)));
                }
                if let Some(metrics) = &rotations.metrics {
                    let triangle = d * (d + 1) / 2;
                    tensors.push((name("metric"), shape(count, &[triangle]), TensorData::Triangles(metrics)));
                }
                if let Some(bands) = &rotations.bands {
                    tensors.push((name("bands"), shape(count, &[d, d]), TensorData::Matrices(bands)));
                }
                if let Some(means) = &rotations.unturned_means {
                    tensors.push((name("unturned_mean"), shape(count, &[d]), TensorData::Means(means)));
                }
            }
        }
    }
    tensors
}

/// The JSON header. Written here because the library keeps metadata in an
/// order that changes from run to run.
fn header_text(
    file: &RotationFile,
    tensors: &[(String, Vec<usize>, TensorData<'_>)],
    precision: Precision,
) -> String {
    let mut entries = Map::new();
    entries.insert(METADATA.to_owned(), Value::Object(metadata(file)));
    let mut offset = 0;
    for (name, shape, values) in tensors {
        let dtype = values.dtype(precision);
        let end = offset + shape.iter().product::<usize>() * dtype.bitsize() / 8;
        let entry = json!({"dtype": dtype.to_string(), "shape": shape, "data_offsets": [offset, end]});
        entries.insert(name.clone(), entry);
        offset = end;
    }
    padded(Value::Object(entries).to_string())
}

/// A header with spaces behind it, so that tensors are aligned.
fn padded(mut text: String) -> String {
    while !text.len().is_multiple_of(8) {
        text.push(' ');
    }
    text
}

fn metadata(file: &RotationFile) -> Map<String, Value> {
    let header = &file.header;
    let mut rules = StoredRules::new();
    for (scope, set) in file.sets() {
        let layers = rules.entry(scope.name().to_owned()).or_default();
        for (&layer, rotations) in set {
            let texts = |side: &SideRotations| side.rules.iter().map(Rule::to_string).collect();
            let sides = rotations.sides().map(|(name, side)| (name.to_owned(), texts(side)));
            layers.insert(layer, sides.into_iter().collect());
        }
    }
    let scopes: Vec<&str> = file.sets().map(|(scope, _)| scope.name()).collect();
    let fields = [
        ("format", Some(FORMAT_NAME.to_owned())),
        ("version", Some(FORMAT_VERSION.to_string())),
        ("model", Some(header.model.clone())),
        ("model_fingerprint", header.model_fingerprint.clone()),
        ("weight_fingerprint", header.weight_fingerprint.clone()),
        ("tokens", Some(header.tokens.to_string())),
        ("corpus_sha256", header.corpus.clone()),
        ("key_objective", Some(header.key_objective.clone())),
        ("value_objective", Some(header.value_objective.clone())),
        ("layer_value_objective", header.layer_value_objective.clone()),
        ("composition", header.composition.map(|composition| composition.to_string())),
        ("scope", Some(scopes.join(","))),
        ("kv_heads", Some(header.kv_heads.to_string())),
        ("head_dim", Some(header.head_dim.to_string())),
        ("seed", header.seed.map(|seed| seed.to_string())),
        ("rules", Some(serde_json::to_string(&rules).expect("maps with text and number keys become JSON"))),
        ("created_by", Some(header.created_by.clone())),
        (WIDTHS, widths_text(&file.widths)),
    ];
    fields.into_iter().filter_map(|(name, value)| Some((name.to_owned(), Value::String(value?)))).collect()
}

/// The upper triangle of a symmetric matrix, row by row.
pub(super) fn pack(matrix: &SquareMatrix) -> impl Iterator<Item = f32> + '_ {
    let dim = matrix.dim();
    (0..dim).flat_map(move |i| (i..dim).map(move |j| (0.5 * (matrix.get(i, j) + matrix.get(j, i))) as f32))
}
