//! The shape of a model, whatever file it was described in.

mod experts;
mod from_gguf;
mod from_hugging_face;
mod quantisation;
mod style;

pub use experts::ExpertsConfig;
pub(crate) use from_gguf::from_gguf;
pub(crate) use from_hugging_face::from_hugging_face;
pub use quantisation::WeightScales;
pub use style::{BlockStyle, SlidingLayers};

use std::sync::Arc;

use oscar_codec::{KeyTurning, KvGeometry};
use oscar_kernels::backend::Feature;

use crate::rope::RopeConfig;

/// Far above any real model.
pub(crate) const MOST_LAYERS: usize = 1 << 16;

/// Hyper-parameters of a decoder-only transformer.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// Name of the family (`llama`, `qwen3_moe`, …).
    pub family: &'static str,
    /// Rows of the token embedding.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the feed-forward block.
    pub intermediate_size: usize,
    /// The number of layers.
    pub layers: usize,
    /// The number of query heads of a layer.
    pub q_heads: usize,
    /// The number of KV heads of a layer.
    pub kv_heads: usize,
    /// The number of channels of a head.
    pub head_dim: usize,
    /// Longest context the model was made for.
    pub max_context: usize,
    /// The epsilon of RMS norms, which is added to the mean square.
    pub norm_eps: f32,
    /// The rotary position embedding, and how it is scaled.
    pub rope: RopeConfig,
    /// Whether the output projection is the embedding; `None` if the description does not say.
    pub tied_embeddings: Option<bool>,
    /// Whether query, key and value projections have a bias.
    pub qkv_bias: bool,
    /// Whether the attention output projection has a bias.
    pub output_bias: bool,
    /// Whether the feed-forward projections have a bias.
    pub mlp_bias: bool,
    /// Whether queries and keys are normed before RoPE.
    pub head_norms: QkNorm,
    /// The experts of a mixture; a model without is dense in every layer.
    pub experts: Option<ExpertsConfig>,
    /// Layers in the file after the last one, which predict further tokens and are not read.
    pub further_layers: usize,
    /// How FP8 weights are scaled, in a file that has them.
    pub fp8: Option<WeightScales>,
    /// How blocks are put together.
    pub style: BlockStyle,
    /// The layers that see a window only, if there are any.
    pub sliding: Option<SlidingLayers>,
}

/// How queries and keys are normed before RoPE.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QkNorm {
    /// They are not normed.
    None,
    /// Each head is normed by itself.
    Heads,
    /// All heads of a layer are normed together.
    Layer,
}

impl ModelConfig {
    /// The part of the shape that decides the size of the KV cache.
    pub fn kv_geometry(&self) -> KvGeometry {
        KvGeometry { layers: self.layers, kv_heads: self.kv_heads, head_dim: self.head_dim }
    }

    /// Query heads per KV head: the size of a GQA group.
    pub fn group(&self) -> usize {
        self.q_heads / self.kv_heads
    }

    /// How many positions a row of a layer sees; `None` if it sees all.
    pub fn window(&self, layer: usize) -> Option<usize> {
        let sliding = self.sliding.as_ref()?;
        sliding.is_sliding[layer].then_some(sliding.window)
    }

    /// The layers that see a window only.
    pub fn sliding_layers(&self) -> Vec<usize> {
        (0..self.layers).filter(|&layer| self.window(layer).is_some()).collect()
    }

    /// How the keys of a layer turn with their position.
    pub fn key_turning(&self, layer: usize) -> KeyTurning {
        let sliding = self.sliding.as_ref().filter(|sliding| sliding.is_sliding[layer]);
        let rope = sliding.and_then(|sliding| sliding.rope.as_ref()).unwrap_or(&self.rope).build();
        let turns = !self.style.unrotated.contains(&layer);
        KeyTurning::new(if turns { rope.inverse_frequencies } else { Vec::new() }, rope.layout)
    }

    /// [`Self::key_turning`] of every layer.
    pub fn key_turnings(&self) -> Vec<Arc<KeyTurning>> {
        (0..self.layers).map(|layer| Arc::new(self.key_turning(layer))).collect()
    }

    /// What a device must support to run the model.
    pub fn features(&self) -> Vec<Feature> {
        style::features(&self.style, self.sliding.as_ref(), self.experts.as_ref())
    }

    /// Checks that the numbers fit together; the result says which do not. `field` picks the name a message uses
    /// from what `config.json` and GGUF metadata call a number.
    pub(crate) fn validate(&self, field: &dyn Fn(&str, &str) -> String) -> Result<(), String> {
        // Far above any real model, and small enough that the size of a KV page stays far from overflow.
        const LIMIT: usize = 1 << 24;
        const HEAD_LIMIT: usize = 1 << 16;
        let sizes = [
            ("vocab_size", "vocab_size", self.vocab_size, LIMIT),
            ("hidden_size", "embedding_length", self.hidden_size, LIMIT),
            ("intermediate_size", "feed_forward_length", self.intermediate_size, LIMIT),
            ("max_position_embeddings", "context_length", self.max_context, LIMIT),
            ("num_hidden_layers", "block_count", self.layers, MOST_LAYERS),
            ("num_attention_heads", "attention.head_count", self.q_heads, HEAD_LIMIT),
            ("num_key_value_heads", "attention.head_count_kv", self.kv_heads, HEAD_LIMIT),
            ("head_dim", "attention.key_length", self.head_dim, HEAD_LIMIT),
        ];
        for (json, gguf, value, limit) in sizes {
            if value == 0 || value > limit {
                return Err(format!("`{}` is {value}, expected 1 to {limit}", field(json, gguf)));
            }
        }
        if self.further_layers > MOST_LAYERS {
            let name = field("num_nextn_predict_layers", "nextn_predict_layers");
            return Err(format!("`{name}` is {}, expected 0 to {MOST_LAYERS}", self.further_layers));
        }
        if !self.q_heads.is_multiple_of(self.kv_heads) {
            return Err(format!(
                "`{}` is {}, not a multiple of `{}`, which is {}",
                field("num_attention_heads", "attention.head_count"),
                self.q_heads,
                field("num_key_value_heads", "attention.head_count_kv"),
                self.kv_heads
            ));
        }
        if !self.head_dim.is_multiple_of(2) {
            let name = field("head_dim", "attention.key_length");
            return Err(format!("`{name}` is {}, expected an even number", self.head_dim));
        }
        let rotary = self.rope.rotary_dim;
        if rotary == 0 || rotary > self.head_dim || !rotary.is_multiple_of(2) {
            let name = field("partial_rotary_factor", "rope.dimension_count");
            return Err(format!(
                "`{name}` makes {rotary} channels rotate, expected an even number up to {}",
                self.head_dim
            ));
        }
        if !(self.norm_eps.is_finite() && self.norm_eps >= 0.0) {
            let name = field("rms_norm_eps", "attention.layer_norm_rms_epsilon");
            return Err(format!("`{name}` is {}, expected 0 or more", self.norm_eps));
        }
        if !(self.rope.theta.is_finite() && self.rope.theta > 0.0) {
            let name = field("rope_theta", "rope.freq_base");
            return Err(format!("`{name}` is {}, expected a number above 0", self.rope.theta));
        }
        if let Some(sliding) = &self.sliding {
            sliding.validate(self.layers, field)?;
        }
        self.rope.validate(field)
    }
}
