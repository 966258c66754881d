//! What the pages of a cache mean: for every layer, head and side the transform its rows go through, and how a full
//! page of transformed rows becomes bytes.
//!
//! Rows are transformed before they are stored anywhere ([`PageCodec::transform`]), in bf16 windows too, so a page
//! seals to the same bytes whenever that happens. [`PageCodec::seal_page`] defines these bytes; encoders for real
//! hardware repeat them. A sealed page of all layers is `[layer][KV head]`, layers may differ in format.

use std::ops::Range;

use half::bf16;

use crate::cache_codec::{CacheCodec, HeadIndex, Side};
use crate::code_page::CodeLayout;
use crate::error::{CodecError, check_finite, check_length};
use crate::fp8_page::Fp8Layout;
use crate::hadamard;
use crate::int2::{HeadEncoder, Int2Codec};
use crate::page::{KvGeometry, PAGE_TOKENS, PageFormat};
use crate::quantise::{RowFormat, quantise_row};
use crate::rule::{Rule, ScaleType};
use crate::transform::HeadTransform;

/// The codec of a paged cache: a transform per layer, KV head and side, and a format per layer.
#[derive(Clone, Debug)]
pub struct PageCodec {
    name: String,
    geometry: KvGeometry,
    scale_type: ScaleType,
    published: bool,
    /// `[layer]`.
    formats: Vec<PageFormat>,
    /// `[layer · kv_heads + head]`.
    keys: Vec<HeadEncoder>,
    values: Vec<HeadEncoder>,
    /// First byte of each layer in a sealed page, and the end.
    offsets: Vec<usize>,
}

impl PageCodec {
    /// 2-bit pages with the rotations and rules of `codec`.
    pub fn int2(codec: Int2Codec) -> PageCodec {
        let geometry = KvGeometry {
            layers: codec.layers(),
            kv_heads: codec.kv_heads(),
            head_dim: codec.layout().head_dim(),
        };
        let (scale_type, published, format) = (codec.scale_type(), codec.is_published(), codec.format());
        let name = codec.name().to_owned();
        let (keys, values) = codec.into_encoders();
        PageCodec {
            name,
            geometry,
            scale_type,
            published,
            formats: vec![format; geometry.layers],
            keys,
            values,
            offsets: Vec::new(),
        }
        .with_offsets()
    }

    /// 4-bit pages: (block) Hadamard, min-max over the row, f16 scales. Keys are centred when their means, indexed by
    /// `layer * kv_heads + head`, are given.
    pub fn int4(geometry: KvGeometry, key_means: Option<Vec<Vec<f32>>>) -> Result<PageCodec, CodecError> {
        CodeLayout::int4(geometry.head_dim, 1)?;
        let transform = HeadTransform::new(None, &hadamard::matrix(geometry.head_dim))?;
        Self::uniform("int4", geometry, PageFormat::Int4 { groups: 1 }, transform, key_means)
    }

    /// Pages of 8-bit floats with a scale per row, not rotated. Keys are centred when their means, indexed by
    /// `layer * kv_heads + head`, are given.
    pub fn fp8(geometry: KvGeometry, key_means: Option<Vec<Vec<f32>>>) -> Result<PageCodec, CodecError> {
        Fp8Layout::new(geometry.head_dim)?;
        let transform = HeadTransform::identity(geometry.head_dim);
        Self::uniform("fp8", geometry, PageFormat::Fp8, transform, key_means)
    }

    /// One transform for all heads but for the means of their keys.
    fn uniform(
        name: &str,
        geometry: KvGeometry,
        format: PageFormat,
        transform: HeadTransform,
        key_means: Option<Vec<Vec<f32>>>,
    ) -> Result<PageCodec, CodecError> {
        let heads = geometry.layers * geometry.kv_heads;
        let values = vec![HeadEncoder::new(transform.clone(), Rule::MIN_MAX); heads];
        let keys = match key_means {
            None => values.clone(),
            Some(means) => {
                check_length("key means (one per layer and KV head)", heads, means.len())?;
                let centred = |(row, mean): (usize, Vec<f32>)| {
                    let transform = transform.with_mean(Some(mean)).map_err(|error| error.in_row(row))?;
                    Ok(HeadEncoder::new(transform, Rule::MIN_MAX))
                };
                means.into_iter().enumerate().map(centred).collect::<Result<_, CodecError>>()?
            }
        };
        let codec = PageCodec {
            name: name.to_owned(),
            geometry,
            scale_type: ScaleType::F16,
            published: false,
            formats: vec![format; geometry.layers],
            keys,
            values,
            offsets: Vec::new(),
        };
        Ok(codec.with_offsets())
    }

    /// The same codec, but `layers` seal to bf16: a copy. Their rows are neither centred nor rotated, so these layers
    /// read what a bf16 cache reads.
    pub fn keep_bf16(mut self, layers: &[usize]) -> Result<PageCodec, CodecError> {
        let KvGeometry { kv_heads, head_dim, .. } = self.geometry;
        let identity = HeadTransform::identity(head_dim);
        for &layer in layers {
            self.check_head(HeadIndex { layer, head: 0 })?;
            if !head_dim.is_multiple_of(2) {
                return Err(CodecError::HeadDim { head_dim, reason: "bf16 pages hold channels in pairs" });
            }
            self.formats[layer] = PageFormat::Bf16;
            for index in layer * kv_heads..(layer + 1) * kv_heads {
                self.keys[index].transform = identity.clone();
                self.values[index].transform = identity.clone();
            }
        }
        Ok(self.with_offsets())
    }

    fn with_offsets(mut self) -> Self {
        let KvGeometry { kv_heads, head_dim, .. } = self.geometry;
        let mut end = 0;
        self.offsets = vec![0];
        for format in &self.formats {
            end += kv_heads * format.page_bytes(head_dim);
            self.offsets.push(end);
        }
        self
    }

    /// The shape of the cache.
    pub fn geometry(&self) -> KvGeometry {
        self.geometry
    }

    /// The name used in tables and on the command line.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// How the pages of a layer are sealed.
    ///
    /// # Panics
    /// When there is no such layer.
    pub fn layer_format(&self, layer: usize) -> PageFormat {
        self.formats[layer]
    }

    /// The order of the codes in the pages of a layer, where these hold codes.
    ///
    /// # Panics
    /// When there is no such layer.
    pub fn code_layout(&self, layer: usize) -> Option<CodeLayout> {
        let head_dim = self.geometry.head_dim;
        let layout = match self.layer_format(layer) {
            PageFormat::Int2 { groups } => CodeLayout::int2(head_dim, groups),
            PageFormat::Int4 { groups } => CodeLayout::int4(head_dim, groups),
            PageFormat::Bf16 | PageFormat::Fp8 => return None,
        };
        Some(layout.expect("the constructors have checked the shape"))
    }

    /// The order of the elements in the pages of a layer, where these hold 8-bit floats.
    ///
    /// # Panics
    /// When there is no such layer.
    pub fn fp8_layout(&self, layer: usize) -> Option<Fp8Layout> {
        match self.layer_format(layer) {
            PageFormat::Fp8 => {
                Some(Fp8Layout::new(self.geometry.head_dim).expect("the constructors have checked the shape"))
            }
            _ => None,
        }
    }

    /// How the scales of codes are stored. Those of 8-bit floats are always f16.
    pub fn scale_type(&self) -> ScaleType {
        self.scale_type
    }

    /// What the rows of one head and side go through before they are stored in any tier.
    pub fn transform(&self, head: HeadIndex, side: Side) -> Result<&HeadTransform, CodecError> {
        Ok(&self.encoder(head, side)?.transform)
    }

    /// How the rows of one head and side become codes. Without meaning in layers that hold no codes.
    pub fn row_format(&self, head: HeadIndex, side: Side) -> Result<RowFormat, CodecError> {
        let rule = self.encoder(head, side)?.rule;
        let (groups, levels) = match self.formats[head.layer] {
            PageFormat::Int2 { groups } => (groups, 4),
            PageFormat::Int4 { groups } => (groups, 16),
            PageFormat::Bf16 | PageFormat::Fp8 => (1, 4),
        };
        Ok(RowFormat { groups, rule, scale_type: self.scale_type, published: self.published, levels })
    }

    /// Bytes of one sealed page over all layers and heads.
    pub fn page_bytes(&self) -> usize {
        self.offsets[self.geometry.layers]
    }

    /// Byte of a layer's first head in a sealed page.
    ///
    /// # Panics
    /// When there is no such layer.
    pub fn layer_offset(&self, layer: usize) -> usize {
        assert!(layer < self.geometry.layers, "layer {layer} of {}", self.geometry.layers);
        self.offsets[layer]
    }

    /// Bytes of one head of a layer in a sealed page.
    ///
    /// # Panics
    /// When there is no such layer.
    pub fn head_bytes(&self, layer: usize) -> usize {
        self.layer_format(layer).page_bytes(self.geometry.head_dim)
    }

    /// Where one head lies in a sealed page.
    pub fn head_range(&self, head: HeadIndex) -> Result<Range<usize>, CodecError> {
        self.check_head(head)?;
        let bytes = self.head_bytes(head.layer);
        let start = self.offsets[head.layer] + head.head * bytes;
        Ok(start..start + bytes)
    }

    /// Seals 64 keys and 64 values of one head, all transformed already: the definition of every byte. On an error
    /// `out` is as it was.
    pub fn seal_page(
        &self,
        head: HeadIndex,
        keys: &[f32],
        values: &[f32],
        out: &mut [u8],
    ) -> Result<(), CodecError> {
        self.check_page(head, keys.len(), values.len(), out.len())?;
        let dim = self.geometry.head_dim;
        let sides = [(Side::Key, keys), (Side::Value, values)];
        for (token, row) in sides.iter().flat_map(|(_, rows)| rows.chunks_exact(dim).enumerate()) {
            check_finite(row, token)?;
        }
        let (codes, floats) = (self.code_layout(head.layer), self.fp8_layout(head.layer));
        for (side, rows) in sides {
            for (token, row) in rows.chunks_exact(dim).enumerate() {
                if let Some(layout) = codes {
                    let format = self.row_format(head, side)?;
                    let (mut codes, mut scales) = (vec![0; dim], vec![(0, 0); layout.groups()]);
                    quantise_row(row, &format, &mut codes, &mut scales)?;
                    layout.write_token(out, side, token, &codes, &scales)?;
                } else if let Some(layout) = floats {
                    layout.write_token(out, side, token, row)?;
                } else {
                    for (channel, &x) in row.iter().enumerate() {
                        let at = bf16_position(dim, side, token, channel);
                        out[at..at + 2].copy_from_slice(&bf16::from_f32(x).to_le_bytes());
                    }
                }
            }
        }
        Ok(())
    }

    /// The rows a reader gets from a sealed page of one head, still transformed: an aid for references and tests.
    pub fn decode_page(
        &self,
        head: HeadIndex,
        page: &[u8],
        keys: &mut [f32],
        values: &mut [f32],
    ) -> Result<(), CodecError> {
        self.check_page(head, keys.len(), values.len(), page.len())?;
        let dim = self.geometry.head_dim;
        let (codes, floats) = (self.code_layout(head.layer), self.fp8_layout(head.layer));
        for (side, rows) in [(Side::Key, keys), (Side::Value, values)] {
            for (token, row) in rows.chunks_exact_mut(dim).enumerate() {
                if let Some(layout) = codes {
                    layout.decode_token(page, side, token, self.scale_type, row)?;
                } else if let Some(layout) = floats {
                    layout.decode_token(page, side, token, row)?;
                } else {
                    for (channel, x) in row.iter_mut().enumerate() {
                        let at = bf16_position(dim, side, token, channel);
                        *x = bf16::from_le_bytes([page[at], page[at + 1]]).to_f32();
                    }
                }
            }
        }
        Ok(())
    }

    fn encoder(&self, head: HeadIndex, side: Side) -> Result<&HeadEncoder, CodecError> {
        self.check_head(head)?;
        let encoders = match side {
            Side::Key => &self.keys,
            Side::Value => &self.values,
        };
        Ok(&encoders[head.layer * self.geometry.kv_heads + head.head])
    }

    fn check_head(&self, HeadIndex { layer, head }: HeadIndex) -> Result<(), CodecError> {
        let KvGeometry { layers, kv_heads: heads, .. } = self.geometry;
        if layer < layers && head < heads {
            Ok(())
        } else {
            Err(CodecError::UnknownHead { layer, head, layers, heads })
        }
    }

    fn check_page(
        &self,
        head: HeadIndex,
        keys: usize,
        values: usize,
        bytes: usize,
    ) -> Result<(), CodecError> {
        self.check_head(head)?;
        let expected = PAGE_TOKENS * self.geometry.head_dim;
        check_length("key values of a page", expected, keys)?;
        check_length("value values of a page", expected, values)?;
        check_length("bytes of a sealed page", self.head_bytes(head.layer), bytes)
    }
}

/// Byte of an element of a bf16 page: keys `[d/2][64 tokens][2]`, then values `[32 token pairs][d][2]`, the order of
/// the CPU kernels.
fn bf16_position(head_dim: usize, side: Side, token: usize, channel: usize) -> usize {
    2 * match side {
        Side::Key => (channel / 2 * PAGE_TOKENS + token) * 2 + channel % 2,
        Side::Value => PAGE_TOKENS * head_dim + (token / 2 * head_dim + channel) * 2 + token % 2,
    }
}
