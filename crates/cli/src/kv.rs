//! Arguments of the KV cache: how history is stored, what stays exact, and how much memory it may take.

use std::sync::Arc;

use clap::{Args, ValueEnum};
use oscar_codec::{PAGE_TOKENS, PageWindows};
use oscar_engine::{KvOptions, PrefillMode};
use oscar_kv::TailPolicy;
use oscar_lab::calibrate::means::{MEAN_TOKENS, mean_keys};
use oscar_lab::eval::EvalError;
use oscar_lab::page_codec::{CacheType, EncoderOptions, page_codec};
use oscar_lab::zoo::RotationFile;

use crate::arguments::byte_size;
use crate::commands::calibrate;
use crate::failure::Failure;
use crate::lab::{RotationArguments, Subject};
use crate::published::Published;

/// How codes are chosen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
enum Encoder {
    /// Per head, centred, with the rules that calibration chose.
    #[default]
    Auto,
    /// As published: per layer, not centred, fixed clips.
    Paper,
}

/// How a prompt reads itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
enum Prefill {
    /// In bf16, layer by layer.
    #[default]
    Exact,
    /// As its answer will read it: pages depend on the tokens alone.
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

/// The KV cache.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "KV cache")]
pub(crate) struct KvArguments {
    /// How history is stored: auto (int2 if there are rotations for the model, else bf16), bf16, fp8, int4 or int2
    /// [default: auto].
    #[arg(long, value_name = "TYPE")]
    kv_cache_dtype: Option<CacheType>,

    /// How 2-bit codes are chosen.
    #[arg(long, default_value = "auto", value_name = "ENCODER")]
    kv_encoder: Encoder,

    /// Channels that share a scale; a whole head by default.
    #[arg(long, value_name = "N")]
    kv_cache_quant_group_size: Option<usize>,

    #[command(flatten)]
    rotations: RotationArguments,

    /// Clip ratio of 2-bit keys, for all heads; values get 0.92 unless --v-clip says otherwise.
    #[arg(long, value_name = "RATIO", value_parser = ratio)]
    k_clip: Option<f32>,

    /// Clip ratio of 2-bit values, for all heads; keys get 0.96 unless --k-clip says otherwise.
    #[arg(long, value_name = "RATIO", value_parser = ratio)]
    v_clip: Option<f32>,

    /// Layers that stay bf16, such as 0,1,27.
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    kv_bf16_layers: Vec<usize>,

    /// Tokens at the start that stay bf16, a multiple of 64 [default: 64].
    #[arg(long, value_name = "TOKENS", value_parser = whole_pages)]
    sink_tokens: Option<usize>,

    /// Tokens before the page being filled that stay bf16, a multiple of 64 [default: 256].
    #[arg(long, value_name = "TOKENS", value_parser = whole_pages)]
    recent_tokens: Option<usize>,

    /// Memory for all page pools, such as 2GiB; room for one full context by default.
    #[arg(long, value_name = "SIZE", value_parser = byte_size)]
    kv_memory: Option<u64>,

    /// How a prompt reads itself.
    #[arg(long, default_value = "exact", value_name = "MODE")]
    prefill: Prefill,

    /// What a prefix hit does when the bf16 copies of its last pages are gone.
    #[arg(long, default_value = "recompute", value_name = "HOW")]
    prefix_tail: PrefixTail,

    /// Do not share pages between requests.
    #[arg(long, alias = "disable-radix-cache")]
    no_prefix_cache: bool,

    /// Same request and seed, same tokens, to the bit, whatever else runs. Slower; implies --prefill uniform.
    #[arg(long)]
    pub(crate) deterministic: bool,
}

impl KvArguments {
    /// The same settings for another cache type.
    pub(crate) fn of_type(&self, kind: CacheType) -> KvArguments {
        KvArguments { kv_cache_dtype: Some(kind), ..self.clone() }
    }

    /// The settings of a cache for a model: rotations are found, or made on the spot if `int2` was asked for.
    pub(crate) fn options(&self, subject: &Subject) -> Result<KvOptions, Failure> {
        let published = Published::from_environment()?;
        let pages = |given: Option<usize>, published: Option<usize>, default: usize| {
            given.or(published).unwrap_or(default) / PAGE_TOKENS
        };
        let windows = PageWindows {
            sink: pages(self.sink_tokens, published.sink_tokens, 64),
            recent: pages(self.recent_tokens, published.recent_tokens, 256),
        };
        let options = EncoderOptions {
            paper: self.kv_encoder == Encoder::Paper,
            key_clip: self.k_clip.or(published.key_clip),
            value_clip: self.v_clip.or(published.value_clip),
            group: self.kv_cache_quant_group_size,
            bf16_layers: self.kv_bf16_layers.clone(),
        };
        let kind = self.kv_cache_dtype.unwrap_or_default();
        let rotations = match kind {
            CacheType::Bf16 => None,
            _ => self.rotations(subject, published)?,
        };
        if kind == CacheType::Auto && rotations.is_none() {
            let name = &subject.name;
            let why =
                format!("no rotations for {name}, so the cache is bf16; `oscar calibrate {name}` makes them");
            // Whoever did not ask need not be told at every start.
            match self.kv_cache_dtype {
                Some(_) => tracing::warn!("{why}"),
                None => tracing::info!("{why}"),
            }
        }
        let geometry = subject.model.config().kv_geometry();
        // Some models collapse even in 4 bits when their keys are not centred.
        let means = || {
            tracing::warn!(
                "no rotations for {}: mean keys are estimated from {MEAN_TOKENS} tokens of generated prose",
                subject.name
            );
            Ok(Some(mean_keys(&subject.model)?.concat()))
        };
        let codec = page_codec(kind, &options, rotations.as_ref(), means, geometry);
        let codec = codec.map_err(|error| match error {
            EvalError::NoRotations { .. } => {
                Failure::new(format!("there are no rotations for {}", subject.name))
                    .with_fix(format!("run `oscar calibrate {}`, or give --rotations FILE", subject.name))
            }
            error => error.into(),
        })?;
        Ok(KvOptions {
            codec: codec.map(Arc::new),
            windows,
            memory: self.kv_memory.map(|bytes| usize::try_from(bytes).unwrap_or(usize::MAX)),
            prefix_tree: !self.no_prefix_cache,
            tail: match self.prefix_tail {
                PrefixTail::Recompute => TailPolicy::Recompute,
                PrefixTail::Sealed => TailPolicy::Sealed,
            },
            prefill: match self.prefill {
                Prefill::Exact => PrefillMode::Exact,
                Prefill::Uniform => PrefillMode::Uniform,
            },
        })
    }

    /// The rotations of the model. `int2` cannot do without: they are made when there are none.
    fn rotations(&self, subject: &Subject, published: Published) -> Result<Option<RotationFile>, Failure> {
        let rotations = self.rotations.or_published(published);
        if let Some(file) = rotations.resolve(subject)? {
            return Ok(Some(file));
        }
        if self.kv_cache_dtype != Some(CacheType::Int2) {
            return Ok(None);
        }
        eprintln!("{} has no rotations yet; calibrating once (`oscar calibrate {0} --help`)", subject.name);
        calibrate::on_the_spot(subject).map_err(|failure| {
            failure.with_fix(format!(
                "give --rotations FILE, calibrate on text of your own (`oscar calibrate {} --data FILE`), or choose \
                 another --kv-cache-dtype",
                subject.name
            ))
        })?;
        rotations.resolve(subject)
    }
}

fn ratio(text: &str) -> Result<f32, String> {
    match text.parse::<f32>() {
        Ok(ratio) if (0.0..=1.0).contains(&ratio) => Ok(ratio),
        _ => Err("must be a number from 0 (no clip) to 1".to_owned()),
    }
}

fn whole_pages(text: &str) -> Result<usize, String> {
    match text.parse::<usize>() {
        Ok(tokens) if tokens.is_multiple_of(PAGE_TOKENS) => Ok(tokens),
        Ok(tokens) => {
            let (below, above) = (tokens / PAGE_TOKENS * PAGE_TOKENS, tokens.next_multiple_of(PAGE_TOKENS));
            Err(format!("windows are counted in pages of {PAGE_TOKENS}: {below} or {above}"))
        }
        Err(error) => Err(error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_are_whole_pages() {
        assert_eq!(whole_pages("0"), Ok(0));
        assert_eq!(whole_pages("256"), Ok(256));
        assert!(whole_pages("100").unwrap_err().contains("64 or 128"));
        assert!(whole_pages("-1").is_err() && whole_pages("many").is_err());
    }

    #[test]
    fn ratios_are_bounded() {
        assert!(ratio("0").is_ok() && ratio("0.96").is_ok() && ratio("1").is_ok());
        assert!(["-0.1", "1.1", "nan", "x"].iter().all(|text| ratio(text).is_err()));
    }
}
