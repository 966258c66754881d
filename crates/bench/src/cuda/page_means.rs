//! Keys that are centred page by page, as those of rotation files are, for kernels that seal and read them.

use std::sync::Arc;

use half::bf16;
use oscar_codec::{
    BandLayout, BandRows, CodecError, HeadEncoder, HeadIndex, HeadTransform, KeyTurning, KvGeometry,
    PageCodec, PageLayout, PageMeans, RopeLayout, RowEncoder, Rule, Side,
};
use oscar_kernels::cuda::{CudaError, Device, PageMeanTable};
use oscar_random::Random;

/// Keys in bands that are centred page by page, and a rule for values. Pages hold rows that are rotated already.
pub(super) fn centred_codec(
    geometry: KvGeometry,
    layout: BandLayout,
    value_rule: Rule,
) -> Result<PageCodec, CodecError> {
    let KvGeometry { layers, kv_heads, head_dim } = geometry;
    let mut random = Random::new(5);
    let unturned: Vec<f32> = (0..head_dim).map(|_| 0.2 * random.signed()).collect();
    let frequencies = (0..head_dim / 2).map(|i| 1e6_f32.powf(-2.0 * i as f32 / head_dim as f32)).collect();
    let turning = Arc::new(KeyTurning::new(frequencies, RopeLayout::Halves));
    let rows = RowEncoder::Banded(BandRows { layout, value_rule });
    let values = HeadEncoder { transform: HeadTransform::identity(head_dim), rows, page_means: None };
    let keys = HeadEncoder { page_means: Some(PageMeans::new(&unturned, turning)?), ..values.clone() };
    let heads = layers * kv_heads;
    PageCodec::new("int2", geometry, vec![keys; heads], vec![values; heads])
}

/// The means of a format that has some, for kernels that read pages.
pub(super) struct CentredPages {
    codec: PageCodec,
    pub(super) table: PageMeanTable,
    pub(super) layers: usize,
}

impl CentredPages {
    /// `layers`: that no two launches in a row read the same means.
    pub(super) fn new(
        device: &Arc<Device>,
        sealed: PageLayout,
        kv_heads: usize,
        layers: usize,
        pages: usize,
    ) -> Result<Option<CentredPages>, CudaError> {
        let PageLayout::Banded(layout) = sealed else { return Ok(None) };
        let geometry = KvGeometry { layers, kv_heads, head_dim: layout.head_dim() };
        let codec = centred_codec(geometry, layout, Rule::Search)
            .map_err(|error| CudaError::Unsupported(error.to_string()))?;
        let table = PageMeanTable::new(device, &codec, pages)?;
        Ok(table.map(|table| CentredPages { codec, table, layers }))
    }

    /// Rows of the first head as readers see them: keys with the mean of their page.
    pub(super) fn with_mean(&self, page: usize, rows: &[Vec<f32>; 2]) -> [Vec<f32>; 2] {
        let mean = self.codec.stored_page_mean(HeadIndex { layer: 0, head: 0 }, Side::Key, page);
        let mean: Vec<f32> =
            mean.ok().flatten().unwrap_or_default().iter().map(|&x| bf16::from_f32(x).to_f32()).collect();
        let [mut keys, values] = rows.clone();
        for key in keys.chunks_exact_mut(mean.len().max(1)) {
            key.iter_mut().zip(&mean).for_each(|(x, mean)| *x += mean);
        }
        [keys, values]
    }
}
