//! FP8 weights, as `quantization_config` in `config.json` describes them.
//!
//! The type of a tensor says whether it was converted; lists of modules that were not are for those who convert. What must be
//! known is how scales lie over a matrix. How activations would be rounded does not matter: here they are not.

use crate::error::ModelError;
use crate::families::{ExpertLayout, ModelFamily};
use crate::files::Fields;

/// The parts of a matrix that have a scale of their own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WeightScales {
    /// Blocks of so many rows and columns.
    Block([usize; 2]),
    /// Each row of a matrix has a scale.
    Channel,
    /// A matrix has one scale.
    Tensor,
}

/// The scales of FP8 weights, if there are any. Every other kind of quantised weights is an error.
///
/// MXFP4 needs no settings: how its scales lie is part of the format. Only experts that are stacked have it.
pub(super) fn from_hugging_face(
    fields: &Fields<'_>,
    family: &ModelFamily,
) -> Result<Option<WeightScales>, ModelError> {
    let Some(config) = fields.fields_if_present("quantization_config")? else { return Ok(None) };
    let scales = match config.str_if_present("quant_method")? {
        Some("fp8") => fp8(&config)?,
        Some("compressed-tensors") => compressed_tensors(&config)?,
        Some("mxfp4") if family.experts.is_some_and(|experts| experts.layout == ExpertLayout::Stacked) => {
            return Ok(None);
        }
        method => {
            let method = method.unwrap_or("not given");
            return Err(unsupported(fields, &format!("`quant_method` is {method}")));
        }
    };
    Ok(Some(scales))
}

fn unsupported(fields: &Fields<'_>, what: &str) -> ModelError {
    let problem = format!(
        "field `quantization_config`: {what}; of quantised safetensors FP8 (`fp8`, `compressed-tensors`) is supported, of others \
         use a GGUF file"
    );
    ModelError::BadConfig { path: fields.path().to_path_buf(), problem }
}

fn fp8(config: &Fields<'_>) -> Result<WeightScales, ModelError> {
    if config.str_if_present("fmt")?.is_some_and(|format| format != "e4m3") {
        return Err(config.wrong("fmt", "`e4m3`").into());
    }
    Ok(block_size(config, "weight_block_size")?.map_or(WeightScales::Tensor, WeightScales::Block))
}

/// The two sizes of a block in field `name`, if the field is there.
fn block_size(config: &Fields<'_>, name: &str) -> Result<Option<[usize; 2]>, ModelError> {
    let Some(sizes) = config.token_ids_if_present(name)? else { return Ok(None) };
    match sizes[..] {
        [rows, cols] if rows > 0 && cols > 0 => Ok(Some([rows as usize, cols as usize])),
        _ => Err(config.wrong(name, "two positive integers").into()),
    }
}

fn compressed_tensors(config: &Fields<'_>) -> Result<WeightScales, ModelError> {
    let groups = config.fields_if_present("config_groups")?;
    let groups = groups.ok_or_else(|| config.wrong("config_groups", "an object"))?;
    let mut found = None;
    for name in groups.object().keys() {
        let group = groups.fields_if_present(name)?.ok_or_else(|| groups.wrong(name, "an object"))?;
        let weights =
            group.fields_if_present("weights")?.ok_or_else(|| group.wrong("weights", "an object"))?;
        if weights.str("type")? != "float" {
            return Err(weights.wrong("type", "`float`").into());
        }
        if weights.positive("num_bits")? != 8 {
            return Err(weights.wrong("num_bits", "8").into());
        }
        if weights.bool_if_present("symmetric")? == Some(false) {
            return Err(weights.wrong("symmetric", "true").into());
        }
        let scales = match weights.str("strategy")? {
            "tensor" => WeightScales::Tensor,
            "channel" => WeightScales::Channel,
            "block" => match block_size(&weights, "block_structure")? {
                Some(size) => WeightScales::Block(size),
                None => return Err(weights.wrong("block_structure", "two positive integers").into()),
            },
            _ => return Err(weights.wrong("strategy", "`tensor`, `channel` or `block`").into()),
        };
        if found.is_some_and(|other| other != scales) {
            return Err(weights.wrong("strategy", "the same in every group").into());
        }
        found = Some(scales);
    }
    found.ok_or_else(|| config.wrong("config_groups", "at least one group").into())
}
