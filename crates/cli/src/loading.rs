//! Loads a model and starts an engine by the arguments of a command.

use std::sync::Arc;

use clap::Args;
use oscar_engine::{Budget, Engine, EngineOptions};
use oscar_kernels::{Backend, Inspect};

use crate::arguments::{ModelArguments, WeightArguments, positive};
use crate::device::DeviceArguments;
use crate::failure::Failure;
use crate::kv::{ChosenCache, KvArguments};
use crate::named_model::NamedModel;

/// How a model runs.
#[derive(Clone, Debug, Args)]
pub(crate) struct EngineArguments {
    /// Tokens the sequence may have, prompt and answer together; the model's own limit, up to 32768, by default.
    #[arg(long, alias = "context-length", value_name = "TOKENS", value_parser = positive)]
    pub(crate) context: Option<usize>,

    #[command(flatten)]
    pub(crate) device: DeviceArguments,

    #[command(flatten)]
    pub(crate) weights: WeightArguments,

    #[command(flatten)]
    pub(crate) kv: KvArguments,
}

impl EngineArguments {
    /// Finds and fetches the model, loads it, settles the codec of its cache, and starts an engine.
    pub(crate) fn load<B: Inspect>(&self, model: &ModelArguments, backend: B) -> Result<Engine<B>, Failure> {
        let named = self.load_model(model, backend)?;
        let chosen = self.kv.settle(&named)?;
        let options = EngineOptions { max_running: 1, ..self.options(&chosen) };
        start(&named, &options, &chosen)
    }

    /// Finds, fetches and loads the model.
    pub(crate) fn load_model<B: Backend>(
        &self,
        model: &ModelArguments,
        backend: B,
    ) -> Result<NamedModel<B>, Failure> {
        let named = NamedModel::load(model, backend, self.weights)?;
        let most = named.model.config().max_context;
        if let Some(context) = self.context.filter(|&context| context > most) {
            return Err(Failure::new(format!(
                "{context} tokens are more than the {most} that {} was made for",
                named.name()
            ))
            .with_fix(format!("ask for {most} or less")));
        }
        Ok(named)
    }

    /// Settings of an engine with this cache.
    pub(crate) fn options(&self, chosen: &ChosenCache) -> EngineOptions {
        EngineOptions {
            context: self.context,
            kv: chosen.options.clone(),
            deterministic: self.kv.cache.deterministic,
            prefill_chunk: self.device.device.prefill_chunk(),
            ..EngineOptions::default()
        }
    }
}

/// Starts an engine and prints what its cache is.
pub(crate) fn start<B: Backend>(
    named: &NamedModel<B>,
    options: &EngineOptions,
    chosen: &ChosenCache,
) -> Result<Engine<B>, Failure> {
    let engine = Engine::new(Arc::clone(&named.model), options)?;
    announce(engine.budget(), chosen);
    Ok(engine)
}

/// One line about a cache, a warning if it is smaller than it would be without a limit, and in the log every byte of it.
pub(crate) fn announce(budget: &Budget, chosen: &ChosenCache) {
    let Budget { context, wanted_context, .. } = *budget;
    let separator = if chosen.source.is_empty() { "" } else { ", " };
    eprintln!(
        "KV cache: {}{separator}{}, {:.2} bits per element, room for {} tokens, {context} in one sequence",
        budget.kv,
        chosen.source,
        budget.bits_per_element,
        budget.capacity_tokens()
    );
    if context < wanted_context {
        tracing::warn!(
            "context shortened from {wanted_context} to {context} tokens by --kv-memory; give more, or --context to \
             choose a length"
        );
    }
    for line in budget.to_string().lines() {
        tracing::info!("{line}");
    }
}
