//! `oscar bench`: speed on this machine.

mod attention;
mod engine;
mod serve;

use clap::builder::RangedU64ValueParser;
use clap::{Args, Subcommand};
use oscar_bench::cuda::CudaCodecBench;
use oscar_bench::{CodecBench, ModelBench};
use oscar_codec::Rule;
use oscar_kernels::Inspect;
use oscar_lab::Report;
use oscar_model::source::Settings;

use crate::arguments::{MeasuredModel, WeightArguments, positive};
use crate::device::{DeviceArguments, OnDevice, worker_threads};
use crate::failure::Failure;
use crate::kv::KvArguments;
use crate::loading::EngineArguments;
use crate::output::print_text;

/// Measure speed on this machine.
#[derive(Debug, Args)]
pub(crate) struct BenchArguments {
    #[command(subcommand)]
    command: BenchCommand,
}

#[derive(Debug, Subcommand)]
enum BenchCommand {
    Model(ModelBenchArguments),
    Codec(CodecBenchArguments),
    Attention(attention::AttentionBenchArguments),
    Engine(engine::EngineBenchArguments),
    Serve(serve::ServeBenchArguments),
}

/// Prefill and decode speed, time to first token and peak memory of a model.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    oscar bench model smollm2\n  \
    oscar bench model smollm2 --prompt-tokens 512 --gen-tokens 64 --context 4096\n  \
    oscar bench model ./model.gguf --threads 8 --repeat 5 --json\n  \
    oscar bench model --device cuda --random-weights qwen3-8b --kv-cache-dtype int2 --context 32768\n\n\
    --context is the number of tokens in the cache when decoding starts; the prompt alone by default.")]
struct ModelBenchArguments {
    #[command(flatten)]
    model: MeasuredModel,

    /// Prompt tokens of the prefill measurement.
    #[arg(long, default_value = "512", value_name = "TOKENS", value_parser = positive)]
    prompt_tokens: usize,

    /// Tokens to generate in the decode measurement.
    #[arg(long, default_value = "64", value_name = "TOKENS", value_parser = positive)]
    gen_tokens: usize,

    /// Tokens in the cache when decoding starts.
    #[arg(long, value_name = "TOKENS", value_parser = positive)]
    context: Option<usize>,

    #[command(flatten)]
    device: DeviceArguments,

    #[command(flatten)]
    weights: WeightArguments,

    /// How often everything is measured.
    #[arg(long, default_value = "3", value_name = "N", value_parser = positive)]
    repeat: usize,

    #[command(flatten)]
    kv: KvArguments,

    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

/// Encoding and decoding speed of the 2-bit cache, on every instruction set of this machine, or sealing on a GPU.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    oscar bench codec\n  \
    oscar bench codec --head-dim 128 --groups 2 --rule search --rows 8192\n  \
    oscar bench codec --threads 2 --json\n  \
    oscar bench codec --device cuda --head-dim 128 --pages 32\n\n\
    Speed is bytes of bf16 input per second and core: the fastest pass of each thread, averaged over threads.\n\
    \"scalar\" is the definition of the codec, written to be read; \"equal\" says whether a path gave its bytes.\n\
    On a GPU whole pages of all layers and heads are sealed: bytes of bf16 input per second.")]
struct CodecBenchArguments {
    /// Where the encoder runs.
    #[arg(long, default_value = "cpu", value_name = "DEVICE")]
    device: attention::BenchDevice,

    /// Channels of a head.
    #[arg(long, default_value = "64,128", value_name = "D", value_delimiter = ',', value_parser = at_most(1024))]
    head_dim: Vec<usize>,

    /// Groups of channels with a scale of their own.
    #[arg(long, default_value = "1", value_name = "N", value_parser = positive)]
    groups: usize,

    /// Rounding rules: clip=RATIO, minmax, gaussian, search.
    #[arg(long, default_value = "clip=0.96,gaussian,search", value_name = "RULE", value_delimiter = ',')]
    rule: Vec<Rule>,

    /// Rows per pass.
    #[arg(long, default_value = "2048", value_name = "ROWS", value_parser = at_most(1 << 20))]
    rows: usize,

    /// Threads that encode at the same time, each its own rows.
    #[arg(long, default_value = "1", value_name = "N", value_parser = at_most(1024))]
    threads: usize,

    /// GPU: layers of a page.
    #[arg(long, default_value = "36", value_name = "N", value_parser = at_most(1024))]
    layers: usize,

    /// GPU: KV heads of a layer.
    #[arg(long, default_value = "8", value_name = "N", value_parser = at_most(1024))]
    kv_heads: usize,

    /// GPU: pages that are sealed at once.
    #[arg(long, default_value = "32", value_name = "N", value_parser = at_most(4096))]
    pages: usize,

    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

/// A number from 1 to `limit`, so that a slip does not ask for all memory.
fn at_most(limit: u64) -> RangedU64ValueParser<usize> {
    RangedU64ValueParser::new().range(1..=limit)
}

/// `8192` or `8k`.
fn tokens(text: &str) -> Result<usize, String> {
    let (digits, factor) = text.strip_suffix(['k', 'K']).map_or((text, 1), |digits| (digits, 1024));
    positive(digits)?.checked_mul(factor).ok_or_else(|| "is too large".to_owned())
}

impl CodecBenchArguments {
    fn run_cuda(self) -> Result<(), Failure> {
        let bench = CudaCodecBench {
            card: 0,
            kernels: Some(Settings::from_environment()?.kernel_folder()),
            layers: self.layers,
            kv_heads: self.kv_heads,
            head_dims: self.head_dim,
            groups: self.groups,
            rules: self.rule,
            pages: self.pages,
            pool_bytes: 2 << 30,
            repeat: 15,
        };
        let mut report = Report::here();
        oscar_bench::cuda::codec(&bench, |row| {
            tracing::info!("{row:?}");
            report.push(row);
        })
        .map_err(Failure::new)?;
        if self.json {
            return print_text(&report.json());
        }
        let columns = [
            "card", "kv", "rule", "head_dim", "groups", "layers", "kv_heads", "pages", "mb", "us", "gb_per_s",
        ];
        print_text(report.table(&columns).trim_end())
    }

    fn run(self) -> Result<(), Failure> {
        if self.device == attention::BenchDevice::Cuda {
            return self.run_cuda();
        }
        let bench = CodecBench {
            head_dims: self.head_dim,
            groups: self.groups,
            rules: self.rule,
            rows: self.rows,
            threads: self.threads,
        };
        let mut report = Report::here();
        oscar_bench::codec(&bench, |row| {
            tracing::info!("{row}");
            report.push(row);
        })
        .map_err(Failure::new)?;
        if self.json {
            return print_text(&report.json());
        }
        let columns = [
            "head_dim",
            "groups",
            "stage",
            "side",
            "rule",
            "path",
            "threads",
            "mb_per_s_per_core",
            "times_scalar",
            "equal",
        ];
        print_text(report.table(&columns).trim_end())
    }
}

impl BenchArguments {
    pub(crate) fn run(self) -> Result<(), Failure> {
        match self.command {
            BenchCommand::Model(arguments) => arguments.run(),
            BenchCommand::Codec(arguments) => arguments.run(),
            BenchCommand::Attention(arguments) => arguments.run(),
            BenchCommand::Engine(arguments) => arguments.run(),
            BenchCommand::Serve(arguments) => arguments.run(),
        }
    }
}

impl ModelBenchArguments {
    fn run(self) -> Result<(), Failure> {
        self.device.clone().run(self.kv.cache.deterministic, self)
    }
}

impl OnDevice for ModelBenchArguments {
    type Output = ();

    fn run_on<B: Inspect>(self, backend: B) -> Result<(), Failure> {
        let start = self.context.unwrap_or(0).max(self.prompt_tokens);
        let needed = start.saturating_add(self.gen_tokens).saturating_add(1);
        let engine_arguments = EngineArguments {
            context: Some(needed),
            device: self.device.clone(),
            weights: self.weights,
            kv: self.kv.clone(),
        };
        let model = self.model.arguments();
        let engine = engine_arguments.load(&model, backend)?;
        let bench = ModelBench {
            prompt_tokens: self.prompt_tokens,
            gen_tokens: self.gen_tokens,
            context: self.context,
            repeat: self.repeat,
        };
        let mut report = Report::here();
        oscar_bench::model(&engine, &bench, worker_threads(self.device.threads), |mut row| {
            row["model"] = model.model.clone().into();
            tracing::info!("{row}");
            report.push(row);
        })?;
        if self.json {
            return print_text(&report.json());
        }
        let columns = [
            "kv",
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

#[cfg(test)]
mod tests {
    use super::tokens;

    #[test]
    fn contexts_are_read_in_thousands_too() {
        assert_eq!((tokens("512"), tokens("8k"), tokens("2K")), (Ok(512), Ok(8192), Ok(2048)));
        assert!(tokens("0").is_err() && tokens("k").is_err() && tokens("99999999999999999999k").is_err());
    }
}
