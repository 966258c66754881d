//! From a cache type on the command line to what the pages of a cache mean.

use std::fmt;
use std::str::FromStr;

use oscar_codec::{KvGeometry, PageCodec, Rule};

use crate::calibrate::run::PAPER_RULES;
use crate::eval::EvalError;
use crate::eval::codecs::{Int2Options, int2_codec, mean_keys};
use crate::zoo::RotationFile;

/// How history is stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CacheType {
    /// 2 bits when there are rotations for the model, else bf16.
    #[default]
    Auto,
    /// Nothing is sealed.
    Bf16,
    /// 8-bit floats.
    Fp8,
    /// 4 bits after a Hadamard.
    Int4,
    /// 2 bits after the model's own rotation.
    Int2,
}

impl CacheType {
    /// Every type.
    pub const ALL: [CacheType; 5] =
        [CacheType::Auto, CacheType::Bf16, CacheType::Fp8, CacheType::Int4, CacheType::Int2];

    /// The word on the command line.
    pub fn name(self) -> &'static str {
        match self {
            CacheType::Auto => "auto",
            CacheType::Bf16 => "bf16",
            CacheType::Fp8 => "fp8",
            CacheType::Int4 => "int4",
            CacheType::Int2 => "int2",
        }
    }
}

impl fmt::Display for CacheType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for CacheType {
    type Err = String;

    fn from_str(text: &str) -> Result<CacheType, String> {
        let found = CacheType::ALL.into_iter().find(|kind| kind.name() == text);
        found.ok_or_else(|| "must be auto, bf16, fp8, int4 or int2".to_owned())
    }
}

/// How codes are chosen, and what is left alone.
#[derive(Clone, Debug, Default)]
pub struct EncoderOptions {
    /// The published encoder: one rotation per layer, keys not centred, fixed clips.
    pub paper: bool,
    /// Clip ratio of the keys instead of the rule in the file.
    pub key_clip: Option<f32>,
    /// Clip ratio of the values.
    pub value_clip: Option<f32>,
    /// Channels that share a scale; a whole head by default.
    pub group: Option<usize>,
    /// Layers that stay bf16.
    pub bf16_layers: Vec<usize>,
}

/// The codec of a cache; `None` if nothing is sealed. `rotations` have key channels in the model's own order; `means`
/// says what to centre keys with where the type needs no rotations and there are none.
pub fn page_codec(
    kind: CacheType,
    options: &EncoderOptions,
    rotations: Option<&RotationFile>,
    means: impl FnOnce() -> Result<Option<Vec<Vec<f32>>>, EvalError>,
    geometry: KvGeometry,
) -> Result<Option<PageCodec>, EvalError> {
    let means = || match rotations.and_then(|file| mean_keys(file, geometry)) {
        Some(means) => Ok(Some(means)),
        None => means(),
    };
    let codec = match kind {
        CacheType::Bf16 => return Ok(None),
        CacheType::Auto if rotations.is_none() => return Ok(None),
        CacheType::Fp8 => PageCodec::fp8(geometry, means()?)?,
        CacheType::Int4 => PageCodec::int4(geometry, means()?)?,
        CacheType::Auto | CacheType::Int2 => {
            let Some(file) = rotations else {
                return Err(EvalError::NoRotations { spec: kind.name().to_owned() });
            };
            PageCodec::int2(int2_codec("int2", file, geometry, &int2_options(options))?)
        }
    };
    Ok(Some(codec.keep_bf16(&options.bf16_layers)?))
}

fn int2_options(options: &EncoderOptions) -> Int2Options {
    let EncoderOptions { paper, key_clip, value_clip, group, .. } = *options;
    // A clip on one side replaces the rules of the file on both: rules per head do not mix with one for all.
    let rules = (key_clip.is_some() || value_clip.is_some()).then(|| {
        let rule = |clip: Option<f32>, published: Rule| clip.map_or(published, Rule::Clip);
        (rule(key_clip, PAPER_RULES.0), rule(value_clip, PAPER_RULES.1))
    });
    Int2Options { paper, rules, group, ..Int2Options::default() }
}
