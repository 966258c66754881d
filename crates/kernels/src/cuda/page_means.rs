//! What the stored keys of sealed pages are less of, for all pages that a sequence may have.
//!
//! The mean key of a page depends on its number in its sequence alone, so all sequences share one table. It is computed when the
//! cache is made: nothing is allocated later, and recorded launches know where it lies.

use std::num::NonZero;
use std::panic::resume_unwind;
use std::sync::Arc;
use std::thread;

use cudarc::driver::{CudaSlice, DevicePtr};
use half::bf16;
use oscar_codec::{CodecError, HeadIndex, KvGeometry, PageCodec, PageLayout, Side};

use super::device::Device;
use crate::error::CudaError;

/// The mean keys of pages as they are stored, in bf16.
pub struct PageMeanTable {
    /// `[layer that has means][page][KV head][channel]`.
    memory: CudaSlice<u16>,
    /// Of each layer: its place among those that have means.
    places: Vec<Option<usize>>,
    /// Pages that there are means of.
    pages: usize,
    /// Numbers of a page.
    page_len: usize,
}

/// The mean keys of one layer.
#[derive(Clone, Copy)]
pub struct PageMeansView<'a> {
    table: &'a PageMeanTable,
    place: usize,
}

impl PageMeanTable {
    /// Computes the means of the first `pages` pages; `None` if the pages of no layer are centred.
    pub fn new(
        device: &Arc<Device>,
        codec: &PageCodec,
        pages: usize,
    ) -> Result<Option<PageMeanTable>, CudaError> {
        let KvGeometry { layers, kv_heads, head_dim } = codec.geometry();
        let centred: Vec<usize> = (0..layers).filter(|&layer| codec.has_page_means(layer)).collect();
        if centred.is_empty() {
            return Ok(None);
        }
        if centred.iter().any(|&layer| !matches!(codec.layout(layer), PageLayout::Banded(_))) {
            return Err(CudaError::Unsupported("pages that are centred one by one without bands".into()));
        }
        let page_len = kv_heads * head_dim;
        let layer_len = pages * page_len;
        let mut memory = device.allocate(centred.len() * layer_len, "mean keys of pages")?;
        for (place, &layer) in centred.iter().enumerate() {
            let means = means_of_layer(codec, layer, pages)
                .map_err(|error| CudaError::Unsupported(error.to_string()))?;
            if !means.is_empty() {
                let mut layer = memory.slice_mut(place * layer_len..(place + 1) * layer_len);
                device.stream().memcpy_htod(&means, &mut layer)?;
            }
        }
        Ok(Some(PageMeanTable { memory, places: places(codec), pages, page_len }))
    }

    /// The means of a layer, if its pages are centred.
    pub fn of_layer(&self, layer: usize) -> Option<PageMeansView<'_>> {
        let place = self.places.get(layer).copied().flatten()?;
        Some(PageMeansView { table: self, place })
    }

    /// Pages that there are means of.
    pub(super) fn pages(&self) -> usize {
        self.pages
    }

    /// Its address, if there are means of so many pages.
    pub(super) fn address(&self, device: &Device, pages: usize) -> Result<u64, CudaError> {
        if pages > self.pages {
            let (expected, got) = (pages, self.pages);
            return Err(CudaError::Shape { what: "pages of a sequence that have mean keys", expected, got });
        }
        Ok(self.memory.device_ptr(device.stream()).0)
    }
}

/// Of each layer of a codec: its place among those whose pages are centred.
pub(super) fn places(codec: &PageCodec) -> Vec<Option<usize>> {
    let mut next = 0..;
    let layers = 0..codec.geometry().layers;
    layers.map(|layer| if codec.has_page_means(layer) { next.next() } else { None }).collect()
}

impl PageMeansView<'_> {
    /// The address of the means of the first page, if there are those of so many, for rows of so many numbers.
    pub(super) fn address(&self, device: &Device, pages: usize, page_len: usize) -> Result<u64, CudaError> {
        let table = self.table;
        if page_len != table.page_len {
            let (expected, got) = (page_len, table.page_len);
            return Err(CudaError::Shape { what: "channels of the mean keys of a page", expected, got });
        }
        let first = self.place * table.pages * page_len * size_of::<u16>();
        Ok(table.address(device, pages)? + first as u64)
    }
}

/// The means of a layer, by all threads of the machine: there may be hundreds of thousands of rows.
fn means_of_layer(codec: &PageCodec, layer: usize, pages: usize) -> Result<Vec<u16>, CodecError> {
    let KvGeometry { kv_heads, head_dim, .. } = codec.geometry();
    let mut means = vec![0; pages * kv_heads * head_dim];
    let threads = thread::available_parallelism().map_or(1, NonZero::get);
    let at_once = pages.div_ceil(threads).max(1);
    thread::scope(|scope| {
        let parts = means.chunks_mut(at_once * kv_heads * head_dim).enumerate();
        let parts: Vec<_> = parts
            .map(|(part, means)| {
                scope.spawn(move || {
                    for (index, row) in means.chunks_exact_mut(head_dim).enumerate() {
                        let (page, head) = (part * at_once + index / kv_heads, index % kv_heads);
                        let mean = codec.stored_page_mean(HeadIndex { layer, head }, Side::Key, page)?;
                        let mean = mean.iter().flatten().map(|&x| bf16::from_f32(x).to_bits());
                        row.iter_mut().zip(mean).for_each(|(row, x)| *row = x);
                    }
                    Ok(())
                })
            })
            .collect();
        parts.into_iter().try_for_each(|part| part.join().unwrap_or_else(|panic| resume_unwind(panic)))
    })?;
    Ok(means)
}
