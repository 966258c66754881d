//! Whether the weights fit on a device with memory of its own, which is known from the tables of the files: said before
//! anything is copied there, which takes long.

use oscar_kernels::Backend;

use crate::config::ModelConfig;
use crate::error::ModelError;
use crate::files::{ElementType, TensorEntry, TensorSource};
use crate::names::TensorNaming;

/// Refuses weights that need more memory than is free on the device.
pub(crate) fn check_room<B: Backend>(
    backend: &B,
    source: &dyn TensorSource,
    naming: TensorNaming,
    config: &ModelConfig,
) -> Result<(), ModelError> {
    let Some(free) = backend.free_memory() else { return Ok(()) };
    let tied = config.tied_embeddings.unwrap_or_else(|| !source.contains(naming.head()));
    let used = source.entries().iter().filter(|entry| {
        !naming.may_ignore(&entry.name, tied) && !naming.is_of_further_layer(&entry.name, config)
    });
    let needed = used.map(|entry| bytes_of(backend, entry)).fold(0, usize::saturating_add);
    match needed.checked_sub(free) {
        None | Some(0) => Ok(()),
        Some(missing) => {
            Err(ModelError::WeightsTooLarge { path: source.path().to_path_buf(), needed, free, missing })
        }
    }
}

/// Bytes of a tensor on the device. What is stored in a form of its own takes as much there as in the file.
fn bytes_of<B: Backend>(backend: &B, entry: &TensorEntry) -> usize {
    match entry.element_type {
        ElementType::Supported(dtype) => backend.weight_bytes(dtype, entry.elements()),
        ElementType::Unsupported(_) => entry.byte_len.unwrap_or(0),
    }
}
