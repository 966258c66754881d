//! Checkpoints: a calibration that was interrupted continues where it was.
//!
//! Beside the output file lies a folder with the rotations fitted so far and the hidden states after the last
//! finished layer. Hidden states are all that is needed to go on; queries, keys and values are never written. The
//! folder carries a key made from everything that decides the result, so a changed setting starts again.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use oscar_kernels::Inspect;
use oscar_rotations as rotations;
use oscar_rotations::certificate::HeadCertificate;
use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use sha2::{Digest, Sha256};

use super::CalibrateError;
use super::corpus::Corpus;
use super::observe::Observer;
use super::settings::Calibration;
use super::state::CalibrationState;

/// Time between two saves.
const INTERVAL: Duration = Duration::from_secs(20);

/// The folder in which the state of a calibration is kept.
pub struct Checkpoint {
    folder: PathBuf,
    key: String,
    interval: Duration,
    last: Mutex<Instant>,
}

impl Checkpoint {
    /// The checkpoint in the folder beside an output file.
    pub fn beside(output: &Path, calibration: &Calibration, corpus: &Corpus) -> Checkpoint {
        let mut name = output.file_name().unwrap_or_default().to_owned();
        name.push(".partial");
        let key = format!("{calibration:?} {} {}", corpus.hash, env!("CARGO_PKG_VERSION"));
        let key = Sha256::digest(key.as_bytes()).iter().map(|byte| format!("{byte:02x}")).collect();
        let last = Mutex::new(Instant::now());
        Checkpoint { folder: output.with_file_name(name), key, interval: INTERVAL, last }
    }

    /// The same, saved after every layer instead of every few seconds.
    pub fn after_every_layer(self) -> Checkpoint {
        Checkpoint { interval: Duration::ZERO, ..self }
    }

    fn error(&self, problem: impl ToString) -> CalibrateError {
        CalibrateError::Checkpoint { path: self.folder.clone(), problem: problem.to_string() }
    }

    /// Saves the state, unless it was saved a moment ago.
    pub fn save<B: Inspect>(
        &self,
        state: &CalibrationState,
        observer: &Observer<'_, B>,
        next: usize,
    ) -> Result<(), CalibrateError> {
        let since = self.last.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).elapsed();
        if since < self.interval { Ok(()) } else { self.save_now(state, observer, next) }
    }

    /// Saves the state now, whenever it was saved before.
    pub fn save_now<B: Inspect>(
        &self,
        state: &CalibrationState,
        observer: &Observer<'_, B>,
        next: usize,
    ) -> Result<(), CalibrateError> {
        fs::create_dir_all(&self.folder).map_err(|error| self.error(error))?;
        rotations::safetensors::write_exact(&self.folder.join("rotations.safetensors"), &state.file)?;
        let heads = serde_json::to_string(&state.heads).map_err(|error| self.error(error))?;
        let hidden: Vec<Vec<u8>> = (0..observer.sequences())
            .map(|index| Ok(observer.hidden(index)?.iter().flat_map(|value| value.to_le_bytes()).collect()))
            .collect::<Result<_, CalibrateError>>()?;
        let views = hidden.iter().enumerate().map(|(index, bytes)| {
            let view =
                TensorView::new(Dtype::F32, vec![bytes.len() / 4], bytes).expect("four bytes per value");
            (format!("hidden.{index}"), view)
        });
        let metadata = HashMap::from([
            ("key".to_owned(), self.key.clone()),
            ("next".to_owned(), next.to_string()),
            ("heads".to_owned(), heads),
        ]);
        let bytes = safetensors::serialize(views, Some(metadata)).map_err(|error| self.error(error))?;
        // The hidden states are the commit: they are renamed into place last.
        let temporary = self.folder.join("hidden.new");
        fs::write(&temporary, bytes).map_err(|error| self.error(error))?;
        fs::rename(&temporary, self.hidden_path()).map_err(|error| self.error(error))?;
        *self.last.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) = Instant::now();
        Ok(())
    }

    fn hidden_path(&self) -> PathBuf {
        self.folder.join("hidden.safetensors")
    }

    /// Loads the saved state, if it belongs to this calibration. Returns the layer to continue with.
    pub fn resume<B: Inspect>(
        &self,
        state: &mut CalibrationState,
        observer: &mut Observer<'_, B>,
    ) -> Result<usize, CalibrateError> {
        let bytes = match fs::read(self.hidden_path()) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(0),
            Err(error) => return Err(self.error(error)),
        };
        let (_, header) = SafeTensors::read_metadata(&bytes).map_err(|error| self.error(error))?;
        let empty = HashMap::new();
        let metadata = header.metadata().as_ref().unwrap_or(&empty);
        if metadata.get("key") != Some(&self.key) {
            tracing::warn!("{}: made with other settings, starting again", self.folder.display());
            // Its rotations must not be taken for ours if this run ends before its first commit.
            self.remove();
            return Ok(0);
        }
        let next: usize = metadata
            .get("next")
            .and_then(|next| next.parse().ok())
            .ok_or_else(|| self.error("the layer to go on with is missing"))?;
        let heads = metadata.get("heads").ok_or_else(|| self.error("the certificates are missing"))?;
        let heads: Vec<HeadCertificate> = serde_json::from_str(heads).map_err(|error| self.error(error))?;
        if next > observer.layers() {
            return Err(self.error(format!("it continues with layer {next} of {}", observer.layers())));
        }
        let fitted = observer.layers_with_history(next);
        if heads.len() != fitted * observer.heads().kv {
            return Err(self.error(format!("it holds certificates of {} heads", heads.len())));
        }
        let mut file = rotations::safetensors::read(&self.folder.join("rotations.safetensors"))?;
        for set in [&mut file.heads, &mut file.layers] {
            // The rotations may be one save ahead of the hidden states.
            let set = set.get_or_insert_default();
            set.retain(|&layer, _| layer < next);
            if set.len() != fitted {
                return Err(self.error(format!("it holds {} of {fitted} layers", set.len())));
            }
        }
        let tensors = SafeTensors::deserialize(&bytes).map_err(|error| self.error(error))?;
        for index in 0..observer.sequences() {
            let tensor = tensors.tensor(&format!("hidden.{index}")).map_err(|error| self.error(error))?;
            if tensor.dtype() != Dtype::F32 || tensor.data().len() != 4 * observer.hidden_len(index) {
                return Err(self.error(format!("the hidden states of sequence {index} have another size")));
            }
            let (values, _) = tensor.data().as_chunks::<4>();
            let values: Vec<f32> = values.iter().map(|&bytes| f32::from_le_bytes(bytes)).collect();
            observer.set_hidden(index, &values)?;
        }
        *state = CalibrationState { file, heads };
        Ok(next)
    }

    /// Removes the saved state, once the result is in its file.
    pub fn remove(&self) {
        if let Err(error) = fs::remove_dir_all(&self.folder)
            && error.kind() != std::io::ErrorKind::NotFound
        {
            tracing::warn!("{}: cannot remove: {error}", self.folder.display());
        }
    }
}
