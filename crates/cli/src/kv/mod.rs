//! Arguments of the KV cache: how history is stored, what stays exact, and how much memory it may take.

mod notices;
mod settle;
mod spec;

use clap::{Args, ValueEnum};
use oscar_codec::PageWindows;
use oscar_engine::{KvOptions, PrefillMode};
use oscar_kernels::Inspect;
use oscar_kv::TailPolicy;
use oscar_rotations::{CacheType, Int2Encoder};

use crate::arguments::byte_size;
use crate::failure::Failure;
use crate::named_model::NamedModel;
use crate::rotations::RotationArguments;
use crate::windows::{GivenWindows, whole_pages};
pub(crate) use notices::warn_without_effect;
pub(crate) use settle::ChosenCache;
pub(crate) use spec::{CacheSpec, type_names};

/// How codes are chosen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
enum EncoderChoice {
    /// Bands if the rotation file has them, else scalar.
    #[default]
    Auto,
    /// Keys in bands of channels by strength, with codes of 4, 2 and 1 bits.
    Band,
    /// 2 bits for every channel, per head, centred, with the rules that calibration chose.
    Scalar,
    /// The published recipe: one rotation per layer, keys that are not centred, fixed clips.
    Paper,
}

impl From<EncoderChoice> for Int2Encoder {
    fn from(choice: EncoderChoice) -> Int2Encoder {
        match choice {
            EncoderChoice::Auto => Int2Encoder::Auto,
            EncoderChoice::Band => Int2Encoder::Band,
            EncoderChoice::Scalar => Int2Encoder::Scalar,
            EncoderChoice::Paper => Int2Encoder::Paper,
        }
    }
}

/// How a prompt reads itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
enum PrefillChoice {
    /// The prompt reads itself in bf16, layer by layer.
    #[default]
    Exact,
    /// The prompt reads itself as its answer will: pages depend on the tokens alone.
    Uniform,
}

/// What a prefix hit does when the bf16 copies of its last pages are gone.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
enum PrefixTail {
    /// Compute the recent window anew.
    #[default]
    Recompute,
    /// Read it sealed.
    Sealed,
}

/// The KV cache of an engine that serves.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "KV cache")]
pub(crate) struct KvArguments {
    /// How history is stored: auto (int2 if there are rotations for the model and their certificate allows it, else
    /// bf16), bf16, fp8, int4, int2 or int1.5 [default: auto].
    #[arg(long, value_name = "TYPE")]
    kv_cache_dtype: Option<CacheType>,

    #[command(flatten)]
    pub(crate) cache: CacheArguments,

    /// Tokens at the start that stay bf16, a multiple of 64 [default: 64].
    #[arg(long, value_name = "TOKENS", value_parser = whole_pages)]
    sink_tokens: Option<usize>,

    /// Tokens before the page being filled that stay bf16, a multiple of 64 [default: 256].
    #[arg(long, value_name = "TOKENS", value_parser = whole_pages)]
    recent_tokens: Option<usize>,

    /// What a prefix hit does when the bf16 copies of its last pages are gone [default: recompute].
    #[arg(long, value_name = "HOW")]
    prefix_tail: Option<PrefixTail>,

    /// Do not share pages between requests.
    #[arg(long, alias = "disable-radix-cache")]
    no_prefix_cache: bool,
}

/// What there is to say about a cache whose type and windows are known.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "KV cache")]
pub(crate) struct CacheArguments {
    /// How 2-bit codes are chosen [default: auto].
    #[arg(long, value_name = "ENCODER")]
    kv_encoder: Option<EncoderChoice>,

    /// Channels that share a scale in 2 bits; a whole head by default.
    #[arg(long, value_name = "N")]
    kv_cache_quant_group_size: Option<usize>,

    #[command(flatten)]
    pub(crate) rotations: RotationArguments,

    /// Clip ratio of 2-bit keys, for all heads; values get 0.92 unless --v-clip says otherwise.
    #[arg(long, value_name = "RATIO", value_parser = ratio)]
    k_clip: Option<f32>,

    /// Clip ratio of 2-bit values, for all heads; keys get 0.96 unless --k-clip says otherwise.
    #[arg(long, value_name = "RATIO", value_parser = ratio)]
    v_clip: Option<f32>,

    /// Layers that stay bf16, such as 0,1,27.
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    kv_bf16_layers: Vec<usize>,

    /// Memory for all page pools, such as 2GiB; room for one full context by default, for `serve` see
    /// --mem-fraction-static.
    #[arg(long, value_name = "SIZE", value_parser = byte_size)]
    kv_memory: Option<u64>,

    /// How a prompt reads itself [default: exact].
    #[arg(long, value_name = "MODE")]
    prefill: Option<PrefillChoice>,

    /// Same request and seed, same tokens, to the bit, whatever else runs or ran before: a server then encodes chats from
    /// their text, not as the ids it drew. Slower; implies --prefill uniform.
    #[arg(long)]
    pub(crate) deterministic: bool,
}

impl KvArguments {
    /// The same settings for the cache of a list's entry.
    pub(crate) fn of_spec(&self, spec: CacheSpec) -> KvArguments {
        KvArguments { kv_cache_dtype: Some(spec.kind), cache: self.cache.of_spec(spec), ..self.clone() }
    }

    /// The cache for a model. Rotations are found, or made on the spot if `int2` was given; options without effect
    /// are named.
    pub(crate) fn settle<B: Inspect>(&self, named: &NamedModel<B>) -> Result<ChosenCache, Failure> {
        let chosen = self.settle_quietly(named)?;
        warn_without_effect(self.without_effect(chosen.kind), chosen.kind.name());
        Ok(chosen)
    }

    /// [`Self::settle`] without a word about options, for those who try several types with the same ones.
    pub(crate) fn settle_quietly<B: Inspect>(&self, named: &NamedModel<B>) -> Result<ChosenCache, Failure> {
        let windows = GivenWindows { sink: self.sink_tokens, recent: self.recent_tokens };
        let mut chosen = self.cache.settle(named, self.kv_cache_dtype, windows)?;
        chosen.options.prefix_tree = !self.no_prefix_cache;
        chosen.options.tail = match self.prefix_tail.unwrap_or_default() {
            PrefixTail::Recompute => TailPolicy::Recompute,
            PrefixTail::Sealed => TailPolicy::Sealed,
        };
        Ok(chosen)
    }

    /// Options that change nothing for any cache of a list.
    pub(crate) fn without_effect_on_any(&self, specs: &[CacheSpec]) -> Vec<&'static str> {
        let mut names = specs.iter().map(|spec| self.without_effect(spec.kind));
        let first = names.next().unwrap_or_default();
        names.fold(first, |common, other| common.into_iter().filter(|name| other.contains(name)).collect())
    }
}

impl CacheArguments {
    fn prefill_mode(&self) -> Result<PrefillMode, Failure> {
        match self.prefill {
            Some(PrefillChoice::Exact) if self.deterministic => {
                Err(Failure::new("--prefill exact contradicts --deterministic")
                    .with_fix("leave out one of the two"))
            }
            Some(PrefillChoice::Uniform) => Ok(PrefillMode::Uniform),
            Some(PrefillChoice::Exact) | None => Ok(PrefillMode::Exact),
        }
    }

    /// The settings that do not depend on the type.
    fn options(&self, windows: PageWindows) -> Result<KvOptions, Failure> {
        Ok(KvOptions {
            windows,
            memory: self.kv_memory.map(|bytes| usize::try_from(bytes).unwrap_or(usize::MAX)),
            prefill: self.prefill_mode()?,
            ..KvOptions::default()
        })
    }

    /// The name in tables: the type, and the encoder if it is not our own.
    pub(crate) fn label(&self, kind: CacheType) -> String {
        match self.kv_encoder {
            Some(choice) if choice != EncoderChoice::Auto && kind == CacheType::Int2 => {
                format!("{kind}:{}", Int2Encoder::from(choice).name())
            }
            _ => kind.to_string(),
        }
    }
}

fn ratio(text: &str) -> Result<f32, String> {
    match text.parse::<f32>() {
        Ok(ratio) if (0.0..=1.0).contains(&ratio) => Ok(ratio),
        _ => Err("must be a number from 0 (no clip) to 1".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ratios_are_bounded() {
        assert!(ratio("0").is_ok() && ratio("0.96").is_ok() && ratio("1").is_ok());
        assert!(["-0.1", "1.1", "nan", "x"].iter().all(|text| ratio(text).is_err()));
    }
}
