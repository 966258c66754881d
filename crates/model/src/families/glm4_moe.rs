//! GLM-4.5, 4.6 and 4.7 (Air too): the first layers dense, then a sigmoid router whose choice is corrected, and an expert
//! that all rows share. Half of a head rotates. A last layer predicts further tokens and is not read.

use oscar_kernels::backend::RopeLayout;
use oscar_kernels::routing::Scores;

use super::{Bias, ExpertFacts, ExpertLayout, ExpertNames, ModelFamily, NormRule, Normalise};

pub(super) static GLM4_MOE: ModelFamily = ModelFamily {
    name: "glm4_moe",
    gguf_architecture: "glm4moe",
    model_type: "glm4_moe",
    gguf_rope: RopeLayout::Halves,
    qkv_bias: Bias::IfDeclaredWithoutOutput,
    head_norms: NormRule::HeadsIfDeclared,
    rotary_divisor: 2,
    experts: Some(&ExpertFacts {
        count: ["n_routed_experts", "num_local_experts"],
        inner: "moe_intermediate_size",
        scores: Scores::Sigmoid,
        normalise: Normalise::Unless(true),
        names: ExpertNames {
            router: "mlp.gate",
            correction: Some("mlp.gate.e_score_correction_bias"),
            experts: "mlp.experts",
            gate: "gate_proj",
            up: "up_proj",
            down: "down_proj",
            shared: Some("mlp.shared_experts"),
        },
        gguf_norm: "post_attention_norm",
        layout: ExpertLayout::Apart,
        biases: false,
        further_layers: "num_nextn_predict_layers",
    }),
    style: None,
};
