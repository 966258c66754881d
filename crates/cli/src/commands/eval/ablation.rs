//! `oscar eval ablation`: what each part of the published recipe is worth.

use std::collections::btree_map::{BTreeMap, Entry};
use std::ops::ControlFlow;
use std::path::PathBuf;

use clap::Args;
use oscar_codec::{CacheCodec, Windows};
use oscar_kernels::Inspect;
use oscar_lab::calibrate::{Calibration, Corpus, CorpusSource, calibrate, corpus};
use oscar_lab::eval::ablation::{AblationSetting, BANDS, TargetSet, band_settings, settings};
use oscar_lab::eval::codecs::CodecSource;
use oscar_lab::eval::divergence::{CodecComparison, Divergence};
use oscar_lab::eval::history::Reading;
use oscar_lab::eval::text::prose;
use oscar_report::Report;
use oscar_rotations::RotationHeader;
use serde_json::json;

use crate::arguments::positive;
use crate::device::OnDevice;
use crate::failure::Failure;
use crate::lab::{check_context, check_prefix};
use crate::named_model::{NamedModel, NamedModelArguments};
use crate::output::print_text;
use crate::progress::Steps;

const STUDIES: [&str; 6] = ["rotation", "target", "windows", "calibration", "clip", BANDS];

/// Take parts of the published recipe and of our own codec away, one at a time, and measure the distance to the exact cache.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    oscar eval ablation smollm2 --calibration-data novel.txt --data other.txt\n  \
    oscar eval ablation qwen15 --centred --studies rotation,target --calibration-tokens 8192\n\n\
    Studies: rotation (without U, H or P, with smaller groups), target (KᵀK and VᵀV), windows, calibration (tokens),\n\
    clip. One rotation per layer and fixed clips, as published; --centred subtracts the mean key first. bands is our own\n\
    codec, calibrated on the same text.")]
pub(crate) struct AblationArguments {
    #[command(flatten)]
    lab: NamedModelArguments,

    /// Text to calibrate on; drawn from the model by default.
    #[arg(long, value_name = "FILE")]
    calibration_data: Vec<PathBuf>,

    /// Most tokens to calibrate on.
    #[arg(long, default_value = "32768", value_name = "N", value_parser = positive)]
    calibration_tokens: usize,

    /// Text to measure on; generated prose by default.
    #[arg(long, value_name = "FILE")]
    data: Vec<PathBuf>,

    /// Tokens of the sequence that is measured.
    #[arg(long, default_value = "4096", value_name = "N", value_parser = positive)]
    tokens: usize,

    /// Tokens of it that are computed exactly, once.
    #[arg(long, default_value_t = 0, value_name = "N")]
    prefix: usize,

    /// Subtract the mean key, without which some models collapse.
    #[arg(long)]
    centred: bool,

    /// Only these studies.
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    studies: Vec<String>,

    /// Seed of generated text.
    #[arg(long, default_value_t = 1, value_name = "N")]
    seed: u64,

    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

impl OnDevice for AblationArguments {
    type Output = ();

    fn run_on<B: Inspect>(self, backend: B) -> Result<(), Failure> {
        let named = self.lab.load(backend)?;
        let report = self.measure(&named)?;
        if self.json {
            return print_text(&report.json());
        }
        let columns = ["study", "setting", "bits_per_element", "kl", "top1_agreement", "perplexity"];
        print_text(report.table(&columns).trim_end())
    }
}

impl AblationArguments {
    pub(crate) fn run(self) -> Result<(), Failure> {
        if let Some(unknown) = self.studies.iter().find(|study| !STUDIES.contains(&study.as_str())) {
            return Err(Failure::new(format!("there is no study {unknown:?}"))
                .with_fix(format!("choose from {}", STUDIES.join(", "))));
        }
        check_prefix(self.prefix, self.tokens)?;
        self.lab.device.clone().run(false, self)
    }

    fn measure<B: Inspect>(&self, named: &NamedModel<B>) -> Result<Report, Failure> {
        let model = &named.model;
        check_context(named, self.tokens)?;
        let ids = if self.data.is_empty() {
            model.tokenizer().encode(&prose(self.seed, self.tokens * 8), true)?
        } else {
            corpus::read(model, &self.data, false)?
        };
        let ids = ids.get(..self.tokens).ok_or_else(|| {
            Failure::new(format!("the text has {} tokens and {} are needed", ids.len(), self.tokens))
                .with_fix("give more text or fewer --tokens")
        })?;
        let source = if self.calibration_data.is_empty() {
            CorpusSource::Model { seed: self.seed }
        } else {
            CorpusSource::Files { paths: self.calibration_data.clone(), chat: false }
        };
        let mut steps: Option<Steps> = None;
        let corpus = Corpus::collect(model, &source, self.calibration_tokens, |done, total| {
            steps.get_or_insert_with(|| Steps::new("drawing text from the model", total)).set(done);
        })?;
        if let Some(steps) = steps {
            steps.finish();
        }
        let sequences = corpus.sequences.len();
        let sequence = corpus.sequences.first().map_or(0, Vec::len);
        let wanted = |study: &str| self.studies.is_empty() || self.studies.iter().any(|name| name == study);
        let chosen: Vec<_> = settings(model.config().head_dim, sequences, sequence)
            .into_iter()
            .filter(|setting| wanted(setting.study))
            .collect();
        let bands = if wanted(BANDS) { band_settings(model.config().head_dim) } else { &[] };
        let mut comparison = CodecComparison::new(model.clone(), self.tokens)?;
        let suffix = self.tokens - self.prefix;
        let mut steps = Steps::new("exact", self.tokens + (chosen.len() + bands.len()) * suffix);
        // All settings score the same positions, those that have a history with every window.
        let widest = chosen.iter().map(|setting| setting.windows.sink + setting.windows.recent).max();
        let skip = if self.prefix > 0 { 0 } else { widest.unwrap_or(0).max(512).min(self.tokens / 2) };
        comparison.set_text(ids, self.prefix, skip, |done| steps.set(done))?;
        let mut done = self.tokens;
        let mut targets: BTreeMap<usize, TargetSet> = BTreeMap::new();
        // In the order of `chosen`.
        let mut measured: Vec<Measured> = Vec::new();
        let kv = if self.centred { "int2:paper+centred" } else { "int2:paper" };
        for setting in &chosen {
            let AblationSetting { study, windows, .. } = *setting;
            // The published recipe stands in every study.
            let same = chosen.iter().zip(&measured).find(|(other, _)| setting.same_recipe(other, sequences));
            let (bits, total) = match same {
                Some((_, same)) => (same.bits, same.total),
                None => {
                    let count = setting.sequences.unwrap_or(sequences);
                    let targets = match targets.entry(count) {
                        Entry::Occupied(entry) => entry.into_mut(),
                        Entry::Vacant(entry) => {
                            steps.say(&format!("calibrating on {} tokens", count * sequence));
                            entry.insert(TargetSet::collect(model, &corpus, count, |_| ())?)
                        }
                    };
                    let codec = targets.fast_codec(setting, self.centred)?;
                    steps.say(codec.name());
                    let reading = Reading { codec: &codec, windows, chunk: None };
                    let total = comparison.measure(reading, |tokens| steps.set(done + tokens))?;
                    (codec.bits_per_element(model.config().head_dim), total)
                }
            };
            done += suffix;
            measured.push(Measured { study, name: setting.name.clone(), kv, windows, bits, total });
        }
        if !bands.is_empty() {
            steps.say("calibrating bands");
            let calibration = Calibration::new(RotationHeader {
                kv_heads: model.config().kv_heads,
                head_dim: model.config().head_dim,
                ..RotationHeader::default()
            });
            let (file, _) = calibrate(model, &corpus, &calibration, None, |_| ControlFlow::Continue(()))?;
            let source = CodecSource::new(model, Some(&file));
            for &(name, kv) in bands {
                let (codec, windows) = (source.build(kv)?, Windows::default());
                steps.say(kv);
                let reading = Reading { codec: &*codec, windows, chunk: None };
                let total = comparison.measure(reading, |tokens| steps.set(done + tokens))?;
                done += suffix;
                let bits = codec.bits_per_element(model.config().head_dim);
                measured.push(Measured { study: BANDS, name: name.to_owned(), kv, windows, bits, total });
            }
        }
        steps.finish();
        let mut report = Report::here();
        for Measured { study, name, kv, windows, bits, total } in measured {
            report.push(json!({
                "kind": "ablation",
                "model": named.name(),
                "study": study,
                "setting": name,
                "kv": kv,
                "bits_per_element": bits,
                "bits_per_element_with_windows": windows.mixed_bits_per_element(bits, self.tokens),
                "kl": total.mean_kl(),
                "top1_agreement": total.top1_agreement(),
                "perplexity": total.perplexity(),
                "exact_perplexity": total.exact_perplexity(),
                "tokens": self.tokens,
                "prefix": self.prefix,
                "skip": skip,
                "sink": windows.sink,
                "recent": windows.recent,
            }));
        }
        Ok(report)
    }
}

/// One line of the table.
struct Measured {
    study: &'static str,
    name: String,
    kv: &'static str,
    windows: Windows,
    bits: f64,
    total: Divergence,
}
