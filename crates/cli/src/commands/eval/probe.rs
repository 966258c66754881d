//! `oscar eval probe`: strings that a model copies from far back.

use clap::Args;
use oscar_kernels::Inspect;
use oscar_lab::eval::history::Reading;
use oscar_lab::eval::paged::PagedCache;
use oscar_lab::eval::probe::{CopyProbe, CopyTask, SEED};
use oscar_report::Report;
use serde_json::json;

use super::served::{MeasuredCacheArguments, MeasuredCaches};
use crate::device::OnDevice;
use crate::failure::Failure;
use crate::named_model::{NamedModel, NamedModelArguments};
use crate::output::print_text;
use crate::progress::Steps;

/// How well a model copies strings that it read 1K to 8K tokens ago, with a codec and with an exact cache.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    oscar eval probe smollm2 --kv int2,int2:scalar,int4\n  \
    oscar eval probe qwen15 --kv int2,int1.5 --seed 3 --json\n  \
    oscar eval probe smollm2 --kv int2 --kv-cache-dtype int2,int4\n\n\
    Prose is read exactly, once for all codecs. Then pieces of it are begun again; exact and sealed are the mean\n\
    log-probabilities of their other tokens, loss is the difference. This is the retrieval probe of certificates.\n\
    --kv measures codecs in the lab (int2 if neither list is given), --kv-cache-dtype caches as they are served.")]
pub(crate) struct ProbeArguments {
    #[command(flatten)]
    lab: NamedModelArguments,

    #[command(flatten)]
    caches: MeasuredCacheArguments,

    /// Seed of the prose; certificates have this one.
    #[arg(long, default_value_t = SEED, value_name = "N")]
    seed: u64,

    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

impl OnDevice for ProbeArguments {
    type Output = ();

    fn run_on<B: Inspect>(self, backend: B) -> Result<(), Failure> {
        let named = self.lab.load(backend)?;
        let task = CopyTask::built_in(&named.model, self.caches.windows(), self.seed)?.ok_or_else(|| {
            Failure::new("the model's context has no room for strings behind the windows")
                .with_fix("give smaller --sink-tokens and --recent-tokens")
        })?;
        let mut caches = self.caches.pages(&named, &["int2"], task.tokens())?;
        let report = self.measure(&named, &task, &mut caches)?;
        if self.json {
            return print_text(&report.json());
        }
        let columns = ["kv", "bits_per_element", "strings", "exact", "sealed", "loss", "verdict"];
        print_text(report.table(&columns).trim_end())
    }
}

impl ProbeArguments {
    pub(crate) fn run(self) -> Result<(), Failure> {
        self.lab.device.clone().run(self.caches.deterministic(), self)
    }

    fn measure<B: Inspect>(
        &self,
        named: &NamedModel<B>,
        task: &CopyTask,
        caches: &mut MeasuredCaches<PagedCache<B>>,
    ) -> Result<Report, Failure> {
        let windows = caches.windows;
        let mut steps = Steps::new("exact", task.tokens() * (1 + caches.served.len()));
        let mut probe = CopyProbe::new(named.model.clone(), task, |done| steps.set(done))?;
        let mut all = Vec::new();
        for codec in &caches.codecs {
            steps.say(codec.name());
            all.push(probe.measure(Reading { codec: &**codec, windows, chunk: None })?);
        }
        for (index, served) in caches.served.iter_mut().enumerate() {
            steps.say(&served.name);
            let before = task.tokens() * (1 + index);
            all.push(probe.measure_served(&mut served.cache, |done| steps.set(before + done))?);
        }
        let mut report = Report::here();
        for (index, measured) in all.into_iter().enumerate() {
            report.push(json!({
                "kind": "probe",
                "model": named.name(),
                "kv": caches.name(index),
                "bits_per_element": caches.history_bits(index),
                "strings": measured.strings,
                "exact": measured.exact,
                "sealed": measured.sealed,
                "loss": measured.loss(),
                "verdict": measured.verdict().map_or("cannot tell".to_owned(), |verdict| verdict.to_string()),
                "tokens": measured.tokens,
                "seed": self.seed,
                "sink": windows.sink,
                "recent": windows.recent,
                "distances": measured.distances,
            }));
        }
        steps.finish();
        Ok(report)
    }
}
