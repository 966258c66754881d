//! `oscar bench`: speed on this machine.

mod attention;
mod calibration;
mod engine;
mod experts;
mod model;
mod serve;

use clap::builder::RangedU64ValueParser;
use clap::{Args, Subcommand};
use oscar_bench::CodecBench;
use oscar_bench::cuda::CudaCodecBench;
use oscar_codec::Rule;
use oscar_model::source::Settings;
use oscar_report::Report;

use crate::arguments::positive;
use crate::failure::Failure;
use crate::output::print_text;

/// Measure speed on this machine.
#[derive(Debug, Args)]
pub(crate) struct BenchArguments {
    #[command(subcommand)]
    command: BenchCommand,
}

#[derive(Debug, Subcommand)]
enum BenchCommand {
    Model(model::ModelBenchArguments),
    Codec(CodecBenchArguments),
    Attention(attention::AttentionBenchArguments),
    Experts(experts::ExpertsBenchArguments),
    Calibrate(calibration::CalibrationBenchArguments),
    Engine(engine::EngineBenchArguments),
    Serve(serve::ServeBenchArguments),
}

/// Encoding and decoding speed of the 2-bit cache, on every instruction set of this machine, or sealing on a GPU.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    oscar bench codec\n  \
    oscar bench codec --head-dim 128 --groups 2 --rule search --rows 8192\n  \
    oscar bench codec --threads 2 --json\n  \
    oscar bench codec --device cuda --head-dim 128 --pages 32\n\n\
    Speed is bytes of bf16 input per second and core: the fastest pass of each thread, averaged over threads.\n\
    kv is int2:scalar, or int2 for keys in bands. The path \"scalar\" is the definition of the codec, written to be read;\n\
    \"equal\" says whether a path gave its bytes.\n\
    On a GPU whole pages of all layers and heads are sealed: bytes of bf16 input per second.")]
struct CodecBenchArguments {
    /// Where the encoder runs.
    #[arg(long, default_value = "cpu", value_name = "DEVICE")]
    device: attention::BenchDevice,

    /// Channels of a head.
    #[arg(long, default_value = "64,128", value_name = "D", value_delimiter = ',', value_parser = at_most(1024))]
    head_dim: Vec<usize>,

    /// Groups of channels with a scale of their own, of scalar codes.
    #[arg(long, default_value = "1", value_name = "N", value_parser = positive)]
    groups: usize,

    /// Rounding rules of scalar codes: clip=RATIO, minmax, gaussian, search.
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

/// A number from 1 to `limit`, so that a slip does not take all memory.
fn at_most(limit: u64) -> RangedU64ValueParser<usize> {
    RangedU64ValueParser::new().range(1..=limit)
}

/// A number of tokens, such as `8192` or `8k`.
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
            "kv",
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
            BenchCommand::Experts(arguments) => arguments.run(),
            BenchCommand::Calibrate(arguments) => arguments.run(),
            BenchCommand::Engine(arguments) => arguments.run(),
            BenchCommand::Serve(arguments) => arguments.run(),
        }
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
