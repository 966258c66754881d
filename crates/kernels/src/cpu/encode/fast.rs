//! A whole codec with the kernels of this machine: what the lab holds, and what benches time.

use std::sync::Arc;

use oscar_codec::{CacheCodec, CodecError, HeadIndex, PageCodec, Side, page_parts};

use super::seal::{SealScratch, Sealer, add_bf16};
use crate::cpu::isa::Isa;
#[cfg(test)]
use crate::cpu::simd::Simd;

/// A [`PageCodec`] that encodes with SIMD: the same bytes, many times faster.
pub struct FastCodec {
    sealer: Sealer,
}

impl FastCodec {
    /// Prepares `codec` for `isa`.
    ///
    /// # Panics
    /// When this machine does not have `isa`.
    pub fn new(isa: Isa, codec: PageCodec) -> FastCodec {
        FastCodec { sealer: Sealer::new(isa, Arc::new(codec)) }
    }

    /// The path of machines without a SIMD path of their own, on any machine.
    #[cfg(test)]
    pub(super) fn portable(codec: PageCodec) -> FastCodec {
        let mut sealer = Sealer::new(Isa::Scalar, Arc::new(codec));
        sealer.simd = Simd::portable();
        FastCodec { sealer }
    }

    /// The codec whose bytes this encoder writes.
    pub fn codec(&self) -> &PageCodec {
        self.sealer.codec()
    }

    /// [`PageCodec::transform`] of whole rows, in place: what a bf16 window holds. Rows that are not finite, or do not
    /// stay finite, are refused; what `rows` hold then has no meaning.
    pub fn transform_rows(
        &self,
        head: HeadIndex,
        side: Side,
        rows: &mut [f32],
        scratch: &mut SealScratch,
    ) -> Result<(), CodecError> {
        self.codec().transform(head, side)?;
        let dim = self.codec().geometry().head_dim;
        let first_bad = |rows: &[f32]| rows.iter().position(|x| !x.is_finite());
        let before = first_bad(rows);
        self.sealer.transform_rows(head, side, rows, scratch);
        // A row that was not finite is not so afterwards; the first row is named, by its own channel if it came so.
        let named = match (before, first_bad(rows)) {
            (Some(before), Some(after)) if after / dim < before / dim => Some(after),
            (before, after) => before.or(after),
        };
        named.map_or(Ok(()), |at| Err(CodecError::NotFinite { row: at / dim, channel: at % dim }))
    }

    /// Writes up to 64 transformed rows of one side, less the mean of their page where pages have one, to a page of one head,
    /// from its first token on. On an error the page is as it was.
    pub fn write_rows(
        &self,
        head: HeadIndex,
        side: Side,
        rows: &[f32],
        page: &mut [u8],
        scratch: &mut SealScratch,
    ) -> Result<(), CodecError> {
        self.sealer.write_rows(head, side, rows, page, scratch)
    }

    /// Replaces transformed rows of one side, from position `first` of their sequence on, by what a reader of their pages gets,
    /// still transformed.
    pub fn through_pages(
        &self,
        head: HeadIndex,
        side: Side,
        first: usize,
        rows: &mut [f32],
        scratch: &mut SealScratch,
    ) -> Result<(), CodecError> {
        self.codec().transform(head, side)?;
        let dim = self.codec().geometry().head_dim;
        let layout = self.codec().layout(head.layer);
        let mut page = vec![0; layout.page_bytes()];
        for (number, tokens) in page_parts(first, rows.len() / dim) {
            let rows = &mut rows[tokens.start * dim..tokens.end * dim];
            let mean = self.sealer.page_mean(head, number, scratch).filter(|_| side == Side::Key);
            let add_mean = |rows: &mut [f32], sign: f32| {
                if let Some(mean) = &mean {
                    rows.chunks_exact_mut(dim).for_each(|row| add_bf16(row, mean, sign));
                }
            };
            add_mean(rows, -1.0);
            self.write_rows(head, side, rows, &mut page, scratch)?;
            for (token, row) in rows.chunks_exact_mut(dim).enumerate() {
                layout.decode_token(&page, side, token, row)?;
            }
            add_mean(rows, 1.0);
        }
        Ok(())
    }
}

impl CacheCodec for FastCodec {
    fn name(&self) -> &str {
        self.codec().name()
    }

    fn round_trip(
        &self,
        head: HeadIndex,
        side: Side,
        first: usize,
        rows: &mut [f32],
    ) -> Result<(), CodecError> {
        let mut scratch = SealScratch::default();
        // An error leaves the rows of the caller alone.
        let mut stored = rows.to_vec();
        self.transform_rows(head, side, &mut stored, &mut scratch)?;
        self.through_pages(head, side, first, &mut stored, &mut scratch)?;
        self.sealer.undo_rows(head, side, &mut stored, &mut scratch);
        rows.copy_from_slice(&stored);
        Ok(())
    }

    fn token_bytes(&self, head_dim: usize) -> f64 {
        self.codec().token_bytes(head_dim)
    }
}
