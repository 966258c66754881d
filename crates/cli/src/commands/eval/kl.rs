//! `oscar eval kl`: distance to the exact cache on text.

use std::path::PathBuf;

use clap::Args;
use oscar_kernels::Inspect;
use oscar_lab::calibrate::corpus;
use oscar_lab::eval::divergence::{CodecComparison, Divergence};
use oscar_lab::eval::history::Reading;
use oscar_lab::eval::paged::PagedCache;
use oscar_lab::eval::text::prose;
use oscar_report::Report;
use serde_json::json;

use super::served::{MeasuredCacheArguments, MeasuredCaches};
use crate::arguments::positive;
use crate::device::OnDevice;
use crate::failure::Failure;
use crate::lab::{check_context, check_prefix};
use crate::named_model::{NamedModel, NamedModelArguments};
use crate::output::print_text;
use crate::progress::Steps;

/// Bytes of prose that are made at most.
const MOST_PROSE: usize = 1 << 28;

/// KL divergence, perplexity and top-1 agreement of a model with a codec against the same model with an exact cache.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    oscar eval kl smollm2 --kv int2,int2:paper,quarot-int2,naive-int2\n  \
    oscar eval kl smollm2 --data book.txt --tokens 4096 --sequences 4 --json\n  \
    oscar eval kl qwen15 --prefix 7168 --tokens 8192 --kv int2,int2:uncentred,int4\n  \
    oscar eval kl smollm2 --kv int2 --kv-cache-dtype int2,int4\n\n\
    Every position after --skip is scored. Without --prefix each query reads its own history through the codec, as\n\
    it would while decoding; with it, the first tokens are computed exactly, once for all codecs. --kv measures codecs in\n\
    the lab (int2, int2:paper, quarot-int2 and naive-int2 if neither list is given), --kv-cache-dtype caches as they are\n\
    served: sealed page by page and read from their codes, with windows of whole pages.")]
pub(crate) struct KlArguments {
    #[command(flatten)]
    lab: NamedModelArguments,

    #[command(flatten)]
    caches: MeasuredCacheArguments,

    /// Text or JSONL files to measure on; generated prose by default.
    #[arg(long, value_name = "FILE")]
    data: Vec<PathBuf>,

    /// Tokens of a sequence.
    #[arg(long, default_value = "4096", value_name = "N", value_parser = positive)]
    tokens: usize,

    /// Sequences, taken from the text at equal distances.
    #[arg(long, default_value = "2", value_name = "N", value_parser = positive)]
    sequences: usize,

    /// Tokens of each sequence that are computed exactly, once for all codecs.
    #[arg(long, default_value_t = 0, value_name = "N")]
    prefix: usize,

    /// Positions after the prefix that are not scored.
    #[arg(long, value_name = "N")]
    skip: Option<usize>,

    /// Codecs of the lab: read the own chunk of so many tokens exactly, as a chunked prefill does.
    #[arg(long, value_name = "TOKENS", value_parser = positive)]
    chunk: Option<usize>,

    /// Seed of generated prose.
    #[arg(long, default_value_t = 1, value_name = "N")]
    seed: u64,

    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

impl OnDevice for KlArguments {
    type Output = ();

    fn run_on<B: Inspect>(self, backend: B) -> Result<(), Failure> {
        let named = self.lab.load(backend)?;
        check_context(&named, self.tokens)?;
        let default = ["int2", "int2:paper", "quarot-int2", "naive-int2"];
        let mut caches = self.caches.pages(&named, &default, self.tokens)?;
        let report = self.measure(&named, &mut caches)?;
        if self.json {
            return print_text(&report.json());
        }
        let columns =
            ["kv", "bits_per_element", "kl", "top1_agreement", "perplexity", "exact_perplexity", "positions"];
        print_text(report.table(&columns).trim_end())
    }
}

impl KlArguments {
    pub(crate) fn run(self) -> Result<(), Failure> {
        check_prefix(self.prefix, self.tokens)?;
        self.lab.device.clone().run(self.caches.deterministic(), self)
    }

    fn measure<B: Inspect>(
        &self,
        named: &NamedModel<B>,
        caches: &mut MeasuredCaches<PagedCache<B>>,
    ) -> Result<Report, Failure> {
        let windows = caches.windows;
        // Queries that still see everything exactly would only dilute the numbers.
        let widest = windows.sink.saturating_add(windows.recent).max(512).min(self.tokens / 2);
        let skip = self.skip.unwrap_or(if self.prefix > 0 { 0 } else { widest });
        let texts = self.texts(named)?;
        let mut comparison = CodecComparison::new(named.model.clone(), self.tokens)?;
        let mut totals = vec![Divergence::default(); caches.len()];
        let suffix = self.tokens - self.prefix.min(self.tokens);
        let all = self.tokens * (1 + caches.served.len()) + suffix * caches.codecs.len();
        let mut steps = Steps::new("exact", texts.len() * all);
        let mut done = 0;
        for ids in &texts {
            steps.say("exact");
            comparison.set_text(ids, self.prefix, skip, |tokens| steps.set(done + tokens))?;
            done += self.tokens;
            let (in_lab, of_served) = totals.split_at_mut(caches.codecs.len());
            for (codec, total) in caches.codecs.iter().zip(in_lab) {
                steps.say(codec.name());
                let reading = Reading { codec: &**codec, windows, chunk: self.chunk };
                total.add(&comparison.measure(reading, |tokens| steps.set(done + tokens))?);
                done += suffix;
            }
            for (served, total) in caches.served.iter_mut().zip(of_served) {
                steps.say(&served.name);
                let measured =
                    comparison.measure_served(&mut served.cache, |tokens| steps.set(done + tokens));
                total.add(&measured?);
                done += self.tokens;
            }
        }
        steps.finish();
        let mut report = Report::here();
        for (index, total) in totals.iter().enumerate() {
            report.push(json!({
                "kind": "kl",
                "model": named.name(),
                "kv": caches.name(index),
                "bits_per_element": caches.history_bits(index),
                "bits_per_element_with_windows": caches.bits_at(index, self.tokens),
                "kl": total.mean_kl(),
                "top1_agreement": total.top1_agreement(),
                "perplexity": total.perplexity(),
                "exact_perplexity": total.exact_perplexity(),
                "positions": total.positions,
                "tokens": self.tokens,
                "prefix": self.prefix,
                "skip": skip,
                "sequences": self.sequences,
                "sink": windows.sink,
                "recent": windows.recent,
                "chunk": self.chunk,
            }));
        }
        Ok(report)
    }

    /// Sequences of exactly `--tokens` tokens.
    fn texts<B: Inspect>(&self, named: &NamedModel<B>) -> Result<Vec<Vec<u32>>, Failure> {
        let ids = if self.data.is_empty() {
            // Enough characters for the shortest tokens prose is made of.
            let text = prose(
                self.seed,
                self.tokens.saturating_mul(self.sequences).saturating_mul(8).min(MOST_PROSE),
            );
            named.model.tokenizer().encode(&text, true)?
        } else {
            corpus::read(&named.model, &self.data, false)?
        };
        let needed = self.tokens.saturating_mul(self.sequences);
        if ids.len() < needed {
            return Err(Failure::new(format!("the text has {} tokens and {needed} are needed", ids.len()))
                .with_fix("give more text, fewer --sequences or shorter --tokens"));
        }
        let step = ids.len() / self.sequences;
        Ok((0..self.sequences).map(|index| ids[index * step..][..self.tokens].to_vec()).collect())
    }
}
