//! Qwen2 and Qwen2.5, dense: Llama with a bias on queries, keys and values.
//!
//! The key bias is large (up to hundreds in the first layers), which is what makes these models hard to quantise.

use oscar_kernels::backend::RopeLayout;

use super::{Bias, ModelFamily, NormRule};

pub(super) static QWEN2: ModelFamily = ModelFamily {
    name: "qwen2",
    gguf_architecture: "qwen2",
    model_type: "qwen2",
    gguf_rope: RopeLayout::Halves,
    qkv_bias: Bias::Always,
    head_norms: NormRule::Never,
    rotary_divisor: 1,
    experts: None,
    style: None,
};
