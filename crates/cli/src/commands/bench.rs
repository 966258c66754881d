//! `oscar bench`: speed on this machine.

use clap::{Args, Subcommand};
use oscar_lab::Report;
use oscar_lab::bench::ModelBench;

use crate::arguments::{ModelArguments, positive};
use crate::failure::Failure;
use crate::loading::EngineArguments;
use crate::output::print_text;

/// Measure speed on this machine.
#[derive(Debug, Args)]
pub(crate) struct BenchArguments {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    Model(ModelBenchArguments),
}

/// Prefill and decode speed, time to first token and peak memory of a model.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    oscar bench model smollm2\n  \
    oscar bench model smollm2 --prompt-tokens 512 --gen-tokens 64 --context 4096\n  \
    oscar bench model ./model.gguf --threads 8 --repeat 5 --json\n\n\
    --context is the number of tokens in the cache when decoding starts; the prompt alone by default.")]
struct ModelBenchArguments {
    #[command(flatten)]
    model: ModelArguments,

    /// Prompt tokens of the prefill measurement.
    #[arg(long, default_value = "512", value_name = "TOKENS", value_parser = positive)]
    prompt_tokens: usize,

    /// Tokens to generate in the decode measurement.
    #[arg(long, default_value = "64", value_name = "TOKENS", value_parser = positive)]
    gen_tokens: usize,

    /// Tokens in the cache when decoding starts.
    #[arg(long, value_name = "TOKENS", value_parser = positive)]
    context: Option<usize>,

    /// Worker threads; as many as the machine has cores by default.
    #[arg(long, value_name = "N", env = "OSCAR_THREADS", value_parser = positive)]
    threads: Option<usize>,

    /// How often everything is measured.
    #[arg(long, default_value = "3", value_name = "N", value_parser = positive)]
    repeat: usize,

    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

impl BenchArguments {
    pub(crate) fn run(self) -> Result<(), Failure> {
        match self.what {
            What::Model(arguments) => arguments.run(),
        }
    }
}

impl ModelBenchArguments {
    fn run(self) -> Result<(), Failure> {
        let start = self.context.unwrap_or(0).max(self.prompt_tokens);
        let needed = start.saturating_add(self.gen_tokens).saturating_add(1);
        let engine_arguments = EngineArguments { context: Some(needed), threads: self.threads };
        let mut engine = engine_arguments.load(&self.model)?;
        let bench = ModelBench {
            prompt_tokens: self.prompt_tokens,
            gen_tokens: self.gen_tokens,
            context: self.context,
            repeat: self.repeat,
        };
        let mut report = Report::here();
        oscar_lab::bench::model(&mut engine, &bench, engine_arguments.threads(), |mut row| {
            row["model"] = self.model.model.clone().into();
            tracing::info!("{row}");
            report.push(row);
        })?;
        if self.json {
            return print_text(&report.json());
        }
        let columns = [
            "threads",
            "prompt_tokens",
            "prefill_tokens_per_s",
            "ttft_ms",
            "context",
            "gen_tokens",
            "decode_tokens_per_s",
            "peak_rss_bytes",
        ];
        print_text(report.table(&columns).trim_end())
    }
}
