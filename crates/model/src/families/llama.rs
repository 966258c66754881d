//! Llama 2 and 3, SmolLM2, TinyLlama and other models of the same shape.
//!
//! Llama GGUF files have their query and key channels reordered so that neighbours rotate together.

use oscar_kernels::backend::RopeLayout;

use super::{Bias, ModelFamily, NormRule};

pub(super) static LLAMA: ModelFamily = ModelFamily {
    name: "llama",
    gguf_architecture: "llama",
    model_type: "llama",
    gguf_rope: RopeLayout::Interleaved,
    qkv_bias: Bias::IfDeclared,
    head_norms: NormRule::Never,
    rotary_divisor: 1,
    experts: None,
    style: None,
};
