//! The page pools of a cache on the card, and the kernels that write, seal and read them.
//!
//! Pools are laid out as on the CPU: bf16 pages `[slot][layer][head]`, scratch pages `[slot][head]`, sealed pages
//! `[slot][layer][head]`, those of a second codec in a pool of their own; inside a page bytes have the order of
//! [`PageOrder`](super::PageOrder).

use std::ops::Range;
use std::panic::resume_unwind;
use std::sync::{Arc, Mutex};

use cudarc::driver::CudaSlice;
use oscar_codec::{HeadIndex, KvGeometry, PAGE_TOKENS, PageCodec, PageLayout, Side};

use super::attention::{DecodeAttention, PoolView, ScratchView, ValueTransform};
use super::device::Device;
use super::host::HostPages;
use super::page_means::PageMeanTable;
use super::prefill::{PrefillAttention, PrefillPools};
use super::readings::Readings;
use super::seal::PageSealer;
use super::step_tables::SpareTables;
use super::tuning::DecodeShape;
use super::write::RowWriter;
use crate::backend::{CacheSpec, HostSlots};
use crate::error::CudaError;

/// Page pools on the card.
pub struct CudaCache {
    pub(super) spec: CacheSpec,
    pub(super) exact: CudaSlice<u8>,
    pub(super) scratch: Option<CudaSlice<u8>>,
    /// Sealed pages, by tier: [`OWN`](super::readings::OWN), then [`HIGH`](super::readings::HIGH).
    pub(super) sealed: Vec<SealedPool>,
    pub(super) writer: RowWriter,
    pub(super) readings: Readings,
    /// The kernels of each format that history has.
    readers: Vec<Reader>,
    /// bf16 and sealed pages in the host's memory, if there is room for any.
    pub(super) host: Option<[HostPages; 2]>,
    undo: Option<Undo>,
    /// What keys are stored less of, in the basis of the pages: `[layer][KV head][channel]`.
    pub(super) mean_keys: Option<CudaSlice<f32>>,
    /// What the keys of sealed pages are less of on top, whichever codec they are of.
    pub(super) page_means: Option<PageMeanTable>,
    /// Tables of decode steps that are over.
    pub(super) spare_tables: SpareTables,
}

/// Sealed pages of one codec.
pub(super) struct SealedPool {
    codec: Arc<PageCodec>,
    pub(super) sealer: Mutex<PageSealer>,
    pub(super) memory: CudaSlice<u8>,
    /// The number of the first slot, that of a dummy.
    pub(super) first: usize,
}

/// The kernels that read one format of sealed pages.
pub(super) struct Reader {
    pub(super) decode: DecodeAttention,
    pub(super) prefill: PrefillAttention,
}

/// What takes values back to the model's basis: `[layer][KV head]`.
struct Undo {
    /// Says of each layer whether its values are in another basis at all.
    needed: Vec<bool>,
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
        // The codecs of sealed pages, with the numbers of their slots.
        let mut codecs: Vec<(&Arc<PageCodec>, Range<usize>)> = Vec::new();
        if let Some(sealed) = &spec.sealed {
            codecs.push((&sealed.codec, 0..sealed.slots));
            codecs.extend(sealed.high.as_ref().map(|high| (&high.codec, sealed.slots..sealed.all_slots())));
        }
        if codecs.iter().any(|(codec, _)| codec.geometry() != spec.geometry) {
            return Err(CudaError::Unsupported(
                "a codec for layers, heads or channels of another cache".into(),
            ));
        }
        let readings =
            Readings::new(spec.geometry, &codecs.iter().map(|(codec, _)| &***codec).collect::<Vec<_>>());
        let reader = |&sealed: &PageLayout| {
            let shape = DecodeShape { head_dim, kv_heads, group, sealed };
            Ok(Reader {
                decode: DecodeAttention::new(device, shape)?,
                prefill: PrefillAttention::new(device, shape)?,
            })
        };
        // Compiling takes seconds for each format, and layers may have six.
        let readers = std::thread::scope(|scope| {
            let compiled: Vec<_> =
                readings.formats.iter().map(|format| scope.spawn(move || reader(format))).collect();
            let results =
                compiled.into_iter().map(|it| it.join().unwrap_or_else(|panic| resume_unwind(panic)));
            results.collect::<Result<_, CudaError>>()
        })?;
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
            sealed: codecs
                .iter()
                .map(|(codec, slots)| {
                    let bytes = product(&[slots.len(), codec.page_bytes()]);
                    Ok(SealedPool {
                        memory: pool(bytes, "sealed pages of the KV cache")?,
                        sealer: Mutex::new(PageSealer::new(device, codec)?),
                        codec: Arc::clone(codec),
                        first: slots.start,
                    })
                })
                .collect::<Result<_, CudaError>>()?,
            writer: RowWriter::new(device, spec.geometry, group, codec)?,
            readers,
            readings,
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
            page_means: match &spec.sealed {
                Some(sealed) => PageMeanTable::new(device, &sealed.codec, sealed.sequence_pages)?,
                None => None,
            },
            spare_tables: SpareTables::default(),
            spec: spec.clone(),
        })
    }

    /// The sizes and page formats that the cache was made with.
    pub fn spec(&self) -> &CacheSpec {
        &self.spec
    }

    /// bf16 pages of a layer.
    pub(super) fn exact_view(&self, layer: usize) -> PoolView<'_> {
        let KvGeometry { layers, kv_heads, head_dim } = self.spec.geometry;
        let head = PageLayout::bf16(head_dim).page_bytes() * kv_heads;
        let scratch = self.scratch.as_ref();
        let scratch = scratch.map(|memory| ScratchView { memory, first: self.spec.slots, stride: head });
        PoolView {
            memory: &self.exact,
            first: 0,
            offset: layer * head,
            stride: layers * head,
            scratch,
            means: None,
        }
    }

    /// The kernels of a reading.
    pub(super) fn reader(&self, reading: usize) -> &Reader {
        &self.readers[self.readings.all[reading].format]
    }

    /// Kernels for bf16 pages alone, which those of every format read.
    pub(super) fn exact_reader(&self) -> &Reader {
        &self.readers[0]
    }

    /// The pools that a reading of a layer reads.
    pub(super) fn pools(&self, reading: usize, layer: usize) -> PrefillPools<'_> {
        let sealed = self.sealed.get(self.readings.all[reading].tier).map(|pool| PoolView {
            memory: &pool.memory,
            first: pool.first,
            offset: pool.codec.layer_offset(layer),
            stride: pool.codec.page_bytes(),
            scratch: None,
            means: self.page_means.as_ref().and_then(|means| means.of_layer(layer)),
        });
        PrefillPools {
            exact: self.exact_view(layer),
            sealed,
            sink: self.spec.sealed.as_ref().map_or(0, |sealed| sealed.windows.sink * PAGE_TOKENS),
        }
    }

    /// What takes the outputs of a layer back to the model's basis.
    pub(super) fn undo(&self, layer: usize) -> Option<ValueTransform<'_>> {
        let undo = self.undo.as_ref().filter(|undo| undo.needed[layer])?;
        Some(ValueTransform { matrices: &undo.matrices, means: Some(&undo.means), layer })
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
        let (mut matrices, mut means, mut needed) = (Vec::new(), Vec::new(), vec![false; layers]);
        for (layer, head) in (0..layers).flat_map(|layer| (0..kv_heads).map(move |head| (layer, head))) {
            let transform = codec
                .transform(HeadIndex { layer, head }, Side::Value)
                .map_err(|error| CudaError::Unsupported(error.to_string()))?;
            needed[layer] |= !transform.is_identity();
            // The inverse is what queries of keys would be multiplied with, transposed.
            let transposed = transform.query_matrix();
            matrices.extend((0..head_dim * head_dim).map(|at| {
                let (row, column) = (at / head_dim, at % head_dim);
                transposed[column * head_dim + row]
            }));
            means.extend(transform.mean().map_or_else(|| vec![0.0; head_dim], <[f32]>::to_vec));
        }
        let stream = device.stream();
        if !needed.contains(&true) {
            return Ok(None);
        }
        let (matrices, means) = (stream.clone_htod(&matrices)?, stream.clone_htod(&means)?);
        Ok(Some(Undo { needed, matrices, means }))
    }
}
