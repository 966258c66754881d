//! The published system's packing, for cross-checks with its bytes.
//!
//! "Quartered split": byte `b` of a row of `d` channels holds channels `b`, `d/4 + b`, `d/2 + b` and `3d/4 + b` in bits
//! 1:0, 3:2, 5:4 and 7:6. Rows of codes lie one after the other; scales are pairs `scale, zero` per group and token.
//! The reference stores the zero point `z` itself where we store `scale · z`.

use oscar_codec::{CodeLayout, CodecError, PAGE_TOKENS, Side};

/// What a scale that underflowed to zero is given back as: the smallest the published rule can have.
const SMALLEST_SCALE: f32 = 1e-8 / 3.0;

/// One side of a page as the reference keeps it.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct QuarteredRows {
    /// 64 rows of `d/4` bytes.
    pub(crate) codes: Vec<u8>,
    /// 64 rows of `scale, zero` per group.
    pub(crate) scales_zeros: Vec<f32>,
}

/// Packs the codes (0 to 3) of one row. The row must have a multiple of four channels.
pub(crate) fn pack_row(codes: &[u8]) -> Result<Vec<u8>, CodecError> {
    check_quarters(codes.len())?;
    let quarter = codes.len() / 4;
    Ok((0..quarter)
        .map(|b| (0..4).fold(0, |byte, q| byte | (codes[q * quarter + b] & 3) << (2 * q)))
        .collect())
}

/// The codes of one packed row.
pub(crate) fn unpack_row(bytes: &[u8]) -> Vec<u8> {
    (0..4).flat_map(|q| bytes.iter().map(move |byte| byte >> (2 * q) & 3)).collect()
}

/// One side of one of our pages in the reference's layout.
pub(crate) fn from_page(layout: &CodeLayout, side: Side, page: &[u8]) -> Result<QuarteredRows, CodecError> {
    check_two_bits(layout)?;
    let mut rows = QuarteredRows { codes: Vec::new(), scales_zeros: Vec::new() };
    let mut codes = vec![0; layout.head_dim()];
    let mut scales = vec![(0, 0); layout.groups()];
    for token in 0..PAGE_TOKENS {
        layout.read_token(page, side, token, &mut codes, &mut scales)?;
        rows.codes.extend(pack_row(&codes)?);
        for &(scale, offset) in &scales {
            let scale = layout.scale_type().to_f32(scale);
            let scale = if scale == 0.0 { SMALLEST_SCALE } else { scale };
            rows.scales_zeros.extend([scale, layout.scale_type().to_f32(offset) / scale]);
        }
    }
    Ok(rows)
}

/// Writes one side of one of our pages from the reference's layout.
pub(crate) fn to_page(
    layout: &CodeLayout,
    side: Side,
    rows: &QuarteredRows,
    page: &mut [u8],
) -> Result<(), CodecError> {
    check_two_bits(layout)?;
    check_quarters(layout.head_dim())?;
    check_length("bytes of quartered codes", PAGE_TOKENS * layout.head_dim() / 4, rows.codes.len())?;
    check_length("scales and zeros", PAGE_TOKENS * layout.groups() * 2, rows.scales_zeros.len())?;
    check_length("bytes of a 2-bit page", layout.page_bytes(), page.len())?;
    let codes = rows.codes.chunks_exact(layout.head_dim() / 4);
    let scales = rows.scales_zeros.chunks_exact(layout.groups() * 2);
    for (token, (codes, scales)) in codes.zip(scales).enumerate() {
        let scales: Vec<_> = scales
            .chunks_exact(2)
            .map(|pair| {
                (layout.scale_type().to_bits(pair[0]), layout.scale_type().to_bits(pair[0] * pair[1]))
            })
            .collect();
        layout.write_token(page, side, token, &unpack_row(codes), &scales)?;
    }
    Ok(())
}

fn check_two_bits(layout: &CodeLayout) -> Result<(), CodecError> {
    check_length("bits of a quartered code", 2, layout.bits() as usize)
}

fn check_quarters(head_dim: usize) -> Result<(), CodecError> {
    if head_dim > 0 && head_dim.is_multiple_of(4) {
        Ok(())
    } else {
        Err(CodecError::HeadDim {
            head_dim,
            reason: "the quartered layout needs a multiple of four channels",
        })
    }
}

fn check_length(what: &'static str, expected: usize, got: usize) -> Result<(), CodecError> {
    if expected == got { Ok(()) } else { Err(CodecError::Shape { what, expected, got }) }
}

#[test]
fn the_worked_example_of_eight_channels() {
    let codes = [0, 1, 2, 3, 1, 0, 3, 2];
    let bytes = pack_row(&codes).unwrap();
    // byte0 = c0 | c2<<2 | c4<<4 | c6<<6; byte1 = c1 | c3<<2 | c5<<4 | c7<<6.
    assert_eq!(bytes, [2 << 2 | 1 << 4 | 3 << 6, 1 | 3 << 2 | 2 << 6]);
    assert_eq!(unpack_row(&bytes), codes);
    assert!(pack_row(&[0; 6]).is_err());
}
