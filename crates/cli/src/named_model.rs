//! The model that a command works on: loaded, with its name and fingerprints.

use std::sync::Arc;

use clap::Args;
use oscar_kernels::Backend;
use oscar_model::{LoadedModel, ModelFiles, Slice, random_model, random_shard};
use oscar_rotations::ModelIdentity;

use crate::arguments::{ModelArguments, WeightArguments};
use crate::device::DeviceArguments;
use crate::failure::Failure;
use crate::free_memory::weight_bytes;
use crate::progress::LateSteps;

/// Which model, and where it runs.
#[derive(Debug, Args)]
pub(crate) struct NamedModelArguments {
    #[command(flatten)]
    pub(crate) model: ModelArguments,

    #[command(flatten)]
    pub(crate) device: DeviceArguments,

    #[command(flatten)]
    weights: WeightArguments,
}

/// A loaded model with the name that the user gave it, and its fingerprints.
pub(crate) struct NamedModel<B: Backend> {
    /// The model on its device, with its tokenizer and template.
    pub(crate) model: Arc<LoadedModel<B>>,
    /// Name of the model as the user gave it, and its fingerprints.
    pub(crate) identity: ModelIdentity,
    /// Bytes of the files that hold its weights.
    pub(crate) weight_bytes: u64,
    /// Whether its weights are random.
    pub(crate) random: bool,
    /// What it is a slice of, if it is one.
    pub(crate) slice: Option<Slice>,
}

impl NamedModelArguments {
    /// Finds, fetches and loads the model.
    pub(crate) fn load<B: Backend>(&self, backend: B) -> Result<NamedModel<B>, Failure> {
        NamedModel::load(&self.model, backend, self.weights)
    }
}

impl<B: Backend> NamedModel<B> {
    /// Finds, fetches and loads a model on a device.
    pub(crate) fn load(
        arguments: &ModelArguments,
        backend: B,
        weights: WeightArguments,
    ) -> Result<NamedModel<B>, Failure> {
        let (files, weight_bytes, slice) = match (arguments.random(), arguments.shard) {
            (Some(shape), Some(shard)) => {
                let (files, slice) = random_shard(shape, shard)?;
                (files, slice.weight_bytes as u64, Some(slice))
            }
            (Some(shape), None) => {
                let files = random_model(shape)?;
                let bytes =
                    files.tensors().entries().iter().filter_map(|entry| entry.byte_len).sum::<usize>();
                (files, bytes as u64, None)
            }
            (None, _) => {
                let path = arguments.resolve()?;
                tracing::info!("loading {}", path.path().display());
                let files = ModelFiles::open_in(&path, weights.weights.into())?;
                (files, weight_bytes(path.path()), None)
            }
        };
        let identity = ModelIdentity::of(&arguments.model, &files)?;
        let mut progress = LateSteps::new(&format!("loading {}", arguments.model), files.config().layers);
        let model = files.load_with(Arc::new(backend), |layers| progress.set(layers));
        progress.finish();
        let model = Arc::new(model?);
        Ok(NamedModel { model, identity, weight_bytes, random: arguments.random().is_some(), slice })
    }

    /// The model as the user named it.
    pub(crate) fn name(&self) -> &str {
        &self.identity.name
    }
}
