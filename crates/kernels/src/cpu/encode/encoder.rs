//! The encoder of one head and side.

use half::bf16;
use oscar_codec::code_page::CodeLayout;
use oscar_codec::quantise::{RowFormat, quantise_row};
use oscar_codec::{CodecError, HeadEncoder, PAGE_TOKENS, Side};

use super::kernel::{Arrange, Decode, Head, Quantise, Restore, Rotate, Undo, run};
use super::lanes::BLOCK;
use super::quantise::BlockCodes;
use super::rotate::{Element, Panels};
use crate::cpu::gemm::aligned::AlignedScratch;
use crate::cpu::isa::Isa;

/// Working memory of an encoder; keep one per thread.
#[derive(Default)]
pub struct Scratch {
    blocks: AlignedScratch,
    rotated: AlignedScratch,
    codes: BlockCodes,
}

/// Encodes and decodes rows of one head and side, on one instruction set.
///
/// Pages hold the bytes of `oscar_codec::Int2Codec`, whatever the instruction set. [`Isa::Scalar`] runs that code.
pub struct Int2Encoder {
    pub(super) isa: Isa,
    head: Head,
    scalar: HeadEncoder,
}

impl Int2Encoder {
    /// An encoder that repeats `encoder` in pages of `layout`; `format` says how rows are quantised (its rule is taken
    /// from `encoder`).
    ///
    /// # Panics
    /// When this machine does not have `isa`.
    pub fn new(
        isa: Isa,
        encoder: &HeadEncoder,
        format: &RowFormat,
        layout: CodeLayout,
    ) -> Result<Self, CodecError> {
        Self::with_panels(isa, encoder, format, layout, Panels::pair(&encoder.transform))
    }

    /// [`Int2Encoder::new`] with the matrices of the transform at hand.
    pub(super) fn with_panels(
        isa: Isa,
        encoder: &HeadEncoder,
        format: &RowFormat,
        layout: CodeLayout,
        [rotation, inverse]: [Panels; 2],
    ) -> Result<Self, CodecError> {
        assert!(isa.is_available(), "{isa} kernels on a machine without them");
        format.check(layout.head_dim())?;
        let shape = |what, expected, got| {
            if expected == got { Ok(()) } else { Err(CodecError::Shape { what, expected, got }) }
        };
        shape("bits of a code", 2, layout.bits() as usize)?;
        shape("levels of a 2-bit code", 4, format.levels.into())?;
        shape("channels of a rotation", layout.head_dim(), encoder.transform.dim())?;
        shape("groups of a page", layout.groups(), format.groups)?;
        let format = RowFormat { rule: encoder.rule, ..*format };
        let head = Head { transform: encoder.transform.clone(), rotation, inverse, format, layout };
        Ok(Int2Encoder { isa, head, scalar: encoder.clone() })
    }

    /// The page layout.
    pub fn layout(&self) -> &CodeLayout {
        &self.head.layout
    }

    /// How rows are quantised.
    pub fn format(&self) -> &RowFormat {
        &self.head.format
    }

    /// Encodes up to 64 rows into `page`, from its first token on. On an error the page is as it was.
    pub fn encode_rows<E: Element>(
        &self,
        side: Side,
        rows: &[E],
        page: &mut [u8],
        scratch: &mut Scratch,
    ) -> Result<(), CodecError> {
        let count = self.check_rows(rows.len())?;
        self.check_page(page.len())?;
        if self.isa == Isa::Scalar {
            return self.encode_plainly(side, rows, page);
        }
        let Scratch { blocks, rotated, codes } = scratch;
        let len = count.next_multiple_of(BLOCK) * self.head.layout.head_dim();
        let (blocks, rotated) = (blocks.at_least(len), rotated.at_least(len));
        let step = Rotate { head: &self.head, rows, blocks, rotated };
        // SAFETY: the constructor has found the path available.
        if !unsafe { run(self.isa, step) } {
            // The definition names the row and the channel. It may also find that only lanes without a row overflowed.
            return self.encode_plainly(side, rows, page);
        }
        let Head { format, layout, .. } = &self.head;
        let step = Quantise { format, layout, side, rows: count, rotated, codes, page };
        // SAFETY: as above.
        unsafe { run(self.isa, step) };
        Ok(())
    }

    /// [`Int2Encoder::encode_rows`] of rows that are centred and rotated already, as a cache's bf16 windows hold them.
    pub fn encode_rotated_rows(
        &self,
        side: Side,
        rows: &[bf16],
        page: &mut [u8],
        scratch: &mut Scratch,
    ) -> Result<(), CodecError> {
        let count = self.check_rows(rows.len())?;
        self.check_page(page.len())?;
        if self.isa == Isa::Scalar {
            return self.encode_rotated_plainly(side, rows, page);
        }
        let dim = self.head.layout.head_dim();
        let Scratch { blocks, codes, .. } = scratch;
        let blocks = blocks.at_least(count.next_multiple_of(BLOCK) * dim);
        // SAFETY: the constructor has found the path available.
        if !unsafe { run(self.isa, Arrange { dim, rows, blocks }) } {
            return self.encode_rotated_plainly(side, rows, page);
        }
        let Head { format, layout, .. } = &self.head;
        let step = Quantise { format, layout, side, rows: count, rotated: blocks, codes, page };
        // SAFETY: as above.
        unsafe { run(self.isa, step) };
        Ok(())
    }

    /// Centres and rotates up to 64 rows: what a bf16 window holds, as `f32`.
    pub fn rotate_rows<E: Element>(
        &self,
        rows: &[E],
        out: &mut [f32],
        scratch: &mut Scratch,
    ) -> Result<(), CodecError> {
        let count = self.check_rows(rows.len())?;
        self.check_len("rotated values", rows.len(), out.len())?;
        let dim = self.head.layout.head_dim();
        let Scratch { blocks, rotated, .. } = scratch;
        let len = count.next_multiple_of(BLOCK) * dim;
        let (blocks, rotated) = (blocks.at_least(len), rotated.at_least(len));
        if self.isa != Isa::Scalar {
            let step = Rotate { head: &self.head, rows, blocks, rotated };
            // SAFETY: the constructor has found the path available.
            if unsafe { run(self.isa, step) } {
                // SAFETY: as above.
                unsafe { run(self.isa, Restore { dim, blocks: rotated, rows: out }) };
                return Ok(());
            }
        }
        let mut results = vec![0.0; rows.len()];
        for ((token, row), result) in rows.chunks_exact(dim).enumerate().zip(results.chunks_exact_mut(dim)) {
            let row: Vec<f32> = row.iter().map(|x| x.to_f32()).collect();
            check_finite(&row, token)?;
            self.scalar.transform.apply(&row, result);
            check_finite(result, token)?;
        }
        out.copy_from_slice(&results);
        Ok(())
    }

    /// The first rows of one side of a page as a reader sees them, still rotated.
    pub fn decode_rotated_rows(
        &self,
        side: Side,
        page: &[u8],
        rows: &mut [f32],
        scratch: &mut Scratch,
    ) -> Result<(), CodecError> {
        let count = self.check_rows(rows.len())?;
        self.check_page(page.len())?;
        let dim = self.head.layout.head_dim();
        if self.isa == Isa::Scalar {
            for (token, row) in rows.chunks_exact_mut(dim).enumerate() {
                self.head.layout.decode_token(page, side, token, self.head.format.scale_type, row)?;
            }
            return Ok(());
        }
        let rotated = scratch.rotated.at_least(count.next_multiple_of(BLOCK) * dim);
        // SAFETY: the constructor has found the path available.
        unsafe {
            run(self.isa, Decode { head: &self.head, side, page, rotated });
            run(self.isa, Restore { dim, blocks: rotated, rows });
        }
        Ok(())
    }

    /// The first rows of one side of a page, un-rotated and with the mean added. Equal on all paths up to rounding.
    pub fn decode_rows(
        &self,
        side: Side,
        page: &[u8],
        rows: &mut [f32],
        scratch: &mut Scratch,
    ) -> Result<(), CodecError> {
        let count = self.check_rows(rows.len())?;
        self.check_page(page.len())?;
        let dim = self.head.layout.head_dim();
        if self.isa == Isa::Scalar {
            let mut rotated = vec![0.0; dim];
            for (token, row) in rows.chunks_exact_mut(dim).enumerate() {
                let scale_type = self.head.format.scale_type;
                self.head.layout.decode_token(page, side, token, scale_type, &mut rotated)?;
                self.scalar.transform.undo(&rotated, row);
            }
            return Ok(());
        }
        let len = count.next_multiple_of(BLOCK) * dim;
        let (blocks, rotated) = (scratch.blocks.at_least(len), scratch.rotated.at_least(len));
        // SAFETY: the constructor has found the path available.
        unsafe {
            run(self.isa, Decode { head: &self.head, side, page, rotated });
            run(self.isa, Undo { head: &self.head, rotated, blocks, rows });
        }
        Ok(())
    }

    /// The definition, row by row.
    fn encode_plainly<E: Element>(&self, side: Side, rows: &[E], page: &mut [u8]) -> Result<(), CodecError> {
        let dim = self.head.layout.head_dim();
        let mut rotated = vec![0.0; dim];
        self.write_plainly(side, rows, page, |row, codes, scales| {
            self.scalar.encode_row(row, &self.head.format, &mut rotated, codes, scales)
        })
    }

    fn encode_rotated_plainly(&self, side: Side, rows: &[bf16], page: &mut [u8]) -> Result<(), CodecError> {
        self.write_plainly(side, rows, page, |row, codes, scales| {
            quantise_row(row, &self.head.format, codes, scales)
        })
    }

    /// Quantises all rows, then writes them, so that an error leaves the page alone.
    fn write_plainly<E: Element>(
        &self,
        side: Side,
        rows: &[E],
        page: &mut [u8],
        mut quantise: impl FnMut(&[f32], &mut [u8], &mut [(u16, u16)]) -> Result<(), CodecError>,
    ) -> Result<(), CodecError> {
        let (dim, groups) = (self.head.layout.head_dim(), self.head.layout.groups());
        let mut codes = vec![0; rows.len()];
        let mut scales = vec![(0, 0); rows.len() / dim * groups];
        let targets = codes.chunks_exact_mut(dim).zip(scales.chunks_exact_mut(groups));
        for ((token, row), (codes, scales)) in rows.chunks_exact(dim).enumerate().zip(targets) {
            let row: Vec<f32> = row.iter().map(|x| x.to_f32()).collect();
            quantise(&row, codes, scales).map_err(|error| error.in_row(token))?;
        }
        let parts = codes.chunks_exact(dim).zip(scales.chunks_exact(groups));
        for (token, (codes, scales)) in parts.enumerate() {
            self.head.layout.write_token(page, side, token, codes, scales)?;
        }
        Ok(())
    }

    /// The number of rows that `values` numbers are.
    fn check_rows(&self, values: usize) -> Result<usize, CodecError> {
        let dim = self.head.layout.head_dim();
        let rows = values / dim;
        self.check_len("values of whole rows", rows * dim, values)?;
        if rows > PAGE_TOKENS {
            return Err(CodecError::Shape { what: "tokens of a page", expected: PAGE_TOKENS, got: rows });
        }
        Ok(rows)
    }

    fn check_page(&self, bytes: usize) -> Result<(), CodecError> {
        self.check_len("bytes of a 2-bit page", self.head.layout.page_bytes(), bytes)
    }

    fn check_len(&self, what: &'static str, expected: usize, got: usize) -> Result<(), CodecError> {
        if expected == got { Ok(()) } else { Err(CodecError::Shape { what, expected, got }) }
    }
}

fn check_finite(row: &[f32], token: usize) -> Result<(), CodecError> {
    match row.iter().position(|value| !value.is_finite()) {
        Some(channel) => Err(CodecError::NotFinite { row: token, channel }),
        None => Ok(()),
    }
}
