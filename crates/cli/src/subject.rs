//! The model that a command works on: loaded, with its name and fingerprints.

use std::sync::Arc;

use clap::Args;
use oscar_model::{LoadedModel, ModelFiles};
use oscar_rotations::ModelIdentity;

use crate::arguments::{ModelArguments, WeightArguments, positive};
use crate::device::{self, Device};
use crate::failure::Failure;
use crate::free_memory::weight_bytes;

/// Which model, on how many threads.
#[derive(Debug, Args)]
pub(crate) struct SubjectArguments {
    #[command(flatten)]
    pub(crate) model: ModelArguments,

    /// Worker threads; as many as the machine has cores by default.
    #[arg(long, value_name = "N", env = "OSCAR_THREADS", value_parser = positive)]
    pub(crate) threads: Option<usize>,

    #[command(flatten)]
    weights: WeightArguments,
}

/// A loaded model and its identity.
pub(crate) struct Subject {
    /// The loaded model.
    pub(crate) model: Arc<LoadedModel<Device>>,
    /// Name of the model as the user gave it, and its fingerprints.
    pub(crate) identity: ModelIdentity,
    /// Bytes of the files that hold its weights.
    pub(crate) weight_bytes: u64,
}

impl SubjectArguments {
    /// Finds, fetches and loads the model.
    pub(crate) fn load(&self) -> Result<Subject, Failure> {
        self.load_on(false)
    }

    /// As [`Self::load`]; with `deterministic`, a row gets the same bits in batches of every size.
    pub(crate) fn load_on(&self, deterministic: bool) -> Result<Subject, Failure> {
        Subject::load(&self.model, device::open(self.threads, deterministic)?, self.weights)
    }
}

impl Subject {
    /// Finds, fetches and loads a model on a device.
    pub(crate) fn load(
        arguments: &ModelArguments,
        device: Device,
        weights: WeightArguments,
    ) -> Result<Subject, Failure> {
        // Encoding and statistics run on a pool of their own; it can only be sized once, before its first use.
        if rayon::ThreadPoolBuilder::new().num_threads(device.threads()).build_global().is_err() {
            tracing::debug!("the thread pool was sized before");
        }
        let path = arguments.resolve()?;
        tracing::info!("loading {}", path.path().display());
        let files = ModelFiles::open_in(&path, weights.weights.into())?;
        let identity = ModelIdentity::of(&arguments.model, &files)?;
        let model = Arc::new(files.load(Arc::new(device))?);
        Ok(Subject { model, identity, weight_bytes: weight_bytes(path.path()) })
    }

    /// The model as the user named it.
    pub(crate) fn name(&self) -> &str {
        &self.identity.name
    }
}
