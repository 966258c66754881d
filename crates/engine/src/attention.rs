//! Attention that replaces the cache's own, so that a measurement can answer requests through the whole engine.

use oscar_kernels::backend::{AttentionSpec, SequenceRows};
use oscar_kernels::{Backend, KernelError};
use oscar_model::LayerAttention;

/// Attention of one sequence at a time in place of [`Backend::attend`]; see [`Engine::with_attention`](crate::Engine).
///
/// Keys and values are written to the bf16 pages of the engine's cache, as always. What queries read instead of them is
/// up to the implementation.
pub trait CustomAttention<B: Backend>: Send {
    /// What the cache is called in banners and metrics.
    fn name(&self) -> String;

    /// Announces the rows of the next step. Those at positions below `exact_until` belong to a prompt and must be computed
    /// exactly.
    fn begin_step(&mut self, rows: &SequenceRows<'_>, exact_until: usize) -> Result<(), KernelError>;

    /// Does the work of [`LayerAttention::attend`] over the engine's cache.
    fn attend(
        &mut self,
        backend: &B,
        step: &B::Step,
        spec: &AttentionSpec<B>,
        layer: usize,
        qkv: &mut B::Buffer,
        cache: &mut B::Cache,
        out: &mut B::Buffer,
    ) -> Result<(), KernelError>;
}

/// A [`CustomAttention`] with the cache that it reads.
pub(crate) struct OverCache<'a, B: Backend> {
    pub(crate) attention: &'a mut dyn CustomAttention<B>,
    pub(crate) cache: &'a mut B::Cache,
}

impl<B: Backend> LayerAttention<B> for OverCache<'_, B> {
    fn attend(
        &mut self,
        backend: &B,
        step: &B::Step,
        spec: &AttentionSpec<B>,
        layer: usize,
        qkv: &mut B::Buffer,
        out: &mut B::Buffer,
    ) -> Result<(), KernelError> {
        self.attention.attend(backend, step, spec, layer, qkv, self.cache, out)
    }
}
