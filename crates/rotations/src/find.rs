//! Finds the rotations of a model: a file that was named, else the user's own, else those that ship with the
//! program.

use std::collections::BTreeMap;
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};

use oscar_codec::{KeyWidths, KvGeometry};
use oscar_kernels::Inspect;
use oscar_kernels::backend::RopeLayout;
use oscar_model::LoadedModel;
use oscar_model::source::Settings;

use super::error::RotationError;
use super::rotation::{BANDS_VERSION, RotationFile, RotationHeader};
use super::safetensors::{self, FileSummary};
use super::shipped::{SHIPPED, ShippedRotations};
use crate::certificate::Certificate;
use crate::hadamard::hadamard_rotations;
use crate::identity::ModelIdentity;
use crate::means::fill_mean_keys;
use crate::notice::Notice;
use crate::{import, interleaved, pt};

/// Bound on the files that are looked at in the cache folder.
const CACHE_LIMIT: usize = 4096;

/// The ending of the name of a certificate, which is otherwise that of its rotations.
pub const CERTIFICATE_ENDING: &str = "certificate.json";

/// Bound on the bytes that are read of a certificate; that of a model with thousands of heads has a few MB.
const CERTIFICATE_LIMIT: u64 = 64 << 20;

/// Where the rotations of a model come from.
#[derive(Clone, Debug, Default)]
pub struct RotationSource {
    /// The files that are looked at.
    pub files: RotationFiles,
    /// Whether rotations that were made for another model are accepted.
    pub force: bool,
}

/// The rotation files of a model.
#[derive(Clone, Debug, Default)]
pub enum RotationFiles {
    /// The newest file for the model in the user's cache, then what ships with the program. A file of the cache that
    /// has no bands is not taken if one that ships has them.
    #[default]
    Search,
    /// A file of our own format.
    Own(PathBuf),
    /// A published pair of PyTorch files.
    Published {
        /// Rotations of keys.
        keys: PathBuf,
        /// Rotations of values.
        values: PathBuf,
    },
    /// No file: a Hadamard rotation for every head, for models of random weights.
    Hadamard,
}

/// Rotations that fit a model.
#[derive(Clone, Debug)]
pub struct FoundRotations {
    /// The rotations, with key channels in the order of the model's own file and mean keys filled in.
    pub file: RotationFile,
    /// Where the rotations come from, for people.
    pub name: String,
    /// The certificate of the rotations, if there is one.
    pub certificate: Option<Certificate>,
    /// What the user should know about the rotations.
    pub notices: Vec<Notice>,
}

impl RotationSource {
    /// The rotations for a model; `None` if none were named and there are none.
    pub fn find<B: Inspect>(
        &self,
        model: &LoadedModel<B>,
        identity: &ModelIdentity,
    ) -> Result<Option<FoundRotations>, RotationError> {
        let mut notices = Vec::new();
        let (name, mut file, certificate) = match &self.files {
            RotationFiles::Own(path) => {
                (path.display().to_string(), safetensors::read(path)?, certificate_beside(path))
            }
            RotationFiles::Published { keys, values } => {
                let file = import::from_pt(&pt::read(keys)?, &pt::read(values)?, &identity.name)?;
                (keys.display().to_string(), file, None)
            }
            RotationFiles::Hadamard => {
                let file = hadamard_rotations(&identity.name, model.config().kv_geometry());
                ("hadamard".to_owned(), file, None)
            }
            RotationFiles::Search => {
                let folder = Settings::from_environment()?.rotation_folder();
                let Some(Choice { taken, passed_over }) = find(&folder, &identity.model_fingerprint) else {
                    return Ok(None);
                };
                notices.extend(passed_over.map(|old| Notice::OldRotations {
                    rotations: old.name,
                    version: old.header.version,
                    model: identity.name.clone(),
                    used: Some(taken.name.clone()),
                }));
                (taken.name.clone(), taken.load()?, taken.certificate())
            }
        };
        let config = model.config();
        file.fill_sliding_layers(&config.sliding_layers());
        let doubt = check_model(&file, &identity.model_fingerprint, config.kv_geometry(), self.force)?;
        notices.extend(doubt.map(Notice::Model));
        if file.header.version < BANDS_VERSION {
            notices.push(Notice::OldRotations {
                rotations: name.clone(),
                version: file.header.version,
                model: identity.name.clone(),
                used: None,
            });
        }
        let mut file = match config.rope.layout {
            RopeLayout::Halves => file,
            RopeLayout::Interleaved => interleaved::to_interleaved(&file, config.rope.rotary_dim),
        };
        if file.sets().any(|(_, set)| set.values().any(|layer| layer.keys.means.is_none())) {
            tracing::info!("{name} has no mean keys; estimating them");
            notices.push(Notice::MeansEstimated { of: format!("{name} has no mean keys") });
            fill_mean_keys(model, &mut file)?;
        }
        Ok(Some(FoundRotations { file, name, certificate, notices }))
    }
}

/// Where a rotation file is.
#[derive(Clone, Debug)]
pub enum RotationOrigin {
    /// The file is inside the program.
    Shipped(&'static ShippedRotations),
    /// The file is on disk.
    Cached(PathBuf),
}

/// A rotation file that can be used, with its header.
#[derive(Clone, Debug)]
pub struct AvailableRotations {
    /// Name without folder and ending.
    pub name: String,
    /// The place where the file was found.
    pub origin: RotationOrigin,
    /// The header of the file: what it was made for.
    pub header: RotationHeader,
    /// Whether the file has bands; without them `int2` has scalar codes.
    pub has_bands: bool,
    /// Bits of the bands of keys in layers that have some of their own.
    pub widths: BTreeMap<usize, KeyWidths>,
    /// Size of the file.
    pub bytes: u64,
}

impl AvailableRotations {
    fn new(name: String, origin: RotationOrigin, summary: FileSummary) -> AvailableRotations {
        let FileSummary { header, has_bands, widths, bytes } = summary;
        AvailableRotations { name, origin, header, has_bands, widths, bytes }
    }

    /// Reads and checks the whole file.
    pub fn load(&self) -> Result<RotationFile, RotationError> {
        match &self.origin {
            RotationOrigin::Cached(path) => safetensors::read(path),
            RotationOrigin::Shipped(shipped) => shipped.load(),
        }
    }
}

impl AvailableRotations {
    /// The certificate of the rotations; `None` if there is none.
    pub fn certificate(&self) -> Option<Certificate> {
        match &self.origin {
            RotationOrigin::Cached(path) => certificate_beside(path),
            RotationOrigin::Shipped(shipped) => shipped.certificate(),
        }
    }
}

/// The certificate that lies beside a rotation file. One that cannot be read is passed over with a warning.
pub fn certificate_beside(rotations: &Path) -> Option<Certificate> {
    let path = rotations.with_extension(CERTIFICATE_ENDING);
    let file = fs::File::open(&path).ok()?;
    let mut text = String::new();
    let read = file.take(CERTIFICATE_LIMIT).read_to_string(&mut text).map_err(|error| error.to_string());
    let parsed = read.and_then(|_| serde_json::from_str(&text).map_err(|error| error.to_string()));
    parsed.map_err(|error| tracing::warn!("{}: passed over: {error}", path.display())).ok()
}

/// Rotations in the cache folder, by name, then those that ship. A file that cannot be read is an error of
/// its own.
pub fn available(folder: &Path) -> Vec<Result<AvailableRotations, RotationError>> {
    let mut paths: Vec<PathBuf> = match fs::read_dir(folder) {
        Ok(files) => {
            files.take(CACHE_LIMIT).flatten().map(|file| file.path()).filter(|path| is_ours(path)).collect()
        }
        // A cache that was never used is empty.
        Err(_) => Vec::new(),
    };
    paths.sort();
    let cached = paths.into_iter().map(|path| {
        let summary = safetensors::read_summary(&path)?;
        let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        Ok(AvailableRotations::new(name, RotationOrigin::Cached(path), summary))
    });
    let shipped = SHIPPED.iter().map(|shipped| {
        let (name, origin) = (shipped.name.to_owned(), RotationOrigin::Shipped(shipped));
        Ok(AvailableRotations::new(name, origin, shipped.summary()?))
    });
    cached.chain(shipped).collect()
}

fn is_ours(path: &Path) -> bool {
    let hidden = path.file_name().is_none_or(|name| name.to_string_lossy().starts_with('.'));
    !hidden && path.extension().is_some_and(|ending| ending == "safetensors")
}

/// The rotations that are taken for a model.
#[derive(Clone, Debug)]
pub struct Choice {
    /// The file that is taken.
    pub taken: AvailableRotations,
    /// The newest file of the cache, if it was not taken because it has no bands.
    pub passed_over: Option<AvailableRotations>,
}

/// Rotations made for the model with this fingerprint: the newest of the cache, then those that ship. Files of the cache
/// without bands lose against those that ship with them. Files that cannot be read are passed over with a warning.
pub fn find(folder: &Path, model_fingerprint: &str) -> Option<Choice> {
    let fits =
        |found: &AvailableRotations| found.header.model_fingerprint.as_deref() == Some(model_fingerprint);
    let mut found: Vec<AvailableRotations> = Vec::new();
    for file in available(folder) {
        match file {
            Ok(file) if fits(&file) => found.push(file),
            Ok(_) => {}
            Err(error) => tracing::warn!("passed over: {error}"),
        }
    }
    // The user's latest calibration is what they mean; those that ship come last.
    found.sort_by_key(|file| match &file.origin {
        RotationOrigin::Cached(path) => {
            (false, std::cmp::Reverse(fs::metadata(path).and_then(|data| data.modified()).ok()))
        }
        RotationOrigin::Shipped(_) => (true, std::cmp::Reverse(None)),
    });
    let shipped_has_bands =
        found.iter().any(|file| matches!(file.origin, RotationOrigin::Shipped(_)) && file.has_bands);
    let index = found.iter().position(|file| file.has_bands || !shipped_has_bands)?;
    // The first is what would have been taken.
    let passed_over = (index > 0).then(|| found[0].clone());
    Some(Choice { taken: found.swap_remove(index), passed_over })
}

/// Whether rotations may be used with a model. Sizes must fit; another model is refused unless `force`. What
/// is returned is a warning for the user.
pub fn check_model(
    file: &RotationFile,
    model_fingerprint: &str,
    geometry: KvGeometry,
    force: bool,
) -> Result<Option<String>, RotationError> {
    let header = &file.header;
    let name = format!("the rotation file of {:?}", header.model);
    let refused = |problem: String, can_force| RotationError::OtherModel {
        rotations: name.clone(),
        problem,
        can_force,
    };
    if header.head_dim != geometry.head_dim {
        let problem =
            format!("its heads have {} channels, the model's {}", header.head_dim, geometry.head_dim);
        return Err(refused(problem, false));
    }
    if header.kv_heads != geometry.kv_heads && header.kv_heads != 0 {
        let problem = format!("it has {} KV heads, the model {}", header.kv_heads, geometry.kv_heads);
        return Err(refused(problem, false));
    }
    for (scope, set) in file.sets() {
        if let Some(layer) = (0..geometry.layers).find(|layer| !set.contains_key(layer)) {
            return Err(refused(format!("it has no {scope} rotations for layer {layer}"), false));
        }
        if let Some((last, _)) = set.last_key_value().filter(|(last, _)| **last >= geometry.layers) {
            let problem =
                format!("it has rotations for layer {last}, the model has {} layers", geometry.layers);
            return Err(refused(problem, false));
        }
    }
    match header.model_fingerprint.as_deref() {
        Some(found) if found == model_fingerprint => Ok(None),
        Some(_) if force => Ok(Some(format!(
            "{name} was made for another model and is used because --force-rotations was given; expect damage"
        ))),
        Some(_) => Err(refused("the fingerprints differ although the sizes fit".to_owned(), true)),
        None => {
            Ok(Some(format!("{name} does not say which model it was made for; only its sizes were checked")))
        }
    }
}
