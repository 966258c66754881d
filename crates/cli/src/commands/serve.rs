//! `oscar serve`: a model behind OpenAI's, Anthropic's, SGLang's and llama.cpp's interfaces.

mod config_file;
mod events;
mod tiers;
mod unsupported;

use std::path::PathBuf;
use std::sync::Arc;

use clap::Args;
use oscar_engine::{EngineOptions, Serve};

use self::events::EventArguments;
use self::tiers::{KvTier, offer};
use self::unsupported::UnsupportedArguments;
use crate::allocator::give_back_early;
use crate::arguments::{ModelArguments, WeightPlace, byte_size, positive};
use crate::device::OnDevice;
use crate::failure::Failure;
use crate::free_memory::free_bytes;
use crate::http::HttpArguments;
use crate::kv::ChosenCache;
use crate::loading::{EngineArguments, start};
use crate::named_model::NamedModel;
use crate::output::binary_bytes;
use oscar_kernels::backend::Feature;
use oscar_kernels::{Backend, Inspect};

pub(crate) use config_file::with_config_file;

/// The share of the free memory that weights and cache may take unless the user says otherwise: the rest is for the
/// activations of prompts, for requests, and for other processes.
const DEFAULT_SHARE: f64 = 0.8;

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

    /// Prompt tokens computed in one pass, 512 on the CPU and 2048 on a card by default; -1 is all of them.
    #[arg(long, value_name = "TOKENS", value_parser = chunk, allow_negative_numbers = true)]
    chunked_prefill_size: Option<usize>,

    /// Share of the free memory for weights and cache, instead of --kv-memory; a container's limit counts. Without
    /// either the cache has room for --max-running-requests of full length, within a share of 0.8.
    #[arg(long, visible_alias = "gpu-memory-fraction", alias = "gpu-memory-utilization", value_name = "SHARE",
          value_parser = share, conflicts_with = "kv_memory")]
    mem_fraction_static: Option<f64>,

    /// Precisions of history that requests may choose (`kv_precision`), such as high,bf16: high is 4 bits beside int2. The
    /// type of the cache is always one of them [default: only that].
    #[arg(long, value_name = "LIST", value_delimiter = ',', help_heading = "KV cache")]
    kv_tiers: Vec<KvTier>,

    /// Memory of the host for pages that leave a card, such as 64GiB: a prompt that is seen again has them copied back
    /// instead of computed. Pinned at start [default: none].
    #[arg(long, value_name = "SIZE", value_parser = byte_size, help_heading = "KV cache")]
    host_kv_memory: Option<u64>,

    #[command(flatten)]
    engine: EngineArguments,

    #[command(flatten)]
    events: EventArguments,

    #[command(flatten)]
    http: HttpArguments,

    #[command(flatten)]
    unsupported: UnsupportedArguments,
}

/// A model that is to be served.
struct Service {
    arguments: ServeArguments,
    model: ModelArguments,
}

impl OnDevice for Service {
    type Output = ();

    fn run_on<B: Inspect>(self, backend: B) -> Result<(), Failure> {
        self.arguments.serve(&self.model, backend)
    }
}

impl ServeArguments {
    pub(crate) fn run(self) -> Result<(), Failure> {
        self.unsupported.check()?;
        give_back_early();
        let Some(model) = self.model.clone().or_else(|| self.model_path.clone()) else {
            return Err(Failure::new("there is no model to serve")
                .with_fix("give a MODEL, such as `oscar serve smollm2`, or --model-path"));
        };
        let model = ModelArguments { model, offline: self.offline, shard: None };
        let deterministic = self.engine.kv.cache.deterministic;
        self.engine.device.clone().run(deterministic, Service { arguments: self, model })
    }

    fn serve<B: Inspect>(&self, model: &ModelArguments, backend: B) -> Result<(), Failure> {
        let listener = self.http.open()?;
        let publisher = self.events.publisher(listener.runtime())?;
        let named = self.engine.load_model(model, backend)?;
        let chosen = self.engine.kv.settle(&named)?;
        let options = self.engine_options(&named, &chosen)?;
        let engine = Arc::new(start(&named, &options, &chosen)?);
        let mut events = None;
        if let Some(publisher) = publisher {
            if !engine.info().prefix_cache {
                tracing::warn!("--kv-events has nothing to tell without a prefix cache");
            }
            events = Some(publisher.address().clone());
            let _context = listener.runtime().enter();
            publisher.start(engine.cache_events()).map_err(|error| Failure::new(error.to_string()))?;
        }
        self.http.serve(listener, &named, engine, events)
    }

    fn engine_options<B: Backend>(
        &self,
        named: &NamedModel<B>,
        chosen: &ChosenCache,
    ) -> Result<EngineOptions, Failure> {
        let mut options = EngineOptions {
            max_running: self.max_running_requests,
            max_queued: self.max_queued_requests,
            ..self.engine.options(chosen)
        };
        options.prefill_chunk = self.chunked_prefill_size.unwrap_or(options.prefill_chunk);
        offer(&self.kv_tiers, chosen.kind, &mut options.kv)?;
        options.kv.host_memory = self.host_memory(named, options.kv.prefix_tree)?;
        if options.kv.memory.is_none() {
            match self.cache_memory(named)? {
                Some(CacheMemory::Fixed(bytes)) => options.kv.memory = Some(bytes),
                Some(CacheMemory::UpTo(bytes)) => options.kv.memory_limit = Some(bytes),
                None => {}
            }
        }
        Ok(options)
    }

    /// The bytes of the host for evicted pages.
    fn host_memory<B: Backend>(&self, named: &NamedModel<B>, prefix_tree: bool) -> Result<usize, Failure> {
        let Some(bytes) = self.host_kv_memory.filter(|&bytes| bytes > 0) else { return Ok(0) };
        if !named.model.model().backend().supports(Feature::HostPages) {
            return Err(Failure::new("--host-kv-memory: pages of the CPU are in the host's memory already")
                .with_fix("leave it out, or give --device cuda"));
        }
        if !prefix_tree {
            return Err(Failure::new(
                "--host-kv-memory: without a prefix cache no page is ever asked for again",
            )
            .with_fix("leave out --no-prefix-cache"));
        }
        if let Some(free) = free_bytes().filter(|&free| bytes > free) {
            return Err(Failure::new(format!(
                "--host-kv-memory: {} of the host are free, and {} are to be pinned",
                binary_bytes(free),
                binary_bytes(bytes)
            ))
            .with_fix("give less"));
        }
        Ok(usize::try_from(bytes).unwrap_or(usize::MAX))
    }

    /// The memory for the cache when nobody has said how much it is. The model is loaded by now.
    fn cache_memory<B: Backend>(&self, named: &NamedModel<B>) -> Result<Option<CacheMemory>, Failure> {
        let weights = named.weight_bytes;
        // Mapped weights are in the page cache, which counts as free; those on a card are there already.
        let on_card = named.model.model().backend().free_memory();
        let loaded = match self.engine.weights.weights {
            WeightPlace::Mapped if on_card.is_none() => 0,
            _ => weights,
        };
        let free = on_card.map(|free| free as u64).or_else(free_bytes).map(|free| free + loaded);
        let Some(share) = self.mem_fraction_static else {
            let rest = free.and_then(|free| rest_for_cache(DEFAULT_SHARE, free, weights));
            return Ok(rest.map(CacheMemory::UpTo));
        };
        let Some(free) = free else {
            return Err(
                Failure::new("the memory of this device is not known").with_fix("give --kv-memory SIZE")
            );
        };
        match rest_for_cache(share, free, weights) {
            Some(rest) => Ok(Some(CacheMemory::Fixed(rest))),
            None => Err(Failure::new(format!(
                "{share} of the memory that is free is {}, and the weights alone have {}",
                binary_bytes((free as f64 * share) as u64),
                binary_bytes(weights)
            ))
            .with_fix("give a larger --mem-fraction-static, or --kv-memory SIZE")),
        }
    }
}

/// Memory for the cache, and how it is used.
enum CacheMemory {
    /// The cache takes all of it.
    Fixed(usize),
    /// The cache takes as much of it as the requests that may run have a use for.
    UpTo(usize),
}

/// What is left for the cache of a share of `free` bytes.
fn rest_for_cache(share: f64, free: u64, weights: u64) -> Option<usize> {
    let rest = ((free as f64 * share) as u64).checked_sub(weights).filter(|&rest| rest > 0)?;
    Some(usize::try_from(rest).unwrap_or(usize::MAX))
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
    fn the_cache_gets_what_the_weights_leave() {
        assert_eq!(rest_for_cache(0.5, 100, 20), Some(30));
        assert_eq!(rest_for_cache(0.5, 100, 50), None);
        assert_eq!(rest_for_cache(0.5, 100, 60), None);
    }

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
