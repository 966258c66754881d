//! What the cache does to rows and pages: transform rows on their way in, seal full pages, undo the values of a result.
//!
//! Everything repeats [`PageCodec`] to the bit on every instruction set. [`Isa::Scalar`] runs that code.

use std::sync::Arc;

use half::bf16;
use oscar_codec::{
    CodecError, HeadIndex, HeadTransform, KvGeometry, PAGE_TOKENS, PageCodec, PageLayout, RowEncoder, Side,
};

use super::bands::QuantiseBands;
use super::kernel::Quantise;
use super::pack::Placement;
use super::product::{Finish, Matrix, Prepare, Product, ROW_BLOCK, TURNED};
use super::quantise::BlockCodes;
use super::unpack::{AllFinite, Arrange, BLOCK, ToFp8, Unpack};
use crate::cpu::aligned::AlignedScratch;
use crate::cpu::attention::page::{page_elements, read_token};
use crate::cpu::isa::Isa;
use crate::cpu::memory;
use crate::cpu::page_means::widen;
use crate::cpu::simd::Simd;

/// Working memory of a [`Sealer`]; keep one per thread.
#[derive(Default)]
pub struct SealScratch {
    keys: AlignedScratch,
    values: AlignedScratch,
    rows: AlignedScratch,
    codes: BlockCodes,
}

/// A [`PageCodec`] on one instruction set.
pub struct Sealer {
    pub(super) simd: Simd,
    codec: Arc<PageCodec>,
}

impl Sealer {
    /// # Panics
    /// When this machine does not have `isa`.
    pub fn new(isa: Isa, codec: Arc<PageCodec>) -> Sealer {
        let simd = Simd::new(isa);
        Sealer { simd, codec }
    }

    /// The codec whose bytes this sealer writes.
    pub fn codec(&self) -> &Arc<PageCodec> {
        &self.codec
    }

    /// Whether nothing happens to the rows of a head and side but their rounding.
    ///
    /// # Panics
    /// Panics when the codec has no such head, like all methods about rows.
    pub fn is_identity(&self, head: HeadIndex, side: Side) -> bool {
        self.transform(head, side).is_identity()
    }

    /// What is subtracted from the rows of a head and side, if anything.
    pub fn mean(&self, head: HeadIndex, side: Side) -> Option<&[f32]> {
        self.transform(head, side).mean()
    }

    /// The mean key of a head as it would be stored if nothing were subtracted; `None` if nothing is.
    pub fn stored_mean_key(&self, head: HeadIndex) -> Option<Vec<f32>> {
        self.transform(head, Side::Key).stored_mean()
    }

    /// Prefetches the rotation of a head and side, which for one row takes far longer to come from memory than to be used.
    pub fn prefetch_rotation(&self, head: HeadIndex, side: Side) {
        let transform = self.transform(head, side);
        if transform.rotates() {
            memory::prefetch(transform.matrix());
        }
    }

    /// Seals a full bf16 page of one head, in the order of [`crate::cpu::attention::page`], to that head's bytes of a
    /// sealed page. `mean` is what its keys are centred by, as [`Self::page_mean`] gives it. On an error `out` is as it was.
    pub fn seal(
        &self,
        head: HeadIndex,
        mean: Option<&[u16]>,
        page: &[u16],
        out: &mut [u8],
        scratch: &mut SealScratch,
    ) -> Result<(), CodecError> {
        let KvGeometry { head_dim: dim, .. } = self.codec.geometry();
        let bytes = self.codec.head_range(head)?.len();
        if !dim.is_multiple_of(2) {
            let reason = "bf16 pages hold channels in pairs";
            return Err(CodecError::HeadDim { head_dim: dim, reason });
        }
        let shape = |what, expected, got| {
            if expected == got { Ok(()) } else { Err(CodecError::Shape { what, expected, got }) }
        };
        shape("elements of a bf16 page", page_elements(dim), page.len())?;
        shape("bytes of a sealed page", bytes, out.len())?;
        if self.simd.isa() == Isa::Scalar || !self.simd.run(AllFinite(page)) {
            // The definition also names the row and the channel of what is not finite.
            return self.seal_plainly(head, mean, page, out);
        }
        match self.codec.layout(head.layer) {
            PageLayout::Bf16(_) => {
                for (bits, out) in page.iter().zip(out.chunks_exact_mut(2)) {
                    out.copy_from_slice(&bits.to_le_bytes());
                }
            }
            PageLayout::Fp8(layout) => {
                self.simd.run(ToFp8 { layout, page, out });
            }
            PageLayout::Codes(_) | PageLayout::Banded(_) => {
                let SealScratch { keys, values, rows, codes } = scratch;
                let len = PAGE_TOKENS * dim;
                let (keys, values, rows) = (keys.at_least(len), values.at_least(len), rows.at_least(len));
                self.simd.run(Unpack { dim, page, keys, values, rows });
                if let Some(mean) = mean {
                    subtract_from_blocks(mean, keys);
                }
                for (side, blocks) in [(Side::Key, keys), (Side::Value, values)] {
                    let encoder = &self.codec.encoder(head, side)?.rows;
                    self.quantise(encoder, side, PAGE_TOKENS, blocks, codes, out);
                }
            }
        }
        Ok(())
    }

    /// What the stored keys of a page are less of, in bf16, by the number of the page in its sequence; `None` where pages are not
    /// centred. Equal to [`PageCodec::stored_page_mean`].
    pub fn page_mean(&self, head: HeadIndex, page: usize, scratch: &mut SealScratch) -> Option<Vec<u16>> {
        let encoder = self.codec.encoder(head, Side::Key).ok()?;
        let mut mean = encoder.page_means.as_ref()?.of_page(page);
        self.transform_rows(head, Side::Key, &mut mean, scratch);
        Some(mean.into_iter().map(|x| bf16::from_f32(x).to_bits()).collect())
    }

    /// Writes up to 64 transformed rows of one side, less the mean of their page where pages have one, to that head's bytes of
    /// a sealed page, from the first token on. On an error the page is as it was.
    pub fn write_rows(
        &self,
        head: HeadIndex,
        side: Side,
        rows: &[f32],
        page: &mut [u8],
        scratch: &mut SealScratch,
    ) -> Result<(), CodecError> {
        let (dim, encoder) = (self.codec.geometry().head_dim, &self.codec.encoder(head, side)?.rows);
        let count = rows.len() / dim;
        let shape = |what, expected, got| {
            if expected == got { Ok(()) } else { Err(CodecError::Shape { what, expected, got }) }
        };
        shape("values of whole rows", count * dim, rows.len())?;
        shape("bytes of a sealed page", self.codec.head_bytes(head.layer), page.len())?;
        if count > PAGE_TOKENS {
            return Err(CodecError::Shape { what: "tokens of a page", expected: PAGE_TOKENS, got: count });
        }
        if let Some(at) = rows.iter().position(|x| !x.is_finite()) {
            return Err(CodecError::NotFinite { row: at / dim, channel: at % dim });
        }
        match encoder {
            RowEncoder::Codes(_) | RowEncoder::Banded(_) if self.simd.isa() != Isa::Scalar => {
                let SealScratch { keys, codes, .. } = scratch;
                let blocks = keys.at_least(count.next_multiple_of(BLOCK) * dim);
                self.simd.run(Arrange { dim, rows, blocks });
                self.quantise(encoder, side, count, blocks, codes, page);
            }
            encoder => {
                for (token, row) in rows.chunks_exact(dim).enumerate() {
                    encoder.write_token(page, side, token, row)?;
                }
            }
        }
        Ok(())
    }

    /// Blocks `[block][channel][16]` of finite numbers to the codes of their page, for encoders that have codes.
    fn quantise(
        &self,
        encoder: &RowEncoder,
        side: Side,
        rows: usize,
        blocks: &[f32],
        codes: &mut BlockCodes,
        page: &mut [u8],
    ) {
        let (format, place, dim) = match (encoder, side) {
            (RowEncoder::Codes(encoder), side) => {
                let layout = &encoder.layout;
                (encoder.row_format(), Placement::of(layout, side), layout.head_dim())
            }
            (RowEncoder::Banded(encoder), Side::Value) => {
                let layout = &encoder.layout;
                (encoder.value_format(), Placement::of_banded_values(layout), layout.head_dim())
            }
            (RowEncoder::Banded(encoder), Side::Key) => {
                let (layout, codes) = (&encoder.layout, &mut codes.codes);
                return self.simd.run(QuantiseBands { layout, rows, blocks, codes, page });
            }
            (RowEncoder::Bf16(_) | RowEncoder::Fp8(_), _) => return,
        };
        self.simd.run(Quantise { format: &format, place, dim, rows, rotated: blocks, codes, page });
    }

    /// The definition, on rows gathered one by one.
    fn seal_plainly(
        &self,
        head: HeadIndex,
        mean: Option<&[u16]>,
        page: &[u16],
        out: &mut [u8],
    ) -> Result<(), CodecError> {
        let dim = self.codec.geometry().head_dim;
        let (mut keys, mut values) = (vec![0.0; PAGE_TOKENS * dim], vec![0.0; PAGE_TOKENS * dim]);
        for (token, (key, value)) in keys.chunks_exact_mut(dim).zip(values.chunks_exact_mut(dim)).enumerate()
        {
            read_token(page, dim, token, key, value);
        }
        if let Some(mean) = mean {
            keys.chunks_exact_mut(dim).for_each(|key| add_bf16(key, mean, -1.0));
        }
        self.codec.seal_page(head, &keys, &values, out)
    }

    /// Centres and rotates keys or values of one head in place and rounds them to bf16: what every tier stores. Equal
    /// to [`HeadTransform::apply`] for finite rows; a row with NaN or infinity gets some that are not finite.
    ///
    /// # Panics
    /// When the codec has no such head or `rows` are not whole rows.
    pub fn transform_rows(&self, head: HeadIndex, side: Side, rows: &mut [f32], scratch: &mut SealScratch) {
        let transform = self.transform(head, side);
        self.check_rows(rows);
        if self.simd.isa() == Isa::Scalar {
            return each_row(transform.dim(), rows, scratch, |row, out| transform.apply(row, out));
        }
        let matrix = match transform.rotates() {
            true => Matrix::Rows(transform.matrix()),
            false => Matrix::One,
        };
        self.multiply(matrix, Prepare::Centre(transform), Finish::Bf16, rows, &mut scratch.rows);
    }

    /// Transforms the queries that read a KV head so that products with its transformed keys stay what they were, in place
    /// and in f32. Queries are not centred: the mean key adds the same to all logits of a query.
    ///
    /// # Panics
    /// When the codec has no such head or `rows` are not whole rows.
    pub fn rotate_queries(&self, head: HeadIndex, rows: &mut [f32], scratch: &mut SealScratch) {
        let transform = self.transform(head, Side::Key);
        self.check_rows(rows);
        if !transform.rotates() {
            return;
        }
        let matrix = &transform.query_matrix()[..];
        if self.simd.isa() == Isa::Scalar {
            return each_row(transform.dim(), rows, scratch, |row, out| multiply_plainly(row, matrix, out));
        }
        self.multiply(Matrix::Rows(matrix), Prepare::Copy, Finish::Keep, rows, &mut scratch.rows);
    }

    /// Takes sums of value rows (whose weights add up to one) back to where values came from, in place and in f32.
    ///
    /// # Panics
    /// When the codec has no such head or `rows` are not whole rows.
    pub fn undo_values(&self, head: HeadIndex, rows: &mut [f32], scratch: &mut SealScratch) {
        self.undo_rows(head, Side::Value, rows, scratch);
    }

    /// Undoes the transform of rows, in place and in f32.
    ///
    /// # Panics
    /// When the codec has no such head or `rows` are not whole rows.
    pub fn undo_rows(&self, head: HeadIndex, side: Side, rows: &mut [f32], scratch: &mut SealScratch) {
        let transform = self.transform(head, side);
        self.check_rows(rows);
        if transform.is_identity() {
            return;
        }
        if self.simd.isa() == Isa::Scalar {
            return each_row(transform.dim(), rows, scratch, |row, out| transform.undo(row, out));
        }
        let SealScratch { values, rows: input, .. } = scratch;
        let matrix = match transform.rotates() {
            true => Matrix::Columns(transform.query_matrix(), values.at_least(TURNED * transform.dim())),
            false => Matrix::One,
        };
        let finish = transform.mean().map_or(Finish::Keep, Finish::Add);
        self.multiply(matrix, Prepare::Copy, finish, rows, input);
    }

    fn multiply(
        &self,
        matrix: Matrix<'_>,
        prepare: Prepare<'_>,
        finish: Finish<'_>,
        rows: &mut [f32],
        input: &mut AlignedScratch,
    ) {
        let dim = self.codec.geometry().head_dim;
        let input = input.at_least(ROW_BLOCK * dim);
        self.simd.run(Product { matrix, dim, prepare, finish, rows, input });
    }

    fn transform(&self, head: HeadIndex, side: Side) -> &HeadTransform {
        match self.codec.transform(head, side) {
            Ok(transform) => transform,
            Err(error) => panic!("{error}"),
        }
    }

    fn check_rows(&self, rows: &[f32]) {
        let dim = self.codec.geometry().head_dim;
        assert!(rows.len().is_multiple_of(dim), "{} values are no whole rows of {dim}", rows.len());
    }
}

/// Subtracts a row of bf16 from all rows of blocks `[block][channel][16]`.
fn subtract_from_blocks(mean: &[u16], blocks: &mut [f32]) {
    for block in blocks.chunks_exact_mut(mean.len() * BLOCK) {
        for (tokens, &mean) in block.chunks_exact_mut(BLOCK).zip(mean) {
            tokens.iter_mut().for_each(|x| *x -= widen(mean));
        }
    }
}

/// Adds a row of bf16 times `factor`.
pub(super) fn add_bf16(row: &mut [f32], other: &[u16], factor: f32) {
    row.iter_mut().zip(other).for_each(|(x, &other)| *x += factor * widen(other));
}

/// Replaces each row by what `f` makes of it.
fn each_row(dim: usize, rows: &mut [f32], scratch: &mut SealScratch, f: impl Fn(&[f32], &mut [f32])) {
    let input: &mut [f32] = scratch.rows.at_least(dim);
    for row in rows.chunks_exact_mut(dim) {
        input.copy_from_slice(row);
        f(input, row);
    }
}

/// `out = row · matrix` in the order of [`HeadTransform::apply`].
fn multiply_plainly(row: &[f32], matrix: &[f32], out: &mut [f32]) {
    out.fill(0.0);
    for (&x, weights) in row.iter().zip(matrix.chunks_exact(row.len())) {
        for (out, &weight) in out.iter_mut().zip(weights) {
            *out = x.mul_add(weight, *out);
        }
    }
}
