//! From arguments to an engine that is ready to run.

use std::sync::Arc;

use clap::Args;
use oscar_engine::{Budget, Engine, EngineOptions};
use oscar_kernels::cpu::CpuBackend;
use oscar_kernels::cpu::pool::Pool;

use crate::arguments::{ModelArguments, WeightArguments, positive};
use crate::failure::Failure;
use crate::kv::{KvArguments, Settled};
use crate::lab::Subject;

/// How a model runs.
#[derive(Clone, Debug, Args)]
pub(crate) struct EngineArguments {
    /// Tokens the sequence may have, prompt and answer together; the model's own limit, up to 32768, by default.
    #[arg(long, alias = "context-length", value_name = "TOKENS", value_parser = positive)]
    pub(crate) context: Option<usize>,

    /// Worker threads; as many as the machine has cores by default.
    #[arg(long, value_name = "N", env = "OSCAR_THREADS", value_parser = positive)]
    pub(crate) threads: Option<usize>,

    #[command(flatten)]
    pub(crate) weights: WeightArguments,

    #[command(flatten)]
    pub(crate) kv: KvArguments,
}

/// Worker threads to use when `asked` was given.
pub(crate) fn worker_threads(asked: Option<usize>) -> usize {
    let most = Pool::default_threads();
    match asked {
        // Workers wait for each other by spinning: more of them than cores only take turns.
        Some(threads) if threads > most => {
            tracing::warn!("--threads {threads}: using {most}, as many as this machine has");
            most
        }
        Some(threads) => threads,
        None => most,
    }
}

impl EngineArguments {
    /// Worker threads to use.
    pub(crate) fn threads(&self) -> usize {
        worker_threads(self.threads)
    }

    /// Finds and fetches the model, loads it, settles the codec of its cache, and starts an engine.
    pub(crate) fn load(&self, model: &ModelArguments) -> Result<Engine<CpuBackend>, Failure> {
        let subject = self.load_model(model)?;
        let settled = self.kv.settle(&subject)?;
        let options = EngineOptions { max_running: 1, ..self.options(&settled) };
        start(&subject, &options, &settled)
    }

    /// Finds, fetches and loads the model.
    pub(crate) fn load_model(&self, model: &ModelArguments) -> Result<Subject, Failure> {
        // A wrong kernel setting should not cost a download.
        let backend = CpuBackend::new(self.threads())?;
        let backend = if self.kv.cache.deterministic { backend.deterministic() } else { backend };
        let subject = Subject::load(model, backend, self.weights)?;
        let most = subject.model.config().max_context;
        if let Some(context) = self.context.filter(|&context| context > most) {
            return Err(Failure::new(format!(
                "{context} tokens are more than the {most} that {} was made for",
                subject.name
            ))
            .with_fix(format!("ask for {most} or less")));
        }
        Ok(subject)
    }

    /// Settings of an engine with this cache.
    pub(crate) fn options(&self, settled: &Settled) -> EngineOptions {
        EngineOptions {
            context: self.context,
            kv: settled.options.clone(),
            deterministic: self.kv.cache.deterministic,
            ..EngineOptions::default()
        }
    }
}

/// Starts an engine and says what its cache is.
pub(crate) fn start(
    subject: &Subject,
    options: &EngineOptions,
    settled: &Settled,
) -> Result<Engine<CpuBackend>, Failure> {
    let engine = Engine::new(Arc::clone(&subject.model), options)?;
    announce(engine.budget(), settled);
    Ok(engine)
}

/// One line about a cache, a warning if it is smaller than it would be without a limit, and in the log every byte of it.
pub(crate) fn announce(budget: &Budget, settled: &Settled) {
    let Budget { context, wanted_context, .. } = *budget;
    let separator = if settled.source.is_empty() { "" } else { ", " };
    eprintln!(
        "KV cache: {}{separator}{}, {:.2} bits per element, room for {} tokens, {context} in one sequence",
        budget.kv,
        settled.source,
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
