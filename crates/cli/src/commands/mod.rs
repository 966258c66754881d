//! The commands.

mod bench;
pub(crate) mod calibrate;
mod chat;
mod doctor;
mod eval;
mod generate;
mod inspect;
mod lab;
mod models;
mod pull;
pub(crate) mod serve;
mod zoo;

use clap::Subcommand;

use crate::failure::Failure;

/// The command that the user gave.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    Chat(chat::ChatArguments),
    Generate(generate::GenerateArguments),
    Serve(Box<serve::ServeArguments>),
    Models(models::ModelsArguments),
    Pull(pull::PullArguments),
    Inspect(inspect::InspectArguments),
    Zoo(zoo::ZooArguments),
    Calibrate(calibrate::CalibrateArguments),
    Eval(eval::EvalArguments),
    Lab(lab::LabArguments),
    Bench(bench::BenchArguments),
    Doctor(doctor::DoctorArguments),
}

impl Command {
    /// Runs the command until it is done.
    pub(crate) fn run(self) -> Result<(), Failure> {
        match self {
            Command::Chat(arguments) => arguments.run(),
            Command::Generate(arguments) => arguments.run(),
            Command::Serve(arguments) => arguments.run(),
            Command::Models(arguments) => arguments.run(),
            Command::Pull(arguments) => arguments.run(),
            Command::Inspect(arguments) => arguments.run(),
            Command::Zoo(arguments) => arguments.run(),
            Command::Calibrate(arguments) => arguments.run(),
            Command::Eval(arguments) => arguments.run(),
            Command::Lab(arguments) => arguments.run(),
            Command::Bench(arguments) => arguments.run(),
            Command::Doctor(arguments) => arguments.run(),
        }
    }
}
