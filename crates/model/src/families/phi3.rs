//! Phi-3 and Phi-4: Llama with fused projections, long RoPE factors in models of long context, and a window in some.

use oscar_kernels::backend::RopeLayout;

use super::style::window_of_all;
use super::{Bias, ModelFamily, NormRule, StyleFacts};
use crate::config::BlockStyle;

pub(super) static PHI3: ModelFamily = ModelFamily {
    name: "phi3",
    gguf_architecture: "phi3",
    model_type: "phi3",
    gguf_rope: RopeLayout::Halves,
    qkv_bias: Bias::IfDeclared,
    head_norms: NormRule::Never,
    rotary_divisor: 1,
    experts: None,
    style: Some(&StyleFacts {
        windows: true,
        from_json: |fields, shape| {
            let context = fields.positive("max_position_embeddings")?;
            let window = fields.positive_if_present("sliding_window")?;
            Ok((style(shape.head_dim), window_of_all(window, context, shape.layers)))
        },
        from_gguf: |gguf, key, shape| {
            let number = |name: &str| gguf.metadata().get::<u32>(&key(name));
            let context = number("context_length")?.unwrap_or(0) as usize;
            // 0 says that there is none.
            let window = number("attention.sliding_window")?.filter(|&window| window > 0);
            let window = window.map(|window| window as usize);
            Ok((style(shape.head_dim), window_of_all(window, context, shape.layers)))
        },
        ..StyleFacts::PLAIN
    }),
};

fn style(head_dim: usize) -> BlockStyle {
    BlockStyle { fused_projections: true, ..BlockStyle::plain(head_dim) }
}
