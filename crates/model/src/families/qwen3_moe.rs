//! Qwen3 with experts (30B-A3B, 235B-A22B, Coder): as Qwen3, and a softmax router over 128 experts, of which 8 are chosen.

use oscar_kernels::backend::RopeLayout;
use oscar_kernels::routing::Scores;

use super::{Bias, ExpertFacts, ExpertLayout, ExpertNames, ModelFamily, NormRule, Normalise};

pub(super) static QWEN3_MOE: ModelFamily = ModelFamily {
    name: "qwen3_moe",
    gguf_architecture: "qwen3moe",
    model_type: "qwen3_moe",
    gguf_rope: RopeLayout::Halves,
    qkv_bias: Bias::IfDeclared,
    head_norms: NormRule::Heads,
    rotary_divisor: 1,
    experts: Some(&ExpertFacts {
        count: ["num_experts", "num_local_experts"],
        inner: "moe_intermediate_size",
        scores: Scores::Softmax,
        normalise: Normalise::Unless(false),
        names: ExpertNames {
            router: "mlp.gate",
            correction: None,
            experts: "mlp.experts",
            gate: "gate_proj",
            up: "up_proj",
            down: "down_proj",
            shared: None,
        },
        gguf_norm: "ffn_norm",
        layout: ExpertLayout::Apart,
        biases: false,
        further_layers: "num_nextn_predict_layers",
    }),
    style: None,
};
