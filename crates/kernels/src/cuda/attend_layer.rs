//! Attention of one layer on a card, from queries to outputs in the model's basis: every reading of the cache, learned sinks, and the
//! way back from the basis of the pages.

use std::sync::PoisonError;

use cudarc::driver::CudaSlice;

use super::attention::ValueTransform;
use super::backend::{CudaBackend, CudaBuffer};
use super::cache::CudaCache;
use super::outputs::LayerSinks;
use super::prefill::{PlannedRows, PrefillPools};
use super::step_tables::DecodeTables;
use crate::backend::{AttentionSpec, KernelError};

impl CudaBackend {
    /// The learned sinks of a layer.
    fn sinks<'a>(&self, spec: &'a AttentionSpec<Self>) -> Result<Option<&'a CudaSlice<f32>>, KernelError> {
        spec.sinks.as_ref().map(|sinks| sinks.vector("learned sinks", spec.q_heads)).transpose()
    }

    /// Attention of many rows, from queries to outputs in the model's basis. Each of the `rows` of the step is planned once.
    pub(super) fn attend_rows(
        &self,
        planned: &[PlannedRows<'_>],
        rows: usize,
        undo: Option<ValueTransform<'_>>,
        spec: &AttentionSpec<Self>,
        layer: usize,
        qkv: &CudaBuffer,
        cache: &CudaCache,
        out: &mut CudaBuffer,
    ) -> Result<(), KernelError> {
        let (queries, stride, out) = (&qkv.values, qkv.cols(), &mut out.values);
        let outputs = cache.exact_reader().prefill.outputs();
        let Some(logits) = self.sinks(spec)? else {
            for PlannedRows { kernel, plan, pools } in planned {
                kernel.attend(plan, pools, queries, stride, spec.scale, None, out)?;
            }
            return Ok(outputs.launch(rows, undo, None, out)?);
        };
        let mut totals = self.totals.lock().unwrap_or_else(PoisonError::into_inner);
        let totals = self.products.multiply().grown(&mut totals, rows * spec.q_heads)?;
        for PlannedRows { kernel, plan, pools } in planned {
            kernel.attend(plan, pools, queries, stride, spec.scale, Some(&mut *totals), out)?;
        }
        let sinks = layer_sinks(spec, layer, qkv, cache, logits, totals);
        Ok(outputs.launch(rows, undo, Some(sinks), out)?)
    }

    /// Attention of one row of each sequence, as [`Self::attend_rows`].
    pub(super) fn attend_decode(
        &self,
        tables: &mut DecodeTables,
        rows: usize,
        undo: Option<ValueTransform<'_>>,
        spec: &AttentionSpec<Self>,
        layer: usize,
        qkv: &CudaBuffer,
        cache: &CudaCache,
        out: &mut CudaBuffer,
    ) -> Result<(), KernelError> {
        let (queries, stride, out) = (&qkv.values, qkv.cols(), &mut out.values);
        let logits = self.sinks(spec)?;
        let mut totals = self.totals.lock().unwrap_or_else(PoisonError::into_inner);
        let mut totals = match logits {
            Some(_) => Some(self.products.multiply().grown(&mut totals, rows * spec.q_heads)?),
            None => None,
        };
        // Where sinks have a share, outputs are taken back after that.
        let at_once = undo.filter(|_| logits.is_none());
        for reading in cache.readings.of_layer(layer) {
            let Some(plan) = tables.plan(reading) else { continue };
            let PrefillPools { exact, sealed, .. } = cache.pools(reading, layer);
            let (kernel, totals) = (&cache.reader(reading).decode, totals.as_deref_mut());
            kernel.attend(plan, exact, sealed, queries, stride, spec.scale, at_once, totals, out)?;
        }
        let (Some(logits), Some(totals)) = (logits, totals) else { return Ok(()) };
        let sinks = layer_sinks(spec, layer, qkv, cache, logits, totals);
        Ok(cache.exact_reader().prefill.outputs().launch(rows, undo, Some(sinks), out)?)
    }
}

/// What the share of a layer's sinks is computed from.
fn layer_sinks<'a>(
    spec: &AttentionSpec<CudaBackend>,
    layer: usize,
    qkv: &'a CudaBuffer,
    cache: &'a CudaCache,
    logits: &'a CudaSlice<f32>,
    totals: &'a CudaSlice<f32>,
) -> LayerSinks<'a> {
    LayerSinks {
        logits,
        totals,
        mean_keys: cache.mean_keys.as_ref(),
        layer,
        queries: &qkv.values,
        query_stride: qkv.cols(),
        scale: spec.scale,
    }
}
