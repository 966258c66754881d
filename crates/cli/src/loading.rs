//! From arguments to an engine that is ready to run.

use std::sync::Arc;

use clap::Args;
use oscar_engine::{Engine, EngineOptions};
use oscar_kernels::cpu::CpuBackend;
use oscar_kernels::cpu::pool::Pool;
use oscar_model::LoadedModel;

use crate::arguments::{ModelArguments, positive};
use crate::failure::Failure;

/// How a model runs.
#[derive(Clone, Debug, Args)]
pub(crate) struct EngineArguments {
    /// Tokens the sequence may have, prompt and answer together; the model's own limit, up to 32768, by default.
    #[arg(long, value_name = "TOKENS", value_parser = positive)]
    pub(crate) context: Option<usize>,

    /// Worker threads; as many as the machine has cores by default.
    #[arg(long, value_name = "N", env = "OSCAR_THREADS", value_parser = positive)]
    pub(crate) threads: Option<usize>,
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

    /// Finds and fetches the model, loads it, and makes room for a sequence.
    pub(crate) fn load(&self, model: &ModelArguments) -> Result<Engine<CpuBackend>, Failure> {
        // A wrong kernel setting should not cost a download.
        let backend = Arc::new(CpuBackend::new(self.threads())?);
        let path = model.resolve()?;
        tracing::info!("loading {}", path.path().display());
        let model = Arc::new(LoadedModel::load(&path, backend)?);
        let most = model.config().max_context;
        if let Some(context) = self.context.filter(|&context| context > most) {
            let path = path.path().display();
            return Err(Failure::new(format!(
                "{context} tokens are more than the {most} that {path} was made for"
            ))
            .with_fix(format!("ask for {most} or less")));
        }
        let options = EngineOptions { context: self.context, ..EngineOptions::default() };
        Ok(Engine::new(model, &options)?)
    }
}
