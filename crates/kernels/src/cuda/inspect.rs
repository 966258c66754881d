//! The card's state on the host, for calibration and evaluation.

use std::ops::Range;

use cudarc::driver::CudaSlice;
use oscar_codec::{ExactSlot, KvGeometry, PAGE_TOKENS, PageLayout, SealedSlot, Side};

use super::backend::{CudaBackend, CudaBuffer};
use super::cache::CudaCache;
use super::page_order::PageOrder;
use super::prefill::{PlannedRows, PrefillPools};
use super::step::{CudaStep, prefill_sequences};
use super::weights::CudaWeight;
use crate::backend::{AttentionSpec, KernelError, expect};
use crate::error::CudaError;
use crate::inspect::{Inspect, KvRows, StandIn};
use crate::sequence::StepSequence;

/// One page of a head on the host.
struct HostPage {
    order: PageOrder,
    /// The bytes of the pool that it was read from.
    range: Range<usize>,
    bytes: Vec<u8>,
}

impl CudaBackend {
    /// Reads the page of a head that holds a position.
    fn read_page(
        &self,
        cache: &CudaCache,
        rows: KvRows<'_>,
        position: usize,
    ) -> Result<HostPage, KernelError> {
        let KvGeometry { layers, kv_heads, head_dim } = cache.spec().geometry;
        let order = PageOrder::new(PageLayout::bf16(head_dim))?;
        let page = position / PAGE_TOKENS;
        let slot = rows.pages.get(page).copied().flatten();
        let Some(slot) = slot else { return Err(KernelError::PageMissing { page, tier: "the bf16 pool" }) };
        let slots = cache.spec().slots;
        if slot.index() >= slots || rows.layer >= layers || rows.head >= kv_heads {
            return Err(KernelError::PageOutOfRange { slot: ExactSlot::table_entry(Some(slot)), slots });
        }
        let bytes = order.page_bytes();
        let start = ((slot.index() * layers + rows.layer) * kv_heads + rows.head) * bytes;
        let range = start..start + bytes;
        let stream = self.device().stream();
        let bytes = stream.clone_dtoh(&cache.exact.slice(range.clone())).map_err(CudaError::Driver)?;
        stream.synchronize().map_err(CudaError::Driver)?;
        Ok(HostPage { order, range, bytes })
    }
}

impl Inspect for CudaBackend {
    fn write(&self, rows: &[f32], buffer: &mut CudaBuffer) -> Result<(), KernelError> {
        let count = rows.len() / buffer.cols().max(1);
        expect("values of whole rows", count * buffer.cols(), rows.len())?;
        buffer.check("rows to be replaced", count)?;
        let stream = self.device().stream();
        let values: &mut CudaSlice<f32> = &mut buffer.values;
        stream.memcpy_htod(rows, values).map_err(CudaError::Driver)?;
        Ok(())
    }

    fn dequantise(&self, weight: &CudaWeight) -> Result<Vec<f32>, KernelError> {
        self.loader().dequantise(weight)
    }

    fn read_kv(
        &self,
        cache: &CudaCache,
        rows: KvRows<'_>,
        positions: Range<usize>,
    ) -> Result<(Vec<f32>, Vec<f32>), KernelError> {
        let d = cache.spec().geometry.head_dim;
        let mut sides = [Vec::new(), Vec::new()];
        let mut position = positions.start;
        while position < positions.end {
            let page = self.read_page(cache, rows, position)?;
            let end = (position / PAGE_TOKENS + 1) * PAGE_TOKENS;
            for token in position..end.min(positions.end) {
                for (side, out) in [Side::Key, Side::Value].into_iter().zip(&mut sides) {
                    out.extend((0..d).map(|channel| {
                        let at = page.order.element_position(side, token % PAGE_TOKENS, channel).0;
                        half::bf16::from_le_bytes([page.bytes[at], page.bytes[at + 1]]).to_f32()
                    }));
                }
            }
            position = end;
        }
        let [keys, values] = sides;
        Ok((keys, values))
    }

    fn write_kv(
        &self,
        cache: &mut CudaCache,
        rows: KvRows<'_>,
        first: usize,
        keys: &[f32],
        values: &[f32],
    ) -> Result<(), KernelError> {
        let d = cache.spec().geometry.head_dim;
        expect("values beside the keys", keys.len(), values.len())?;
        expect("numbers of whole keys", keys.len() / d * d, keys.len())?;
        let (mut position, last) = (first, first + keys.len() / d);
        while position < last {
            let mut page = self.read_page(cache, rows, position)?;
            let end = ((position / PAGE_TOKENS + 1) * PAGE_TOKENS).min(last);
            for token in position..end {
                let row = (token - first) * d..(token - first + 1) * d;
                let (key, value) = (&keys[row.clone()], &values[row]);
                page.order.write_bf16(&mut page.bytes, token % PAGE_TOKENS, key, value);
            }
            let mut target = cache.exact.slice_mut(page.range.clone());
            self.device().stream().memcpy_htod(&page.bytes, &mut target).map_err(CudaError::Driver)?;
            position = end;
        }
        Ok(())
    }

    fn attend_with_stand_in(
        &self,
        step: &CudaStep,
        spec: &AttentionSpec<CudaBackend>,
        layer: usize,
        qkv: &CudaBuffer,
        exact: &CudaCache,
        StandIn { cache, ends }: StandIn<'_, CudaBackend>,
        out: &mut CudaBuffer,
    ) -> Result<(), KernelError> {
        expect("page slots of the stand-in", exact.spec().slots, cache.spec().slots)?;
        expect("KV heads of the stand-in", spec.kv_heads, cache.spec().geometry.kv_heads)?;
        expect("head dimension of the stand-in", spec.head_dim, cache.spec().geometry.head_dim)?;
        expect("query heads of the stand-in", spec.q_heads, cache.spec().query_heads)?;
        out.check("attention rows", step.rows)?;
        // A history of whole positions: the end of a row is at most its own.
        let end = |_: &StepSequence, position: usize| ends(position).min(position + 1);
        let mut sequences = prefill_sequences(&step.sequences, &end);
        // History lies in the slots of bf16 pages.
        let same_slot = |slot: &Option<ExactSlot>| SealedSlot::new(ExactSlot::table_entry(*slot));
        let history: Vec<Vec<_>> =
            sequences.iter().map(|sequence| sequence.exact.iter().map(same_slot).collect()).collect();
        for (sequence, history) in sequences.iter_mut().zip(&history) {
            sequence.sealed = history;
        }
        expect("columns of queries, keys and values", spec.qkv_cols(), qkv.cols())?;
        let kernel = &cache.exact_reader().prefill;
        let plan = &kernel.plan(&sequences, None)?;
        let (exact, sealed) = (exact.exact_view(layer), Some(cache.exact_view(layer)));
        let pools = PrefillPools { exact, sealed, sink: 0 };
        self.attend_rows(
            &[PlannedRows { kernel, plan, pools }],
            step.rows,
            None,
            spec,
            layer,
            qkv,
            cache,
            out,
        )
    }
}
