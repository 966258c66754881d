//! The published shapes of mixtures of experts.

use oscar_kernels::routing::{Routing, RoutingRule};

use super::Geometry;
use crate::config::{ExpertsConfig, ModelConfig, WeightScales};
use crate::error::ModelError;
use crate::families;
use crate::rope::RopeConfig;

/// A published shape with experts; heads of 128 channels.
#[derive(Clone, Copy)]
pub(super) struct Mixture {
    pub(super) name: &'static str,
    family: &'static str,
    vocabulary: usize,
    hidden: usize,
    /// Width of dense layers.
    inner: usize,
    layers: usize,
    /// Layers before the first one with experts.
    dense: usize,
    q_heads: usize,
    kv_heads: usize,
    experts: usize,
    expert_inner: usize,
    /// Experts that all rows share.
    shared: usize,
    rotary: usize,
    biased: bool,
    normed: bool,
    scale: f32,
    /// Tokens of `max_position_embeddings`; 131072 in those that are measured with less than theirs.
    context: usize,
    /// How weights are scaled in a file that has FP8.
    fp8: Option<WeightScales>,
}

const QWEN3_30B: Mixture = Mixture {
    name: "qwen3-30b-a3b",
    family: "qwen3_moe",
    vocabulary: 151_936,
    hidden: 2048,
    inner: 6144,
    layers: 48,
    dense: 0,
    q_heads: 32,
    kv_heads: 4,
    experts: 128,
    expert_inner: 768,
    shared: 0,
    rotary: 128,
    biased: false,
    normed: true,
    scale: 1.0,
    context: 131_072,
    fp8: None,
};

const GLM_AIR: Mixture = Mixture {
    name: "glm-4.5-air",
    family: "glm4_moe",
    vocabulary: 151_552,
    hidden: 4096,
    inner: 10_944,
    layers: 46,
    dense: 1,
    q_heads: 96,
    kv_heads: 8,
    experts: 128,
    expert_inner: 1408,
    shared: 1,
    rotary: 64,
    biased: true,
    normed: false,
    scale: 1.0,
    context: 131_072,
    fp8: None,
};

/// `zai-org/GLM-4.7`, `config.json`: `num_hidden_layers` 92, `first_k_dense_replace` 3, `hidden_size` 5120, `intermediate_size`
/// 12288, `num_attention_heads` 96, `num_key_value_heads` 8, `head_dim` 128, `partial_rotary_factor` 0.5, `n_routed_experts` 160,
/// `num_experts_per_tok` 8, `moe_intermediate_size` 1536, `n_shared_experts` 1, `routed_scaling_factor` 2.5, `use_qk_norm`,
/// `attention_bias`, `vocab_size` 151552, `max_position_embeddings` 202752; one further layer that predicts tokens is not run.
const GLM_47: Mixture = Mixture {
    name: "glm-4.7",
    hidden: 5120,
    inner: 12_288,
    layers: 92,
    dense: 3,
    experts: 160,
    expert_inner: 1536,
    normed: true,
    scale: 2.5,
    context: 202_752,
    ..GLM_AIR
};

pub(super) const MIXTURES: [Mixture; 6] = [
    QWEN3_30B,
    Mixture {
        name: "qwen3-235b-a22b",
        hidden: 4096,
        inner: 12_288,
        layers: 94,
        q_heads: 64,
        expert_inner: 1536,
        ..QWEN3_30B
    },
    GLM_AIR,
    GLM_47,
    // `zai-org/GLM-4.7-FP8`: the same shape, projections of layers in FP8 with a scale for each output (`compressed-tensors`).
    Mixture { name: "glm-4.7-fp8", fp8: Some(WeightScales::Channel), ..GLM_47 },
    // `MiniMaxAI/MiniMax-M2`, `config.json`: `num_hidden_layers` 62, `hidden_size` 3072, `intermediate_size` 1536 (of an expert),
    // `num_attention_heads` 48, `num_key_value_heads` 8, `head_dim` 128, `rotary_dim` 64, `num_local_experts` 256,
    // `num_experts_per_tok` 8, `shared_intermediate_size` 0, `qk_norm_type` "per_layer", `vocab_size` 200064,
    // `max_position_embeddings` 196608. Its weights are FP8 in blocks of 128: `minimax-m2:fp8`.
    Mixture {
        name: "minimax-m2",
        family: "minimax_m2",
        vocabulary: 200_064,
        hidden: 3072,
        inner: 1536,
        layers: 62,
        q_heads: 48,
        kv_heads: 8,
        experts: 256,
        expert_inner: 1536,
        rotary: 64,
        context: 196_608,
        ..QWEN3_30B
    },
];

/// Experts that a row goes to, in all of them.
const TOP_K: usize = 8;

impl Mixture {
    pub(super) fn config(&self) -> Result<ModelConfig, ModelError> {
        let unknown =
            || ModelError::BadConfig { path: self.name.into(), problem: "no such family".to_owned() };
        let family = families::by_model_type(self.family).ok_or_else(unknown)?;
        let facts = family.experts.ok_or_else(unknown)?;
        let rule = RoutingRule {
            experts: self.experts,
            top_k: TOP_K,
            scores: facts.scores,
            groups: None,
            normalise: true,
            scale: self.scale,
        };
        let dense = Geometry {
            name: self.name,
            hidden: self.hidden,
            inner: self.inner,
            layers: self.layers,
            q_heads: self.q_heads,
            kv_heads: self.kv_heads,
            tied: false,
        };
        let dense = dense.config();
        Ok(ModelConfig {
            family: family.name,
            vocab_size: self.vocabulary,
            rope: RopeConfig { rotary_dim: self.rotary, ..dense.rope },
            qkv_bias: self.biased,
            head_norms: family.head_norms.norms(self.normed),
            max_context: self.context,
            fp8: self.fp8,
            experts: Some(ExpertsConfig {
                inner: self.expert_inner,
                shared_inner: (self.shared > 0).then_some(self.shared * self.expert_inner),
                routing: Routing::new(rule)?,
                routed: (0..self.layers).map(|layer| layer >= self.dense).collect(),
                facts,
            }),
            ..dense
        })
    }

    /// The same with other sizes, for tests.
    #[cfg(test)]
    pub(super) fn small(&self) -> Mixture {
        Mixture {
            vocabulary: 512,
            hidden: 256,
            inner: 512,
            layers: self.dense + 1,
            q_heads: 4,
            kv_heads: 2,
            experts: 10,
            expert_inner: 256,
            ..*self
        }
    }
}
