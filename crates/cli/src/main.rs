//! The command line: one file per command under `commands`, everything they share beside this one.

mod arguments;
mod commands;
mod conversation;
mod failure;
mod interrupt;
mod kv;
mod lab;
mod loading;
mod output;
mod progress;
mod published;

use std::process::ExitCode;

use clap::Parser;
use tracing_subscriber::EnvFilter;

use crate::commands::Command;

/// Runs language models on this machine, from a GGUF file, a folder or a name.
#[derive(Debug, Parser)]
#[command(
    name = "oscar",
    version,
    arg_required_else_help = true,
    after_help = "MODEL is a catalogue name (`oscar models`), a .gguf file, a folder with config.json and \
                  safetensors, or a hub id such as Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF.\n\n\
                  Examples:\n  \
                  oscar chat smollm2\n  \
                  oscar generate smollm2 --prompt \"Why is the sky blue?\" --max-tokens 64\n  \
                  oscar inspect ./model.gguf --memory 8GiB\n  \
                  oscar doctor"
)]
struct Arguments {
    /// What is logged to stderr: error, warn, info, debug, trace, or a filter such as oscar_model=debug.
    #[arg(long, global = true, env = "OSCAR_LOG", default_value = "warn", value_name = "LEVEL", value_parser = log_filter)]
    log_level: String,

    #[command(subcommand)]
    command: Command,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .with_env_filter(EnvFilter::new(&arguments.log_level))
        .with_target(false)
        .init();
    match arguments.command.run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report(),
    }
}

fn log_filter(text: &str) -> Result<String, String> {
    EnvFilter::try_new(text).map(|_| text.to_owned()).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    #[test]
    fn the_argument_definitions_are_consistent() {
        super::Arguments::command().debug_assert();
    }
}
