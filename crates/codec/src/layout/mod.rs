//! Page layouts: what the bytes of a page are, format by format.
//!
//! Each format is a file of its own that owns its sizes, its order, and how a row is written and read. [`PageLayout`] is
//! the registry: everything a reader of pages needs to know. [`RowEncoder`] is the writer's side: how the transformed
//! rows of one head and side become the bytes of a layout.

pub mod banded;
pub mod bf16;
pub mod codes;
pub mod fp8;
pub mod widths;

use banded::{BandLayout, BandRows};
use bf16::Bf16Layout;
use codes::{CodeLayout, CodeRows};
use fp8::Fp8Layout;

use crate::cache_codec::Side;
use crate::error::{CodecError, check_length};
use crate::rule::Rule;

/// Tokens in a page. Pages are position-aligned: page `p` holds positions `[64p, 64p + 64)`.
pub const PAGE_TOKENS: usize = 64;

/// Head dimensions are padded up to a multiple of this in sealed pages; the padding is counted.
pub const HEAD_DIM_STEP: usize = 32;

/// How the keys and values of one layer and one KV head are stored in a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageLayout {
    /// 16 bits per element, no scales.
    Bf16(Bf16Layout),
    /// 2-bit or 4-bit codes with a 16-bit scale and offset per row and group of channels.
    Codes(CodeLayout),
    /// 8-bit floats (E4M3) with one f16 scale per row.
    Fp8(Fp8Layout),
    /// Keys in bands of 4-, 2- and 1-bit codes with 8-bit scales, values as 2-bit or 4-bit codes.
    Banded(BandLayout),
}

impl PageLayout {
    /// Pages of bf16 elements.
    pub fn bf16(head_dim: usize) -> PageLayout {
        PageLayout::Bf16(Bf16Layout::new(head_dim))
    }

    /// Pages of 2-bit codes in `groups` groups of channels, with f16 scales.
    pub fn int2(head_dim: usize, groups: usize) -> Result<PageLayout, CodecError> {
        Ok(PageLayout::Codes(CodeLayout::new(2, head_dim, groups)?))
    }

    /// Pages of 4-bit codes in `groups` groups of channels, with f16 scales.
    pub fn int4(head_dim: usize, groups: usize) -> Result<PageLayout, CodecError> {
        Ok(PageLayout::Codes(CodeLayout::new(4, head_dim, groups)?))
    }

    /// Pages with keys in bands of 4-, 2- and 1-bit codes, two bits a channel on average, and 2-bit values.
    pub fn banded(head_dim: usize) -> Result<PageLayout, CodecError> {
        Ok(PageLayout::Banded(BandLayout::int2(head_dim)?))
    }

    /// The smaller format: bands for the stronger half of a key's channels, 2-bit values.
    pub fn int15(head_dim: usize) -> Result<PageLayout, CodecError> {
        Ok(PageLayout::Banded(BandLayout::int15(head_dim)?))
    }

    /// Pages of 8-bit floats.
    pub fn fp8(head_dim: usize) -> Result<PageLayout, CodecError> {
        Ok(PageLayout::Fp8(Fp8Layout::new(head_dim)?))
    }

    /// Whether rows are stored as they are, rounded to bf16: nothing is lost by sealing, and nothing gained.
    pub fn is_bf16(&self) -> bool {
        matches!(self, PageLayout::Bf16(_))
    }

    /// Channels of a row, without padding.
    pub fn head_dim(&self) -> usize {
        match self {
            PageLayout::Bf16(layout) => layout.head_dim(),
            PageLayout::Codes(layout) => layout.head_dim(),
            PageLayout::Fp8(layout) => layout.head_dim(),
            PageLayout::Banded(layout) => layout.head_dim(),
        }
    }

    /// Bytes of a page, scales and padding included.
    pub fn page_bytes(&self) -> usize {
        match self {
            PageLayout::Bf16(layout) => layout.page_bytes(),
            PageLayout::Codes(layout) => layout.page_bytes(),
            PageLayout::Fp8(layout) => layout.page_bytes(),
            PageLayout::Banded(layout) => layout.page_bytes(),
        }
    }

    /// Bits per stored key or value element, scales and padding included.
    pub fn bits_per_element(&self) -> f64 {
        self.page_bytes() as f64 * 8.0 / (PAGE_TOKENS * 2 * self.head_dim()) as f64
    }

    /// The row a reader makes of one token, still transformed.
    pub fn decode_token(
        &self,
        page: &[u8],
        side: Side,
        token: usize,
        row: &mut [f32],
    ) -> Result<(), CodecError> {
        match self {
            PageLayout::Bf16(layout) => layout.decode_token(page, side, token, row),
            PageLayout::Codes(layout) => layout.decode_token(page, side, token, row),
            PageLayout::Fp8(layout) => layout.decode_token(page, side, token, row),
            PageLayout::Banded(layout) => layout.decode_token(page, side, token, row),
        }
    }
}

/// How transformed rows of one head and side become bytes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RowEncoder {
    /// Rows are rounded to bf16.
    Bf16(Bf16Layout),
    /// Codes, with the rule that chooses the grid of a row.
    Codes(CodeRows),
    /// Rounded to 8-bit floats after the largest magnitude was scaled to the largest float.
    Fp8(Fp8Layout),
    /// Keys in bands, values as codes.
    Banded(BandRows),
}

impl RowEncoder {
    /// The layout of the pages that rows are written to.
    pub fn layout(&self) -> PageLayout {
        match self {
            RowEncoder::Bf16(layout) => PageLayout::Bf16(*layout),
            RowEncoder::Codes(rows) => PageLayout::Codes(rows.layout),
            RowEncoder::Fp8(layout) => PageLayout::Fp8(*layout),
            RowEncoder::Banded(rows) => PageLayout::Banded(rows.layout),
        }
    }

    /// Four bits where this has two, for the same transformed rows; bf16 stays as it is. `None` for other encoders, and for
    /// one that does not store all channels.
    pub(crate) fn high(&self) -> Option<RowEncoder> {
        // A grid of sixteen levels needs no outliers clipped.
        let rule = |rule| if matches!(rule, Rule::Clip(_)) { Rule::MIN_MAX } else { rule };
        match self {
            RowEncoder::Bf16(layout) => Some(RowEncoder::Bf16(*layout)),
            RowEncoder::Codes(rows) if rows.layout.bits() == 2 => {
                let CodeRows { layout, rule: own, .. } = *rows;
                let layout = CodeLayout::new(4, layout.head_dim(), layout.groups()).ok()?;
                let layout = layout.with_scales(rows.layout.scale_type());
                Some(RowEncoder::Codes(CodeRows { layout, rule: rule(own), published: false }))
            }
            RowEncoder::Banded(rows) if rows.layout.has_bands_of_int2() && rows.layout.value_bits() == 2 => {
                let layout = BandLayout::high(rows.layout.head_dim()).ok()?;
                Some(RowEncoder::Banded(BandRows { layout, value_rule: rule(rows.value_rule) }))
            }
            RowEncoder::Codes(_) | RowEncoder::Fp8(_) | RowEncoder::Banded(_) => None,
        }
    }

    /// Writes one token's transformed row, leaving all other tokens as they are. On an error the page is as it was.
    pub fn write_token(
        &self,
        page: &mut [u8],
        side: Side,
        token: usize,
        row: &[f32],
    ) -> Result<(), CodecError> {
        match self {
            RowEncoder::Bf16(layout) => layout.write_token(page, side, token, row),
            RowEncoder::Codes(rows) => rows.write_token(page, side, token, row),
            RowEncoder::Fp8(layout) => layout.write_token(page, side, token, row),
            RowEncoder::Banded(rows) => rows.write_token(page, side, token, row),
        }
    }
}

/// Refuses a page that does not have the bytes of its layout, and a token outside a page.
fn check_token(
    page: &'static str,
    page_bytes: usize,
    given_bytes: usize,
    token: usize,
) -> Result<(), CodecError> {
    check_length(page, page_bytes, given_bytes)?;
    if token >= PAGE_TOKENS {
        return Err(CodecError::Shape { what: "token of a page", expected: PAGE_TOKENS, got: token });
    }
    Ok(())
}

/// The part of a model's shape that decides how large its KV cache is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvGeometry {
    /// Layers that keep keys and values.
    pub layers: usize,
    /// KV heads per layer.
    pub kv_heads: usize,
    /// The number of channels of a head.
    pub head_dim: usize,
}

impl KvGeometry {
    /// Bytes of one page over all layers and heads.
    pub fn page_bytes(&self, layout: PageLayout) -> usize {
        self.layers * self.kv_heads * layout.page_bytes()
    }

    /// Bytes per token over all layers and heads, in full pages of a layout.
    pub fn bytes_per_token(&self, layout: PageLayout) -> usize {
        self.page_bytes(layout) / PAGE_TOKENS
    }

    /// bf16 pages of this shape.
    pub fn bf16(&self) -> PageLayout {
        PageLayout::bf16(self.head_dim)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn int2(head_dim: usize, groups: usize) -> PageLayout {
        PageLayout::int2(head_dim, groups).expect("a layout")
    }

    fn int4(head_dim: usize, groups: usize) -> PageLayout {
        PageLayout::int4(head_dim, groups).expect("a layout")
    }

    #[test]
    fn int2_pages_have_the_documented_sizes() {
        for (head_dim, bytes) in [(48, 2560), (64, 2560), (96, 3584), (128, 4608), (256, 8704)] {
            assert_eq!(int2(head_dim, 1).page_bytes(), bytes, "d={head_dim}");
        }
        assert_eq!(int2(128, 2).page_bytes(), 4096 + 2 * 512);
    }

    #[test]
    fn bits_per_element_counts_scales_and_padding() {
        assert_eq!(PageLayout::bf16(128).bits_per_element(), 16.0);
        assert_eq!(int2(128, 1).bits_per_element(), 2.25);
        assert_eq!(int2(64, 1).bits_per_element(), 2.5);
        assert!(int2(48, 1).bits_per_element() > 3.3);
    }

    #[test]
    fn the_safe_tiers_have_the_documented_bits() {
        let fp8 = |head_dim| PageLayout::fp8(head_dim).expect("a layout");
        assert_eq!(int4(128, 1).bits_per_element(), 4.25);
        assert_eq!(int4(128, 2).page_bytes(), 64 * 2 * (64 + 8));
        assert_eq!(fp8(128).bits_per_element(), 8.125);
        assert_eq!(fp8(48).page_bytes(), 64 * 2 * 66);
    }

    #[test]
    fn geometry_matches_hand_arithmetic() {
        // SmolLM2-135M: 30 layers, 3 KV heads, d=64, two tensors of bf16.
        let smollm2 = KvGeometry { layers: 30, kv_heads: 3, head_dim: 64 };
        assert_eq!(smollm2.bytes_per_token(smollm2.bf16()), 30 * 3 * 64 * 2 * 2);
        assert_eq!(smollm2.bytes_per_token(int2(64, 1)), 30 * 3 * 40);
    }
}
