//! The command line: one file per command under `commands`, everything they share beside this one.

mod allocator;
mod answer;
mod arguments;
mod commands;
mod conversation;
mod device;
mod failure;
mod free_memory;
mod http;
mod interrupt;
mod kv;
mod lab;
mod loading;
mod named_model;
mod output;
mod progress;
mod rotations;
mod sglang_variables;
mod signals;
mod windows;

use std::process::ExitCode;

use clap::{Parser, ValueEnum};
use tracing_subscriber::EnvFilter;

use crate::commands::Command;
use crate::commands::serve::with_config_file;

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
                  oscar serve smollm2\n  \
                  oscar generate smollm2 --prompt \"Why is the sky blue?\" --max-tokens 64\n  \
                  oscar inspect ./model.gguf --memory 8GiB\n  \
                  oscar doctor"
)]
struct Arguments {
    /// What is logged to stderr: error, warn, info, debug, trace, or a filter such as oscar_model=debug.
    #[arg(long, global = true, env = "OSCAR_LOG", default_value = "warn", value_name = "LEVEL", value_parser = log_filter)]
    log_level: String,

    /// How it is logged.
    #[arg(long, global = true, env = "OSCAR_LOG_FORMAT", default_value = "text", value_name = "FORMAT")]
    log_format: LogFormat,

    #[command(subcommand)]
    command: Command,
}

/// The form of log lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum LogFormat {
    /// Lines of text for people.
    Text,
    /// One JSON object a line.
    Json,
}

fn main() -> ExitCode {
    let arguments = match with_config_file(std::env::args_os().collect()) {
        Ok(arguments) => Arguments::parse_from(arguments),
        Err(failure) => return failure.report(),
    };
    let log = tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .with_env_filter(EnvFilter::new(&arguments.log_level))
        .with_target(false);
    match arguments.log_format {
        LogFormat::Text => log.init(),
        LogFormat::Json => log.json().flatten_event(true).init(),
    }
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

    #[test]
    fn the_sample_configuration_is_understood() {
        use clap::Parser;

        let sample = concat!(env!("CARGO_MANIFEST_DIR"), "/../../deploy/oscar.toml");
        let read = |file: &str| {
            let line = ["oscar", "serve", "--config", file].map(std::ffi::OsString::from);
            let line = super::with_config_file(line.to_vec()).map_err(|_| "not TOML".to_owned())?;
            super::Arguments::try_parse_from(line).map_err(|error| error.to_string())
        };
        let arguments = read(sample).expect("deploy/oscar.toml");
        let shown = format!("{:?}", arguments.command);
        assert!(shown.contains("port: 30000") && shown.contains("\"smollm2\""), "{shown}");
        // Every key is looked at: one that is no flag is refused.
        let folder = tempfile::tempdir().expect("folder");
        let misspelt = folder.path().join("misspelt.toml");
        let text = std::fs::read_to_string(sample).expect("deploy/oscar.toml");
        std::fs::write(&misspelt, text.replace("max-queued-requests", "max-queued")).expect("file");
        let refused = read(misspelt.to_str().expect("path")).expect_err("a key that is no flag");
        assert!(refused.contains("--max-queued"), "{refused}");
    }
}
