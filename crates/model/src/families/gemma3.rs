//! Gemma 3, text only: most layers see a sliding window and rotate with a base of their own, every sixth sees
//! everything; blocks are normed before and after; GELU; embeddings scaled by the root of their width.
//!
//! Norm gains are stored as the distance from one in Hugging Face checkpoints and whole in GGUF files. Checkpoints that also
//! see images wrap the text model: its settings are in `text_config`, its tensors under `language_model`.

use oscar_kernels::backend::{Activation, RopeLayout};

use super::style::{all_but_every, sliding_by_pattern, sliding_by_types};
use super::{ActivationField, Bias, BlockShape, FieldName, ModelFamily, NormRule, StyleFacts};
use crate::config::{BlockStyle, SlidingLayers};
use crate::error::ModelError;
use crate::files::{Fields, FileError, Gguf};
use crate::rope::{RopeConfig, RopeScaling};

pub(super) static GEMMA3: ModelFamily = ModelFamily {
    name: "gemma3",
    gguf_architecture: "gemma3",
    model_type: "gemma3_text",
    gguf_rope: RopeLayout::Halves,
    qkv_bias: Bias::IfDeclared,
    head_norms: NormRule::Heads,
    rotary_divisor: 1,
    experts: None,
    style: Some(&StyleFacts {
        default_sizes: &DEFAULTS,
        default_theta: GLOBAL_THETA,
        activation: ActivationField {
            field: "hidden_activation",
            value: "gelu_pytorch_tanh",
            expected: "`gelu_pytorch_tanh`, the only activation supported",
        },
        windows: true,
        from_json: style_of_json,
        from_gguf: style_of_gguf,
        ..StyleFacts::PLAIN
    }),
};

/// `model_type` of checkpoints with images.
const WITH_IMAGES: &str = "gemma3";

/// Every so many layers one is global, where a file does not say.
const PATTERN: usize = 6;

/// Bases of the rotary frequencies, where a file does not say.
const GLOBAL_THETA: f64 = 1e6;
const LOCAL_THETA: f64 = 1e4;

/// Fields that `config.json` may leave out.
const DEFAULTS: [(&str, usize); 8] = [
    ("vocab_size", 262_208),
    ("hidden_size", 2304),
    ("intermediate_size", 9216),
    ("num_hidden_layers", 26),
    ("num_attention_heads", 8),
    ("num_key_value_heads", 4),
    ("head_dim", 256),
    ("max_position_embeddings", 131_072),
];

/// How the blocks are put together, and the layers with a window, as `config.json` says.
fn style_of_json(
    fields: &Fields<'_>,
    BlockShape { hidden_size, head_dim, layers, .. }: BlockShape,
) -> Result<(BlockStyle, Option<SlidingLayers>), ModelError> {
    for name in ["final_logit_softcapping", "attn_logit_softcapping"] {
        if fields.contains(name) {
            return Err(fields.wrong(name, "null, as softcapping is not supported").into());
        }
    }
    if fields.bool_if_present("use_bidirectional_attention")? == Some(true) {
        return Err(fields.wrong("use_bidirectional_attention", "false").into());
    }
    let scalar = fields.float_if_present("query_pre_attn_scalar")?.unwrap_or(256.0);
    if !(scalar.is_finite() && scalar > 0.0) {
        return Err(fields.wrong("query_pre_attn_scalar", "a number above 0").into());
    }
    let style = style(hidden_size, 1.0, scalar);
    let is_sliding = match sliding_by_types(fields)? {
        Some(is_sliding) => is_sliding,
        None => {
            let name = ["sliding_window_pattern", "_sliding_window_pattern"]
                .into_iter()
                .find(|name| fields.contains(name))
                .unwrap_or("sliding_window_pattern");
            all_but_every(fields.positive_if_present(name)?.unwrap_or(PATTERN), layers)
        }
    };
    let parameters = match fields.fields_if_present("rope_parameters")? {
        Some(all) => all.fields_if_present("sliding_attention")?,
        None => None,
    };
    if let Some(parameters) = &parameters
        && parameters.str_if_present("rope_type")?.is_some_and(|kind| kind != "default")
    {
        return Err(parameters.wrong("rope_type", "`default` for layers with a window").into());
    }
    let theta = match &parameters {
        Some(parameters) => parameters.float_if_present("rope_theta")?,
        None => fields.float_if_present("rope_local_base_freq")?,
    };
    let window = fields.positive_if_present("sliding_window")?;
    if window.is_none() && is_sliding.contains(&true) {
        return Err(fields.wrong("sliding_window", "a positive integer").into());
    }
    let rope = Some(local_rope(theta.unwrap_or(LOCAL_THETA), head_dim));
    let sliding = window.filter(|_| is_sliding.contains(&true) || is_sliding.len() != layers);
    Ok((style, sliding.map(|window| SlidingLayers { window, is_sliding, rope })))
}

/// The same as the metadata of a GGUF file say.
fn style_of_gguf(
    gguf: &Gguf,
    key: &FieldName<'_>,
    BlockShape { hidden_size, head_dim, layers, q_heads }: BlockShape,
) -> Result<(BlockStyle, Option<SlidingLayers>), ModelError> {
    let metadata = gguf.metadata();
    let number = |name: &str| metadata.get::<u32>(&key(name)).map(|value| value.map(|value| value as usize));
    for name in ["attn_logit_softcapping", "final_logit_softcapping"] {
        if let Some(cap) = metadata.get::<f32>(&key(name))?.filter(|&cap| cap != 0.0) {
            let problem = format!("`{}` is {cap}: softcapping is not supported", key(name));
            return Err(ModelError::BadConfig { path: gguf.path().to_path_buf(), problem });
        }
    }
    // Files do not hold the scalar. In the largest model, of 62 layers, it is the width that a head would have without
    // one of its own; in all others the head dimension.
    let scalar = if layers == 62 { hidden_size / q_heads.max(1) } else { head_dim };
    let style = style(hidden_size, 0.0, scalar as f64);
    let Some(window) = number("attention.sliding_window")? else { return Ok((style, None)) };
    let is_sliding = sliding_by_pattern(gguf, key, PATTERN, layers)?;
    let theta = metadata.get::<f32>(&key("rope.freq_base_swa"))?.map_or(LOCAL_THETA, f64::from);
    let rope = Some(local_rope(theta, head_dim));
    let sliding = is_sliding.contains(&true).then_some(SlidingLayers { window, is_sliding, rope });
    Ok((style, sliding))
}

/// Whether a `config.json` is that of a checkpoint with images.
pub(crate) fn has_images(fields: &Fields<'_>) -> Result<bool, FileError> {
    Ok(fields.str("model_type")? == WITH_IMAGES)
}

/// The settings of the text model in a `config.json`, and its `model_type`.
pub(crate) fn text_settings<'a>(fields: Fields<'a>) -> Result<(Fields<'a>, &'a str), FileError> {
    if !has_images(&fields)? {
        let model_type = fields.str("model_type")?;
        return Ok((fields, model_type));
    }
    let text = fields.fields_if_present("text_config")?;
    let text = text.ok_or_else(|| fields.wrong("text_config", "an object"))?;
    let model_type = text.str_if_present("model_type")?.unwrap_or(GEMMA3.model_type);
    Ok((text, model_type))
}

/// What a tensor of a checkpoint with images is called in one without: `None` for parts that only see images.
pub(crate) fn text_name(name: &str) -> Option<String> {
    let of_images = ["vision_tower.", "multi_modal_projector."];
    let inner = name.strip_prefix("model.").unwrap_or(name);
    if of_images.iter().any(|prefix| inner.starts_with(prefix)) {
        return None;
    }
    // `language_model.model.layers` in older files, `model.language_model.layers` in newer ones.
    Some(match inner.strip_prefix("language_model.") {
        Some(rest) if rest.starts_with("model.") || rest.starts_with("lm_head.") => rest.to_owned(),
        Some(rest) => format!("model.{rest}"),
        None => name.to_owned(),
    })
}

fn style(hidden_size: usize, norm_offset: f32, scalar: f64) -> BlockStyle {
    BlockStyle {
        activation: Activation::GeluTanh,
        output_norms: true,
        norm_offset,
        embedding_scale: Some((hidden_size as f64).sqrt() as f32),
        attention_scale: (1.0 / scalar.sqrt()) as f32,
        ..BlockStyle::plain(1)
    }
}

fn local_rope(theta: f64, head_dim: usize) -> RopeConfig {
    RopeConfig { theta, rotary_dim: head_dim, layout: RopeLayout::Halves, scaling: RopeScaling::None }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tensors_of_a_checkpoint_with_images_get_the_names_of_one_without() {
        for (name, expected) in [
            ("language_model.model.layers.3.mlp.up_proj.weight", Some("model.layers.3.mlp.up_proj.weight")),
            ("model.language_model.layers.3.mlp.up_proj.weight", Some("model.layers.3.mlp.up_proj.weight")),
            ("model.language_model.norm.weight", Some("model.norm.weight")),
            ("language_model.lm_head.weight", Some("lm_head.weight")),
            ("lm_head.weight", Some("lm_head.weight")),
            ("vision_tower.vision_model.embeddings.weight", None),
            ("model.vision_tower.vision_model.embeddings.weight", None),
            ("multi_modal_projector.mm_soft_emb_norm.weight", None),
            ("model.something_else.weight", Some("model.something_else.weight")),
        ] {
            assert_eq!(text_name(name).as_deref(), expected, "{name}");
        }
    }

    #[test]
    fn every_sixth_layer_is_global() {
        let sliding = all_but_every(PATTERN, 18);
        let global: Vec<usize> = (0..18).filter(|&layer| !sliding[layer]).collect();
        assert_eq!(global, [5, 11, 17]);
        assert_eq!(all_but_every(1, 3), [false; 3]);
    }
}
