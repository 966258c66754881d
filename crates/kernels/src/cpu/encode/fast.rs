//! All heads of a 2-bit codec on the fast path.

use std::collections::HashMap;

use oscar_codec::{CacheCodec, CodecError, HeadEncoder, HeadIndex, Int2Codec, PAGE_TOKENS, Side};

use super::encoder::{Int2Encoder, Scratch};
use super::rotate::{Element, Panels};
use crate::cpu::isa::Isa;

/// An [`Int2Codec`] that encodes and decodes with SIMD: the same bytes, many times faster.
pub struct FastInt2 {
    codec: Int2Codec,
    /// `[layer · kv_heads + head]`.
    keys: Vec<Int2Encoder>,
    values: Vec<Int2Encoder>,
}

impl FastInt2 {
    /// Prepares the encoders of `codec` for `isa`.
    ///
    /// # Panics
    /// When this machine does not have `isa`.
    pub fn new(isa: Isa, codec: Int2Codec) -> Self {
        // Heads often share a matrix; clones of a transform tell by their pointer.
        let mut shared: HashMap<*const f32, [Panels; 2]> = HashMap::new();
        let mut prepare = |side| {
            let heads = (0..codec.layers())
                .flat_map(|layer| (0..codec.kv_heads()).map(move |head| HeadIndex { layer, head }));
            heads
                .map(|head| {
                    let encoder: &HeadEncoder = codec.encoder(head, side)?;
                    let panels = shared
                        .entry(encoder.transform.rotation().as_ptr())
                        .or_insert_with(|| Panels::pair(&encoder.transform))
                        .clone();
                    let format = codec.row_format(head, side)?;
                    Int2Encoder::with_panels(isa, encoder, &format, *codec.layout(), panels)
                })
                .collect::<Result<Vec<_>, CodecError>>()
                .expect("the heads of a codec fit its own layout")
        };
        let (keys, values) = (prepare(Side::Key), prepare(Side::Value));
        FastInt2 { codec, keys, values }
    }

    /// The codec this repeats.
    pub fn codec(&self) -> &Int2Codec {
        &self.codec
    }

    /// The encoder of one head and side.
    pub fn encoder(&self, head: HeadIndex, side: Side) -> Result<&Int2Encoder, CodecError> {
        self.codec.encoder(head, side)?;
        let encoders = match side {
            Side::Key => &self.keys,
            Side::Value => &self.values,
        };
        Ok(&encoders[head.layer * self.codec.kv_heads() + head.head])
    }

    /// Encodes rows of one side into consecutive pages, 64 each and the rest in the last, whose other tokens stay as
    /// they are. On an error pages before the one with the bad row may have been written.
    pub fn encode_rows<E: Element>(
        &self,
        head: HeadIndex,
        side: Side,
        rows: &[E],
        pages: &mut [u8],
        scratch: &mut Scratch,
    ) -> Result<(), CodecError> {
        let encoder = self.encoder(head, side)?;
        self.check_pages(rows.len(), pages.len())?;
        let (page_values, page_bytes) = self.page_sizes();
        let parts = rows.chunks(page_values).zip(pages.chunks_exact_mut(page_bytes));
        for (index, (rows, page)) in parts.enumerate() {
            encoder.encode_rows(side, rows, page, scratch).map_err(|error| match error {
                CodecError::NotFinite { row, channel } => {
                    CodecError::NotFinite { row: index * PAGE_TOKENS + row, channel }
                }
                other => other,
            })?;
        }
        Ok(())
    }

    /// Reads rows of one side back from consecutive pages, un-rotated and with the mean added.
    pub fn decode_rows(
        &self,
        head: HeadIndex,
        side: Side,
        pages: &[u8],
        rows: &mut [f32],
        scratch: &mut Scratch,
    ) -> Result<(), CodecError> {
        let encoder = self.encoder(head, side)?;
        self.check_pages(rows.len(), pages.len())?;
        let (page_values, page_bytes) = self.page_sizes();
        for (rows, page) in rows.chunks_mut(page_values).zip(pages.chunks_exact(page_bytes)) {
            encoder.decode_rows(side, page, rows, scratch)?;
        }
        Ok(())
    }

    /// Values of one side and bytes of a page.
    fn page_sizes(&self) -> (usize, usize) {
        let layout = self.codec.layout();
        (PAGE_TOKENS * layout.head_dim(), layout.page_bytes())
    }

    fn check_pages(&self, values: usize, bytes: usize) -> Result<(), CodecError> {
        let (page_values, page_bytes) = self.page_sizes();
        let expected = values.div_ceil(page_values) * page_bytes;
        if bytes == expected {
            return Ok(());
        }
        Err(CodecError::Shape { what: "bytes of 2-bit pages", expected, got: bytes })
    }
}

impl CacheCodec for FastInt2 {
    fn name(&self) -> &str {
        self.codec.name()
    }

    fn round_trip(&self, head: HeadIndex, side: Side, rows: &mut [f32]) -> Result<(), CodecError> {
        let (page_values, page_bytes) = self.page_sizes();
        let mut pages = vec![0; rows.len().div_ceil(page_values) * page_bytes];
        let mut scratch = Scratch::default();
        // All rows are encoded before the first is replaced.
        self.encode_rows(head, side, rows, &mut pages, &mut scratch)?;
        self.decode_rows(head, side, &pages, rows, &mut scratch)
    }

    fn token_bytes(&self, head_dim: usize) -> f64 {
        self.codec.token_bytes(head_dim)
    }
}
