//! Mistral: Llama with a sliding window in all layers, or in newer models in none. GGUF files say `llama`, and nothing of windows.

use oscar_kernels::backend::RopeLayout;

use super::style::window_of_all;
use super::{Bias, ModelFamily, NormRule, StyleFacts};
use crate::config::BlockStyle;

pub(super) static MISTRAL: ModelFamily = ModelFamily {
    name: "mistral",
    // Never found by this name: Llama comes first.
    gguf_architecture: "llama",
    model_type: "mistral",
    gguf_rope: RopeLayout::Interleaved,
    qkv_bias: Bias::IfDeclared,
    head_norms: NormRule::Never,
    rotary_divisor: 1,
    experts: None,
    style: Some(&StyleFacts {
        windows: true,
        from_json: |fields, shape| {
            // A file that does not say has the window of the first models; `null` says that there is none.
            let window = match fields.object().contains_key("sliding_window") {
                true => fields.positive_if_present("sliding_window")?,
                false => Some(WINDOW),
            };
            let sliding = window_of_all(window, fields.positive("max_position_embeddings")?, shape.layers);
            Ok((BlockStyle::plain(shape.head_dim), sliding))
        },
        ..StyleFacts::PLAIN
    }),
};

const WINDOW: usize = 4096;
