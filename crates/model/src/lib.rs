//! Files in, logits out.
//!
//! | module | job |
//! |---|---|
//! | [`source`] | from a name to files: catalogue, cache directory, hub layout |
//! | [`files`] | GGUF, safetensors and JSON, read with suspicion |
//! | [`text`] | tokenizers and chat templates |
//! | `families` | what sets model families apart |
//! | `config`, `rope` | the shape of a model |
//! | `weights`, `experts`, `stacked_experts`, `scales`, `forward` | one forward pass over any backend |
//! | [`SamplingDefaults`] | the sampling settings that a model's makers recommend |
//! | `loaded` | all of it put together |

mod config;
mod error;
mod experts;
mod families;
pub mod files;
mod forward;
mod loaded;
mod names;
mod random;
mod room;
mod rope;
mod sampling;
mod scales;
pub mod source;
mod stacked_experts;
pub mod text;
mod weights;

pub use config::{BlockStyle, ExpertsConfig, ModelConfig, QkNorm, SlidingLayers, WeightScales};
pub use error::ModelError;
pub use forward::{Activations, LayerAttention, Model, PagedAttention, PagedSealing};
pub use loaded::{ChatError, LoadedModel, ModelFiles};
pub use random::{Shard, Slice, random_layers, random_mixture, random_model, random_names, random_shard};
pub use rope::{RopeConfig, RopeScaling};
pub use sampling::SamplingDefaults;
pub use weights::{FeedForward, LayerWeights};
