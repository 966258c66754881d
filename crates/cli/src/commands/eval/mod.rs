//! `oscar eval`: what a codec does to a model.

mod ablation;
mod kl;
mod niah;
mod probe;
mod report;
mod served;

use clap::{Args, Subcommand};

use crate::failure::Failure;

/// Measure what a cache codec does to a model.
#[derive(Debug, Args)]
pub(crate) struct EvalArguments {
    #[command(subcommand)]
    command: EvalCommand,
}

#[derive(Debug, Subcommand)]
enum EvalCommand {
    Kl(kl::KlArguments),
    Niah(niah::NiahArguments),
    Probe(probe::ProbeArguments),
    Ablation(ablation::AblationArguments),
    Report(report::ReportArguments),
}

impl EvalArguments {
    pub(crate) fn run(self) -> Result<(), Failure> {
        match self.command {
            EvalCommand::Kl(arguments) => arguments.run(),
            EvalCommand::Niah(arguments) => arguments.run(),
            EvalCommand::Probe(arguments) => arguments.run(),
            EvalCommand::Ablation(arguments) => arguments.run(),
            EvalCommand::Report(arguments) => arguments.run(),
        }
    }
}
