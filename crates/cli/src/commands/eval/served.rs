//! Caches of both kinds in one table: codecs of the lab, and caches that serve.

use clap::Args;
use oscar_codec::{CacheCodec, Windows};
use oscar_engine::{Budget, EngineOptions, KvOptions};
use oscar_kernels::Inspect;
use oscar_lab::eval::codecs::HELP;
use oscar_lab::eval::paged::PagedCache;
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
    /// (int2:scalar). They have the pages and kernels of a server and the options under "KV cache", and are named `served
    /// TYPE` in the table.
    #[arg(long, value_name = "LIST", value_delimiter = ',', help_heading = "KV cache")]
    kv_cache_dtype: Vec<CacheSpec>,

    #[command(flatten)]
    cache: CacheArguments,

    #[command(flatten)]
    windows: WindowArguments,
}

/// A cache as it is served.
pub(super) struct Served<C> {
    /// Its name in tables.
    pub(super) name: String,
    /// What it costs.
    budget: Budget,
    /// What is measured: an engine, or the pages of one text.
    pub(super) cache: C,
}

/// Caches to be compared on one model.
pub(super) struct MeasuredCaches<C> {
    /// Codecs of the lab, first in every table.
    pub(super) codecs: Vec<Box<dyn CacheCodec>>,
    /// The tokens at both ends of a sequence that codecs leave exact.
    pub(super) windows: Windows,
    /// Caches as they are served.
    pub(super) served: Vec<Served<C>>,
    head_dim: usize,
}

impl MeasuredCacheArguments {
    /// Whether a row should get the same bits in batches of every size.
    pub(super) fn deterministic(&self) -> bool {
        self.cache.deterministic
    }

    /// The tokens at both ends of a sequence that codecs leave exact.
    pub(super) fn windows(&self) -> Windows {
        self.windows.windows()
    }

    /// The caches, with room for sequences of `context` tokens, as engines that answer. Without either list the `default`
    /// codecs are measured.
    pub(super) fn engines<B: Inspect>(
        &self,
        named: &NamedModel<B>,
        default: &[&str],
        context: usize,
    ) -> Result<MeasuredCaches<ServedCache<B>>, Failure> {
        self.caches(named, default, context, |options, name| {
            let cache = ServedCache::new(named.model.clone(), options, name)?;
            let budget = cache.engine().budget().clone();
            Ok((cache, budget))
        })
    }

    /// The caches, with room for one text of `context` tokens. Without either list the `default` codecs are measured.
    pub(super) fn pages<B: Inspect>(
        &self,
        named: &NamedModel<B>,
        default: &[&str],
        context: usize,
    ) -> Result<MeasuredCaches<PagedCache<B>>, Failure> {
        let idle = self.cache.given_for_requests();
        if !self.kv_cache_dtype.is_empty() && !idle.is_empty() {
            tracing::warn!("{}: no effect on what is measured here", idle.join(", "));
        }
        self.caches(named, default, context, |options, _| {
            let kv = KvOptions { memory: None, ..options.kv.clone() };
            let cache = PagedCache::new(named.model.clone(), kv.codec.clone(), kv.windows, context)?;
            let options = EngineOptions { kv, ..options.clone() };
            Ok((cache, Budget::of(named.model.config(), &options)?))
        })
    }

    fn caches<B: Inspect, C>(
        &self,
        named: &NamedModel<B>,
        default: &[&str],
        context: usize,
        mut make: impl FnMut(&EngineOptions, &str) -> Result<(C, Budget), Failure>,
    ) -> Result<MeasuredCaches<C>, Failure> {
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
            let (cache, budget) = make(&options, &name)?;
            announce(&budget, &chosen);
            served.push(Served { name, budget, cache });
            let mut here = self.cache.without_effect(chosen.kind);
            here.retain(|name| idle.as_ref().is_none_or(|idle| idle.contains(name)));
            idle = Some(here);
        }
        warn_without_effect(idle.unwrap_or_default(), &type_names(&self.kv_cache_dtype));
        let head_dim = named.model.config().head_dim;
        Ok(MeasuredCaches { codecs, windows: self.windows.windows(), served, head_dim })
    }
}

impl<C> MeasuredCaches<C> {
    /// The number of caches, codecs of the lab and served ones together.
    pub(super) fn len(&self) -> usize {
        self.codecs.len() + self.served.len()
    }

    /// The name of a cache in tables.
    pub(super) fn name(&self, index: usize) -> &str {
        match self.codecs.get(index) {
            Some(codec) => codec.name(),
            None => &self.served[index - self.codecs.len()].name,
        }
    }

    /// Bits per element of history.
    pub(super) fn history_bits(&self, index: usize) -> f64 {
        match self.codecs.get(index) {
            Some(codec) => codec.bits_per_element(self.head_dim),
            None => self.served[index - self.codecs.len()].budget.history_bits(),
        }
    }

    /// Bits per element of a sequence, windows included: by tokens in the lab, by pages where it is served.
    pub(super) fn bits_at(&self, index: usize, tokens: usize) -> f64 {
        match self.codecs.get(index) {
            Some(codec) => self.windows.lab_bits_per_element(&**codec, self.head_dim, tokens),
            None => self.served[index - self.codecs.len()].budget.bits_at(tokens),
        }
    }
}
