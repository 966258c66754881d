//! The page pools of a cache on the card, and the kernels that write, seal and read them.
//!
//! Pools are laid out as on the CPU: bf16 pages `[slot][layer][head]`, scratch pages `[slot][head]`, sealed pages
//! `[slot][layer][head]`; inside a page bytes have the order of [`PageOrder`](super::PageOrder).

use std::sync::{Arc, Mutex};

use cudarc::driver::CudaSlice;
use oscar_codec::{HeadIndex, KvGeometry, PAGE_TOKENS, PageCodec, PageLayout, Side};

use super::attention::{DecodeAttention, PoolView, ScratchView, ValueTransform};
use super::device::Device;
use super::error::CudaError;
use super::host::HostPages;
use super::prefill::{PrefillAttention, PrefillPools};
use super::seal::PageSealer;
use super::step::SpareTables;
use super::tuning::DecodeShape;
use super::write::RowWriter;
use crate::backend::{CacheSpec, HostSlots};

/// Page pools on the card.
pub struct CudaCache {
    pub(super) spec: CacheSpec,
    pub(super) exact: CudaSlice<u8>,
    pub(super) scratch: Option<CudaSlice<u8>>,
    pub(super) sealed: Option<CudaSlice<u8>>,
    pub(super) writer: RowWriter,
    pub(super) sealer: Option<Mutex<PageSealer>>,
    pub(super) decode: DecodeAttention,
    pub(super) prefill: PrefillAttention,
    /// bf16 and sealed pages in the host's memory, if there is room for any.
    pub(super) host: Option<[HostPages; 2]>,
    undo: Option<Undo>,
    /// What keys are stored less of, in the basis of the pages: `[layer][KV head][channel]`.
    pub(super) mean_keys: Option<CudaSlice<f32>>,
    /// Tables of decode steps that are over.
    pub(super) spare_tables: SpareTables,
}

/// What takes values back to the model's basis: `[layer][KV head]`.
struct Undo {
    matrices: CudaSlice<f32>,
    means: CudaSlice<f32>,
}

impl CudaCache {
    pub(super) fn new(device: &Arc<Device>, spec: &CacheSpec) -> Result<CudaCache, CudaError> {
        let KvGeometry { layers, kv_heads, head_dim } = spec.geometry;
        if kv_heads == 0 || !spec.query_heads.is_multiple_of(kv_heads) {
            let heads = spec.query_heads;
            return Err(CudaError::Unsupported(format!("{heads} query heads over {kv_heads} KV heads")));
        }
        let group = spec.query_heads / kv_heads;
        let codec = spec.sealed.as_ref().map(|sealed| &*sealed.codec);
        let layout = match codec {
            Some(codec) => one_layout(codec)?,
            None => PageLayout::bf16(head_dim),
        };
        let shape = DecodeShape { head_dim, kv_heads, group, sealed: layout };
        let head = PageLayout::bf16(head_dim).page_bytes() * kv_heads;
        let pool = |bytes: Option<usize>, what| {
            bytes
                .ok_or(CudaError::OutOfMemory { what, bytes: usize::MAX, free: 0 })
                .and_then(|bytes| device.allocate(bytes, what))
        };
        let product = |parts: &[usize]| parts.iter().try_fold(1_usize, |a, &b| a.checked_mul(b));
        Ok(CudaCache {
            exact: pool(product(&[spec.slots, layers, head]), "bf16 pages of the KV cache")?,
            scratch: match spec.scratch_slots {
                0 => None,
                slots => Some(pool(product(&[slots, head]), "prefill scratch of the KV cache")?),
            },
            sealed: match &spec.sealed {
                Some(sealed) => Some(pool(
                    product(&[sealed.slots, sealed.codec.page_bytes()]),
                    "sealed pages of the KV cache",
                )?),
                None => None,
            },
            writer: RowWriter::new(device, spec.geometry, group, codec)?,
            sealer: codec.map(|codec| PageSealer::new(device, codec)).transpose()?.map(Mutex::new),
            decode: DecodeAttention::new(device, shape)?,
            prefill: PrefillAttention::new(device, shape)?,
            host: match spec.host {
                HostSlots { exact: 0, sealed: 0 } => None,
                HostSlots { exact, sealed } => {
                    let sealed_bytes = codec.map_or(0, PageCodec::page_bytes);
                    Some([
                        HostPages::new(device, exact, layers * head)?,
                        HostPages::new(device, sealed, sealed_bytes)?,
                    ])
                }
            },
            undo: codec.map(|codec| Undo::new(device, codec)).transpose()?.flatten(),
            mean_keys: codec.map(|codec| mean_keys(device, codec)).transpose()?.flatten(),
            spare_tables: SpareTables::default(),
            spec: spec.clone(),
        })
    }

    /// Sizes and formats.
    pub fn spec(&self) -> &CacheSpec {
        &self.spec
    }

    /// bf16 pages of a layer.
    pub(super) fn exact_view(&self, layer: usize) -> PoolView<'_> {
        let KvGeometry { layers, kv_heads, head_dim } = self.spec.geometry;
        let head = PageLayout::bf16(head_dim).page_bytes() * kv_heads;
        let scratch = self.scratch.as_ref();
        let scratch = scratch.map(|memory| ScratchView { memory, first: self.spec.slots, stride: head });
        PoolView { memory: &self.exact, offset: layer * head, stride: layers * head, scratch }
    }

    /// Sealed pages of a layer.
    pub(super) fn sealed_view(&self, layer: usize) -> Option<PoolView<'_>> {
        let (sealed, memory) = (self.spec.sealed.as_ref()?, self.sealed.as_ref()?);
        let (offset, stride) = (sealed.codec.layer_offset(layer), sealed.codec.page_bytes());
        Some(PoolView { memory, offset, stride, scratch: None })
    }

    /// All pools, as the attention of many rows reads a layer of them.
    pub(super) fn prefill_pools(&self, layer: usize) -> PrefillPools<'_> {
        PrefillPools {
            exact: self.exact_view(layer),
            sealed: self.sealed_view(layer),
            sink: self.spec.sealed.as_ref().map_or(0, |sealed| sealed.windows.sink * PAGE_TOKENS),
        }
    }

    /// What takes the outputs of a layer back to the model's basis.
    pub(super) fn undo(&self, layer: usize) -> Option<ValueTransform<'_>> {
        let undo = self.undo.as_ref()?;
        Some(ValueTransform { matrices: &undo.matrices, means: Some(&undo.means), layer })
    }
}

/// The format of all layers that keep history: a kernel reads one.
fn one_layout(codec: &PageCodec) -> Result<PageLayout, CudaError> {
    let mut layers = (0..codec.geometry().layers).filter(|&layer| codec.has_history(layer));
    let Some(first) = layers.next() else { return Ok(codec.layout(0)) };
    match layers.find(|&layer| codec.layout(layer) != codec.layout(first)) {
        Some(layer) => Err(CudaError::Unsupported(format!(
            "layer {layer} is kept in another format than layer {first}: the CUDA kernels read one format"
        ))),
        None => Ok(codec.layout(first)),
    }
}

/// The mean keys of all heads in the basis of the pages, if any head has one.
fn mean_keys(device: &Arc<Device>, codec: &PageCodec) -> Result<Option<CudaSlice<f32>>, CudaError> {
    let KvGeometry { layers, kv_heads, head_dim } = codec.geometry();
    let (mut means, mut any) = (Vec::new(), false);
    for (layer, head) in (0..layers).flat_map(|layer| (0..kv_heads).map(move |head| (layer, head))) {
        let transform = codec
            .transform(HeadIndex { layer, head }, Side::Key)
            .map_err(|error| CudaError::Unsupported(error.to_string()))?;
        let mean = transform.stored_mean();
        any |= mean.is_some();
        means.extend(mean.unwrap_or_else(|| vec![0.0; head_dim]));
    }
    if any { Ok(Some(device.stream().clone_htod(&means)?)) } else { Ok(None) }
}

impl Undo {
    /// The inverses of the value transforms, or nothing if all of them are the identity.
    fn new(device: &Arc<Device>, codec: &PageCodec) -> Result<Option<Undo>, CudaError> {
        let KvGeometry { layers, kv_heads, head_dim } = codec.geometry();
        let (mut matrices, mut means, mut any) = (Vec::new(), Vec::new(), false);
        for (layer, head) in (0..layers).flat_map(|layer| (0..kv_heads).map(move |head| (layer, head))) {
            let transform = codec
                .transform(HeadIndex { layer, head }, Side::Value)
                .map_err(|error| CudaError::Unsupported(error.to_string()))?;
            any |= !transform.is_identity();
            // The inverse is what queries of keys would be multiplied with, transposed.
            let transposed = transform.query_matrix();
            matrices.extend((0..head_dim * head_dim).map(|at| {
                let (row, column) = (at / head_dim, at % head_dim);
                transposed[column * head_dim + row]
            }));
            means.extend(transform.mean().map_or_else(|| vec![0.0; head_dim], <[f32]>::to_vec));
        }
        let stream = device.stream();
        if !any {
            return Ok(None);
        }
        Ok(Some(Undo { matrices: stream.clone_htod(&matrices)?, means: stream.clone_htod(&means)? }))
    }
}
