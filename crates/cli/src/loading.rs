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

impl EngineArguments {
    /// Worker threads to use.
    pub(crate) fn threads(&self) -> usize {
        self.threads.unwrap_or_else(Pool::default_threads)
    }

    /// Finds and fetches the model, loads it, and makes room for a sequence.
    pub(crate) fn load(&self, model: &ModelArguments) -> Result<Engine<CpuBackend>, Failure> {
        // A wrong kernel setting should not cost a download.
        let backend = Arc::new(CpuBackend::new(self.threads())?);
        let path = model.resolve()?;
        tracing::info!("loading {}", path.path().display());
        let model = Arc::new(LoadedModel::load(&path, backend)?);
        let most = model.config().max_context;
        if self.context.is_some_and(|context| context > most) {
            return Err(Failure::new(format!(
                "--context {} is more than the {most} tokens {} was made for",
                self.context.unwrap_or_default(),
                path.path().display()
            ))
            .with_fix(format!("use --context {most} or less")));
        }
        let options = EngineOptions { context: self.context, ..EngineOptions::default() };
        Ok(Engine::new(model, &options)?)
    }
}
