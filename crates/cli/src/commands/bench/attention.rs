//! `oscar bench attention`: attention alone, format against format, without a model.

use std::fs;
use std::path::PathBuf;

use clap::builder::RangedU64ValueParser;
use clap::{Args, ValueEnum};
use oscar_bench::cuda::{CudaAttentionBench, CudaPrefillBench};
use oscar_bench::{AttentionBench, PageFormat};
use oscar_kernels::cpu::isa::Isa;
use oscar_kernels::cpu::pool::Pool;
use oscar_model::source::Settings;
use oscar_report::Report;

use super::{at_most, tokens};
use crate::arguments::positive;
use crate::failure::Failure;
use crate::output::print_text;

/// Attention over pages of every cache type, without a model.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    oscar bench attention\n  \
    oscar bench attention --q-heads 12 --kv-heads 2 --head-dim 128 --contexts 8k,16k,32k\n  \
    oscar bench attention --kv bf16,int2 --threads 1 --json\n  \
    oscar bench attention --device cuda --q-heads 32 --kv-heads 8 --batch 1,32 --contexts 32k --svg roofline.svg\n  \
    oscar bench attention --device cuda --q-heads 32 --kv-heads 8 --prompt-tokens 8k --contexts 8k,128k --kv bf16,int2\n\n\
    One token attends to a context, in as many layers as it takes to read --pool-mb of pages: us_per_layer is the time\n\
    of one layer. read_gb_per_s is a plain read of the same pages, four at a time; read_share is how close attention\n\
    comes to it, and error the difference to the definition of the format. The second table is the cost per 1024 tokens\n\
    of context.\n\
    On a GPU, --batch sequences attend at once, sink and window in bf16; of_ceiling compares with a plain read of the\n\
    card's memory. With --prompt-tokens, so many tokens at the end of the context are computed at once, as when a prompt\n\
    is read.")]
pub(super) struct AttentionBenchArguments {
    /// Where to measure.
    #[arg(long, default_value = "cpu", value_name = "DEVICE")]
    device: BenchDevice,

    /// Sequences that decode together; on a GPU only.
    #[arg(long, default_value = "1", value_name = "LIST", value_delimiter = ',', value_parser = at_most(4096))]
    batch: Vec<usize>,

    /// Tokens of a prompt that are computed at once, the last ones of the context, instead of --batch; on a GPU only.
    #[arg(long, value_name = "TOKENS", value_parser = tokens)]
    prompt_tokens: Option<usize>,

    /// Tokens at the start that are read in bf16; on a GPU only.
    #[arg(long, default_value = "64", value_name = "TOKENS")]
    sink_tokens: usize,

    /// Latest tokens that are read in bf16; on a GPU only.
    #[arg(long, default_value = "256", value_name = "TOKENS")]
    recent_tokens: usize,

    /// Results that do not depend on the batch; on a GPU only.
    #[arg(long)]
    deterministic: bool,

    /// Query heads.
    #[arg(long, default_value = "12", value_name = "N", value_parser = at_most(1024))]
    q_heads: usize,

    /// KV heads.
    #[arg(long, default_value = "2", value_name = "N", value_parser = at_most(1024))]
    kv_heads: usize,

    /// Channels of a head.
    #[arg(long, default_value = "128", value_name = "D", value_parser = at_most(1024))]
    head_dim: usize,

    /// Groups of channels with a scale of their own, in int2:scalar and int4.
    #[arg(long, default_value = "1", value_name = "N", value_parser = at_most(1024))]
    groups: usize,

    /// Tokens in the cache; 8k is 8192.
    #[arg(long, default_value = "8k,16k,32k", value_name = "LIST", value_delimiter = ',', value_parser = tokens)]
    contexts: Vec<usize>,

    /// Page formats: bf16, fp8, int4, int2 (keys in bands), int2:widths=4/2/2/2 and others of the menu, int2:scalar, int1.5
    /// and high.
    #[arg(long, default_value = "bf16,fp8,int4,int2", value_name = "LIST", value_delimiter = ',')]
    kv: Vec<PageFormat>,

    /// Worker threads; as many as the machine has cores by default.
    #[arg(long, value_name = "N", env = "OSCAR_THREADS", value_parser = at_most(1024))]
    threads: Option<usize>,

    /// Megabytes of pages to read per measurement, more than any cache holds.
    #[arg(long, default_value = "1024", value_name = "MB",
          value_parser = RangedU64ValueParser::<usize>::new().range(1..=1 << 20))]
    pool_mb: usize,

    /// How often everything is measured; the fastest counts.
    #[arg(long, default_value = "5", value_name = "N", value_parser = positive)]
    repeat: usize,

    /// Print one JSON object.
    #[arg(long)]
    json: bool,

    /// Draw the measurements below the read ceiling; on a GPU only.
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
}

/// The device that attention is measured on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum BenchDevice {
    /// This machine's processor.
    Cpu,
    /// The first NVIDIA GPU.
    Cuda,
}

impl AttentionBenchArguments {
    pub(super) fn run(self) -> Result<(), Failure> {
        match (self.device, self.prompt_tokens) {
            (BenchDevice::Cuda, Some(prompt_tokens)) => return self.run_prompts(prompt_tokens),
            (BenchDevice::Cuda, None) => return self.run_cuda(),
            (BenchDevice::Cpu, Some(_)) => {
                return Err(Failure::new("--prompt-tokens is measured on a GPU only: add --device cuda"));
            }
            (BenchDevice::Cpu, None) => {}
        }
        let bench = AttentionBench {
            q_heads: self.q_heads,
            kv_heads: self.kv_heads,
            head_dim: self.head_dim,
            groups: self.groups,
            contexts: self.contexts,
            formats: self.kv,
            threads: self.threads.unwrap_or_else(Pool::default_threads),
            pool_bytes: self.pool_mb << 20,
            repeat: self.repeat,
            isa: Isa::from_env().map_err(Failure::new)?,
        };
        let (mut report, mut slopes) = (Report::here(), Report::here());
        let lines = oscar_bench::attention(&bench, |row| {
            tracing::info!("{row:?}");
            report.push(row);
        })
        .map_err(Failure::new)?;
        lines.into_iter().for_each(|line| slopes.push(line));
        if self.json {
            report.rows.extend(slopes.rows);
            return print_text(&report.json());
        }
        let columns = [
            "kv",
            "context",
            "threads",
            "path",
            "layers",
            "us_per_layer",
            "gb_per_s",
            "read_gb_per_s",
            "read_share",
            "times_bf16",
            "error",
        ];
        print_text(report.table(&columns).trim_end())?;
        print_text(slopes.table(&["kv", "us_per_1k_tokens", "of_bf16"]).trim_end())
    }

    fn run_prompts(self, prompt_tokens: usize) -> Result<(), Failure> {
        let bench = CudaPrefillBench {
            card: 0,
            kernels: Some(Settings::from_environment()?.kernel_folder()),
            q_heads: self.q_heads,
            kv_heads: self.kv_heads,
            head_dim: self.head_dim,
            groups: self.groups,
            prompt_tokens,
            contexts: self.contexts,
            formats: self.kv,
            sink_tokens: self.sink_tokens,
            repeat: self.repeat,
        };
        let mut report = Report::here();
        oscar_bench::cuda::prefill(&bench, |row| {
            tracing::info!("{row:?}");
            report.push(row);
        })
        .map_err(Failure::new)?;
        if self.json {
            return print_text(&report.json());
        }
        let columns =
            ["card", "kv", "prompt_tokens", "context", "us_per_layer", "tflop_per_s", "of_bf16", "error"];
        print_text(report.table(&columns).trim_end())
    }

    fn run_cuda(self) -> Result<(), Failure> {
        let bench = CudaAttentionBench {
            card: 0,
            kernels: Some(Settings::from_environment()?.kernel_folder()),
            q_heads: self.q_heads,
            kv_heads: self.kv_heads,
            head_dim: self.head_dim,
            groups: self.groups,
            batches: self.batch,
            contexts: self.contexts,
            formats: self.kv,
            sink_tokens: self.sink_tokens,
            recent_tokens: self.recent_tokens,
            deterministic: self.deterministic,
            pool_bytes: self.pool_mb << 20,
            repeat: self.repeat,
        };
        let mut report = Report::here();
        let mut rows = Vec::new();
        oscar_bench::cuda::attention(&bench, |row| {
            tracing::info!("{row:?}");
            report.push(row);
            rows.push(row.clone());
        })
        .map_err(Failure::new)?;
        if let Some(path) = &self.svg {
            fs::write(path, oscar_bench::cuda::roofline(&rows))
                .map_err(|error| Failure::new(format!("{}: {error}", path.display())))?;
        }
        if self.json {
            return print_text(&report.json());
        }
        let columns = [
            "card",
            "kv",
            "batch",
            "context",
            "layers",
            "us_per_layer",
            "gb_per_s",
            "ceiling_gb_per_s",
            "of_ceiling",
            "times_bf16",
            "error",
        ];
        print_text(report.table(&columns).trim_end())
    }
}
