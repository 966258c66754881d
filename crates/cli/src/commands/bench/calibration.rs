//! `oscar bench calibrate`: how long a calibration takes.

use std::sync::Arc;

use clap::Args;
use oscar_kernels::Inspect;
use oscar_model::random_layers;
use oscar_report::Report;

use super::at_most;
use crate::arguments::positive;
use crate::device::{DeviceArguments, OnDevice};
use crate::failure::Failure;
use crate::output::print_text;

/// Time of a calibration, from some layers of a published shape.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    oscar bench calibrate --device cuda --random-weights qwen3-8b --tokens 30000\n  \
    oscar bench calibrate --random-weights qwen3-0.6b --tokens 4096 --layers 1\n\n\
    Layers are calibrated one after the other and take equally long, so some of them tell the time of all. The text is \
    random tokens:\n\
    drawing it from the model, and the probe after a calibration, come on top.")]
pub(super) struct CalibrationBenchArguments {
    /// A published shape, such as qwen3-8b.
    #[arg(long, value_name = "SHAPE")]
    random_weights: String,

    /// Tokens that moments are summed over.
    #[arg(long, default_value = "8192", value_name = "N", value_parser = positive)]
    tokens: usize,

    /// Layers that are calibrated.
    #[arg(long, default_value = "2", value_name = "N", value_parser = at_most(128))]
    layers: usize,

    #[command(flatten)]
    device: DeviceArguments,

    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

impl CalibrationBenchArguments {
    pub(super) fn run(self) -> Result<(), Failure> {
        self.device.clone().run(false, self)
    }
}

impl OnDevice for CalibrationBenchArguments {
    type Output = ();

    fn run_on<B: Inspect>(self, backend: B) -> Result<(), Failure> {
        let (files, all_layers) = random_layers(&self.random_weights, self.layers.max(1))?;
        let model = files.load(Arc::new(backend))?;
        let row = oscar_bench::calibration(&model, self.tokens, all_layers).map_err(Failure::new)?;
        let mut row = serde_json::to_value(row).expect("a row holds plain values only");
        row["shape"] = self.random_weights.into();
        let mut report = Report::here();
        report.push(row);
        if self.json {
            return print_text(&report.json());
        }
        let columns = ["shape", "tokens", "layers", "s_per_layer", "all_layers", "s_for_all"];
        print_text(report.table(&columns).trim_end())
    }
}
