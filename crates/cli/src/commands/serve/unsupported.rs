//! Flags of SGLang for what is not there. Saying so beats a server that quietly does something else.

use clap::Args;

use crate::failure::Failure;

/// Flags that are known and refused.
#[derive(Debug, Default, Args)]
pub(super) struct UnsupportedArguments {
    #[arg(long, hide = true, alias = "tp-size", alias = "tp", value_name = "N")]
    tensor_parallel_size: Option<usize>,
    #[arg(long, hide = true, alias = "pp-size", value_name = "N")]
    pipeline_parallel_size: Option<usize>,
    #[arg(long, hide = true, alias = "dp-size", alias = "dp", value_name = "N")]
    data_parallel_size: Option<usize>,
    #[arg(long, hide = true, num_args = 0.., value_name = "PATH")]
    lora_paths: Option<Vec<String>>,
    #[arg(long, hide = true)]
    enable_lora: bool,
    #[arg(long, hide = true, value_name = "NAME")]
    speculative_algorithm: Option<String>,
    #[arg(long, hide = true, value_name = "PATH")]
    speculative_draft_model_path: Option<String>,
    #[arg(long, hide = true)]
    enable_multimodal: bool,
    #[arg(long, hide = true, value_name = "MODE")]
    disaggregation_mode: Option<String>,
    #[arg(long, hide = true, value_name = "NAME")]
    quantization: Option<String>,
    /// Accepted: nothing remote is ever run.
    #[arg(long, hide = true)]
    trust_remote_code: bool,
    /// Accepted: metrics are always there.
    #[arg(long, hide = true)]
    enable_metrics: bool,
}

impl UnsupportedArguments {
    /// Refuses an option of another server that is not there, in one line.
    pub(super) fn check(&self) -> Result<(), Failure> {
        let several = |size: Option<usize>| size.is_some_and(|size| size != 1);
        let routers = "run several servers behind a router";
        for (asked, flag, why, fix) in [
            (
                several(self.tensor_parallel_size),
                "--tensor-parallel-size",
                "one process serves a whole model",
                routers,
            ),
            (
                several(self.pipeline_parallel_size),
                "--pipeline-parallel-size",
                "one process serves a whole model",
                routers,
            ),
            (
                several(self.data_parallel_size),
                "--data-parallel-size",
                "one process serves one copy of a model",
                routers,
            ),
            (
                self.lora_paths.is_some() || self.enable_lora,
                "--lora-paths",
                "there are no adapters",
                "merge the adapter into the weights first",
            ),
            (
                self.speculative_algorithm.is_some() || self.speculative_draft_model_path.is_some(),
                "--speculative-algorithm",
                "there is no speculative decoding",
                "leave it out",
            ),
            (self.enable_multimodal, "--enable-multimodal", "models read text only", "leave it out"),
            (
                self.disaggregation_mode.as_deref().is_some_and(|mode| mode != "null"),
                "--disaggregation-mode",
                "prompts and answers are computed by the same process",
                "leave it out",
            ),
            (
                self.quantization.is_some(),
                "--quantization",
                "weights are used as their file stores them",
                "choose a quantised file; --kv-cache-dtype is about the cache",
            ),
        ] {
            if asked {
                return Err(Failure::new(format!("{flag} is not supported: {why}")).with_fix(fix));
            }
        }
        Ok(())
    }
}
