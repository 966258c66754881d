//! Chooses the cache of a model by the command line: [`CachePlan`], with calibration at once
//! where `int2` has no rotations.

use oscar_engine::KvOptions;
use oscar_kernels::Inspect;
use oscar_rotations::{
    CacheOptions, CachePlan, CacheType, EncoderOptions, Notice, RotationError, RotationFiles, RotationSource,
};

use super::CacheArguments;
use crate::failure::Failure;
use crate::lab::first_use::make_rotations;
use crate::named_model::NamedModel;
use crate::sglang_variables::SglangVariables;
use crate::windows::GivenWindows;

/// The cache that was chosen for a model.
#[derive(Clone, Debug)]
pub(crate) struct ChosenCache {
    /// Settings of the cache for the engine.
    pub(crate) options: KvOptions,
    /// The cache type that was chosen; never `auto`.
    pub(crate) kind: CacheType,
    /// The encoder and where its rotations come from, for people; empty if there is nothing to say.
    pub(crate) source: String,
}

impl CacheArguments {
    /// The cache of the type `asked` for, or of the best that is possible.
    pub(crate) fn settle<B: Inspect>(
        &self,
        named: &NamedModel<B>,
        asked: Option<CacheType>,
        windows: GivenWindows,
    ) -> Result<ChosenCache, Failure> {
        let variables = SglangVariables::from_environment()?;
        let mut options = self.options(windows.pages(&variables))?;
        let cache = CacheOptions {
            dtype: asked.unwrap_or_default(),
            encoder: EncoderOptions {
                encoder: self.kv_encoder.unwrap_or_default().into(),
                key_clip: self.k_clip.or(variables.key_clip),
                value_clip: self.v_clip.or(variables.value_clip),
                group: self.kv_cache_quant_group_size,
                bf16_layers: self.kv_bf16_layers.clone(),
            },
            rotations: match named.random {
                true => RotationSource { files: RotationFiles::Hadamard, force: false },
                false => self.rotations.source_or_variables(&variables),
            },
        };
        let settle = || CachePlan::settle(&named.model, &named.identity, &cache);
        let plan = match settle() {
            Err(RotationError::NoRotations { .. }) => {
                make_rotations(named)?;
                settle()?
            }
            plan => plan?,
        };
        for notice in &plan.notices {
            match notice {
                // Whoever did not ask need not be told at every start.
                Notice::NoRotations { .. } if asked.is_none() => tracing::info!("{notice}"),
                notice => tracing::warn!("{notice}"),
            }
        }
        options.codec = plan.codec;
        Ok(ChosenCache { options, kind: plan.kind, source: plan.source })
    }
}
