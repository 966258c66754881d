//! `oscar eval probe`: strings that a model copies from far back.

use clap::Args;
use oscar_codec::CacheCodec;
use oscar_kernels::Inspect;
use oscar_lab::eval::codecs::HELP;
use oscar_lab::eval::history::Reading;
use oscar_lab::eval::probe::{CopyProbe, CopyTask, SEED};
use oscar_report::Report;
use serde_json::json;

use crate::device::OnDevice;
use crate::failure::Failure;
use crate::lab::ReadingArguments;
use crate::named_model::{NamedModel, NamedModelArguments};
use crate::output::print_text;
use crate::progress::Steps;

/// How well a model copies strings that it read 1K to 8K tokens ago, with a codec and with an exact cache.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    oscar eval probe smollm2 --kv int2,int2:scalar,int4\n  \
    oscar eval probe qwen15 --kv int2,int1.5 --seed 3 --json\n\n\
    Prose is read exactly, once for all codecs. Then pieces of it are begun again; exact and sealed are the mean\n\
    log-probabilities of their other tokens, loss is the difference. This is the retrieval probe of certificates.")]
pub(crate) struct ProbeArguments {
    #[command(flatten)]
    lab: NamedModelArguments,

    #[arg(long, default_value = "int2", value_name = "LIST", value_delimiter = ',',
          help = format!("Codecs, separated by commas: {HELP}"))]
    kv: Vec<String>,

    #[command(flatten)]
    reading: ReadingArguments,

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
        let codecs = self.reading.codecs(&named, &self.kv)?;
        let report = self.measure(&named, &codecs)?;
        if self.json {
            return print_text(&report.json());
        }
        let columns = ["kv", "bits_per_element", "strings", "exact", "sealed", "loss", "verdict"];
        print_text(report.table(&columns).trim_end())
    }
}

impl ProbeArguments {
    pub(crate) fn run(self) -> Result<(), Failure> {
        self.lab.device.clone().run(false, self)
    }

    fn measure<B: Inspect>(
        &self,
        named: &NamedModel<B>,
        codecs: &[Box<dyn CacheCodec>],
    ) -> Result<Report, Failure> {
        let windows = self.reading.windows();
        let task = CopyTask::built_in(&named.model, windows, self.seed)?.ok_or_else(|| {
            Failure::new("the model's context has no room for strings behind the windows")
                .with_fix("give smaller --sink-tokens and --recent-tokens")
        })?;
        let mut steps = Steps::new("exact", task.tokens());
        let mut probe = CopyProbe::new(named.model.clone(), &task, |done| steps.set(done))?;
        let mut report = Report::here();
        for codec in codecs {
            steps.say(codec.name());
            let measured = probe.measure(Reading { codec: &**codec, windows, chunk: None })?;
            report.push(json!({
                "kind": "probe",
                "model": named.name(),
                "kv": codec.name(),
                "bits_per_element": codec.bits_per_element(named.model.config().head_dim),
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
