//! Rotations of a model in memory, whatever file they came from.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

use oscar_codec::{Composition, KeyWidths, Rule, SquareMatrix};
use rayon::prelude::*;

use super::error::RotationError;
use super::limits::{HEAD_DIM_LIMIT, HEAD_LIMIT, LAYER_ID_LIMIT, LAYER_LIMIT, ORTHOGONALITY_LIMIT};

/// The version of our own format that is written. Earlier ones are read.
pub const FORMAT_VERSION: u32 = 4;

/// The first version whose files have bands. Those of keys that are centred page by page came with version 4.
pub const BANDS_VERSION: u32 = 3;

/// Rotations of each layer by layer id.
pub type RotationSet = BTreeMap<usize, LayerRotations>;

/// Everything in a rotation file. Key channels are in the order of Hugging Face checkpoints: channel `i`
/// turns with channel `i + rotary_dim / 2`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RotationFile {
    /// Where the rotations come from and what they were made for.
    pub header: RotationHeader,
    /// A rotation for each KV head (encoder `auto`).
    pub heads: Option<RotationSet>,
    /// A rotation for each layer, shared by its heads (encoder `paper`, published files of format 1).
    pub layers: Option<RotationSet>,
    /// Bits of the bands of keys in layers for which a calibration chose them; all others have the default.
    pub widths: BTreeMap<usize, KeyWidths>,
}

/// Where rotations come from and what they were made for.
#[derive(Clone, Debug, PartialEq)]
pub struct RotationHeader {
    /// Version of the format.
    pub version: u32,
    /// Name of the model, for people.
    pub model: String,
    /// The model fingerprint, equal for every quantisation of one checkpoint; published files have none.
    pub model_fingerprint: Option<String>,
    /// The weight fingerprint of the files that were calibrated.
    pub weight_fingerprint: Option<String>,
    /// Tokens that the rotations were calibrated on; 0 if not known.
    pub tokens: usize,
    /// SHA-256 of the calibration text.
    pub corpus: Option<String>,
    /// What key rotations minimise: `qqt` or `ktk`.
    pub key_objective: String,
    /// What value rotations minimise: `sst` (the reference's proxy), `cs` (the paper) or `vtv`.
    pub value_objective: String,
    /// What value rotations that heads share minimise, if it is something else.
    pub layer_value_objective: Option<String>,
    /// How eigenvectors, Hadamard and permutation were multiplied; `None` for rotations without eigenvectors.
    pub composition: Option<Composition>,
    /// KV heads of a layer; 0 if not known (published files of format 1 do not say).
    pub kv_heads: usize,
    /// Channels per head.
    pub head_dim: usize,
    /// Seed of sampled calibration text.
    pub seed: Option<u64>,
    /// Program that wrote the file.
    pub created_by: String,
}

impl Default for RotationHeader {
    fn default() -> RotationHeader {
        RotationHeader {
            version: FORMAT_VERSION,
            model: String::new(),
            model_fingerprint: None,
            weight_fingerprint: None,
            tokens: 0,
            corpus: None,
            key_objective: String::new(),
            value_objective: String::new(),
            layer_value_objective: None,
            composition: None,
            kv_heads: 0,
            head_dim: 0,
            seed: None,
            created_by: concat!("oscar ", env!("CARGO_PKG_VERSION")).to_owned(),
        }
    }
}

/// Rotations of one layer.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerRotations {
    /// Rotations of keys, which queries are multiplied with too.
    pub keys: SideRotations,
    /// Rotations of values.
    pub values: SideRotations,
}

/// Rotations of the keys or the values of one layer.
#[derive(Clone, Debug, PartialEq)]
pub struct SideRotations {
    /// One matrix, or one for each KV head; applied as `row · M`.
    pub rotations: Vec<SquareMatrix>,
    /// Eigenvalues of the objective, ascending; one list for each rotation, or none at all.
    pub eigenvalues: Vec<Vec<f64>>,
    /// Mean rows that are subtracted before rotating: one for each rotation, or one for each KV head.
    pub means: Option<Vec<Vec<f32>>>,
    /// The metric in which an error counts: C_Q for keys, `Σ_h W_o,h W_o,hᵀ` for values. One for each rotation.
    pub metrics: Option<Vec<SquareMatrix>>,
    /// Keys only: matrices to bands of channels by falling strength, each of about unit strength; not rotations. One for
    /// each rotation.
    pub bands: Option<Vec<SquareMatrix>>,
    /// Beside bands: the mean key of each KV head before rotary embedding. The keys of a page are centred by the mean that follows
    /// from it. Without it keys have one mean, as in files before version 4.
    pub unturned_means: Option<Vec<Vec<f32>>>,
    /// Rules by which rows are rounded; one for each rotation.
    pub rules: Vec<Rule>,
}

/// Whether heads of a layer share a rotation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Scope {
    /// Each KV head has its own rotation.
    Head,
    /// All heads of a layer share one rotation.
    Layer,
}

impl Scope {
    /// Both scopes.
    pub const ALL: [Scope; 2] = [Scope::Head, Scope::Layer];

    /// The name of the scope in files.
    pub fn name(self) -> &'static str {
        match self {
            Scope::Head => "head",
            Scope::Layer => "layer",
        }
    }
}

impl fmt::Display for Scope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Keys and values, as files name them.
pub(crate) const SIDES: [&str; 2] = ["keys", "values"];

impl LayerRotations {
    /// Keys and values with their names.
    pub fn sides(&self) -> [(&'static str, &SideRotations); 2] {
        [(SIDES[0], &self.keys), (SIDES[1], &self.values)]
    }
}

impl RotationFile {
    /// The rotations of one scope.
    pub fn set(&self, scope: Scope) -> Option<&RotationSet> {
        match scope {
            Scope::Head => self.heads.as_ref(),
            Scope::Layer => self.layers.as_ref(),
        }
    }

    /// All rotations: for each KV head, then for each layer.
    pub fn sets(&self) -> impl Iterator<Item = (Scope, &RotationSet)> {
        Scope::ALL.into_iter().filter_map(|scope| self.set(scope).map(|set| (scope, set)))
    }

    /// Every matrix with the name of its tensor.
    pub fn rotations(&self) -> impl Iterator<Item = (RotationName, &SquareMatrix)> {
        self.sets().flat_map(|(scope, set)| {
            set.iter().flat_map(move |(&layer, rotations)| {
                rotations.sides().into_iter().flat_map(move |(side, rotations)| {
                    let named = move |head| RotationName { scope, layer, side, head };
                    rotations.rotations.iter().enumerate().map(move |(head, matrix)| (named(head), matrix))
                })
            })
        })
    }

    /// Checks counts and sizes against the header, and that every number is finite. `path` is for messages.
    pub fn check_shapes(&self, path: &Path) -> Result<(), RotationError> {
        let RotationHeader { kv_heads, head_dim, .. } = self.header;
        if !(2..=HEAD_DIM_LIMIT).contains(&head_dim) {
            let problem = format!("is {head_dim}, expected 2 to {HEAD_DIM_LIMIT}");
            return Err(RotationError::field(path, "head_dim", problem));
        }
        if kv_heads > HEAD_LIMIT || kv_heads == 0 && self.heads.is_some() {
            let problem = format!("is {kv_heads}, expected 1 to {HEAD_LIMIT}");
            return Err(RotationError::field(path, "kv_heads", problem));
        }
        if let Some((layer, widths)) =
            self.widths.iter().find(|(_, widths)| KeyWidths::menu(head_dim).all(|fit| fit != **widths))
        {
            let problem = format!("{widths} are not for heads of {head_dim} channels");
            return Err(RotationError::field(path, format!("key_widths of layer {layer}"), problem));
        }
        if self.sets().next().is_none() {
            let problem = "it holds no rotations".to_owned();
            return Err(RotationError::NotARotationFile { path: path.to_owned(), problem });
        }
        for (scope, set) in self.sets() {
            if set.is_empty() || set.len() > LAYER_LIMIT {
                let problem = format!("{} layers, expected 1 to {LAYER_LIMIT}", set.len());
                return Err(RotationError::field(path, format!("{scope} rotations"), problem));
            }
            for (&layer, rotations) in set {
                if layer > LAYER_ID_LIMIT {
                    return Err(RotationError::field(
                        path,
                        format!("layers.{layer}"),
                        "the layer id is too large",
                    ));
                }
                for (side, rotations) in rotations.sides() {
                    let name = |what: &str| format!("layers.{layer}.{side}.{scope}.{what}");
                    rotations.check(path, scope, kv_heads, head_dim, &name)?;
                }
            }
        }
        Ok(())
    }

    /// Checks that every matrix is a rotation.
    pub fn check_orthogonal(&self, path: &Path) -> Result<(), RotationError> {
        let matrices: Vec<_> = self.rotations().collect();
        let errors: Vec<f64> = matrices.par_iter().map(|(_, matrix)| matrix.orthogonality_error()).collect();
        // NaN is above every limit.
        match errors.iter().position(|error| error.is_nan() || *error > ORTHOGONALITY_LIMIT) {
            Some(index) => Err(RotationError::NotOrthogonal {
                path: path.to_owned(),
                tensor: matrices[index].0.to_string(),
                error: errors[index],
                limit: ORTHOGONALITY_LIMIT,
            }),
            None => Ok(()),
        }
    }
}

impl SideRotations {
    fn check(
        &self,
        path: &Path,
        scope: Scope,
        kv_heads: usize,
        dim: usize,
        name: &dyn Fn(&str) -> String,
    ) -> Result<(), RotationError> {
        let expected = if scope == Scope::Head { kv_heads } else { 1 };
        let count = |what: &str, found: usize, allowed: &[usize]| {
            if allowed.contains(&found) {
                return Ok(());
            }
            let expected = allowed.iter().map(usize::to_string).collect::<Vec<_>>().join(" or ");
            Err(RotationError::tensor(path, name(what), format!("{found} of them, expected {expected}")))
        };
        let length = |what: &str, found: usize| {
            if found == dim {
                return Ok(());
            }
            Err(RotationError::tensor(path, name(what), format!("{found} channels, expected {dim}")))
        };
        let finite = |what: &str, finite: bool| {
            if finite {
                return Ok(());
            }
            Err(RotationError::NotFinite { path: path.to_owned(), tensor: name(what) })
        };
        let matrices = |what: &str, matrices: &[SquareMatrix]| {
            count(what, matrices.len(), &[expected])?;
            matrices.iter().try_for_each(|matrix| {
                length(what, matrix.dim())?;
                finite(what, matrix.values().iter().all(|value| value.is_finite()))
            })
        };
        matrices("rotation", &self.rotations)?;
        if let Some(metrics) = &self.metrics {
            matrices("metric", metrics)?;
        }
        if let Some(bands) = &self.bands {
            matrices("bands", bands)?;
        }
        if let Some(unturned_means) = &self.unturned_means {
            count("bands", self.bands.as_ref().map_or(0, Vec::len), &[expected])?;
            count("unturned_mean", unturned_means.len(), &[expected])?;
            for mean in unturned_means {
                length("unturned_mean", mean.len())?;
                finite("unturned_mean", mean.iter().all(|value| value.is_finite()))?;
            }
        }
        count("eigenvalues", self.eigenvalues.len(), &[expected, 0])?;
        for values in &self.eigenvalues {
            length("eigenvalues", values.len())?;
            finite("eigenvalues", values.iter().all(|value| value.is_finite()))?;
        }
        if let Some(means) = &self.means {
            count("mean", means.len(), &[expected, kv_heads.max(expected)])?;
            for mean in means {
                length("mean", mean.len())?;
                finite("mean", mean.iter().all(|value| value.is_finite()))?;
            }
        }
        count("rules", self.rules.len(), &[expected])
    }
}

/// The name of one rotation of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RotationName {
    /// Whether heads share the rotation.
    pub scope: Scope,
    /// Layer id.
    pub layer: usize,
    /// `keys` or `values`.
    pub side: &'static str,
    /// Index among the rotations of the layer.
    pub head: usize,
}

impl fmt::Display for RotationName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "layers.{}.{}.{}.rotation", self.layer, self.side, self.scope)?;
        match self.scope {
            Scope::Head => write!(f, "[{}]", self.head),
            Scope::Layer => Ok(()),
        }
    }
}
