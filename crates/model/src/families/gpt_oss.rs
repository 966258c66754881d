//! GPT-OSS: every second layer sees a window of 128 positions, every head has a learned sink, all projections have biases, and
//! the router's softmax is over the four experts that it chose. The activation is clamped. Published weights of experts are
//! MXFP4.

use oscar_kernels::backend::{Activation, RopeLayout};
use oscar_kernels::routing::Scores;

use super::style::{above_zero, all_but_every, sliding_by_pattern, sliding_by_types};
use super::{
    Bias, BlockShape, ExpertFacts, ExpertLayout, ExpertNames, FieldName, ModelFamily, NormRule, Normalise,
    StyleFacts,
};
use crate::config::{BlockStyle, SlidingLayers};
use crate::error::ModelError;
use crate::files::{Fields, Gguf};

pub(super) static GPT_OSS: ModelFamily = ModelFamily {
    name: "gpt_oss",
    gguf_architecture: "gpt-oss",
    model_type: "gpt_oss",
    gguf_rope: RopeLayout::Halves,
    qkv_bias: Bias::UnlessDenied,
    head_norms: NormRule::Never,
    rotary_divisor: 1,
    experts: Some(&ExpertFacts {
        count: ["num_local_experts", "num_experts"],
        inner: "intermediate_size",
        scores: Scores::SoftmaxOfChosen,
        normalise: Normalise::Always,
        names: ExpertNames {
            router: "mlp.router",
            correction: None,
            experts: "mlp.experts",
            gate: "gate_up_proj",
            up: "gate_up_proj",
            down: "down_proj",
            shared: None,
        },
        gguf_norm: "post_attention_norm",
        layout: ExpertLayout::Stacked,
        biases: true,
        further_layers: "num_nextn_predict_layers",
    }),
    style: Some(&StyleFacts {
        default_sizes: &DEFAULTS,
        default_theta: 150_000.0,
        gguf_yarn_truncates: false,
        windows: true,
        from_json: style_of_json,
        from_gguf: style_of_gguf,
        ..StyleFacts::PLAIN
    }),
};

/// Fields that `config.json` may leave out.
const DEFAULTS: [(&str, usize); 8] = [
    ("vocab_size", 201_088),
    ("hidden_size", 2880),
    ("intermediate_size", 2880),
    ("num_hidden_layers", 36),
    ("num_attention_heads", 64),
    ("num_key_value_heads", 8),
    ("head_dim", 64),
    ("max_position_embeddings", 131_072),
];

/// Settings of the activation where a file does not give them.
const ALPHA: f64 = 1.702;
const LIMIT: f64 = 7.0;

/// Positions that a layer with a window sees, where a file does not say.
const WINDOW: usize = 128;

/// The first layer has a window, the second sees everything, and so on, where a file does not say.
const PERIOD: usize = 2;

fn style_of_json(
    fields: &Fields<'_>,
    BlockShape { head_dim, layers, .. }: BlockShape,
) -> Result<(BlockStyle, Option<SlidingLayers>), ModelError> {
    if !fields.contains("rope_parameters") && !fields.contains("rope_scaling") {
        return Err(fields.wrong("rope_scaling", "an object; the model was trained with YaRN").into());
    }
    let style = style(
        head_dim,
        above_zero(fields, "swiglu_alpha", ALPHA)?,
        above_zero(fields, "swiglu_limit", LIMIT)?,
    );
    let is_sliding = match sliding_by_types(fields)? {
        Some(is_sliding) => is_sliding,
        None => all_but_every(PERIOD, layers),
    };
    let window = fields.positive_if_present("sliding_window")?.unwrap_or(WINDOW);
    Ok((style, Some(SlidingLayers { window, is_sliding, rope: None })))
}

/// The same of a GGUF file, whose activation is the published one.
fn style_of_gguf(
    gguf: &Gguf,
    key: &FieldName<'_>,
    BlockShape { head_dim, layers, .. }: BlockShape,
) -> Result<(BlockStyle, Option<SlidingLayers>), ModelError> {
    let window = gguf.metadata().get::<u32>(&key("attention.sliding_window"))?;
    let window = window.map_or(WINDOW, |window| window as usize);
    let is_sliding = sliding_by_pattern(gguf, key, PERIOD, layers)?;
    let sliding = SlidingLayers { window, is_sliding, rope: None };
    Ok((style(head_dim, ALPHA, LIMIT), Some(sliding)))
}

fn style(head_dim: usize, alpha: f64, limit: f64) -> BlockStyle {
    BlockStyle {
        activation: Activation::ClampedSwiglu { alpha: alpha as f32, limit: limit as f32 },
        learned_sinks: true,
        ..BlockStyle::plain(head_dim)
    }
}
