//! What comes after attention: outputs go back to the basis of values, less the share of learned sinks.

use std::sync::Arc;

use cudarc::driver::{CudaFunction, CudaSlice, DevicePtr, DevicePtrMut, DeviceRepr, LaunchConfig};

use super::attention::ValueTransform;
use super::compile::{Source, texts};
use super::device::{Device, launch};
use super::tuning::DecodeShape;
use crate::error::CudaError;

/// Rows of a block, as the source says.
const VECTORS: usize = 16;

/// The source of the kernel.
pub(super) fn source(head_dim: usize) -> Source {
    let texts = texts!["undo.cu"];
    let defines = vec![("HEAD_DIM", head_dim)];
    Source { name: format!("outputs of attention, {head_dim} channels"), texts, defines, exact: false }
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Arguments {
    rows: u64,
    matrices: u64,
    means: u64,
    totals: u64,
    sinks: u64,
    mean_keys: u64,
    queries: u64,
    query_stride: i64,
    row_count: i32,
    group: i32,
    scale: f32,
}
// SAFETY: plain numbers in the order of the kernel's `Arguments`.
unsafe impl DeviceRepr for Arguments {}

/// The learned sinks of a layer, and what their share of a row's weights depends on.
#[derive(Clone, Copy)]
pub(super) struct LayerSinks<'a> {
    /// A logit for each query head.
    pub(super) logits: &'a CudaSlice<f32>,
    /// The logarithm (base 2) of the sum of each row's weights, as attention left them: `[row][query head]`.
    pub(super) totals: &'a CudaSlice<f32>,
    /// What keys are stored less of, in the basis of the pages: `[layer][KV head][channel]`.
    pub(super) mean_keys: Option<&'a CudaSlice<f32>>,
    pub(super) layer: usize,
    /// Queries in the basis of the pages, `query_stride` numbers from row to row.
    pub(super) queries: &'a CudaSlice<f32>,
    pub(super) query_stride: usize,
    /// The factor that logits are multiplied with.
    pub(super) scale: f32,
}

/// The kernel for one shape on one card.
pub(super) struct AttentionOutputs {
    device: Arc<Device>,
    shape: DecodeShape,
    function: CudaFunction,
}

impl AttentionOutputs {
    /// Compiles (or finds) and loads the kernel.
    pub(super) fn new(device: &Arc<Device>, shape: DecodeShape) -> Result<AttentionOutputs, CudaError> {
        let function = device.load(&source(shape.head_dim), "undo")?;
        Ok(AttentionOutputs { device: device.clone(), shape, function })
    }

    /// Changes the first `rows` rows of `out`, `[row][query head][channel]`.
    pub(super) fn launch(
        &self,
        rows: usize,
        transform: Option<ValueTransform<'_>>,
        sinks: Option<LayerSinks<'_>>,
        out: &mut CudaSlice<f32>,
    ) -> Result<(), CudaError> {
        if rows == 0 || (transform.is_none() && sinks.is_none()) {
            return Ok(());
        }
        let DecodeShape { head_dim, kv_heads, group, .. } = self.shape;
        let (stream, q_heads) = (self.device.stream(), kv_heads * group);
        let enough = |what, expected: usize, got: usize| {
            if got >= expected { Ok(()) } else { Err(CudaError::Shape { what, expected, got }) }
        };
        enough("outputs", rows * q_heads * head_dim, out.len())?;
        let (matrices, means) = match transform {
            Some(transform) => transform.addresses(&self.device, &self.shape)?,
            None => (0, 0),
        };
        let mut arguments = Arguments {
            rows: out.device_ptr_mut(stream).0,
            matrices,
            means,
            totals: 0,
            sinks: 0,
            mean_keys: 0,
            queries: 0,
            query_stride: 0,
            row_count: rows as i32,
            group: group as i32,
            scale: 0.0,
        };
        if let Some(sinks) = sinks {
            enough("learned sinks", q_heads, sinks.logits.len())?;
            enough("sums of weights", rows * q_heads, sinks.totals.len())?;
            enough("queries", (rows - 1) * sinks.query_stride + q_heads * head_dim, sinks.queries.len())?;
            if let Some(means) = sinks.mean_keys {
                let layer = kv_heads * head_dim;
                enough("means of keys", (sinks.layer + 1) * layer, means.len())?;
                arguments.mean_keys = means.device_ptr(stream).0 + (sinks.layer * layer * 4) as u64;
            }
            arguments.totals = sinks.totals.device_ptr(stream).0;
            arguments.sinks = sinks.logits.device_ptr(stream).0;
            arguments.queries = sinks.queries.device_ptr(stream).0;
            arguments.query_stride = sinks.query_stride as i64;
            arguments.scale = sinks.scale;
        }
        let config = LaunchConfig {
            grid_dim: ((rows * group).div_ceil(VECTORS) as u32, kv_heads as u32, 1),
            block_dim: (head_dim as u32, 1, 1),
            shared_mem_bytes: 0,
        };
        // SAFETY: all lengths were checked; one stream orders all uses.
        unsafe { launch(stream, &self.function, config, &arguments) }
    }
}
