//! The published shapes of mixtures of experts.

use oscar_kernels::routing::{Routing, RoutingRule};

use super::Geometry;
use crate::config::{ExpertsConfig, ModelConfig};
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
};

pub(super) const MIXTURES: [Mixture; 5] = [
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
    Mixture {
        name: "glm-4.7",
        hidden: 5120,
        inner: 12_288,
        layers: 92,
        dense: 3,
        experts: 160,
        expert_inner: 1536,
        normed: true,
        scale: 2.5,
        ..GLM_AIR
    },
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
