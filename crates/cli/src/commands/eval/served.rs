//! Caches of both kinds in one table: codecs of the lab, and caches that serve.

use clap::Args;
use oscar_codec::{CacheCodec, Windows};
use oscar_engine::EngineOptions;
use oscar_kernels::{Backend, Inspect};
use oscar_lab::eval::codecs::HELP;
use oscar_lab::eval::served::ServedCache;

use crate::failure::Failure;
use crate::kv::{CacheArguments, CacheSpec, type_names, warn_without_effect};
use crate::lab::codecs;
use crate::loading::announce;
use crate::named_model::NamedModel;
use crate::windows::WindowArguments;

/// The caches that are measured: codecs of the lab, and types that are served.
#[derive(Debug, Args)]
pub(super) struct MeasuredCacheArguments {
    #[arg(long, value_name = "LIST", value_delimiter = ',',
          help = format!("Codecs of the lab, separated by commas: {HELP}"))]
    kv: Vec<String>,

    /// Caches that serve, separated by commas: auto, bf16, fp8, int4, int2, int1.5; int2 also with its encoder
    /// (int2:scalar). Each answers through an engine, with the options under "KV cache", and is named `served TYPE` in the
    /// table.
    #[arg(long, value_name = "LIST", value_delimiter = ',', help_heading = "KV cache")]
    kv_cache_dtype: Vec<CacheSpec>,

    #[command(flatten)]
    cache: CacheArguments,

    #[command(flatten)]
    windows: WindowArguments,
}

/// Caches to be compared on one model.
pub(super) struct MeasuredCaches<B: Backend> {
    /// Codecs of the lab, first in every table.
    pub(super) codecs: Vec<Box<dyn CacheCodec>>,
    /// The tokens at both ends of a sequence that codecs leave exact.
    pub(super) windows: Windows,
    /// Caches as they are served, each with an engine.
    pub(super) served: Vec<ServedCache<B>>,
    head_dim: usize,
}

impl MeasuredCacheArguments {
    /// Whether a row should get the same bits in batches of every size.
    pub(super) fn deterministic(&self) -> bool {
        self.cache.deterministic
    }

    /// The caches, with room for sequences of `context` tokens. Without either list the `default` codecs are measured.
    pub(super) fn caches<B: Inspect>(
        &self,
        named: &NamedModel<B>,
        default: &[&str],
        context: usize,
    ) -> Result<MeasuredCaches<B>, Failure> {
        let mut specs = self.kv.clone();
        if specs.is_empty() && self.kv_cache_dtype.is_empty() {
            specs = default.iter().map(|&spec| spec.to_owned()).collect();
        }
        let ignored = self.cache.given_for_an_engine();
        if self.kv_cache_dtype.is_empty() && !ignored.is_empty() {
            tracing::warn!("{}: no effect without --kv-cache-dtype", ignored.join(", "));
        }
        let codecs = match specs.is_empty() {
            true => Vec::new(),
            false => codecs(&self.cache.rotations, named, &specs)?,
        };
        let mut served = Vec::new();
        let mut idle: Option<Vec<&'static str>> = None;
        for &spec in &self.kv_cache_dtype {
            let arguments = self.cache.of_spec(spec);
            let chosen = arguments.settle(named, Some(spec.kind), self.windows.whole_pages()?)?;
            let options = EngineOptions {
                context: Some(context),
                kv: chosen.options.clone(),
                deterministic: self.cache.deterministic,
                ..EngineOptions::default()
            };
            let name = format!("served {}", arguments.label(chosen.kind));
            let cache = ServedCache::new(named.model.clone(), &options, name)?;
            announce(cache.engine().budget(), &chosen);
            served.push(cache);
            let mut here = self.cache.without_effect(chosen.kind);
            here.retain(|name| idle.as_ref().is_none_or(|idle| idle.contains(name)));
            idle = Some(here);
        }
        warn_without_effect(idle.unwrap_or_default(), &type_names(&self.kv_cache_dtype));
        let head_dim = named.model.config().head_dim;
        Ok(MeasuredCaches { codecs, windows: self.windows.windows(), served, head_dim })
    }
}

impl<B: Backend> MeasuredCaches<B> {
    /// The number of caches, codecs of the lab and served ones together.
    pub(super) fn len(&self) -> usize {
        self.codecs.len() + self.served.len()
    }

    /// The name of a cache in tables.
    pub(super) fn name(&self, index: usize) -> &str {
        match self.codecs.get(index) {
            Some(codec) => codec.name(),
            None => self.served[index - self.codecs.len()].name(),
        }
    }

    /// Bits per element of history.
    pub(super) fn history_bits(&self, index: usize) -> f64 {
        match self.codecs.get(index) {
            Some(codec) => codec.bits_per_element(self.head_dim),
            None => self.served[index - self.codecs.len()].engine().budget().history_bits(),
        }
    }

    /// Bits per element of a sequence, windows included: by tokens in the lab, by pages where it is served.
    pub(super) fn bits_at(&self, index: usize, tokens: usize) -> f64 {
        match self.codecs.get(index) {
            Some(codec) => self.windows.lab_bits_per_element(&**codec, self.head_dim, tokens),
            None => self.served[index - self.codecs.len()].engine().budget().bits_at(tokens),
        }
    }
}
