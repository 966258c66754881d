//! `oscar bench experts`: layers with experts alone.

use clap::Args;
use oscar_bench::ExpertsBench;
use oscar_kernels::Inspect;
use oscar_model::{ModelFiles, random_mixture};
use oscar_report::Report;

use super::at_most;
use crate::arguments::positive;
use crate::device::{DeviceArguments, OnDevice};
use crate::failure::Failure;
use crate::output::print_text;
use crate::progress::LateSteps;

/// Time of one layer with experts, and how fast the weights of the experts that were chosen are read.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    oscar bench experts --device cuda --random-weights qwen3-30b-a3b:fp8 --rows 1,32\n  \
    oscar bench experts --random-weights qwen3-30b-a3b:q4_k_m --rows 1,8 --layers 1\n\n\
    Rows are random and independent, so that every expert is about as likely as any other. \"distinct_experts\" is how many\n\
    of them some row went to; the weights of the others are not read.")]
pub(super) struct ExpertsBenchArguments {
    /// The shape of a published mixture of experts: qwen3-30b-a3b or 235b-a22b, glm-4.5-air, glm-4.7, glm-4.7-fp8, minimax-m2;
    /// :fp8, :q8_0 or :q4_k_m after it for quantised ones.
    #[arg(long, value_name = "SHAPE")]
    random_weights: String,

    /// Rows that go through a layer at once.
    #[arg(long, default_value = "1,8,32", value_name = "N", value_delimiter = ',', value_parser = at_most(8192))]
    rows: Vec<usize>,

    /// Layers, each with weights of its own: so many that none is left in a cache of the processor or the card.
    #[arg(long, default_value = "4", value_name = "N", value_parser = at_most(128))]
    layers: usize,

    /// Passes over all layers that are timed together.
    #[arg(long, default_value = "8", value_name = "N", value_parser = positive)]
    passes: usize,

    /// How often; the fastest counts.
    #[arg(long, default_value = "3", value_name = "N", value_parser = positive)]
    repeat: usize,

    /// Measure the way that rows take with `--deterministic`.
    #[arg(long)]
    deterministic: bool,

    #[command(flatten)]
    device: DeviceArguments,

    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

impl ExpertsBenchArguments {
    pub(super) fn run(self) -> Result<(), Failure> {
        self.device.clone().run(self.deterministic, self)
    }
}

impl OnDevice for ExpertsBenchArguments {
    type Output = ();

    fn run_on<B: Inspect>(self, backend: B) -> Result<(), Failure> {
        let files = random_mixture(&self.random_weights, self.layers)?.ok_or_else(|| {
            Failure::new(format!("{} has no experts", self.random_weights))
                .with_fix("name a mixture of experts, such as qwen3-30b-a3b:fp8")
        })?;
        let expert_bytes = bytes_of_an_expert(&files);
        let mut progress = LateSteps::new(&format!("making {}", self.random_weights), self.layers);
        let model = files.load_with(std::sync::Arc::new(backend), |layers| progress.set(layers));
        progress.finish();
        let bench = ExpertsBench { rows: self.rows, passes: self.passes, repeat: self.repeat, expert_bytes };
        let mut report = Report::here();
        for row in oscar_bench::experts(model?.model(), &bench).map_err(Failure::new)? {
            let mut row = serde_json::to_value(row).expect("a row holds plain values only");
            row["shape"] = self.random_weights.clone().into();
            row["layers"] = self.layers.into();
            row["deterministic"] = self.deterministic.into();
            report.push(row);
        }
        if self.json {
            return print_text(&report.json());
        }
        let columns =
            ["shape", "rows", "experts", "top_k", "distinct_experts", "expert_mb", "layer_us", "gb_per_s"];
        print_text(report.table(&columns).trim_end())
    }
}

/// Bytes of the weights of one expert, their scales included.
fn bytes_of_an_expert(files: &ModelFiles) -> usize {
    let entries = files.tensors().entries().iter();
    let first =
        entries.filter(|entry| entry.name.contains(".layers.0.") && entry.name.contains(".experts.0."));
    first.filter_map(|entry| entry.byte_len).sum()
}
