//! What the pages of a cache mean: for every layer, head and side the transform its rows go through, and how a full
//! page of transformed rows becomes bytes.
//!
//! Rows are transformed before they are stored anywhere ([`PageCodec::transform`]), in bf16 windows too, so a page
//! seals to the same bytes whenever that happens. [`PageCodec::seal_page`] defines these bytes; encoders for real
//! hardware repeat them. A sealed page of all layers is `[layer][KV head]`, layers may differ in format.

use std::ops::Range;

use crate::cache_codec::{CacheCodec, HeadIndex, Side};
use crate::error::{CodecError, check_finite, check_length};
use crate::hadamard;
use crate::layout::bf16::Bf16Layout;
use crate::layout::codes::{CodeLayout, CodeRows};
use crate::layout::fp8::Fp8Layout;
use crate::layout::{KvGeometry, PAGE_TOKENS, PageLayout, RowEncoder};
use crate::rule::Rule;
use crate::transform::HeadTransform;
use crate::turning::PageMeans;

/// How the rows of one head and side are encoded.
#[derive(Clone, Debug)]
pub struct HeadEncoder {
    /// Centring and rotation, before rows are stored anywhere.
    pub transform: HeadTransform,
    /// Writes transformed rows as the bytes of a sealed page.
    pub rows: RowEncoder,
    /// What the rows of a sealed page are centred by, beside the mean of the transform; keys in bands only.
    pub page_means: Option<PageMeans>,
}

impl HeadEncoder {
    /// A copy: rows are neither centred nor rotated, and rounded to bf16.
    pub fn bf16(head_dim: usize) -> HeadEncoder {
        HeadEncoder {
            transform: HeadTransform::identity(head_dim),
            rows: RowEncoder::Bf16(Bf16Layout::new(head_dim)),
            page_means: None,
        }
    }

    /// An encoder of codes. With `published` they are chosen against the unrounded scale, as in the paper.
    pub fn codes(transform: HeadTransform, layout: CodeLayout, rule: Rule, published: bool) -> HeadEncoder {
        let rows = RowEncoder::Codes(CodeRows { layout, rule, published });
        HeadEncoder { transform, rows, page_means: None }
    }
}

/// The codec of a paged cache: an encoder per layer, KV head and side, and a layout per layer.
#[derive(Clone, Debug)]
pub struct PageCodec {
    name: String,
    geometry: KvGeometry,
    /// `[layer · kv_heads + head]`.
    keys: Vec<HeadEncoder>,
    values: Vec<HeadEncoder>,
    /// Layers of which nothing is sealed.
    without_history: Vec<bool>,
    /// First byte of each layer in a sealed page, and the end.
    offsets: Vec<usize>,
}

impl PageCodec {
    /// A codec whose encoders are indexed by `layer * kv_heads + head`. All heads of a layer, keys and values, have one
    /// layout, and either all or none of its keys have page means.
    pub fn new(
        name: impl Into<String>,
        geometry: KvGeometry,
        keys: Vec<HeadEncoder>,
        values: Vec<HeadEncoder>,
    ) -> Result<PageCodec, CodecError> {
        let KvGeometry { layers, kv_heads, head_dim } = geometry;
        check_length("key encoders (one per layer and KV head)", layers * kv_heads, keys.len())?;
        check_length("value encoders (one per key encoder)", keys.len(), values.len())?;
        if kv_heads == 0 {
            return Err(CodecError::Shape { what: "KV heads, at least", expected: 1, got: 0 });
        }
        for encoder in keys.iter().chain(&values) {
            check_length("channels of a rotation", head_dim, encoder.transform.dim())?;
            check_length("channels of a page", head_dim, encoder.rows.layout().head_dim())?;
            if let Some(means) = &encoder.page_means {
                means.check_dim(head_dim)?;
            }
        }
        for (layer, (keys, values)) in keys.chunks(kv_heads).zip(values.chunks(kv_heads)).enumerate() {
            let layout = keys[0].rows.layout();
            let has_means = keys[0].page_means.is_some();
            if keys.iter().chain(values).any(|encoder| encoder.rows.layout() != layout)
                || keys.iter().any(|encoder| encoder.page_means.is_some() != has_means)
            {
                return Err(CodecError::MixedLayouts { layer });
            }
        }
        let without_history = vec![false; layers];
        let codec =
            PageCodec { name: name.into(), geometry, keys, values, without_history, offsets: Vec::new() };
        Ok(codec.with_offsets())
    }

    /// Pages that are sealed to bf16, a copy, for caches of which some layers keep no history.
    pub fn bf16(geometry: KvGeometry) -> Result<PageCodec, CodecError> {
        let encoder = HeadEncoder::bf16(geometry.head_dim);
        Self::uniform("bf16", geometry, encoder, None)
    }

    /// 4-bit pages: (block) Hadamard, min-max over the row, f16 scales. Keys are centred when their means, indexed by
    /// `layer * kv_heads + head`, are given.
    pub fn int4(geometry: KvGeometry, key_means: Option<Vec<Vec<f32>>>) -> Result<PageCodec, CodecError> {
        let layout = CodeLayout::new(4, geometry.head_dim, 1)?;
        let transform = HeadTransform::new(None, &hadamard::matrix(geometry.head_dim))?;
        let encoder = HeadEncoder::codes(transform, layout, Rule::MIN_MAX, false);
        Self::uniform("int4", geometry, encoder, key_means)
    }

    /// Pages of 8-bit floats with a scale per row, not rotated. Keys are centred when their means, indexed by
    /// `layer * kv_heads + head`, are given.
    pub fn fp8(geometry: KvGeometry, key_means: Option<Vec<Vec<f32>>>) -> Result<PageCodec, CodecError> {
        let rows = RowEncoder::Fp8(Fp8Layout::new(geometry.head_dim)?);
        let transform = HeadTransform::identity(geometry.head_dim);
        Self::uniform("fp8", geometry, HeadEncoder { transform, rows, page_means: None }, key_means)
    }

    /// One encoder for all heads but for the means of their keys.
    fn uniform(
        name: &str,
        geometry: KvGeometry,
        encoder: HeadEncoder,
        key_means: Option<Vec<Vec<f32>>>,
    ) -> Result<PageCodec, CodecError> {
        let heads = geometry.layers * geometry.kv_heads;
        let keys = match key_means {
            None => vec![encoder.clone(); heads],
            Some(means) => {
                check_length("key means (one per layer and KV head)", heads, means.len())?;
                let centred = |(row, mean): (usize, Vec<f32>)| {
                    let transform =
                        encoder.transform.with_mean(Some(mean)).map_err(|error| error.in_row(row))?;
                    Ok(HeadEncoder { transform, ..encoder.clone() })
                };
                means.into_iter().enumerate().map(centred).collect::<Result<_, CodecError>>()?
            }
        };
        Self::new(name, geometry, keys, vec![encoder; heads])
    }

    /// The same codec, but `layers` seal to bf16: a copy. Their rows are neither centred nor rotated, so these layers
    /// read what a bf16 cache reads.
    pub fn keep_bf16(mut self, layers: &[usize]) -> Result<PageCodec, CodecError> {
        let KvGeometry { kv_heads, head_dim, .. } = self.geometry;
        let exact = HeadEncoder::bf16(head_dim);
        for &layer in layers {
            self.check_head(HeadIndex { layer, head: 0 })?;
            if !head_dim.is_multiple_of(2) {
                return Err(CodecError::HeadDim { head_dim, reason: "bf16 pages hold channels in pairs" });
            }
            for index in layer * kv_heads..(layer + 1) * kv_heads {
                self.keys[index] = exact.clone();
                self.values[index] = exact.clone();
            }
        }
        Ok(self.with_offsets())
    }

    /// The same codec, but nothing of `layers` is sealed: they read a window of bf16 pages and no history. Their rows are
    /// neither centred nor rotated, and they take no bytes of a sealed page.
    pub fn without_history(self, layers: &[usize]) -> Result<PageCodec, CodecError> {
        let mut codec = self.keep_bf16(layers)?;
        for &layer in layers {
            codec.without_history[layer] = true;
        }
        Ok(codec.with_offsets())
    }

    /// Whether pages of a layer are sealed.
    ///
    /// # Panics
    /// When there is no such layer.
    pub fn has_history(&self, layer: usize) -> bool {
        !self.without_history[layer]
    }

    /// A codec of about twice the bits whose rows go through the same transforms, so that pages of both share windows in
    /// bf16: bands of four bits, or 4-bit codes for every channel. `None` unless this one has 2-bit codes of all channels,
    /// in some layers at least; layers in bf16 stay so.
    pub fn high(&self) -> Option<PageCodec> {
        let rows = |encoder: &HeadEncoder| -> Option<HeadEncoder> {
            Some(HeadEncoder { rows: encoder.rows.high()?, ..encoder.clone() })
        };
        let encoders = |encoders: &[HeadEncoder]| encoders.iter().map(rows).collect::<Option<Vec<_>>>();
        let codec = PageCodec {
            name: "high".to_owned(),
            keys: encoders(&self.keys)?,
            values: encoders(&self.values)?,
            ..self.clone()
        };
        let is_larger = (0..self.geometry.layers).any(|layer| codec.layout(layer) != self.layout(layer));
        is_larger.then(|| codec.with_offsets())
    }

    fn with_offsets(mut self) -> Self {
        let mut end = 0;
        self.offsets = vec![0];
        for layer in 0..self.geometry.layers {
            end += self.geometry.kv_heads * self.head_bytes(layer);
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

    /// How the pages of a layer are stored.
    ///
    /// # Panics
    /// When there is no such layer.
    pub fn layout(&self, layer: usize) -> PageLayout {
        self.keys[layer * self.geometry.kv_heads].rows.layout()
    }

    /// The encoder of one head and side.
    pub fn encoder(&self, head: HeadIndex, side: Side) -> Result<&HeadEncoder, CodecError> {
        self.check_head(head)?;
        let encoders = match side {
            Side::Key => &self.keys,
            Side::Value => &self.values,
        };
        Ok(&encoders[head.layer * self.geometry.kv_heads + head.head])
    }

    /// What the rows of one head and side go through before they are stored in any tier.
    pub fn transform(&self, head: HeadIndex, side: Side) -> Result<&HeadTransform, CodecError> {
        Ok(&self.encoder(head, side)?.transform)
    }

    /// What the stored rows of one head and side are less of in a sealed page, by the number of the page in its sequence: the
    /// mean key of the page, transformed as a key is. `None` where pages are not centred.
    pub fn stored_page_mean(
        &self,
        head: HeadIndex,
        side: Side,
        page: usize,
    ) -> Result<Option<Vec<f32>>, CodecError> {
        let encoder = self.encoder(head, side)?;
        let stored = |means: &PageMeans| {
            let mut stored = vec![0.0; self.geometry.head_dim];
            encoder.transform.apply(&means.of_page(page), &mut stored);
            stored
        };
        Ok(encoder.page_means.as_ref().map(stored))
    }

    /// Whether the keys of sealed pages of a layer are centred page by page.
    ///
    /// # Panics
    /// When there is no such layer.
    pub fn has_page_means(&self, layer: usize) -> bool {
        self.keys[layer * self.geometry.kv_heads].page_means.is_some()
    }

    /// Bytes of the means in bf16 that a cache keeps for every page that its longest sequence has, over all layers and heads.
    pub fn page_mean_bytes(&self) -> usize {
        let centred = (0..self.geometry.layers).filter(|&layer| self.has_page_means(layer)).count();
        centred * self.geometry.kv_heads * self.geometry.head_dim * 2
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

    /// Bytes of one head of a layer in a sealed page; none for a layer without history.
    ///
    /// # Panics
    /// When there is no such layer.
    pub fn head_bytes(&self, layer: usize) -> usize {
        if self.has_history(layer) { self.layout(layer).page_bytes() } else { 0 }
    }

    /// Where one head lies in a sealed page.
    pub fn head_range(&self, head: HeadIndex) -> Result<Range<usize>, CodecError> {
        self.check_head(head)?;
        let bytes = self.head_bytes(head.layer);
        let start = self.offsets[head.layer] + head.head * bytes;
        Ok(start..start + bytes)
    }

    /// Seals 64 keys and 64 values of one head, all transformed already, keys also less [`Self::stored_page_mean`]: the
    /// definition of every byte. On an error `out` is as it was.
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
        for (side, rows) in sides {
            let encoder = &self.encoder(head, side)?.rows;
            for (token, row) in rows.chunks_exact(dim).enumerate() {
                encoder.write_token(out, side, token, row)?;
            }
        }
        Ok(())
    }

    /// The rows a reader gets from a sealed page of one head, still transformed, keys less [`Self::stored_page_mean`]: an aid
    /// for references and tests.
    pub fn decode_page(
        &self,
        head: HeadIndex,
        page: &[u8],
        keys: &mut [f32],
        values: &mut [f32],
    ) -> Result<(), CodecError> {
        self.check_page(head, keys.len(), values.len(), page.len())?;
        let (dim, layout) = (self.geometry.head_dim, self.layout(head.layer));
        for (side, rows) in [(Side::Key, keys), (Side::Value, values)] {
            for (token, row) in rows.chunks_exact_mut(dim).enumerate() {
                layout.decode_token(page, side, token, row)?;
            }
        }
        Ok(())
    }

    /// Transforms up to 64 rows of one side and writes them to a page of one head, from its first token on. `page` is the number
    /// of the page in its sequence. On an error the page is as it was.
    pub fn encode_rows(
        &self,
        head: HeadIndex,
        side: Side,
        page: usize,
        rows: &[f32],
        bytes: &mut [u8],
    ) -> Result<(), CodecError> {
        let encoder = self.encoder(head, side)?;
        let dim = self.geometry.head_dim;
        let tokens = rows.len() / dim;
        check_length("values of whole rows", tokens * dim, rows.len())?;
        check_length("bytes of a sealed page", self.head_bytes(head.layer), bytes.len())?;
        if tokens > PAGE_TOKENS {
            return Err(CodecError::Shape { what: "tokens of a page", expected: PAGE_TOKENS, got: tokens });
        }
        let mean = self.stored_page_mean(head, side, page)?;
        let mut transformed = vec![0.0; rows.len()];
        for (token, (row, out)) in rows.chunks_exact(dim).zip(transformed.chunks_exact_mut(dim)).enumerate() {
            check_finite(row, token)?;
            encoder.transform.apply(row, out);
            check_finite(out, token)?;
            mean.iter().for_each(|mean| subtract(out, mean));
        }
        for (token, row) in transformed.chunks_exact(dim).enumerate() {
            encoder.rows.write_token(bytes, side, token, row)?;
        }
        Ok(())
    }

    /// The first rows of one side of a page as a reader sees them, with the transform undone. `page` is the number of the page
    /// in its sequence.
    pub fn decode_rows(
        &self,
        head: HeadIndex,
        side: Side,
        page: usize,
        bytes: &[u8],
        rows: &mut [f32],
    ) -> Result<(), CodecError> {
        let dim = self.geometry.head_dim;
        check_length("values of whole rows", rows.len() / dim * dim, rows.len())?;
        let (transform, layout) = (self.transform(head, side)?, self.layout(head.layer));
        let mean = self.stored_page_mean(head, side, page)?;
        let mut stored = vec![0.0; dim];
        for (token, row) in rows.chunks_exact_mut(dim).enumerate() {
            layout.decode_token(bytes, side, token, &mut stored)?;
            mean.iter().for_each(|mean| add(&mut stored, mean));
            transform.undo(&stored, row);
        }
        Ok(())
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

impl CacheCodec for PageCodec {
    fn name(&self) -> &str {
        &self.name
    }

    fn round_trip(
        &self,
        head: HeadIndex,
        side: Side,
        first: usize,
        rows: &mut [f32],
    ) -> Result<(), CodecError> {
        self.check_head(head)?;
        if !self.has_history(head.layer) {
            return Ok(());
        }
        let dim = self.geometry.head_dim;
        check_length("values of whole rows", rows.len() / dim * dim, rows.len())?;
        let mut decoded = vec![0.0; rows.len()];
        let mut bytes = vec![0; self.head_bytes(head.layer)];
        for (page, tokens) in page_parts(first, rows.len() / dim) {
            let values = tokens.start * dim..tokens.end * dim;
            self.encode_rows(head, side, page, &rows[values.clone()], &mut bytes)
                .map_err(|error| error.after_rows(tokens.start))?;
            self.decode_rows(head, side, page, &bytes, &mut decoded[values])?;
        }
        rows.copy_from_slice(&decoded);
        Ok(())
    }

    fn token_bytes(&self, _: usize) -> f64 {
        let layers = (0..self.geometry.layers).filter(|&layer| self.has_history(layer)).count();
        let heads = layers.max(1) * self.geometry.kv_heads;
        self.page_bytes() as f64 / (heads * PAGE_TOKENS) as f64
    }
}

/// Consecutive tokens from position `first` on, cut where pages end: the number of each page, and the tokens in it.
pub fn page_parts(first: usize, tokens: usize) -> impl Iterator<Item = (usize, Range<usize>)> {
    (first / PAGE_TOKENS..(first + tokens).div_ceil(PAGE_TOKENS)).map(move |page| {
        let start = (page * PAGE_TOKENS).max(first) - first;
        (page, start..((page + 1) * PAGE_TOKENS - first).min(tokens))
    })
}

fn subtract(row: &mut [f32], mean: &[f32]) {
    row.iter_mut().zip(mean).for_each(|(x, mean)| *x -= mean);
}

fn add(row: &mut [f32], mean: &[f32]) {
    row.iter_mut().zip(mean).for_each(|(x, mean)| *x += mean);
}
