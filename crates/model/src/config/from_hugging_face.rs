//! The shape of a model from `config.json`.
//!
//! Rotary settings come in two spellings: `rope_theta` with `rope_scaling` (older files) and one `rope_parameters`
//! object (newer ones). Settings that would change the result and that we do not implement are errors.

use oscar_kernels::backend::RopeLayout;

use super::{experts, quantisation};
use crate::config::ModelConfig;
use crate::error::ModelError;
use crate::families::{self, BlockShape, ModelFamily};
use crate::files::{Fields, JsonFile};
use crate::rope::{LongRope, RopeConfig, RopeScaling, yarn_magnitude_of};

/// Reads the description of a model.
pub(crate) fn from_hugging_face(file: &JsonFile) -> Result<ModelConfig, ModelError> {
    let (fields, model_type) = families::gemma3::text_settings(file.fields())?;
    let bad = |problem: String| ModelError::BadConfig { path: fields.path().to_path_buf(), problem };
    let family = families::by_model_type(model_type).ok_or_else(|| ModelError::UnsupportedArchitecture {
        path: fields.path().to_path_buf(),
        field: "model_type",
        name: model_type.to_owned(),
        supported: families::names(),
    })?;
    refuse_unsupported_settings(&fields, family)?;

    let size = |name: &str| family.size(&fields, name);
    let hidden_size = size("hidden_size")?;
    let layers = size("num_hidden_layers")?;
    let q_heads = size("num_attention_heads")?;
    let head_dim = family.size_or(&fields, "head_dim", hidden_size / q_heads)?;
    let kv_heads = family.size_or(&fields, "num_key_value_heads", q_heads)?;
    let trained_context = size("max_position_embeddings")?;
    let (style, sliding) =
        family.style_of_json(&fields, BlockShape::new(hidden_size, head_dim, layers, q_heads))?;
    let (qkv_bias, output_bias) = family.qkv_bias.of_projections(fields.bool_if_present("attention_bias")?);
    let parameters = family.rope_parameters(&fields)?;
    let rotary = |name: &str| {
        let inside = match &parameters {
            Some(parameters) => parameters.float_if_present(name)?,
            None => None,
        };
        Ok::<_, ModelError>(inside.or(fields.float_if_present(name)?))
    };
    let theta = rotary("rope_theta")?;
    // MiniMax gives the number of channels that rotate, others a share of them.
    let rotary_dim = match (rotary("partial_rotary_factor")?, fields.positive_if_present("rotary_dim")?) {
        (Some(share), _) if share > 0.0 && share <= 1.0 => (head_dim as f64 * share) as usize,
        (Some(share), _) => {
            return Err(bad(format!(
                "field `partial_rotary_factor` is {share}, expected above 0, at most 1"
            )));
        }
        (None, Some(channels)) => channels,
        (None, None) => head_dim / family.rotary_divisor,
    };
    let scaling = match &parameters {
        Some(parameters) => rope_scaling(parameters, &fields, trained_context, rotary_dim)?,
        None => match fields.fields_if_present("rope_scaling")? {
            Some(scaling) => rope_scaling(&scaling, &fields, trained_context, rotary_dim)?,
            None => RopeScaling::None,
        },
    };
    let described = |facts| experts::from_hugging_face(&fields, facts, layers);
    let further_layers = match family.experts {
        Some(facts) => fields.count_if_present(facts.further_layers)?.unwrap_or(0),
        None => 0,
    };
    let config = ModelConfig {
        family: family.name,
        vocab_size: size("vocab_size")?,
        hidden_size,
        intermediate_size: size("intermediate_size")?,
        layers,
        q_heads,
        kv_heads,
        head_dim,
        max_context: scaling.context(trained_context),
        norm_eps: fields.float_if_present("rms_norm_eps")?.unwrap_or(1e-6) as f32,
        rope: RopeConfig {
            theta: theta.unwrap_or(family.default_theta()),
            rotary_dim,
            layout: RopeLayout::Halves,
            scaling,
        },
        tied_embeddings: fields.bool_if_present("tie_word_embeddings")?,
        qkv_bias,
        output_bias,
        mlp_bias: fields.bool_if_present("mlp_bias")?.unwrap_or(false),
        head_norms: family.head_norms.norms(fields.bool_if_present("use_qk_norm")? == Some(true)),
        experts: family.experts.map(described).transpose()?,
        further_layers,
        fp8: quantisation::from_hugging_face(&fields, family)?,
        style,
        sliding,
    };
    config.validate(&|json, _| json.to_owned()).map_err(bad)?;
    Ok(config)
}

fn refuse_unsupported_settings(fields: &Fields<'_>, family: &ModelFamily) -> Result<(), ModelError> {
    family.check_activation(fields)?;
    if fields.bool_if_present("use_sliding_window")? == Some(true) {
        return Err(fields.wrong("use_sliding_window", "false, as only full attention is supported").into());
    }
    let layers = fields.strings_if_present("layer_types")?.unwrap_or_default();
    if !family.has_windows() && layers.iter().any(|layer| *layer != "full_attention") {
        return Err(fields.wrong("layer_types", "only `full_attention`").into());
    }
    Ok(())
}

/// Reads the settings of scaling, some of which older files have beside them and not inside.
fn rope_scaling(
    fields: &Fields<'_>,
    outside: &Fields<'_>,
    max_context: usize,
    rotary_dim: usize,
) -> Result<RopeScaling, ModelError> {
    let bad = |problem: String| ModelError::BadConfig { path: fields.path().to_path_buf(), problem };
    let name = if fields.contains("rope_type") { "rope_type" } else { "type" };
    let kind = fields.str_if_present(name)?.unwrap_or("default");
    if kind == "default" {
        return Ok(RopeScaling::None);
    }
    let original = fields.positive_if_present("original_max_position_embeddings")?;
    // `su` in the first files of Phi-3.
    if kind == "longrope" || kind == "su" {
        let original = original.or(outside.positive_if_present("original_max_position_embeddings")?);
        return long_rope(fields, original.unwrap_or(max_context), max_context, rotary_dim);
    }
    // Before the other fields: types we do not know have other ones.
    if !["linear", "llama3", "yarn"].contains(&kind) {
        return Err(fields.wrong(name, "`default`, `linear`, `llama3`, `yarn` or `longrope`").into());
    }
    let factor = fields.float("factor")?;
    if !(factor.is_finite() && factor >= 1.0) {
        return Err(fields.wrong("factor", "a number, 1 or more").into());
    }
    let original_context = original.unwrap_or(max_context);
    match kind {
        "linear" => Ok(RopeScaling::Linear { factor }),
        "llama3" => {
            let (low, high) = (fields.float("low_freq_factor")?, fields.float("high_freq_factor")?);
            if !(low > 0.0 && high > low && high.is_finite()) {
                return Err(bad(format!(
                    "`low_freq_factor` {low} and `high_freq_factor` {high} do not form a range"
                )));
            }
            Ok(RopeScaling::Llama3 {
                factor,
                low_frequency_factor: low,
                high_frequency_factor: high,
                original_context,
            })
        }
        _ => {
            let scales = (fields.float_if_present("mscale")?, fields.float_if_present("mscale_all_dim")?);
            let by_scales = match scales {
                (Some(own), Some(all)) if own != 0.0 && all != 0.0 => {
                    Some(yarn_magnitude_of(factor, own) / yarn_magnitude_of(factor, all))
                }
                _ => None,
            };
            Ok(RopeScaling::Yarn {
                factor,
                original_context,
                beta_fast: fields.float_if_present("beta_fast")?.unwrap_or(32.0),
                beta_slow: fields.float_if_present("beta_slow")?.unwrap_or(1.0),
                attention_factor: fields.float_if_present("attention_factor")?.or(by_scales),
                truncate: fields.bool_if_present("truncate")?.unwrap_or(true),
            })
        }
    }
}

fn long_rope(
    fields: &Fields<'_>,
    original_context: usize,
    context: usize,
    rotary_dim: usize,
) -> Result<RopeScaling, ModelError> {
    let factors = |name: &'static str| {
        let factors =
            fields.floats_if_present(name)?.ok_or_else(|| fields.wrong(name, "a list of numbers"))?;
        Ok::<Vec<f32>, ModelError>(factors.into_iter().map(|factor| factor as f32).collect())
    };
    let long_rope = LongRope {
        short: factors("short_factor")?,
        long: factors("long_factor")?,
        original_context,
        context,
        magnitude: fields.float_if_present("attention_factor")?,
    };
    let bad = |problem| ModelError::BadConfig { path: fields.path().to_path_buf(), problem };
    long_rope.scaling(rotary_dim / 2).map_err(bad)
}
