//! Other people's codecs, and the safe tiers, behind the same interface as ours.
//!
//! They exist to be compared with, so each goes through real bytes and counts them: codes, scales, masks, and the
//! padding of a row to whole bytes; the padding of a head to 32 channels that our pages have (d=48) is not theirs and
//! not counted. Where a publication leaves a choice open the module of the codec says what we took. Windows are not
//! part of a codec here: the lab gives all of them the same.

mod affine_rows;
mod exact;
mod float8;
mod hadamard_int;
mod kitty;
mod kivi;
mod line;
mod naive;
mod quarot;
mod saw;
mod turboquant;

pub use affine_rows::{AffineRows, KeyMeans};
pub use exact::Bf16Rows;
pub use float8::Fp8Rows;
pub use hadamard_int::{int3, int4};
pub use kitty::Kitty;
pub use kivi::Kivi;
pub use naive::naive_int2;
pub use quarot::quarot_int2;
pub use saw::saw_int4;
pub use turboquant::TurboQuant;

use crate::cache_codec::CacheCodec;
use crate::error::CodecError;

/// The names [`by_name`] knows, cheapest last.
pub const NAMES: [&str; 10] =
    ["bf16", "fp8", "int4", "saw-int4", "int3", "turboquant", "kivi2", "kitty", "quarot-int2", "naive-int2"];

/// A baseline by its name, for heads of `head_dim` channels. Key means centre the keys of the codecs that treat
/// rows alone (`naive-int2`, `quarot-int2`, `int3`, `int4`, `saw-int4`); the others have their own answer to a large
/// constant and refuse them.
pub fn by_name(
    name: &str,
    head_dim: usize,
    key_means: Option<KeyMeans>,
) -> Result<Box<dyn CacheCodec>, CodecError> {
    let rows = match name {
        "naive-int2" => Some(naive_int2(head_dim)?),
        "quarot-int2" => Some(quarot_int2(head_dim)?),
        "int3" => Some(int3(head_dim)?),
        "int4" => Some(int4(head_dim)?),
        "saw-int4" => Some(saw_int4(head_dim)?),
        _ => None,
    };
    let other: Box<dyn CacheCodec> = match (rows, name, &key_means) {
        (Some(rows), _, None) => return Ok(Box::new(rows)),
        (Some(rows), _, Some(_)) => {
            let means = key_means.expect("matched as present");
            return Ok(Box::new(rows.with_key_means(means)?));
        }
        (None, "bf16", None) => Box::new(Bf16Rows::new(head_dim)?),
        (None, "fp8", None) => Box::new(Fp8Rows::new(head_dim)?),
        (None, "turboquant", None) => Box::new(TurboQuant::new(head_dim, TurboQuant::DEFAULT_SEED)?),
        (None, "kivi2", None) => Box::new(Kivi::new(head_dim)?),
        (None, "kitty", None) => Box::new(Kitty::new(head_dim)?),
        _ => {
            return Err(CodecError::UnknownName {
                what: if key_means.is_some() { "baseline that takes key means" } else { "baseline" },
                name: name.to_owned(),
                known: if key_means.is_some() {
                    "int4, saw-int4, int3, quarot-int2, naive-int2"
                } else {
                    "bf16, fp8, int4, saw-int4, int3, turboquant, kivi2, kitty, quarot-int2, naive-int2"
                },
            });
        }
    };
    Ok(other)
}

/// Refuses head dimensions no model has, so that sizes below cannot overflow.
fn check_head_dim(head_dim: usize) -> Result<(), CodecError> {
    if (1..=1 << 16).contains(&head_dim) {
        Ok(())
    } else {
        Err(CodecError::HeadDim { head_dim, reason: "a head has 1 to 65536 channels" })
    }
}

/// Tokens of a slice of whole rows.
fn count_rows(rows: &[f32], head_dim: usize) -> Result<usize, CodecError> {
    let tokens = rows.len() / head_dim;
    crate::error::check_length("values of whole rows", tokens * head_dim, rows.len())?;
    Ok(tokens)
}

/// The largest divisor of `length` that is at most `wanted`: how a fixed group size meets a head it does not divide.
fn group_channels(length: usize, wanted: usize) -> usize {
    (1..=wanted.min(length)).rev().find(|&group| length.is_multiple_of(group)).unwrap_or(1)
}
