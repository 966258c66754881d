//! The model that a command works on: loaded, with its name and fingerprints.

use std::sync::Arc;

use clap::Args;
use oscar_kernels::Backend;
use oscar_model::{LoadedModel, ModelFiles, random_model};
use oscar_rotations::ModelIdentity;

use crate::arguments::{ModelArguments, WeightArguments};
use crate::device::DeviceArguments;
use crate::failure::Failure;
use crate::free_memory::weight_bytes;
use crate::progress::LateSteps;

/// Which model, and where it runs.
#[derive(Debug, Args)]
pub(crate) struct SubjectArguments {
    #[command(flatten)]
    pub(crate) model: ModelArguments,

    #[command(flatten)]
    pub(crate) device: DeviceArguments,

    #[command(flatten)]
    weights: WeightArguments,
}

/// A loaded model and its identity.
pub(crate) struct Subject<B: Backend> {
    /// The loaded model.
    pub(crate) model: Arc<LoadedModel<B>>,
    /// Name of the model as the user gave it, and its fingerprints.
    pub(crate) identity: ModelIdentity,
    /// Bytes of the files that hold its weights.
    pub(crate) weight_bytes: u64,
    /// Whether its weights are random.
    pub(crate) random: bool,
}

impl SubjectArguments {
    /// Finds, fetches and loads the model.
    pub(crate) fn load<B: Backend>(&self, backend: B) -> Result<Subject<B>, Failure> {
        Subject::load(&self.model, backend, self.weights)
    }
}

impl<B: Backend> Subject<B> {
    /// Finds, fetches and loads a model on a device.
    pub(crate) fn load(
        arguments: &ModelArguments,
        backend: B,
        weights: WeightArguments,
    ) -> Result<Subject<B>, Failure> {
        let (files, weight_bytes) = match arguments.random() {
            Some(shape) => {
                let files = random_model(shape)?;
                let bytes =
                    files.tensors().entries().iter().filter_map(|entry| entry.byte_len).sum::<usize>();
                (files, bytes as u64)
            }
            None => {
                let path = arguments.resolve()?;
                tracing::info!("loading {}", path.path().display());
                (ModelFiles::open_in(&path, weights.weights.into())?, weight_bytes(path.path()))
            }
        };
        let identity = ModelIdentity::of(&arguments.model, &files)?;
        let mut progress = LateSteps::new(&format!("loading {}", arguments.model), files.config().layers);
        let model = files.load_with(Arc::new(backend), |layers| progress.set(layers));
        progress.finish();
        let model = Arc::new(model?);
        Ok(Subject { model, identity, weight_bytes, random: arguments.random().is_some() })
    }

    /// The model as the user named it.
    pub(crate) fn name(&self) -> &str {
        &self.identity.name
    }
}
