//! Qwen3, dense: no bias, query and key heads normed before RoPE, head dimension given on its own.

use oscar_kernels::backend::RopeLayout;

use super::{Bias, ModelFamily, NormRule};

pub(super) static QWEN3: ModelFamily = ModelFamily {
    name: "qwen3",
    gguf_architecture: "qwen3",
    model_type: "qwen3",
    gguf_rope: RopeLayout::Halves,
    qkv_bias: Bias::IfDeclared,
    head_norms: NormRule::Heads,
    rotary_divisor: 1,
    experts: None,
    style: None,
};
