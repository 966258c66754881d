//! What sets the blocks of some families apart, and layers that see a window only.

use oscar_kernels::backend::{Activation, Feature};

use super::ExpertsConfig;
use crate::rope::RopeConfig;

/// How the blocks of a model are put together. [`BlockStyle::plain`] is what most families have.
#[derive(Clone, Debug, PartialEq)]
pub struct BlockStyle {
    /// How the gate of a feed-forward block and what it is multiplied with become one.
    pub activation: Activation,
    /// Whether what attention and the feed-forward block return is normed before it is added.
    pub output_norms: bool,
    /// Added to the stored gain of every norm.
    pub norm_offset: f32,
    /// What embeddings are multiplied with.
    pub embedding_scale: Option<f32>,
    /// What `q · k` is multiplied with to get a logit.
    pub attention_scale: f32,
    /// Whether each query head has a learned logit that takes part in its softmax and has no value.
    pub learned_sinks: bool,
    /// What attention and the feed-forward block return is multiplied with this before it is added (Granite). The residual stream
    /// is kept divided by it instead, which norms do not notice but for their epsilon; embeddings are scaled accordingly.
    pub residual_scale: f32,
    /// What logits are multiplied with.
    pub logit_scale: f32,
    /// Layers whose queries and keys do not rotate.
    pub unrotated: Vec<usize>,
    /// Whether query, key and value projections are one matrix in the file, and gate and up projections another.
    pub fused_projections: bool,
}

impl BlockStyle {
    /// SiLU, norms before the blocks only, and logits scaled by the head dimension.
    pub fn plain(head_dim: usize) -> BlockStyle {
        BlockStyle {
            activation: Activation::Silu,
            output_norms: false,
            norm_offset: 0.0,
            embedding_scale: None,
            attention_scale: 1.0 / (head_dim as f32).sqrt(),
            learned_sinks: false,
            residual_scale: 1.0,
            logit_scale: 1.0,
            unrotated: Vec::new(),
            fused_projections: false,
        }
    }
}

/// The layers of a model that see a window of positions instead of all.
#[derive(Clone, Debug, PartialEq)]
pub struct SlidingLayers {
    /// Positions that a row sees, itself included.
    pub window: usize,
    /// Which layers have the window, in the order of the layers; the others are global.
    pub is_sliding: Vec<bool>,
    /// Rotary position embedding of these layers, where it is not that of the others.
    pub rope: Option<RopeConfig>,
}

impl SlidingLayers {
    /// Checks that the numbers fit a model of `layers` layers; `field` as in [`crate::ModelConfig`]'s own check.
    pub(super) fn validate(&self, layers: usize, field: &dyn Fn(&str, &str) -> String) -> Result<(), String> {
        if self.window == 0 {
            let name = field("sliding_window", "attention.sliding_window");
            return Err(format!("`{name}` is 0, expected 1 or more"));
        }
        if self.is_sliding.len() != layers {
            let name = field("layer_types", "attention.sliding_window_pattern");
            return Err(format!("`{name}` has {} entries for {layers} layers", self.is_sliding.len()));
        }
        let Some(rope) = &self.rope else { return Ok(()) };
        if !(rope.theta.is_finite() && rope.theta > 0.0) {
            let name = field("rope_local_base_freq", "rope.freq_base_swa");
            return Err(format!("`{name}` is {}, expected a number above 0", rope.theta));
        }
        rope.validate(field)
    }
}

/// What a device must support for a model to run on it.
pub(super) fn features(
    style: &BlockStyle,
    sliding: Option<&SlidingLayers>,
    experts: Option<&ExpertsConfig>,
) -> Vec<Feature> {
    let needs = [
        (Feature::SlidingWindows, sliding.is_some()),
        (Feature::OutputNorms, style.output_norms),
        (Feature::GeluTanh, style.activation == Activation::GeluTanh),
        (Feature::ScaledEmbeddings, style.embedding_scale.is_some()),
        (Feature::LearnedSinks, style.learned_sinks),
        (Feature::ClampedSwiglu, matches!(style.activation, Activation::ClampedSwiglu { .. })),
        (Feature::LayersWithoutRope, !style.unrotated.is_empty()),
        (Feature::ExpertBiases, experts.is_some_and(|experts| experts.facts.biases)),
    ];
    needs.into_iter().filter_map(|(feature, needed)| needed.then_some(feature)).collect()
}
