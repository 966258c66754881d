//! Attention over sealed pages by decoding them.
use half::bf16;
use oscar_codec::code_page::CodeLayout;
use oscar_codec::fp8_page::Fp8Layout;
use oscar_codec::{PAGE_TOKENS, PageCodec, ScaleType, Side};

use super::{AttentionScratch, SoftmaxState, Span};
use crate::cpu::isa::Isa;

/// What the bytes of a sealed page mean.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SealedFormat {
    /// bf16.
    Bf16,
    /// Codes.
    Codes(CodeLayout, ScaleType),
    /// 8-bit floats.
    Fp8(Fp8Layout),
}

impl SealedFormat {
    /// How a layer of a codec is read.
    pub fn of(codec: &PageCodec, layer: usize) -> SealedFormat {
        match (codec.code_layout(layer), codec.fp8_layout(layer)) {
            (Some(layout), _) => SealedFormat::Codes(layout, codec.scale_type()),
            (None, Some(layout)) => SealedFormat::Fp8(layout),
            (None, None) => SealedFormat::Bf16,
        }
    }
}

/// Attends.
pub fn attend_sealed(
    isa: Isa,
    format: &SealedFormat,
    q: &[f32],
    scale: f32,
    spans: &[Span],
    first_page: usize,
    pages: &[&[u8]],
    scratch: &mut AttentionScratch,
    state: &mut SoftmaxState,
) {
    let d = state.head_dim();
    let decoded: Vec<Vec<u16>> = pages
        .iter()
        .map(|page| {
            let mut out = vec![0u16; super::page_elements(d)];
            for token in 0..PAGE_TOKENS {
                let (mut key, mut value) = (vec![0.0; d], vec![0.0; d]);
                match format {
                    SealedFormat::Bf16 => {
                        super::read_token(bytemuck::cast_slice(page), d, token, &mut key, &mut value);
                    }
                    SealedFormat::Codes(layout, scales) => {
                        layout.decode_token(page, Side::Key, token, *scales, &mut key).expect("a page");
                        layout.decode_token(page, Side::Value, token, *scales, &mut value).expect("a page");
                    }
                    SealedFormat::Fp8(layout) => {
                        layout.decode_token(page, Side::Key, token, &mut key).expect("a page");
                        layout.decode_token(page, Side::Value, token, &mut value).expect("a page");
                    }
                }
                super::write_token(&mut out, d, token, &key, &value);
            }
            let _ = bf16::ZERO;
            out
        })
        .collect();
    let pages: Vec<&[u16]> = decoded.iter().map(Vec::as_slice).collect();
    super::attend(isa, q, scale, spans, first_page, &pages, d, scratch, state);
}
