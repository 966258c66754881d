//! The 2-bit codec: transform a row, quantise it, put it in a page. One encoder for prefill and for sealing.

use crate::cache_codec::{CacheCodec, HeadIndex, Side};
use crate::code_page::CodeLayout;
use crate::error::{CodecError, check_finite, check_length};
use crate::page::{PAGE_TOKENS, PageFormat};
use crate::quantise::{RowFormat, ScalePair, quantise_row};
use crate::rule::{Rule, ScaleType};
use crate::transform::HeadTransform;

/// How the rows of one head and side are encoded.
#[derive(Clone, Debug)]
pub struct HeadEncoder {
    /// Centring and rotation.
    pub transform: HeadTransform,
    /// How the grid of a row is chosen.
    pub rule: Rule,
}

impl HeadEncoder {
    /// An encoder from its two parts.
    pub fn new(transform: HeadTransform, rule: Rule) -> Self {
        HeadEncoder { transform, rule }
    }

    /// Transforms and quantises one row. `rotated` is scratch of the same length and ends up holding the bf16
    /// row that the codes stand for. Nothing is written to `codes` and `scales` on an error.
    pub fn encode_row(
        &self,
        row: &[f32],
        format: &RowFormat,
        rotated: &mut [f32],
        codes: &mut [u8],
        scales: &mut [ScalePair],
    ) -> Result<(), CodecError> {
        check_length("channels of a row", self.transform.dim(), row.len())?;
        check_length("channels of a row", self.transform.dim(), rotated.len())?;
        check_finite(row, 0)?;
        self.transform.apply(row, rotated);
        quantise_row(rotated, &RowFormat { rule: self.rule, ..*format }, codes, scales)
    }
}

/// A codec of real 2-bit pages, with one encoder per layer, KV head and side.
#[derive(Clone, Debug)]
pub struct Int2Codec {
    name: String,
    kv_heads: usize,
    layout: CodeLayout,
    scale_type: ScaleType,
    published: bool,
    keys: Vec<HeadEncoder>,
    values: Vec<HeadEncoder>,
}

impl Int2Codec {
    /// A codec whose encoders are indexed by `layer * kv_heads + head`. With `published` the codes are chosen
    /// against the unrounded scale, as in the paper; see [`crate::quantise`].
    pub fn new(
        name: impl Into<String>,
        head_dim: usize,
        kv_heads: usize,
        groups: usize,
        scale_type: ScaleType,
        published: bool,
        keys: Vec<HeadEncoder>,
        values: Vec<HeadEncoder>,
    ) -> Result<Self, CodecError> {
        let layout = CodeLayout::int2(head_dim, groups)?;
        check_length("value encoders (one per key encoder)", keys.len(), values.len())?;
        if kv_heads == 0 || !keys.len().is_multiple_of(kv_heads) {
            return Err(CodecError::Shape {
                what: "key encoders (a multiple of the KV heads)",
                expected: kv_heads,
                got: keys.len(),
            });
        }
        for encoder in keys.iter().chain(&values) {
            check_length("channels of a rotation", head_dim, encoder.transform.dim())?;
        }
        Ok(Int2Codec { name: name.into(), kv_heads, layout, scale_type, published, keys, values })
    }

    /// The page layout.
    pub fn layout(&self) -> &CodeLayout {
        &self.layout
    }

    /// The page format.
    pub fn format(&self) -> PageFormat {
        PageFormat::Int2 { groups: self.layout.groups() }
    }

    /// How scales are stored.
    pub fn scale_type(&self) -> ScaleType {
        self.scale_type
    }

    /// Whether codes are chosen against the unrounded scale.
    pub fn is_published(&self) -> bool {
        self.published
    }

    /// The encoders of keys and of values, `[layer * kv_heads + head]`.
    pub(crate) fn into_encoders(self) -> (Vec<HeadEncoder>, Vec<HeadEncoder>) {
        (self.keys, self.values)
    }

    /// Layers this codec has encoders for.
    pub fn layers(&self) -> usize {
        self.keys.len() / self.kv_heads
    }

    /// KV heads per layer.
    pub fn kv_heads(&self) -> usize {
        self.kv_heads
    }

    /// The encoder of one head and side.
    pub fn encoder(&self, head: HeadIndex, side: Side) -> Result<&HeadEncoder, CodecError> {
        let unknown = CodecError::UnknownHead {
            layer: head.layer,
            head: head.head,
            layers: self.layers(),
            heads: self.kv_heads,
        };
        if head.head >= self.kv_heads || head.layer >= self.layers() {
            return Err(unknown);
        }
        let encoders = match side {
            Side::Key => &self.keys,
            Side::Value => &self.values,
        };
        Ok(&encoders[head.layer * self.kv_heads + head.head])
    }

    /// How rows of one head and side become codes.
    pub fn row_format(&self, head: HeadIndex, side: Side) -> Result<RowFormat, CodecError> {
        Ok(RowFormat {
            groups: self.layout.groups(),
            rule: self.encoder(head, side)?.rule,
            scale_type: self.scale_type,
            published: self.published,
            levels: 4,
        })
    }

    /// Encodes up to 64 rows of one side into `page`, from its first token on. On an error the page is as it was.
    pub fn encode_rows(
        &self,
        head: HeadIndex,
        side: Side,
        rows: &[f32],
        page: &mut [u8],
    ) -> Result<(), CodecError> {
        let dim = self.layout.head_dim();
        let tokens = rows.len() / dim;
        check_length("values of whole rows", tokens * dim, rows.len())?;
        check_length("bytes of a 2-bit page", self.layout.page_bytes(), page.len())?;
        if tokens > PAGE_TOKENS {
            return Err(CodecError::Shape { what: "tokens of a page", expected: PAGE_TOKENS, got: tokens });
        }
        let encoder = self.encoder(head, side)?;
        let format = self.row_format(head, side)?;
        let groups = self.layout.groups();
        let mut rotated = vec![0.0; dim];
        let mut codes = vec![0; rows.len()];
        let mut scales = vec![(0, 0); tokens * groups];
        for (token, row) in rows.chunks_exact(dim).enumerate() {
            let codes = &mut codes[token * dim..][..dim];
            let scales = &mut scales[token * groups..][..groups];
            encoder
                .encode_row(row, &format, &mut rotated, codes, scales)
                .map_err(|error| error.in_row(token))?;
        }
        for token in 0..tokens {
            let codes = &codes[token * dim..][..dim];
            let scales = &scales[token * groups..][..groups];
            self.layout.write_token(page, side, token, codes, scales)?;
        }
        Ok(())
    }

    /// Seals a page: 64 key rows and 64 value rows of one head to bytes.
    pub fn encode_page(&self, head: HeadIndex, keys: &[f32], values: &[f32]) -> Result<Vec<u8>, CodecError> {
        let expected = PAGE_TOKENS * self.layout.head_dim();
        check_length("key values of a page", expected, keys.len())?;
        check_length("value values of a page", expected, values.len())?;
        let mut page = vec![0; self.layout.page_bytes()];
        self.encode_rows(head, Side::Key, keys, &mut page)?;
        self.encode_rows(head, Side::Value, values, &mut page)?;
        Ok(page)
    }

    /// The rows a reader gets from the first tokens of one side of a page, un-rotated and with the mean added.
    pub fn decode_rows(
        &self,
        head: HeadIndex,
        side: Side,
        page: &[u8],
        rows: &mut [f32],
    ) -> Result<(), CodecError> {
        let dim = self.layout.head_dim();
        check_length("values of whole rows", rows.len() / dim * dim, rows.len())?;
        let encoder = self.encoder(head, side)?;
        let mut rotated = vec![0.0; dim];
        for (token, row) in rows.chunks_exact_mut(dim).enumerate() {
            self.layout.decode_token(page, side, token, self.scale_type, &mut rotated)?;
            encoder.transform.undo(&rotated, row);
        }
        Ok(())
    }
}

impl CacheCodec for Int2Codec {
    fn name(&self) -> &str {
        &self.name
    }

    fn round_trip(&self, head: HeadIndex, side: Side, rows: &mut [f32]) -> Result<(), CodecError> {
        let dim = self.layout.head_dim();
        let mut decoded = vec![0.0; rows.len()];
        let mut page = vec![0; self.layout.page_bytes()];
        for (index, (rows, decoded)) in
            rows.chunks(PAGE_TOKENS * dim).zip(decoded.chunks_mut(PAGE_TOKENS * dim)).enumerate()
        {
            self.encode_rows(head, side, rows, &mut page).map_err(|error| match error {
                CodecError::NotFinite { row, channel } => {
                    CodecError::NotFinite { row: index * PAGE_TOKENS + row, channel }
                }
                other => other,
            })?;
            self.decode_rows(head, side, &page, decoded)?;
        }
        rows.copy_from_slice(&decoded);
        Ok(())
    }

    fn token_bytes(&self, head_dim: usize) -> f64 {
        self.format().page_bytes(head_dim) as f64 / PAGE_TOKENS as f64
    }
}
