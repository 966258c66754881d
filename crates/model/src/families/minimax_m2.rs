//! MiniMax-M2: queries and keys normed over all heads of a layer, half of a head rotates (`rotary_dim`), and a sigmoid
//! router over 256 experts whose choice is corrected. Its experts have the names that Mixtral gave them.

use oscar_kernels::backend::RopeLayout;
use oscar_kernels::routing::Scores;

use super::{Bias, ExpertFacts, ExpertLayout, ExpertNames, ModelFamily, NormRule, Normalise};

pub(super) static MINIMAX_M2: ModelFamily = ModelFamily {
    name: "minimax_m2",
    gguf_architecture: "minimax-m2",
    model_type: "minimax_m2",
    gguf_rope: RopeLayout::Halves,
    qkv_bias: Bias::IfDeclaredWithoutOutput,
    head_norms: NormRule::Layer,
    rotary_divisor: 1,
    experts: Some(&ExpertFacts {
        count: ["num_local_experts", "num_experts"],
        inner: "intermediate_size",
        scores: Scores::Sigmoid,
        normalise: Normalise::Always,
        names: ExpertNames {
            router: "block_sparse_moe.gate",
            correction: Some("block_sparse_moe.e_score_correction_bias"),
            experts: "block_sparse_moe.experts",
            gate: "w1",
            up: "w3",
            down: "w2",
            shared: None,
        },
        gguf_norm: "ffn_norm",
        layout: ExpertLayout::Apart,
        biases: false,
        further_layers: "num_mtp_modules",
    }),
    style: None,
};
