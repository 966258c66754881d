//! What a family says about its blocks and its `config.json`, where they are not the plain ones.

use super::ModelFamily;
use crate::config::{BlockStyle, MOST_LAYERS, SlidingLayers};
use crate::error::ModelError;
use crate::files::gguf::{MetadataArray, MetadataValue};
use crate::files::{Fields, FileError, Gguf};

/// The base of rotary frequencies in most families, where `config.json` does not say.
const PLAIN_THETA: f64 = 10_000.0;
/// The activation of most families.
const PLAIN_ACTIVATION: ActivationField =
    ActivationField { field: "hidden_act", value: "silu", expected: "`silu`, the only activation supported" };

/// The facts of a family whose blocks are put together in a way of its own and whose layers may have a sliding window.
#[derive(Debug)]
pub(crate) struct StyleFacts {
    /// Sizes that `config.json` may leave out.
    pub default_sizes: &'static [(&'static str, usize)],
    /// The base of the rotary frequencies of layers that see everything, where `config.json` does not say.
    pub default_theta: f64,
    /// The activation that is supported.
    pub activation: ActivationField,
    /// Whether YaRN's ramp begins and ends at whole channels in models that come as GGUF files, which do not say so.
    pub gguf_yarn_truncates: bool,
    /// Whether layers may have a sliding window.
    pub windows: bool,
    /// Reads the style and the layers with a window from `config.json`.
    pub from_json: fn(&Fields<'_>, BlockShape) -> Style,
    /// Reads the same from the metadata of a GGUF file.
    pub from_gguf: fn(&Gguf, &FieldName<'_>, BlockShape) -> Style,
}

impl StyleFacts {
    /// What holds for most families.
    pub(crate) const PLAIN: StyleFacts = StyleFacts {
        default_sizes: &[],
        default_theta: PLAIN_THETA,
        activation: PLAIN_ACTIVATION,
        gguf_yarn_truncates: true,
        windows: false,
        from_json: |_, shape| Ok((BlockStyle::plain(shape.head_dim), None)),
        from_gguf: |_, _, shape| Ok((BlockStyle::plain(shape.head_dim), None)),
    };
}

/// Where `config.json` names the activation, and what it must be.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ActivationField {
    pub field: &'static str,
    pub value: &'static str,
    /// What an error says is expected.
    pub expected: &'static str,
}

/// Gives the full name of a field of GGUF metadata, which the architecture begins.
pub(crate) type FieldName<'a> = dyn Fn(&str) -> String + 'a;

/// How blocks are put together, and the layers with a window, if there are any.
type Style = Result<(BlockStyle, Option<SlidingLayers>), ModelError>;

/// The sizes that a style may depend on. They were not checked yet, but there are no more than
/// [`MOST_LAYERS`] layers.
#[derive(Clone, Copy)]
pub(crate) struct BlockShape {
    pub hidden_size: usize,
    pub head_dim: usize,
    pub layers: usize,
    pub q_heads: usize,
}

impl BlockShape {
    /// A number of layers that no model has must not become a list of that length before it is refused.
    pub(crate) fn new(hidden_size: usize, head_dim: usize, layers: usize, q_heads: usize) -> BlockShape {
        BlockShape { hidden_size, head_dim, layers: layers.min(MOST_LAYERS), q_heads }
    }
}

/// A window that all layers of a model have, if it is less than the context.
pub(super) fn window_of_all(window: Option<usize>, context: usize, layers: usize) -> Option<SlidingLayers> {
    let window = window.filter(|&window| window < context)?;
    Some(SlidingLayers { window, is_sliding: vec![true; layers], rope: None })
}

/// A number of `config.json` that must be above zero; `default` if it is not there.
pub(super) fn above_zero(fields: &Fields<'_>, name: &'static str, default: f64) -> Result<f64, FileError> {
    match fields.float_if_present(name)? {
        Some(value) if !((value as f32).is_finite() && value as f32 > 0.0) => {
            Err(fields.wrong(name, "a number above 0"))
        }
        value => Ok(value.unwrap_or(default)),
    }
}

/// Which layers have a window, as `layer_types` in `config.json` says, if it does.
pub(super) fn sliding_by_types(fields: &Fields<'_>) -> Result<Option<Vec<bool>>, FileError> {
    let Some(types) = fields.strings_if_present("layer_types")? else { return Ok(None) };
    let is_sliding = types.into_iter().map(|kind| match kind {
        "sliding_attention" => Ok(true),
        "full_attention" => Ok(false),
        _ => Err(fields.wrong("layer_types", "only `sliding_attention` and `full_attention`")),
    });
    is_sliding.collect::<Result<_, _>>().map(Some)
}

/// All layers have a window but every `period`th.
pub(super) fn all_but_every(period: usize, layers: usize) -> Vec<bool> {
    (1..=layers).map(|layer| !layer.is_multiple_of(period)).collect()
}

/// Which layers have a window, as the metadata of a GGUF file say: by a period, whose last layer sees everything, or by a
/// boolean, or 0 or 1, for each layer. `period` holds for files that do not say.
pub(super) fn sliding_by_pattern(
    gguf: &Gguf,
    key: &FieldName<'_>,
    period: usize,
    layers: usize,
) -> Result<Vec<bool>, ModelError> {
    let name = key("attention.sliding_window_pattern");
    let metadata = gguf.metadata();
    let bad = |problem: String| ModelError::BadConfig { path: gguf.path().to_path_buf(), problem };
    let is_sliding: Vec<bool> = match metadata.value(&name) {
        None => return Ok(all_but_every(period, layers)),
        Some(MetadataValue::Array(MetadataArray::Bool(flags))) => flags.clone(),
        Some(MetadataValue::Array(_)) => {
            let flags = metadata.i32s(&name)?;
            if let Some(flag) = flags.iter().find(|flag| !(0..=1).contains(*flag)) {
                return Err(bad(format!("`{name}` holds {flag}, expected true or false for each layer")));
            }
            flags.iter().map(|&flag| flag == 1).collect()
        }
        Some(_) => match metadata.u32(&name)? {
            0 => return Err(bad(format!("`{name}` is 0, expected 1 or more, or a boolean for each layer"))),
            period => return Ok(all_but_every(period as usize, layers)),
        },
    };
    match is_sliding.len() == layers {
        true => Ok(is_sliding),
        false => Err(bad(format!("`{name}` has {} entries for {layers} layers", is_sliding.len()))),
    }
}

impl ModelFamily {
    /// Whether layers may have a sliding window.
    pub(crate) fn has_windows(&self) -> bool {
        self.style.is_some_and(|style| style.windows)
    }

    /// A number that must be given, unless the family has one for files that leave it out.
    pub(crate) fn size(&self, fields: &Fields<'_>, name: &str) -> Result<usize, FileError> {
        match self.default_size(name) {
            Some(default) => Ok(fields.positive_if_present(name)?.unwrap_or(default)),
            None => fields.positive(name),
        }
    }

    /// A number that the family, or else `default`, has for files that leave it out.
    pub(crate) fn size_or(
        &self,
        fields: &Fields<'_>,
        name: &str,
        default: usize,
    ) -> Result<usize, FileError> {
        let default = self.default_size(name).unwrap_or(default);
        Ok(fields.positive_if_present(name)?.unwrap_or(default))
    }

    fn default_size(&self, name: &str) -> Option<usize> {
        let (_, default) = self.style?.default_sizes.iter().find(|(field, _)| *field == name)?;
        Some(*default)
    }

    /// Base of the rotary frequencies where `config.json` does not say.
    pub(crate) fn default_theta(&self) -> f64 {
        self.style.map_or(PLAIN_THETA, |style| style.default_theta)
    }

    /// Whether YaRN's ramp begins and ends at whole channels in GGUF files.
    pub(crate) fn gguf_yarn_truncates(&self) -> bool {
        self.style.is_none_or(|style| style.gguf_yarn_truncates)
    }

    /// The settings of rotary embedding of layers that see everything, where they are one object.
    pub(crate) fn rope_parameters<'a>(&self, fields: &Fields<'a>) -> Result<Option<Fields<'a>>, FileError> {
        match fields.fields_if_present("rope_parameters")? {
            // Where layers with a window have settings of their own.
            Some(all) if all.contains("full_attention") => all.fields_if_present("full_attention"),
            other => Ok(other),
        }
    }

    /// Refuses another activation than the family's.
    pub(crate) fn check_activation(&self, fields: &Fields<'_>) -> Result<(), FileError> {
        let ActivationField { field, value, expected } =
            self.style.map_or(PLAIN_ACTIVATION, |style| style.activation);
        match fields.str_if_present(field)? {
            Some(activation) if activation != value => Err(fields.wrong(field, expected)),
            _ => Ok(()),
        }
    }

    /// How the blocks are put together, and the layers with a window, as `config.json` says.
    pub(crate) fn style_of_json(&self, fields: &Fields<'_>, shape: BlockShape) -> Style {
        match self.style {
            Some(style) => (style.from_json)(fields, shape),
            None => Ok((BlockStyle::plain(shape.head_dim), None)),
        }
    }

    /// The same as the metadata of a GGUF file say.
    pub(crate) fn style_of_gguf(&self, gguf: &Gguf, key: &FieldName<'_>, shape: BlockShape) -> Style {
        match self.style {
            Some(style) => (style.from_gguf)(gguf, key, shape),
            None => Ok((BlockStyle::plain(shape.head_dim), None)),
        }
    }
}
