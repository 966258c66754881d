//! A codec of the lab behind the engine, so that any harness can measure it over HTTP.
//!
//! It is slow and exact: every position is kept in bf16 and, as the codec gives it back, a second time. Prompts are
//! computed exactly up to their last token; that token and the answer read the history through the codec.

use oscar_codec::{CacheCodec, ExactSlot, Windows};
use oscar_engine::CustomAttention;
use oscar_kernels::backend::{CacheSpec, SequenceRows};
use oscar_kernels::{Inspect, KernelError};
use oscar_model::{LayerAttention, LoadedModel};

use super::history::{HistoryAttention, Reading};

/// [`CustomAttention`] that reads history through a codec, one sequence at a time.
pub struct CodecAttention<B: Inspect> {
    codec: Box<dyn CacheCodec>,
    windows: Windows,
    history: B::Cache,
    /// Per layer, how many positions the history holds.
    filled: Vec<usize>,
    /// Page table of the sequence that the history belongs to.
    pages: Vec<Option<ExactSlot>>,
    /// Tokens of that sequence after the step in progress.
    end: usize,
}

impl<B: Inspect> CodecAttention<B> {
    /// Attention over a cache of `slots` bf16 pages of a model.
    pub fn new(
        model: &LoadedModel<B>,
        codec: Box<dyn CacheCodec>,
        windows: Windows,
        slots: usize,
    ) -> Result<CodecAttention<B>, KernelError> {
        let config = model.config();
        let history =
            model.model().backend().cache(&CacheSpec::exact(config.kv_geometry(), config.q_heads, slots))?;
        let filled = vec![0; config.layers];
        Ok(CodecAttention { codec, windows, history, filled, pages: Vec::new(), end: 0 })
    }
}

impl<B: Inspect> CustomAttention<B> for CodecAttention<B> {
    fn name(&self) -> String {
        format!("{} of the lab over bf16 pages", self.codec.name())
    }

    fn for_step<'a>(
        &'a mut self,
        cache: &'a mut B::Cache,
        rows: &SequenceRows<'_>,
        exact_until: usize,
    ) -> Box<dyn LayerAttention<B> + 'a> {
        // A history that was made for other tokens is made anew from the exact pages, which always hold everything.
        if rows.start != self.end || !rows.pages.starts_with(&self.pages) {
            self.filled.fill(0);
        }
        self.pages = rows.pages.to_vec();
        self.end = rows.start + rows.len;
        Box::new(HistoryAttention {
            exact: cache,
            history: &mut self.history,
            pages: &self.pages,
            filled: &mut self.filled,
            reading: Reading { codec: &*self.codec, windows: self.windows, chunk: None },
            end: self.end,
            exact_until,
        })
    }
}
