//! `oscar eval niah`: needles in a haystack.

use std::fs;
use std::path::PathBuf;

use clap::Args;
use oscar_kernels::Inspect;
use oscar_lab::eval::evaluator::Evaluator;
use oscar_lab::eval::needle::{Haystack, NeedleKind, NeedleOptions, build};
use oscar_lab::eval::report::{heat_map_svg, needle_maps};
use oscar_lab::eval::retrieval::{NeedleTokens, Retrieved, retrieve, retrieve_served};
use oscar_lab::eval::served::ServedCache;
use oscar_lab::eval::text::mix;
use oscar_report::Report;
use serde_json::json;

use super::served::{MeasuredCacheArguments, MeasuredCaches};
use crate::arguments::positive;
use crate::device::OnDevice;
use crate::failure::Failure;
use crate::interrupt::Watch;
use crate::lab::check_context;
use crate::named_model::{NamedModel, NamedModelArguments};
use crate::output::print_text;
use crate::progress::Steps;

/// Tokens a chat template may add around a prompt.
const TEMPLATE_TOKENS: usize = 96;

/// Find numbers hidden in long text: single, multi-key, multi-value and look-alike needles.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    oscar eval niah smollm2 --lengths 4k,8k --keys 1 --kv bf16,int2,int2:paper\n  \
    oscar eval niah smollm2 --lengths 4k --kv-cache-dtype bf16,int4,int2\n  \
    oscar eval niah qwen15 --lengths 8k,16k --keys 8 --depths 10,50,90 --svg needles.svg\n  \
    oscar eval niah qwen15 --kind multi-value --haystack book.txt --prompts 4 --json\n\n\
    --kv measures codecs in the lab (bf16, int2 and int2:paper if neither list is given): the context is computed\n\
    exactly, once for all codecs; question and answer read it through the codec. --kv-cache-dtype measures caches as\n\
    they are served: the context is a request of its own, and the question finds it in the prefix cache.\n\
    bits_per_element is that of history, bits_with_windows that of the whole sequence. score is the share of numbers that the\n\
    answer holds, log_probability the mean over the tokens of the right answer. Prompts come from the seed.")]
pub(crate) struct NiahArguments {
    #[command(flatten)]
    lab: NamedModelArguments,

    #[command(flatten)]
    caches: MeasuredCacheArguments,

    /// Tokens of prompt and answer together; 4k is 4096.
    #[arg(long, default_value = "4k", value_name = "LIST", value_delimiter = ',', value_parser = length)]
    lengths: Vec<usize>,

    /// Keys that are hidden, of which the question names one.
    #[arg(long, default_value = "1", value_name = "LIST", value_delimiter = ',', value_parser = positive)]
    keys: Vec<usize>,

    /// Where the asked needle is, in percent of the context.
    #[arg(long, default_value = "10,30,50,70,90", value_name = "LIST", value_delimiter = ',')]
    depths: Vec<f64>,

    /// single, multi-key, multi-value or distractors; single for one key and multi-key for more by default.
    #[arg(long, value_name = "KIND")]
    kind: Option<NeedleKind>,

    /// Numbers under the asked key of multi-value needles.
    #[arg(long, default_value = "4", value_name = "N", value_parser = positive)]
    values: usize,

    /// Digits of a number.
    #[arg(long, default_value_t = 7, value_name = "N")]
    digits: usize,

    /// Prompts for each length, number of keys and depth.
    #[arg(long, default_value = "1", value_name = "N", value_parser = positive)]
    prompts: usize,

    /// Text to hide needles in; generated prose by default.
    #[arg(long, value_name = "FILE")]
    haystack: Option<PathBuf>,

    /// Seed of the prompts.
    #[arg(long, default_value_t = 1, value_name = "N")]
    seed: u64,

    /// Write depth x length heat maps to this file.
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,

    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

/// A number of tokens, such as `4096`, `4k` or `32k`.
fn length(text: &str) -> Result<usize, String> {
    let (digits, factor) = match text.strip_suffix(['k', 'K']) {
        Some(digits) => (digits, 1024),
        None => (text, 1),
    };
    let wrong = |_| format!("{text:?} is not a number of tokens such as 4096 or 4k");
    positive(digits).map_err(wrong)?.checked_mul(factor).ok_or_else(|| format!("{text:?} is out of range"))
}

impl OnDevice for NiahArguments {
    type Output = ();

    fn run_on<B: Inspect>(self, backend: B) -> Result<(), Failure> {
        let haystack = match &self.haystack {
            None => Haystack::Generated,
            Some(path) => {
                let text = fs::read_to_string(path)
                    .map_err(|error| Failure::new(format!("{}: {error}", path.display())))?;
                Haystack::from_text(&text)
                    .map_err(|error| Failure::new(format!("{}: {error}", path.display())))?
            }
        };
        let named = self.lab.load(backend)?;
        let longest = self.lengths.iter().copied().max().unwrap_or(1);
        check_context(&named, longest)?;
        let caches = self.caches.engines(&named, &["bf16", "int2", "int2:paper"], longest)?;
        let report = self.measure(&named, &caches, longest, &haystack)?;
        if let Some(path) = &self.svg {
            let rows: Vec<_> = report.rows.iter().collect();
            let title = format!("Needles in a haystack, {}", named.name());
            fs::write(path, heat_map_svg(&title, &needle_maps(&rows)))
                .map_err(|error| Failure::new(format!("{}: {error}", path.display())))?;
        }
        if self.json {
            return print_text(&report.json());
        }
        let columns = [
            "kv",
            "bits_per_element",
            "bits_with_windows",
            "needle",
            "keys",
            "length",
            "depth",
            "prompts",
            "score",
            "log_probability",
        ];
        print_text(report.table(&columns).trim_end())
    }
}

impl NiahArguments {
    pub(crate) fn run(self) -> Result<(), Failure> {
        self.lab.device.clone().run(self.caches.deterministic(), self)
    }

    fn measure<B: Inspect>(
        &self,
        named: &NamedModel<B>,
        caches: &MeasuredCaches<ServedCache<B>>,
        longest: usize,
        haystack: &Haystack,
    ) -> Result<Report, Failure> {
        let codecs = &caches.codecs;
        let mut evaluator = match codecs.is_empty() {
            true => None,
            false => Some(Evaluator::new(named.model.clone(), longest)?),
        };
        // A codec of the lab reads a context that all of them share; a cache that serves computes its own.
        let passes = usize::from(evaluator.is_some()) + caches.served.len();
        let tokenizer = named.model.tokenizer().clone();
        let count = move |text: &str| tokenizer.encode(text, false).map_or(usize::MAX / 2, |ids| ids.len());
        let cells: usize = self.keys.len() * self.depths.len() * self.prompts;
        let total: usize = self.lengths.iter().map(|length| length * cells * passes).sum();
        let mut steps = Steps::new("needles", total);
        let watch = Watch::new();
        let windows = caches.windows;
        let mut report = Report::here();
        let mut done = 0;
        'all: for &length in &self.lengths {
            for &keys in &self.keys {
                let kind =
                    self.kind.unwrap_or(if keys > 1 { NeedleKind::MultiKey } else { NeedleKind::Single });
                for &depth in &self.depths {
                    let mut sums = vec![(0.0, 0.0); caches.len()];
                    for index in 0..self.prompts {
                        if watch.caught() {
                            // A cell that is not complete is not reported.
                            break 'all;
                        }
                        let mut options = NeedleOptions {
                            kind,
                            tokens: length,
                            depth,
                            keys,
                            values: self.values,
                            digits: self.digits,
                            seed: mix(&[
                                self.seed,
                                length as u64,
                                keys as u64,
                                depth.to_bits(),
                                index as u64,
                            ]),
                        };
                        let answers = if kind == NeedleKind::MultiValue { self.values } else { 1 };
                        let reserved = TEMPLATE_TOKENS + NeedleTokens::tokens_for(answers);
                        options.tokens = length.saturating_sub(reserved);
                        let prompt = build(&options, haystack, &count).map_err(Failure::new)?;
                        steps.say(&format!("{length} tokens, {keys} keys, depth {depth} %"));
                        let mut found = Vec::new();
                        if let Some(evaluator) = &mut evaluator {
                            found = retrieve(evaluator, &prompt, codecs, windows, |tokens| {
                                steps.set(done + tokens)
                            })?;
                            done += length;
                        }
                        for served in &caches.served {
                            found.push(retrieve_served(&served.cache, &prompt, |tokens| {
                                steps.set(done + tokens)
                            })?);
                            done += length;
                        }
                        for (index, Retrieved { score, log_probability, text }) in
                            found.into_iter().enumerate()
                        {
                            let wanted = &prompt.answers;
                            tracing::info!("{}: {score} {text:?} wanted {wanted:?}", caches.name(index));
                            sums[index].0 += score;
                            sums[index].1 += log_probability;
                        }
                    }
                    for (index, (score, log_probability)) in sums.into_iter().enumerate() {
                        report.push(json!({
                            "kind": "niah",
                            "model": named.name(),
                            "kv": caches.name(index),
                            "bits_per_element": caches.history_bits(index),
                            "bits_with_windows": caches.bits_at(index, length),
                            "needle": kind.name(),
                            "keys": keys,
                            "length": length,
                            "depth": depth,
                            "prompts": self.prompts,
                            "score": score / self.prompts as f64,
                            "log_probability": log_probability / self.prompts as f64,
                            "sink": windows.sink,
                            "recent": windows.recent,
                        }));
                    }
                }
            }
        }
        steps.finish();
        if watch.caught() {
            if report.rows.is_empty() {
                return Err(Failure::Interrupted("interrupted before the first result".to_owned()));
            }
            eprintln!("interrupted: the table is not complete");
        }
        Ok(report)
    }
}
