//! Attention that replaces the cache's own, so that a measurement can answer requests through the whole engine.

use oscar_kernels::Backend;
use oscar_kernels::backend::SequenceRows;
use oscar_model::LayerAttention;

/// Attention of one sequence at a time in place of [`Backend::attend`]; see [`Engine::with_attention`](crate::Engine).
///
/// Keys and values are written to the bf16 pages of the engine's cache, as always. What queries read instead of them is
/// up to the implementation.
pub trait CustomAttention<B: Backend>: Send {
    /// Returns what the cache is called in banners and metrics.
    fn name(&self) -> String;

    /// Returns the attention of the next step, whose rows these are. Rows at positions below `exact_until` belong to a
    /// prompt and must be computed exactly.
    fn for_step<'a>(
        &'a mut self,
        cache: &'a mut B::Cache,
        rows: &SequenceRows<'_>,
        exact_until: usize,
    ) -> Box<dyn LayerAttention<B> + 'a>;
}
