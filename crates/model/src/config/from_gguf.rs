//! The shape of a model from GGUF metadata.

use super::experts;
use crate::config::ModelConfig;
use crate::error::ModelError;
use crate::families::{self, Bias, BlockShape, ModelFamily};
use crate::files::{FileError, Gguf, TensorSource};
use crate::names::TensorNaming;
use crate::rope::{LongRope, RopeConfig, RopeScaling, yarn_magnitude};

/// Reads the description of a model.
pub(crate) fn from_gguf(gguf: &Gguf) -> Result<ModelConfig, ModelError> {
    let path = || gguf.path().to_path_buf();
    let metadata = gguf.metadata();
    let architecture = metadata.str("general.architecture")?;
    let family =
        families::by_gguf_architecture(architecture).ok_or_else(|| ModelError::UnsupportedArchitecture {
            path: path(),
            field: "general.architecture",
            name: architecture.to_owned(),
            supported: families::names(),
        })?;
    let key = |name: &str| format!("{architecture}.{name}");
    let size = |name: &str| metadata.u32(&key(name)).map(|value| value as usize);
    let optional =
        |name: &str| metadata.get::<u32>(&key(name)).map(|value| value.map(|value| value as usize));

    if family.experts.is_none() && optional("expert_count")?.is_some_and(|experts| experts > 0) {
        let problem =
            format!("`{}`: {} models with experts are not supported", key("expert_count"), family.name);
        return Err(ModelError::BadConfig { path: path(), problem });
    }
    let hidden_size = size("embedding_length")?;
    let q_heads = size("attention.head_count")?;
    let kv_heads = optional("attention.head_count_kv")?.unwrap_or(q_heads);
    let head_dim = match optional("attention.key_length")? {
        Some(head_dim) => head_dim,
        None => hidden_size.checked_div(q_heads).unwrap_or(0),
    };
    if let Some(value_dim) = optional("attention.value_length")?.filter(|&value_dim| value_dim != head_dim) {
        let problem = format!(
            "`{}` is {value_dim} beside keys of {head_dim} channels, which is not supported",
            key("attention.value_length")
        );
        return Err(ModelError::BadConfig { path: path(), problem });
    }
    let rotary_dim = optional("rope.dimension_count")?.unwrap_or(head_dim);
    let trained_context = size("context_length")?;
    let scaling = rope_scaling(gguf, &key, rotary_dim, trained_context, family)?;
    // The embedding itself is the truth about the vocabulary; a separate number may count padding differently.
    // Its shape is enough: a file of types that cannot be read can still be inspected.
    let embedding = TensorNaming::Gguf.embedding();
    let missing = || FileError::MissingTensor { path: path(), tensor: embedding.to_owned() };
    let vocab_size = match gguf.entries()[gguf.position(embedding).ok_or_else(missing)?].shape[..] {
        [rows, _] => rows,
        ref shape => {
            let (tensor, shape) = (embedding.to_owned(), shape.to_vec());
            return Err(FileError::WrongShape { path: path(), tensor, expected: "a matrix", shape }.into());
        }
    };

    // Layers that predict further tokens are counted as blocks.
    let further_layers = optional("nextn_predict_layers")?.filter(|_| family.experts.is_some()).unwrap_or(0);
    let layers = size("block_count")?.saturating_sub(further_layers);
    let (style, sliding) =
        family.style_of_gguf(gguf, &key, BlockShape::new(hidden_size, head_dim, layers, q_heads))?;
    let bad = |problem| ModelError::BadConfig { path: path(), problem };
    let is_dense = |layer: usize| gguf.contains(&format!("blk.{layer}.ffn_gate.weight"));
    let experts = match family.experts {
        Some(facts) => Some(experts::from_gguf(metadata, facts, &key, layers, &is_dense)?.map_err(bad)?),
        None => None,
    };

    let config = ModelConfig {
        family: family.name,
        vocab_size,
        hidden_size,
        intermediate_size: size("feed_forward_length")?,
        layers,
        q_heads,
        kv_heads,
        head_dim,
        max_context: scaling.context(trained_context),
        norm_eps: metadata.f32(&key("attention.layer_norm_rms_epsilon"))?,
        rope: RopeConfig {
            theta: metadata.get::<f32>(&key("rope.freq_base"))?.map_or(10_000.0, f64::from),
            rotary_dim,
            layout: family.gguf_rope,
            scaling,
        },
        tied_embeddings: None,
        qkv_bias: family.qkv_bias == Bias::Always || gguf.contains("blk.0.attn_q.bias"),
        output_bias: gguf.contains("blk.0.attn_output.bias"),
        mlp_bias: gguf.contains("blk.0.ffn_gate.bias"),
        head_norms: family.head_norms.norms(gguf.contains("blk.0.attn_q_norm.weight")),
        experts,
        further_layers,
        fp8: None,
        style,
        sliding,
    };
    config
        .validate(&|_, gguf| key(gguf))
        .map_err(|problem| ModelError::BadConfig { path: path(), problem })?;
    Ok(config)
}

fn rope_scaling(
    gguf: &Gguf,
    key: &dyn Fn(&str) -> String,
    rotary_dim: usize,
    max_context: usize,
    family: &ModelFamily,
) -> Result<RopeScaling, ModelError> {
    let metadata = gguf.metadata();
    let bad = |problem: String| ModelError::BadConfig { path: gguf.path().to_path_buf(), problem };
    // Llama 3.1 and later: the scaling rule is baked into a table of divisors.
    if let Some(divisors) = divisors(gguf, "rope_freqs.weight")? {
        if divisors.len() != rotary_dim / 2 {
            let problem =
                format!("`rope_freqs.weight` has {} entries, expected {}", divisors.len(), rotary_dim / 2);
            return Err(bad(problem));
        }
        if let Some(divisor) = divisors.iter().find(|divisor| !(divisor.is_finite() && **divisor > 0.0)) {
            return Err(bad(format!("`rope_freqs.weight` holds {divisor}, expected numbers above 0")));
        }
        return Ok(RopeScaling::Divisors { divisors, magnitude: 1.0 });
    }
    let number = |name: &str| metadata.get::<f32>(&key(name)).map(|value| value.map(f64::from));
    let original = metadata.get::<u32>(&key("rope.scaling.original_context_length"))?;
    let original = original.map_or(max_context, |original| original as usize).max(1);
    let [short, long] =
        ["rope_factors_short.weight", "rope_factors_long.weight"].map(|name| divisors(gguf, name));
    if let (Some(short), Some(long)) = (short?, long?) {
        let magnitude = number("rope.scaling.attn_factor")?;
        let long_rope = LongRope { short, long, original_context: original, context: max_context, magnitude };
        return long_rope.scaling(rotary_dim / 2).map_err(bad);
    }
    let factor = number("rope.scaling.factor")?.unwrap_or(1.0);
    match metadata.get::<&str>(&key("rope.scaling.type"))?.unwrap_or("none") {
        "none" => Ok(RopeScaling::None),
        _ if !(factor.is_finite() && factor > 0.0) => {
            Err(bad(format!("`{}` is {factor}, expected a number above 0", key("rope.scaling.factor"))))
        }
        "linear" => Ok(RopeScaling::Linear { factor }),
        "yarn" => {
            Ok(RopeScaling::Yarn {
                factor,
                original_context: original,
                beta_fast: number("rope.scaling.yarn_beta_fast")?.unwrap_or(32.0),
                beta_slow: number("rope.scaling.yarn_beta_slow")?.unwrap_or(1.0),
                // Here the file's factor comes on top of YaRN's own; in `config.json` it replaces it.
                attention_factor: number("rope.scaling.attn_factor")?.map(|own| own * yarn_magnitude(factor)),
                truncate: family.gguf_yarn_truncates(),
            })
        }
        other => Err(bad(format!(
            "`{}` is {other:?}; supported: none, linear, yarn, and Llama 3 by `rope_freqs.weight`",
            key("rope.scaling.type")
        ))),
    }
}

/// The numbers of a vector, if the file has it.
fn divisors(gguf: &Gguf, name: &str) -> Result<Option<Vec<f32>>, FileError> {
    let Some(tensor) = gguf.find(name)? else { return Ok(None) };
    let stored = tensor.vector()?;
    let data = stored.data().map_err(|_| FileError::WrongShape {
        path: gguf.path().to_path_buf(),
        tensor: name.to_owned(),
        expected: "whole blocks",
        shape: vec![stored.cols],
    })?;
    let mut divisors = vec![0.0; stored.cols];
    oscar_kernels::quant::dequantise(stored.dtype, data, &mut divisors);
    Ok(Some(divisors))
}
