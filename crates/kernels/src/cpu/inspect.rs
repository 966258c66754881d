//! The CPU's state on the host, for calibration and evaluation.

use std::ops::Range;

use super::attend::{History, Tiers};
use super::backend::{CpuBackend, sinks};
use super::{Cache, Matrix, Step, Weight};
use crate::backend::{AttentionSpec, KernelError, expect};
use crate::inspect::{Inspect, KvRows, StandIn};

impl Inspect for CpuBackend {
    fn write(&self, rows: &[f32], buffer: &mut Matrix) -> Result<(), KernelError> {
        let count = rows.len() / buffer.cols().max(1);
        expect("values of whole rows", count * buffer.cols(), rows.len())?;
        buffer.first_rows_mut("rows to be replaced", count)?.copy_from_slice(rows);
        Ok(())
    }

    fn dequantise(&self, weight: &Weight) -> Result<Vec<f32>, KernelError> {
        let mut rows = vec![0.0; weight.rows() * weight.cols()];
        weight.dequantise_rows(0..weight.rows(), &mut rows);
        Ok(rows)
    }

    fn read_kv(
        &self,
        cache: &Cache,
        rows: KvRows<'_>,
        positions: Range<usize>,
    ) -> Result<(Vec<f32>, Vec<f32>), KernelError> {
        let d = cache.spec().geometry.head_dim;
        let mut keys = vec![0.0; positions.len() * d];
        let mut values = keys.clone();
        let slots = keys.chunks_exact_mut(d).zip(values.chunks_exact_mut(d));
        for (position, (key, value)) in positions.zip(slots) {
            cache.read_token(rows, position, key, value)?;
        }
        Ok((keys, values))
    }

    fn write_kv(
        &self,
        cache: &mut Cache,
        rows: KvRows<'_>,
        first: usize,
        keys: &[f32],
        values: &[f32],
    ) -> Result<(), KernelError> {
        let d = cache.spec().geometry.head_dim;
        expect("values beside the keys", keys.len(), values.len())?;
        expect("numbers of whole keys", keys.len() / d * d, keys.len())?;
        for (index, (key, value)) in keys.chunks_exact(d).zip(values.chunks_exact(d)).enumerate() {
            cache.write_token(rows, first + index, key, value)?;
        }
        Ok(())
    }

    fn attend_with_stand_in(
        &self,
        step: &Step,
        spec: &AttentionSpec<CpuBackend>,
        layer: usize,
        qkv: &Matrix,
        exact: &Cache,
        StandIn { cache, ends }: StandIn<'_, CpuBackend>,
        out: &mut Matrix,
    ) -> Result<(), KernelError> {
        expect("page slots of the stand-in", exact.spec().slots, cache.spec().slots)?;
        expect("KV heads of the stand-in", spec.kv_heads, cache.spec().geometry.kv_heads)?;
        expect("head dimension of the stand-in", spec.head_dim, cache.spec().geometry.head_dim)?;
        let history = History { cache, layer, ends };
        let tiers = Tiers { cache: exact, layer, sinks: sinks(spec)?, history: Some(history) };
        self.attend_tiers(step, spec, qkv, &tiers, out)
    }
}
