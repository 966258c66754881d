//! Our own rotation file: one safetensors file for keys and values, with what they were made for.
//!
//! Tensors are `layers.{i}.{keys|values}.{head|layer}.{rotation|eigenvalues|mean|metric|bands|unturned_mean}`. Those of scope
//! `head` begin with an axis of KV heads; a metric is the upper triangle, row by row. Everything else is text in the
//! metadata. The same rotations give the same bytes.
//!
//! Rotations are float16 and are made orthonormal again when they are read; bands are float16 and used as they are;
//! metrics are bfloat16, because their range is large and they are only compared with; eigenvalues and means are float32.
//! Bands are there from version 3 on; from version 4 on they are of keys that are centred page by page. Files of version 1, rotations
//! that others have published and work in progress have float32 throughout.

use std::collections::BTreeMap;
use std::path::Path;

use half::{bf16, f16};
use oscar_codec::{KeyWidths, Rule, SquareMatrix};
use oscar_model::files::{MappedFile, WeightMemory};
use rayon::prelude::*;
use safetensors::tensor::{Dtype, Metadata, TensorInfo};

use super::error::RotationError;
use super::limits::{ELEMENT_LIMIT, FILE_LIMIT, LAYER_ID_LIMIT, LAYER_LIMIT, ORTHOGONALITY_LIMIT};
use super::rotation::{
    FORMAT_VERSION, LayerRotations, RotationFile, RotationHeader, RotationSet, SIDES, Scope, SideRotations,
};

mod write;

pub use write::{write, write_exact, write_widths};

const FORMAT_NAME: &str = "oscar-rotations";
const HEADER_LIMIT: u64 = 16 << 20;
/// Most tensors of a file: two scopes, two sides, six tensors for each layer.
const TENSOR_LIMIT: usize = 24 * LAYER_LIMIT;
const METADATA: &str = "__metadata__";
/// The field of metadata with the widths of keys by layer id. Programs that do not know it use the default in every layer.
const WIDTHS: &str = "key_widths";

/// Rules by scope, layer id and side.
type StoredRules = BTreeMap<String, BTreeMap<usize, BTreeMap<String, Vec<String>>>>;

/// Reads a file and checks that everything in it can be used.
pub fn read(path: &Path) -> Result<RotationFile, RotationError> {
    let file = read_unverified(path)?;
    file.check_orthogonal(path)?;
    Ok(file)
}

/// Reads a file without checking that its matrices are rotations.
pub fn read_unverified(path: &Path) -> Result<RotationFile, RotationError> {
    let mapped = map(path)?;
    parse(path, mapped.as_ref().as_ref())
}

/// Reads a whole file from memory; `path` is for messages.
pub fn parse(path: &Path, bytes: &[u8]) -> Result<RotationFile, RotationError> {
    let contents = Contents::open(path, bytes)?;
    let header = contents.header()?;
    let rules = contents.rules()?;
    let mut used = 0;
    let mut set = |scope| contents.set(scope, &header, &rules, &mut used);
    let (heads, layers) = (set(Scope::Head)?, set(Scope::Layer)?);
    let found = contents.metadata.tensors().len();
    if used != found {
        let problem =
            format!("{} of its {found} tensors have names that are not of this format", found - used);
        return Err(contents.not_ours(problem));
    }
    let file = RotationFile { widths: contents.widths()?, header, heads, layers };
    file.check_shapes(path)?;
    Ok(file)
}

/// What can be known of a file without reading its matrices.
#[derive(Clone, Debug, PartialEq)]
pub struct FileSummary {
    /// Where the rotations come from and what they were made for.
    pub header: RotationHeader,
    /// Whether all keys have bands.
    pub has_bands: bool,
    /// Bits of the bands of keys in layers that have some of their own.
    pub widths: BTreeMap<usize, KeyWidths>,
    /// Size of the file.
    pub bytes: u64,
}

/// Reads only what is known of a file without its matrices.
pub fn read_summary(path: &Path) -> Result<FileSummary, RotationError> {
    let mapped = map(path)?;
    Contents::open(path, mapped.as_ref().as_ref())?.summary()
}

/// What is known of a file by its beginning in memory, whatever follows the header.
pub(crate) fn parse_header(path: &Path, bytes: &[u8]) -> Result<FileSummary, RotationError> {
    let (header, _) = split_header(path, bytes)?;
    Contents::open_header(path, header, &[])?.summary()
}

/// A file's length of its header with the header, and its tensors.
pub(crate) fn split_header<'a>(path: &Path, bytes: &'a [u8]) -> Result<(&'a [u8], &'a [u8]), RotationError> {
    let bad = |problem: &str| RotationError::NotARotationFile {
        path: path.to_owned(),
        problem: problem.to_owned(),
    };
    let Some(length) = bytes.first_chunk::<8>() else {
        return Err(bad("it is shorter than any safetensors file"));
    };
    let length = u64::from_le_bytes(*length);
    if length > HEADER_LIMIT {
        // Also what other kinds of file look like.
        return Err(bad("it does not begin as a safetensors file does"));
    }
    bytes.split_at_checked(8 + length as usize).ok_or_else(|| bad("it is cut off in its header"))
}

fn map(path: &Path) -> Result<oscar_kernels::backend::SharedBytes, RotationError> {
    let size = std::fs::metadata(path).map_err(|error| RotationError::io(path, "read", error))?.len();
    if size > FILE_LIMIT {
        let what = "the file".to_owned();
        return Err(RotationError::TooLarge { path: path.to_owned(), what, size, limit: FILE_LIMIT });
    }
    MappedFile::shared(path, WeightMemory::Mapped).map_err(|error| RotationError::Model(error.into()))
}

struct Contents<'a> {
    path: &'a Path,
    metadata: Metadata,
    data: &'a [u8],
    /// Size of the whole file by its header.
    bytes: u64,
}

impl<'a> Contents<'a> {
    fn open(path: &'a Path, bytes: &'a [u8]) -> Result<Contents<'a>, RotationError> {
        let (header, data) = split_header(path, bytes)?;
        let contents = Contents::open_header(path, header, data)?;
        // The sum is ours to check: the library adds the parts without care for overflow.
        let expected = contents.metadata.data_len();
        if expected != data.len() {
            let problem = format!("its tensors take {expected} bytes, {} are there", data.len());
            return Err(contents.not_ours(format!("it is cut off or damaged: {problem}")));
        }
        if data.len() / size_of::<f16>() > 2 * ELEMENT_LIMIT {
            return Err(contents.not_ours("it holds more numbers than any model needs".to_owned()));
        }
        Ok(contents)
    }

    /// The contents of a file without a look at its tensors. `header` begins with its length.
    fn open_header(path: &'a Path, header: &[u8], data: &'a [u8]) -> Result<Contents<'a>, RotationError> {
        let bad = |problem: String| RotationError::NotARotationFile { path: path.to_owned(), problem };
        let metadata: Metadata = serde_json::from_slice(&header[8..])
            .map_err(|error| bad(format!("its header is not that of a safetensors file: {error}")))?;
        let tensors = metadata.tensors();
        if tensors.len() > TENSOR_LIMIT {
            return Err(bad(format!("{} tensors, at most {TENSOR_LIMIT} are read", tensors.len())));
        }
        let bytes = header.len().saturating_add(metadata.data_len()) as u64;
        let contents = Contents { path, metadata, data, bytes };
        match contents.text("format") {
            Some(FORMAT_NAME) => {}
            _ => {
                return Err(contents.not_ours("its metadata does not say that it holds rotations".to_owned()));
            }
        }
        match contents.text("version") {
            Some("1" | "2" | "3" | "4") => Ok(contents),
            found => Err(RotationError::Version {
                path: path.to_owned(),
                found: found.unwrap_or("").to_owned(),
                supported: FORMAT_VERSION,
            }),
        }
    }

    fn not_ours(&self, problem: String) -> RotationError {
        RotationError::NotARotationFile { path: self.path.to_owned(), problem }
    }

    fn text(&self, name: &str) -> Option<&str> {
        self.metadata.metadata().as_ref()?.get(name).map(String::as_str)
    }

    fn required(&self, name: &str) -> Result<&str, RotationError> {
        self.text(name).ok_or_else(|| RotationError::field(self.path, name, "is missing from the metadata"))
    }

    fn number<T: std::str::FromStr>(&self, name: &str) -> Result<T, RotationError> {
        let text = self.required(name)?;
        text.parse()
            .map_err(|_| RotationError::field(self.path, name, format!("{text:?} is not a whole number")))
    }

    fn header(&self) -> Result<RotationHeader, RotationError> {
        let optional = |name: &str| self.text(name).map(str::to_owned);
        let composition = match self.text("composition") {
            None => None,
            Some(name) => {
                let parsed =
                    name.parse().map_err(|error| RotationError::field(self.path, "composition", error))?;
                Some(parsed)
            }
        };
        Ok(RotationHeader {
            version: self.number("version")?,
            model: self.required("model")?.to_owned(),
            model_fingerprint: optional("model_fingerprint"),
            weight_fingerprint: optional("weight_fingerprint"),
            tokens: self.number("tokens")?,
            corpus: optional("corpus_sha256"),
            key_objective: self.required("key_objective")?.to_owned(),
            value_objective: self.required("value_objective")?.to_owned(),
            layer_value_objective: optional("layer_value_objective"),
            composition,
            kv_heads: self.number("kv_heads")?,
            head_dim: self.number("head_dim")?,
            seed: self.text("seed").map(|_| self.number("seed")).transpose()?,
            created_by: optional("created_by").unwrap_or_default(),
        })
    }

    fn summary(&self) -> Result<FileSummary, RotationError> {
        let count =
            |ending: &str| self.metadata.tensors().keys().filter(|name| name.ends_with(ending)).count();
        let bands = count(".keys.head.bands");
        let has_bands = bands > 0 && bands == count(".keys.head.rotation");
        Ok(FileSummary { header: self.header()?, has_bands, widths: self.widths()?, bytes: self.bytes })
    }

    fn rules(&self) -> Result<StoredRules, RotationError> {
        serde_json::from_str(self.required("rules")?).map_err(|error| {
            RotationError::field(self.path, "rules", format!("not the JSON of this format: {error}"))
        })
    }

    /// Bits of the bands of keys, of layers that have some of their own.
    fn widths(&self) -> Result<BTreeMap<usize, KeyWidths>, RotationError> {
        let wrong = |problem: String| RotationError::field(self.path, WIDTHS, problem);
        let Some(text) = self.text(WIDTHS) else { return Ok(BTreeMap::new()) };
        let stored: BTreeMap<usize, String> = serde_json::from_str(text)
            .map_err(|error| wrong(format!("not the JSON of this format: {error}")))?;
        let parse = |(layer, widths): (usize, String)| match widths.parse() {
            Ok(widths) if layer <= LAYER_ID_LIMIT => Ok((layer, widths)),
            Ok(_) => Err(wrong(format!("the layer id {layer} is too large"))),
            Err(error) => Err(wrong(format!("layer {layer}: {error}"))),
        };
        stored.into_iter().map(parse).collect()
    }

    /// The rotations of one scope; the layers are those that have rules.
    fn set(
        &self,
        scope: Scope,
        header: &RotationHeader,
        rules: &StoredRules,
        used: &mut usize,
    ) -> Result<Option<RotationSet>, RotationError> {
        let Some(rules) = rules.get(scope.name()) else { return Ok(None) };
        let mut set = RotationSet::new();
        for (&layer, rules) in rules {
            let mut side = |name: &str| -> Result<SideRotations, RotationError> {
                let field = || format!("rules of layers.{layer}.{name}.{scope}");
                let rules =
                    rules.get(name).ok_or_else(|| RotationError::field(self.path, field(), "are missing"))?;
                let rules = rules.iter().map(|rule| rule.parse::<Rule>()).collect::<Result<_, _>>();
                let rules = rules.map_err(|error| RotationError::field(self.path, field(), error))?;
                self.side(&format!("layers.{layer}.{name}.{scope}"), scope, header, rules, used)
            };
            let (keys, values) = (side(SIDES[0])?, side(SIDES[1])?);
            set.insert(layer, LayerRotations { keys, values });
        }
        Ok(Some(set))
    }

    fn side(
        &self,
        name: &str,
        scope: Scope,
        header: &RotationHeader,
        rules: Vec<Rule>,
        used: &mut usize,
    ) -> Result<SideRotations, RotationError> {
        let d = header.head_dim;
        let heads = (scope == Scope::Head).then_some(header.kv_heads);
        let mut tensor = |what: &str, shapes: &[Vec<usize>]| -> Result<Option<Vec<f32>>, RotationError> {
            let tensor = format!("{name}.{what}");
            let Some(info) = self.metadata.info(&tensor) else { return Ok(None) };
            *used += 1;
            self.values(&tensor, info, shapes).map(Some)
        };
        let shape = |tail: &[usize]| heads.into_iter().chain(tail.iter().copied()).collect::<Vec<_>>();
        let triangle = d.saturating_mul(d.saturating_add(1)) / 2;
        let Some(rotation) = tensor("rotation", &[shape(&[d, d])])? else {
            return Err(RotationError::tensor(self.path, format!("{name}.rotation"), "is missing"));
        };
        let rotations =
            chunks(&rotation, d.saturating_mul(d)).map(|values| SquareMatrix::from_f32(d, values));
        let rotations = rotations.collect::<Result<Vec<_>, _>>();
        let mut rotations =
            rotations.map_err(|source| RotationError::Codec { path: self.path.to_owned(), source })?;
        if self.metadata.info(&format!("{name}.rotation")).is_some_and(|info| info.dtype == Dtype::F16) {
            // What 16 bits cannot explain stays as it is, for the check that follows to find.
            let rounded =
                |rotation: &&mut SquareMatrix| rotation.orthogonality_error() <= ORTHOGONALITY_LIMIT;
            rotations
                .par_iter_mut()
                .filter(rounded)
                .for_each(|rotation| *rotation = rotation.orthonormalised());
        }
        let eigenvalues = tensor("eigenvalues", &[shape(&[d])])?.unwrap_or_default();
        let eigenvalues = chunks(&eigenvalues, d)
            .map(|values| values.iter().map(|&value| value.into()).collect())
            .collect();
        // A rotation of a whole layer may still be used with the mean of each head.
        let means = tensor("mean", &[shape(&[d]), vec![header.kv_heads, d]])?;
        let means = means.map(|means| chunks(&means, d).map(<[f32]>::to_vec).collect());
        let metrics = tensor("metric", &[shape(&[triangle])])?;
        let metrics =
            metrics.map(|metrics| chunks(&metrics, triangle).map(|values| unpack(d, values)).collect());
        let bands = match tensor("bands", &[shape(&[d, d])])? {
            Some(values) => {
                let matrices =
                    chunks(&values, d.saturating_mul(d)).map(|values| SquareMatrix::from_f32(d, values));
                let matrices = matrices.collect::<Result<_, _>>();
                let failed = |source| RotationError::Codec { path: self.path.to_owned(), source };
                Some(matrices.map_err(failed)?)
            }
            None => None,
        };
        let unturned_means = tensor("unturned_mean", &[shape(&[d])])?;
        let unturned_means = unturned_means.map(|means| chunks(&means, d).map(<[f32]>::to_vec).collect());
        Ok(SideRotations { rotations, eigenvalues, means, metrics, bands, unturned_means, rules })
    }

    fn values(
        &self,
        name: &str,
        info: &TensorInfo,
        shapes: &[Vec<usize>],
    ) -> Result<Vec<f32>, RotationError> {
        if !shapes.contains(&info.shape) {
            let problem = format!("has shape {:?}, expected {:?}", info.shape, shapes[0]);
            return Err(RotationError::tensor(self.path, name, problem));
        }
        let bytes = self.data.get(info.data_offsets.0..info.data_offsets.1);
        let bytes = bytes.ok_or_else(|| RotationError::tensor(self.path, name, "lies outside the file"))?;
        match info.dtype {
            Dtype::F32 => Ok(bytes.as_chunks().0.iter().map(|&number| f32::from_le_bytes(number)).collect()),
            Dtype::F16 => Ok(bytes.as_chunks().0.iter().map(|&n| f16::from_le_bytes(n).to_f32()).collect()),
            Dtype::BF16 => Ok(bytes.as_chunks().0.iter().map(|&n| bf16::from_le_bytes(n).to_f32()).collect()),
            other => {
                let problem = format!("has type {other}, expected F16, BF16 or F32");
                Err(RotationError::tensor(self.path, name, problem))
            }
        }
    }
}

/// Pieces of `size` values; none when `size` is 0.
fn chunks(values: &[f32], size: usize) -> std::slice::ChunksExact<'_, f32> {
    values.chunks_exact(size.max(1))
}

/// A symmetric matrix from its upper triangle.
fn unpack(dim: usize, triangle: &[f32]) -> SquareMatrix {
    // Row i begins after the rows above it, of dim, dim - 1, … values.
    let index = |i: usize, j: usize| i * dim - i * i.saturating_sub(1) / 2 + (j - i);
    SquareMatrix::from_fn(dim, |i, j| triangle[index(i.min(j), i.max(j))].into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn triangles_are_packed_row_by_row() {
        use super::write::pack;
        let matrix = SquareMatrix::from_fn(4, |i, j| (10 * i.min(j) + i.max(j)) as f64);
        let packed: Vec<f32> = pack(&matrix).collect();
        assert_eq!(packed, [0.0, 1.0, 2.0, 3.0, 11.0, 12.0, 13.0, 22.0, 23.0, 33.0]);
        assert_eq!(unpack(4, &packed), matrix);
    }
}
