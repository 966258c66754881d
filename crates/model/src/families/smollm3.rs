//! SmolLM3: Llama with some layers, every fourth as a rule, whose queries and keys do not rotate.

use oscar_kernels::backend::RopeLayout;

use super::{Bias, ModelFamily, NormRule, StyleFacts};
use crate::config::BlockStyle;

pub(super) static SMOLLM3: ModelFamily = ModelFamily {
    name: "smollm3",
    gguf_architecture: "smollm3",
    model_type: "smollm3",
    gguf_rope: RopeLayout::Interleaved,
    qkv_bias: Bias::IfDeclared,
    head_norms: NormRule::Never,
    rotary_divisor: 1,
    experts: None,
    style: Some(&StyleFacts {
        default_theta: 2e6,
        from_json: |fields, shape| {
            let layers = shape.layers;
            let unrotated = match fields.token_ids_if_present("no_rope_layers")? {
                // One where a layer rotates, despite the name.
                Some(rotates) if rotates.len() == layers && rotates.iter().all(|flag| *flag <= 1) => {
                    (0..layers).filter(|&layer| rotates[layer] == 0).collect()
                }
                Some(_) => return Err(fields.wrong("no_rope_layers", "a 0 or 1 for each layer").into()),
                None => {
                    let interval = fields.positive_if_present("no_rope_layer_interval")?;
                    every(interval.unwrap_or(INTERVAL), layers)
                }
            };
            Ok((BlockStyle { unrotated, ..BlockStyle::plain(shape.head_dim) }, None))
        },
        // Files do not say.
        from_gguf: |_, _, shape| {
            let unrotated = every(INTERVAL, shape.layers);
            Ok((BlockStyle { unrotated, ..BlockStyle::plain(shape.head_dim) }, None))
        },
        ..StyleFacts::PLAIN
    }),
};

const INTERVAL: usize = 4;

/// The numbers of every `interval`th layer.
fn every(interval: usize, layers: usize) -> Vec<usize> {
    (0..layers).filter(|layer| (layer + 1).is_multiple_of(interval)).collect()
}
