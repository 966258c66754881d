//! Arguments that several commands share, checked while they are parsed.

use clap::{Args, ValueEnum};
use oscar_engine::SamplingOptions;
use oscar_model::files::WeightMemory;
use oscar_model::source::{FetchPolicy, ModelPath, resolve};
use oscar_model::{SamplingDefaults, Shard};

use crate::failure::Failure;
use crate::progress::DownloadProgress;

/// What a model of random weights is called, before the name of its shape.
const RANDOM: &str = "random:";

/// Which model.
#[derive(Clone, Debug, Args)]
pub(crate) struct ModelArguments {
    /// Catalogue name, .gguf file, folder with config.json, or hub id (org/name, org/name:Q4_K_M).
    #[arg(value_name = "MODEL")]
    pub(crate) model: String,

    /// Use only what is on disk; never download.
    #[arg(long, env = "OSCAR_OFFLINE", value_parser = clap::builder::FalseyValueParser::new())]
    pub(crate) offline: bool,

    /// The slice of a model of random weights that is loaded; all of it if there is none.
    #[arg(skip)]
    pub(crate) shard: Option<Shard>,
}

/// Which model is measured.
#[derive(Clone, Debug, Args)]
pub(crate) struct MeasuredModel {
    /// Catalogue name, .gguf file, folder with config.json, or hub id (org/name, org/name:Q4_K_M).
    #[arg(value_name = "MODEL", required_unless_present = "random_weights")]
    model: Option<String>,

    /// Random weights instead of a model's, in a published shape: qwen3-0.6b, 1.7b, 4b, 8b, 32b, 30b-a3b or 235b-a22b,
    /// glm-4.5-air, glm-4.7, glm-4.7-fp8, minimax-m2; :fp8, :q8_0 or :q4_k_m after it for quantised ones.
    #[arg(long, value_name = "SHAPE", conflicts_with = "model")]
    random_weights: Option<String>,

    /// Use only what is on disk; never download.
    #[arg(long, env = "OSCAR_OFFLINE", value_parser = clap::builder::FalseyValueParser::new())]
    offline: bool,
}

impl MeasuredModel {
    /// The model as other commands name it.
    pub(crate) fn arguments(&self) -> ModelArguments {
        let random = self.random_weights.as_deref().map(ModelArguments::random_name);
        let model = random.or_else(|| self.model.clone()).unwrap_or_default();
        ModelArguments { model, offline: self.offline, shard: None }
    }
}

impl ModelArguments {
    /// The name of a model of random weights with a shape.
    pub(crate) fn random_name(shape: &str) -> String {
        format!("{RANDOM}{shape}")
    }

    /// The shape of a model of random weights, if it is one.
    pub(crate) fn random(&self) -> Option<&str> {
        self.model.strip_prefix(RANDOM)
    }

    /// Finds the files of the model, fetching them if need be.
    pub(crate) fn resolve(&self) -> Result<ModelPath, Failure> {
        let policy = if self.offline { FetchPolicy::Never } else { FetchPolicy::Allow };
        Ok(resolve(&self.model, policy, &DownloadProgress::new())?)
    }
}

/// Where weights are kept.
#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct WeightArguments {
    /// Where the weights are kept.
    #[arg(long, value_name = "PLACE", default_value = "mapped", env = "OSCAR_WEIGHTS")]
    pub(crate) weights: WeightPlace,
}

/// See [`WeightArguments`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum WeightPlace {
    /// In the system's cache of the file: shared with other processes, and dropped when memory is short
    Mapped,
    /// In memory of this process, in pages of 2 MiB: decoding is a few percent faster
    LargePages,
}

impl From<WeightPlace> for WeightMemory {
    fn from(place: WeightPlace) -> WeightMemory {
        match place {
            WeightPlace::Mapped => WeightMemory::Mapped,
            WeightPlace::LargePages => WeightMemory::LargePages,
        }
    }
}

/// How tokens are chosen.
#[derive(Clone, Debug, Args)]
pub(crate) struct SamplingArguments {
    /// Randomness: 0 always takes the most likely token and is exactly reproducible.
    #[arg(long, value_name = "T", value_parser = temperature, allow_negative_numbers = true)]
    temperature: Option<f32>,

    /// Keep the most likely tokens that together reach this probability.
    #[arg(long, value_name = "P", value_parser = top_p, allow_negative_numbers = true)]
    top_p: Option<f32>,

    /// Keep the K most likely tokens; 0 keeps all.
    #[arg(long, value_name = "K")]
    top_k: Option<usize>,

    /// Drop tokens less likely than this share of the most likely one.
    #[arg(long, value_name = "P", value_parser = min_p, allow_negative_numbers = true)]
    min_p: Option<f32>,

    /// Seed of the random choices; the same seed gives the same text.
    #[arg(long, value_name = "N")]
    seed: Option<u64>,

    /// Make tokens less likely that the prompt or the answer holds already; 1 is off, 1.1 is usual.
    #[arg(long, value_name = "F", value_parser = factor, allow_negative_numbers = true)]
    repetition_penalty: Option<f32>,

    /// Make tokens less likely that the answer holds already; 0 is off.
    #[arg(long, default_value_t = 0.0, value_name = "X", value_parser = number, allow_negative_numbers = true)]
    presence_penalty: f32,

    /// Make tokens less likely each time the answer holds them; 0 is off.
    #[arg(long, default_value_t = 0.0, value_name = "X", value_parser = number, allow_negative_numbers = true)]
    frequency_penalty: f32,
}

impl SamplingArguments {
    /// The settings, with `defaults` where the user gave none.
    pub(crate) fn options(&self, defaults: &SamplingDefaults) -> SamplingOptions {
        let plain = SamplingOptions::default();
        SamplingOptions {
            temperature: self.temperature.or(defaults.temperature).unwrap_or(1.0),
            top_p: self.top_p.or(defaults.top_p).unwrap_or(plain.top_p),
            top_k: self.top_k.or(defaults.top_k).unwrap_or(plain.top_k),
            min_p: self.min_p.or(defaults.min_p).unwrap_or(plain.min_p),
            seed: self.seed,
            repetition_penalty: self
                .repetition_penalty
                .or(defaults.repetition_penalty)
                .unwrap_or(plain.repetition_penalty),
            presence_penalty: self.presence_penalty,
            frequency_penalty: self.frequency_penalty,
            ..plain
        }
    }
}

/// A whole number of at least 1.
pub(crate) fn positive(text: &str) -> Result<usize, String> {
    match text.parse::<usize>() {
        Ok(0) => Err("must be at least 1".to_owned()),
        Ok(value) => Ok(value),
        Err(error) => Err(error.to_string()),
    }
}

/// Text with at least one character.
pub(crate) fn non_empty(text: &str) -> Result<String, String> {
    if text.is_empty() { Err("must not be empty".to_owned()) } else { Ok(text.to_owned()) }
}

/// `8GiB`, `512 MiB`, `10GB` or a plain number of bytes.
pub(crate) fn byte_size(text: &str) -> Result<u64, String> {
    let text = text.trim();
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let number: f64 = number.parse().map_err(|_| format!("{text:?} does not begin with a number"))?;
    let factor = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 1u64,
        "k" | "kib" => 1 << 10,
        "m" | "mib" => 1 << 20,
        "g" | "gib" => 1 << 30,
        "t" | "tib" => 1 << 40,
        "kb" => 1_000,
        "mb" => 1_000_000,
        "gb" => 1_000_000_000,
        "tb" => 1_000_000_000_000,
        other => return Err(format!("unknown unit {other:?}; use KiB, MiB, GiB or TiB")),
    };
    let bytes = number * factor as f64;
    // 2^63: above it a float no longer names a size exactly, and no machine has that much.
    if (1.0..9.2e18).contains(&bytes) { Ok(bytes as u64) } else { Err(format!("{text:?} is out of range")) }
}

fn temperature(text: &str) -> Result<f32, String> {
    in_range(text, "a number of at least 0", |value| value >= 0.0)
}

fn top_p(text: &str) -> Result<f32, String> {
    in_range(text, "above 0 and at most 1", |value| value > 0.0 && value <= 1.0)
}

fn min_p(text: &str) -> Result<f32, String> {
    in_range(text, "at least 0 and at most 1", |value| (0.0..=1.0).contains(&value))
}

fn factor(text: &str) -> Result<f32, String> {
    in_range(text, "a number above 0", |value| value > 0.0)
}

fn number(text: &str) -> Result<f32, String> {
    in_range(text, "a number", |_| true)
}

fn in_range(text: &str, wanted: &str, accept: impl Fn(f32) -> bool) -> Result<f32, String> {
    let value: f32 = text.parse().map_err(|_| format!("must be {wanted}"))?;
    if value.is_finite() && accept(value) { Ok(value) } else { Err(format!("must be {wanted}")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_with_and_without_units() {
        for (text, bytes) in
            [("1", 1), ("8GiB", 8 << 30), ("1.5 MiB", 3 << 19), ("10GB", 10_000_000_000), ("4k", 4096)]
        {
            assert_eq!(byte_size(text), Ok(bytes), "{text}");
        }
        for text in ["", "GiB", "-1", "0", "1e30TiB", "99999999999TiB", "3 apples", "1.2.3"] {
            assert!(byte_size(text).is_err(), "{text}");
        }
    }

    #[test]
    fn the_user_wins_over_the_model() {
        #[derive(clap::Parser)]
        struct Line {
            #[command(flatten)]
            sampling: SamplingArguments,
        }
        let read = |line: &str| <Line as clap::Parser>::parse_from(line.split(' ')).sampling;
        let defaults = SamplingDefaults {
            temperature: Some(0.6),
            top_k: Some(20),
            repetition_penalty: Some(1.05),
            ..SamplingDefaults::default()
        };
        let options = read("oscar").options(&defaults);
        assert_eq!((options.temperature, options.top_k, options.repetition_penalty), (0.6, 20, 1.05));
        assert_eq!((options.top_p, options.min_p), (1.0, 0.0));
        let options = read("oscar --temperature 0 --top-k 0 --repetition-penalty 1").options(&defaults);
        assert_eq!((options.temperature, options.top_k, options.repetition_penalty), (0.0, 0, 1.0));
    }

    #[test]
    fn sampling_settings_are_bounded() {
        assert!(temperature("0").is_ok() && temperature("1.5").is_ok());
        assert!(["-0.1", "nan", "inf", "warm"].iter().all(|text| temperature(text).is_err()));
        assert!(top_p("1").is_ok() && ["0", "1.01", "-1", "NaN"].iter().all(|text| top_p(text).is_err()));
        assert!(factor("1.1").is_ok() && ["0", "-1", "nan"].iter().all(|text| factor(text).is_err()));
        assert!(number("-2").is_ok() && number("inf").is_err());
        assert!(min_p("0").is_ok() && ["-0.5", "2"].iter().all(|text| min_p(text).is_err()));
    }
}
