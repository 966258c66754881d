//! `oscar serve`: a model behind OpenAI's, Anthropic's, SGLang's and llama.cpp's interfaces.

mod config_file;
mod events;
mod unsupported;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::Args;
use oscar_engine::{EngineOptions, Serve};
use oscar_lab::Machine;
use oscar_model::source::ModelPath;

use self::events::EventArguments;
use self::unsupported::UnsupportedArguments;
use crate::arguments::{ModelArguments, positive};
use crate::failure::Failure;
use crate::http::HttpArguments;
use crate::kv::Settled;
use crate::loading::{EngineArguments, start};
use crate::output::binary_bytes;

pub(crate) use config_file::with_config_file;

/// Serve a model over HTTP.
#[derive(Debug, Args)]
#[command(
    args_override_self = true,
    after_help = "Examples:\n  \
    oscar serve smollm2\n  \
    oscar serve qwen2.5-coder-1.5b --port 8000 --kv-cache-dtype int2 --kv-memory 4GiB\n  \
    oscar serve --model-path ./model.gguf --served-model-name mine --api-key SECRET --host 0.0.0.0\n  \
    oscar serve --config server.toml\n\n\
    Then: curl http://127.0.0.1:30000/v1/chat/completions -H 'content-type: application/json' \
    -d '{\"messages\": [{\"role\": \"user\", \"content\": \"Hello!\"}]}'\n\n\
    SIGTERM and Ctrl-C let answers in progress end first; a second one does not. A configuration file is TOML with \
    the names of flags as keys; flags on the command line win."
)]
pub(crate) struct ServeArguments {
    /// Catalogue name, .gguf file, folder with config.json, or hub id.
    #[arg(value_name = "MODEL")]
    model: Option<String>,

    /// The same as MODEL, which wins.
    #[arg(long, value_name = "MODEL", alias = "model")]
    model_path: Option<String>,

    /// Use only what is on disk; never download.
    #[arg(long, env = "OSCAR_OFFLINE", value_parser = clap::builder::FalseyValueParser::new())]
    offline: bool,

    /// Settings from a TOML file.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,

    /// Answers in progress at a time.
    #[arg(long, default_value = "32", value_name = "N", value_parser = positive)]
    max_running_requests: usize,

    /// Requests that may wait; more get 429.
    #[arg(long, default_value = "1024", value_name = "N", value_parser = positive)]
    max_queued_requests: usize,

    /// Prompt tokens computed in one pass; -1 is all of them.
    #[arg(long, default_value = "512", value_name = "TOKENS", value_parser = chunk, allow_negative_numbers = true)]
    chunked_prefill_size: usize,

    /// Share of the machine's memory for weights and cache, instead of --kv-memory.
    #[arg(long, value_name = "SHARE", value_parser = share, conflicts_with = "kv_memory")]
    mem_fraction_static: Option<f64>,

    #[command(flatten)]
    engine: EngineArguments,

    #[command(flatten)]
    events: EventArguments,

    #[command(flatten)]
    http: HttpArguments,

    #[command(flatten)]
    unsupported: UnsupportedArguments,
}

impl ServeArguments {
    pub(crate) fn run(self) -> Result<(), Failure> {
        self.unsupported.check()?;
        let Some(model) = self.model.clone().or_else(|| self.model_path.clone()) else {
            return Err(Failure::new("there is no model to serve")
                .with_fix("give a MODEL, such as `oscar serve smollm2`, or --model-path"));
        };
        let model = ModelArguments { model, offline: self.offline };
        let listener = self.http.open()?;
        let publisher = self.events.publisher(listener.runtime())?;
        let subject = self.engine.load_model(&model)?;
        let settled = self.engine.kv.settle(&subject)?;
        let options = self.engine_options(&model, &settled)?;
        let engine = Arc::new(start(&subject, &options, &settled)?);
        let mut events = None;
        if let Some(publisher) = publisher {
            if !engine.info().prefix_cache {
                tracing::warn!("--kv-events has nothing to tell without a prefix cache");
            }
            events = Some(publisher.address().clone());
            let _context = listener.runtime().enter();
            publisher.start(engine.cache_events()).map_err(|error| Failure::new(error.to_string()))?;
        }
        self.http.serve(listener, &subject, engine, events)
    }

    fn engine_options(&self, model: &ModelArguments, settled: &Settled) -> Result<EngineOptions, Failure> {
        let mut options = EngineOptions {
            max_running: self.max_running_requests,
            max_queued: self.max_queued_requests,
            prefill_chunk: self.chunked_prefill_size,
            ..self.engine.options(settled)
        };
        if let Some(share) = self.mem_fraction_static {
            options.kv.memory = Some(memory_for_cache(share, &model.resolve()?)?);
        }
        Ok(options)
    }
}

/// What is left for the cache of a share of this machine's memory.
fn memory_for_cache(share: f64, path: &ModelPath) -> Result<usize, Failure> {
    let Some(all) = Machine::here().memory_bytes else {
        return Err(Failure::new("the memory of this machine is not known").with_fix("give --kv-memory SIZE"));
    };
    let weights = weight_bytes(path.path());
    let allowed = (all as f64 * share) as u64;
    match allowed.checked_sub(weights).filter(|&rest| rest > 0) {
        Some(rest) => Ok(usize::try_from(rest).unwrap_or(usize::MAX)),
        None => Err(Failure::new(format!(
            "{share} of this machine's memory is {}, and the weights alone have {}",
            binary_bytes(allowed),
            binary_bytes(weights)
        ))
        .with_fix("give a larger --mem-fraction-static, or --kv-memory SIZE")),
    }
}

/// Bytes of a model's files.
fn weight_bytes(path: &Path) -> u64 {
    let size = |path: &Path| path.metadata().map_or(0, |data| data.len());
    match path.read_dir() {
        Ok(files) => {
            let weights = files.flatten().map(|file| file.path());
            weights
                .filter(|path| path.extension().is_some_and(|kind| kind == "safetensors"))
                .map(|path| size(&path))
                .sum()
        }
        Err(_) => size(path),
    }
}

/// Tokens of a pass; -1 puts no bound on them.
fn chunk(text: &str) -> Result<usize, String> {
    if text == "-1" { Ok(usize::MAX) } else { positive(text) }
}

fn share(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(share) if share > 0.0 && share < 1.0 => Ok(share),
        _ => Err("must be a number between 0 and 1".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_bounded() {
        assert_eq!(chunk("-1"), Ok(usize::MAX));
        assert_eq!(chunk("8192"), Ok(8192));
        assert!(chunk("0").is_err() && chunk("-2").is_err());
        assert!(
            share("0.85").is_ok() && ["0", "1", "-1", "nan", "x"].iter().all(|text| share(text).is_err())
        );
    }
}
