//! The shape of a model, whatever file it was described in.

mod from_gguf;
mod from_hugging_face;

pub use from_gguf::from_gguf;
pub use from_hugging_face::from_hugging_face;

use oscar_codec::KvGeometry;
use oscar_kernels::backend::RopeLayout;

use crate::rope::RopeScaling;

/// Hyper-parameters of a decoder-only transformer.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// Name of the family (`llama`, `qwen2`, `qwen3`).
    pub family: &'static str,
    /// Rows of the embedding.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the feed-forward block.
    pub intermediate_size: usize,
    /// Transformer layers.
    pub layers: usize,
    /// Query heads.
    pub q_heads: usize,
    /// KV heads.
    pub kv_heads: usize,
    /// Channels per head.
    pub head_dim: usize,
    /// Longest context the model was made for.
    pub max_context: usize,
    /// Added to the mean square in norms.
    pub norm_eps: f32,
    /// Rotary position embedding.
    pub rope: RopeConfig,
    /// Whether the output projection is the embedding; `None` if the description does not say.
    pub tied_embeddings: Option<bool>,
    /// Query, key and value projections have a bias.
    pub qkv_bias: bool,
    /// The attention output projection has a bias.
    pub output_bias: bool,
    /// The feed-forward projections have a bias.
    pub mlp_bias: bool,
    /// Query and key heads are normed.
    pub head_norms: bool,
}

/// Rotary position embedding as a model describes it.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeConfig {
    /// Base of the frequencies.
    pub theta: f64,
    /// Channels of a head that rotate.
    pub rotary_dim: usize,
    /// Which channels form a pair.
    pub layout: RopeLayout,
    /// How the frequencies are changed for longer contexts.
    pub scaling: RopeScaling,
}

impl ModelConfig {
    /// What decides the size of the KV cache.
    pub fn kv_geometry(&self) -> KvGeometry {
        KvGeometry { layers: self.layers, kv_heads: self.kv_heads, head_dim: self.head_dim }
    }

    /// Query heads per KV head.
    pub fn group(&self) -> usize {
        self.q_heads / self.kv_heads
    }

    /// Checks that the numbers fit together; the result says which do not.
    pub fn validate(&self) -> Result<(), String> {
        let positive = [
            ("vocabulary size", self.vocab_size),
            ("hidden size", self.hidden_size),
            ("feed-forward size", self.intermediate_size),
            ("layer count", self.layers),
            ("attention head count", self.q_heads),
            ("KV head count", self.kv_heads),
            ("head dimension", self.head_dim),
            ("context length", self.max_context),
        ];
        // Far above any real model, and small enough that products of three stay far from overflow.
        const LIMIT: usize = 1 << 24;
        for (name, value) in positive {
            if value == 0 || value > LIMIT {
                return Err(format!("{name} is {value}, expected 1 to {LIMIT}"));
            }
        }
        if !self.q_heads.is_multiple_of(self.kv_heads) {
            return Err(format!(
                "{} query heads cannot share {} KV heads evenly",
                self.q_heads, self.kv_heads
            ));
        }
        if !self.head_dim.is_multiple_of(2) {
            return Err(format!("head dimension {} is odd", self.head_dim));
        }
        let rotary = self.rope.rotary_dim;
        if rotary > self.head_dim || !rotary.is_multiple_of(2) {
            return Err(format!("{rotary} rotary channels do not fit a head of {}", self.head_dim));
        }
        if !(self.norm_eps.is_finite() && self.norm_eps >= 0.0) {
            return Err(format!("norm epsilon is {}", self.norm_eps));
        }
        if !(self.rope.theta.is_finite() && self.rope.theta > 0.0) {
            return Err(format!("RoPE base is {}", self.rope.theta));
        }
        Ok(())
    }
}
