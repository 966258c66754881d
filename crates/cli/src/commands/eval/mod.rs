//! `oscar eval`: what a codec does to a model.

mod ablation;
mod kl;
mod niah;
mod report;
mod served;
mod tasks;

use clap::{Args, Subcommand};

use crate::failure::Failure;

/// Measure what a cache codec does to a model.
#[derive(Debug, Args)]
pub(crate) struct EvalArguments {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    Kl(kl::KlArguments),
    Niah(niah::NiahArguments),
    Ablation(ablation::AblationArguments),
    Tasks(tasks::TasksArguments),
    Report(report::ReportArguments),
}

impl EvalArguments {
    pub(crate) fn run(self) -> Result<(), Failure> {
        match self.what {
            What::Kl(arguments) => arguments.run(),
            What::Niah(arguments) => arguments.run(),
            What::Ablation(arguments) => arguments.run(),
            What::Tasks(arguments) => arguments.run(),
            What::Report(arguments) => arguments.run(),
        }
    }
}
