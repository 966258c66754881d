//! Whole pages: where each code lies, that both layouts hold the same codes, and what a reader gets back.

use crate::support::{random_rotation, relative_error};
use oscar_codec::quantise::{RowFormat, quantise_row};
use oscar_codec::{
    CacheCodec, CodeLayout, CodecError, Composition, Fp8Layout, HeadEncoder, HeadIndex, HeadTransform,
    KvGeometry, PAGE_TOKENS, PageCodec, PageLayout, RowEncoder, Rule, ScaleType, Side, SquareMatrix,
    hadamard,
};
use oscar_random::Random;
use proptest::prelude::*;

const HEAD: HeadIndex = HeadIndex { layer: 0, head: 0 };
const SIDES: [Side; 2] = [Side::Key, Side::Value];

/// A codec of one head.
fn one_head(layout: CodeLayout, transform: HeadTransform, rule: Rule, published: bool) -> PageCodec {
    let geometry = KvGeometry { layers: 1, kv_heads: 1, head_dim: layout.head_dim() };
    let encoders = vec![HeadEncoder::codes(transform, layout, rule, published)];
    PageCodec::new("test", geometry, encoders.clone(), encoders).unwrap()
}

fn code_layout(codec: &PageCodec) -> CodeLayout {
    let PageLayout::Codes(layout) = codec.layout(0) else { panic!("a page of codes") };
    layout
}

fn row_format(codec: &PageCodec, side: Side) -> RowFormat {
    let RowEncoder::Codes(rows) = codec.encoder(HEAD, side).unwrap().rows else { panic!("rows of codes") };
    rows.row_format()
}

/// A page of raw rows.
fn encode_page(codec: &PageCodec, keys: &[f32], values: &[f32]) -> Vec<u8> {
    let mut page = vec![0; codec.head_bytes(0)];
    codec.encode_rows(HEAD, Side::Key, 0, keys, &mut page).unwrap();
    codec.encode_rows(HEAD, Side::Value, 0, values, &mut page).unwrap();
    page
}

fn codec(dim: usize, groups: usize, rule: Rule, published: bool) -> PageCodec {
    let rotation = Composition::RHPbr.compose(&random_rotation(dim, 9));
    let transform = if published {
        HeadTransform::published(&rotation).unwrap()
    } else {
        let mean = Random::new(8).normal_vec(dim);
        HeadTransform::new(Some(mean), &rotation).unwrap()
    };
    one_head(CodeLayout::new(2, dim, groups).unwrap(), transform, rule, published)
}

/// The documented word layout, read with shifts and masks and none of the crate's code.
#[test]
fn codes_lie_where_the_documentation_says() {
    for (bits, dim) in [32, 64, 96, 128, 256].into_iter().flat_map(|dim| [(2_usize, dim), (4, dim)]) {
        let layout = CodeLayout::new(bits as u32, dim, 1).unwrap();
        let (per_word, levels) = (32 / bits, 1 << bits);
        let mut page = vec![0; layout.page_bytes()];
        let mut random = Random::new(dim as u64);
        let mut expected = [vec![0_u8; 64 * dim], vec![0_u8; 64 * dim]];
        for (side, codes) in SIDES.into_iter().zip(&mut expected) {
            codes.iter_mut().for_each(|code| *code = (random.fraction() * f64::from(levels)) as u8);
            for (token, codes) in codes.chunks(dim).enumerate() {
                layout
                    .write_token(&mut page, side, token, codes, &[(token as u16, 1000 + token as u16)])
                    .unwrap();
            }
        }
        let words: Vec<u32> = page.chunks(4).map(|w| u32::from_le_bytes([w[0], w[1], w[2], w[3]])).collect();
        for token in 0..64 {
            for channel in 0..dim {
                let (block, inner) = (channel / per_word, channel % per_word);
                let key = words[block * 64 + token] >> (8 * (inner % 4) + bits * (inner / 4)) & (levels - 1);
                assert_eq!(key as u8, expected[0][token * dim + channel], "K d={dim} {token} {channel}");
                let (block, inner) = (token / per_word, token % per_word);
                let word = words[(64 / per_word + block) * dim + channel];
                let value = word >> (8 * (inner % 4) + bits * (inner / 4)) & (levels - 1);
                assert_eq!(value as u8, expected[1][token * dim + channel], "V d={dim} {token} {channel}");
            }
            let scales = &page[64 * 2 * dim * bits / 8..];
            let u16_at = |i: usize| u16::from_le_bytes([scales[2 * i], scales[2 * i + 1]]);
            for side in 0..2 {
                assert_eq!(u16_at(side * 128 + token), token as u16);
                assert_eq!(u16_at(side * 128 + 64 + token), 1000 + token as u16);
            }
        }
    }
}

/// Every code and every scale byte of a page belongs to exactly one place.
#[test]
fn a_page_has_no_holes_and_no_overlaps() {
    let shapes = [(32, 1), (48, 3), (64, 4), (96, 3), (128, 2), (256, 16)];
    for (bits, (dim, groups)) in shapes.into_iter().flat_map(|shape| [(2, shape), (4, shape)]) {
        let layout = CodeLayout::new(bits, dim, groups).unwrap();
        let padded = dim.next_multiple_of(32);
        assert_eq!(layout.page_bytes(), 128 * padded * bits as usize / 8 + 512 * groups);
        let mask = layout.largest_code();
        let mut used = vec![0_u8; layout.page_bytes()];
        for side in SIDES {
            for token in 0..PAGE_TOKENS {
                for channel in 0..layout.padded_dim() {
                    let (byte, shift) = layout.code_position(side, token, channel);
                    assert_eq!(used[byte] >> shift & mask, 0);
                    used[byte] |= mask << shift;
                }
                for group in 0..groups {
                    let at = layout.scale_position(side, token, group);
                    for byte in [at, at + 1, at + 128, at + 129] {
                        assert_eq!(used[byte], 0);
                        used[byte] = 0xff;
                    }
                }
            }
        }
        assert!(used.iter().all(|&byte| byte == 0xff), "d={dim}");
    }
}

/// 8-bit pages: the documented order, nothing twice and no hole, and rows that come back within half a step of E4M3.
#[test]
fn eight_bit_pages_lie_in_the_order_of_bf16_pages() {
    for dim in [32, 48, 64, 96, 128, 256] {
        let layout = Fp8Layout::new(dim).unwrap();
        let padded = dim.next_multiple_of(32);
        assert_eq!(layout.page_bytes(), 128 * (padded + 2));
        let mut used = vec![0_u8; layout.page_bytes()];
        let mut page = vec![0xa5; layout.page_bytes()];
        let mut random = Random::new(dim as u64);
        let rows = SIDES.map(|_| random.normal_vec(64 * dim));
        for token in 0..64 {
            for channel in 0..padded {
                let key = channel / 2 * 128 + 2 * token + channel % 2;
                let value = 64 * padded + token / 2 * 2 * padded + 2 * channel + token % 2;
                assert_eq!(layout.position(Side::Key, token, channel), key);
                assert_eq!(layout.position(Side::Value, token, channel), value);
                used[key] += 1;
                used[value] += 1;
            }
            for (index, side) in SIDES.into_iter().enumerate() {
                assert_eq!(layout.scale_position(side, token), 128 * padded + 128 * index + 2 * token);
                used[layout.scale_position(side, token)] += 1;
                used[layout.scale_position(side, token) + 1] += 1;
                layout.write_token(&mut page, side, token, &rows[index][token * dim..][..dim]).unwrap();
            }
        }
        assert!(used.iter().all(|&count| count == 1), "d={dim}");
        let mut read = vec![0.0; dim];
        for token in 0..64 {
            for (index, side) in SIDES.into_iter().enumerate() {
                layout.decode_token(&page, side, token, &mut read).unwrap();
                for (read, x) in read.iter().zip(&rows[index][token * dim..]) {
                    assert!((read - x).abs() <= x.abs() / 16.0 + 1e-4, "d={dim}: {read} against {x}");
                }
            }
        }
    }
    assert!(Fp8Layout::new(0).is_err());
    let layout = Fp8Layout::new(32).unwrap();
    let mut page = vec![7; layout.page_bytes()];
    let mut row = [1.0; 32];
    row[9] = f32::NAN;
    let error = layout.write_token(&mut page, Side::Key, 0, &row).unwrap_err();
    assert_eq!(error, CodecError::NotFinite { row: 0, channel: 9 });
    assert!(page.iter().all(|&byte| byte == 7));
    assert!(layout.write_token(&mut page, Side::Key, 64, &[1.0; 32]).is_err());
}

/// Ours and the reference's quartered layout hold the same codes, and converting there and back keeps every byte.
#[test]
fn both_layouts_hold_the_same_codes() {
    for (dim, groups, rule, published) in [
        (64, 1, Rule::Clip(0.96), true),
        (128, 1, Rule::Search, false),
        (128, 4, Rule::Clip(0.92), true),
        (96, 3, Rule::Gaussian, false),
        (48, 1, Rule::MIN_MAX, false),
        (256, 16, Rule::Gaussian, false),
    ] {
        let codec = codec(dim, groups, rule, published);
        let layout = &code_layout(&codec);
        let mut random = Random::new(11);
        let mut keys = random.normal_vec(64 * dim);
        // A constant row: its f16 scale underflows under the published rule.
        keys[..dim].fill(0.0);
        let page = encode_page(&codec, &keys, &random.normal_vec(64 * dim));
        let mut back = vec![0; page.len()];
        for side in SIDES {
            let reference = crate::quartered::from_page(layout, side, &page).unwrap();
            assert_eq!(reference.codes.len(), 64 * dim / 4);
            for token in 0..64 {
                let mut ours = vec![0; dim];
                layout.read_token(&page, side, token, &mut ours, &mut vec![(0, 0); groups]).unwrap();
                let row = &reference.codes[token * dim / 4..][..dim / 4];
                for channel in 0..dim {
                    let theirs = row[channel % (dim / 4)] >> (2 * (channel / (dim / 4))) & 3;
                    assert_eq!(theirs, ours[channel], "d={dim} {side:?} token {token} channel {channel}");
                }
                // The reference reads (code - zero) · scale; that must be what we read.
                let mut read = vec![0.0; dim];
                layout.decode_token(&page, side, token, &mut read).unwrap();
                for (channel, read) in read.iter().enumerate() {
                    let pair = 2 * (token * groups + channel / (dim / groups));
                    let (scale, zero) = (reference.scales_zeros[pair], reference.scales_zeros[pair + 1]);
                    let theirs = (f32::from(ours[channel]) - zero) * scale;
                    assert!((theirs - read).abs() <= 1e-5 * (1.0 + read.abs()), "{theirs} against {read}");
                }
            }
            crate::quartered::to_page(layout, side, &reference, &mut back).unwrap();
        }
        assert!(page == back, "d={dim}: converting there and back changed the page");
    }
}

#[test]
fn padding_is_counted_and_changes_nothing() {
    let codec = codec(48, 1, Rule::Clip(0.92), false);
    let rows = Random::new(12).normal_vec(64 * 48);
    let page = encode_page(&codec, &rows, &rows);
    assert_eq!(page.len(), 2560);
    assert_eq!(codec.token_bytes(48), 40.0);
    let layout = code_layout(&codec);
    let encoder = codec.encoder(HEAD, Side::Key).unwrap();
    for (token, row) in rows.chunks(48).enumerate() {
        for channel in 48..64 {
            for side in SIDES {
                let (byte, shift) = layout.code_position(side, token, channel);
                assert_eq!(page[byte] >> shift & 3, 0);
            }
        }
        // The scale is that of the 48 real channels.
        let mut rotated = [0.0; 48];
        encoder.transform.apply(row, &mut rotated);
        let format = RowFormat::int2(1, Rule::Clip(0.92), ScaleType::F16);
        let (mut codes, mut scales) = ([0; 48], [(0, 0)]);
        quantise_row(&rotated, &format, &mut codes, &mut scales).unwrap();
        let (mut page_codes, mut page_scales) = ([0; 48], [(0, 0)]);
        layout.read_token(&page, Side::Key, token, &mut page_codes, &mut page_scales).unwrap();
        assert_eq!((codes, scales), (page_codes, page_scales));
    }
}

/// One encoder: a row gives the same bytes wherever and with whomever it is encoded.
#[test]
fn a_token_encodes_the_same_whichever_way_its_page_is_sealed() {
    for published in [false, true] {
        let codec = codec(64, 1, Rule::Clip(0.96), published);
        let rows = Random::new(13).normal_vec(64 * 64);
        let page = encode_page(&codec, &rows, &rows);
        let mut pieces = vec![0xa5; page.len()];
        let mut rotated = [0.0; 64];
        for side in SIDES {
            for token in (0..64).rev() {
                let encoder = codec.encoder(HEAD, side).unwrap();
                encoder.transform.apply(&rows[token * 64..][..64], &mut rotated);
                encoder.rows.write_token(&mut pieces, side, token, &rotated).unwrap();
            }
        }
        assert!(page == pieces);
    }
}

#[test]
fn identity_rotation_without_clip_is_the_bare_quantiser() {
    let dim = 64;
    let layout = CodeLayout::new(2, dim, 4).unwrap().with_scales(ScaleType::Bf16);
    let codec = one_head(layout, HeadTransform::identity(dim), Rule::MIN_MAX, true);
    let rows: Vec<f32> =
        Random::new(14).normal_vec(64 * dim).iter().map(|&x| half::bf16::from_f32(x).to_f32()).collect();
    let page = encode_page(&codec, &rows, &rows);
    let format = row_format(&codec, Side::Key);
    for (token, row) in rows.chunks(dim).enumerate() {
        let (mut codes, mut scales) = (vec![0; dim], vec![(0, 0); 4]);
        quantise_row(row, &format, &mut codes, &mut scales).unwrap();
        for side in SIDES {
            let (mut read, mut read_scales) = (vec![0; dim], vec![(0, 0); 4]);
            layout.read_token(&page, side, token, &mut read, &mut read_scales).unwrap();
            assert_eq!((&codes, &scales), (&read, &read_scales));
        }
    }
}

/// The reference's own round-trip bar: random rotations, 8 groups, ratio 0.99, mean cosine above 0.85.
#[test]
fn rotated_rows_come_back() {
    for published in [false, true] {
        let codec = codec(128, 8, Rule::Clip(0.99), published);
        let rows = Random::new(15).normal_vec(256 * 128);
        let mut back = rows.clone();
        codec.round_trip(HEAD, Side::Key, 0, &mut back).unwrap();
        let cosines = rows.chunks(128).zip(back.chunks(128)).map(|(a, b)| {
            let dot = |x: &[f32], y: &[f32]| x.iter().zip(y).map(|(x, y)| f64::from(x * y)).sum::<f64>();
            dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()
        });
        let mean = cosines.sum::<f64>() / 256.0;
        assert!(mean > 0.85, "{mean}");
    }
}

#[test]
fn rotation_and_centring_pay_where_they_should() {
    let mut random = Random::new(16);
    let dim = 64;
    // A few loud channels and a large constant per channel, as real keys have.
    let mean: Vec<f32> = random.normal_vec(dim).iter().map(|x| 20.0 * x).collect();
    let rows: Vec<f32> = (0..256 * dim)
        .map(|i| mean[i % dim] + random.normal() as f32 * if i % dim < 3 { 8.0 } else { 1.0 })
        .collect();
    let error = |mean: Option<Vec<f32>>, rotation: &SquareMatrix| {
        let transform = HeadTransform::new(mean, rotation).unwrap();
        let codec = one_head(CodeLayout::new(2, dim, 1).unwrap(), transform, Rule::Search, false);
        let mut back = rows.clone();
        codec.round_trip(HEAD, Side::Key, 0, &mut back).unwrap();
        rows.iter().zip(back).map(|(a, b)| f64::from(a - b).powi(2)).sum::<f64>() / rows.len() as f64
    };
    let h = hadamard::matrix(dim);
    let centred = error(Some(mean.clone()), &h);
    let centred_unrotated = error(Some(mean), &SquareMatrix::identity(dim));
    let plain = error(None, &h);
    assert!(centred < 0.1 * plain, "centring: {centred} against {plain}");
    assert!(centred < centred_unrotated, "rotation: {centred} against {centred_unrotated}");
}

#[test]
fn bad_rows_are_named_and_nothing_changes() {
    let codec = codec(64, 1, Rule::Search, false);
    let mut rows = Random::new(17).normal_vec(100 * 64);
    rows[70 * 64 + 9] = f32::NAN;
    let before: Vec<u32> = rows.iter().map(|x| x.to_bits()).collect();
    for side in SIDES {
        let error = codec.round_trip(HEAD, side, 0, &mut rows).unwrap_err();
        assert_eq!(error, CodecError::NotFinite { row: 70, channel: 9 });
        assert!(rows.iter().map(|x| x.to_bits()).eq(before.iter().copied()));
    }
    let mut page = vec![0x5a; codec.head_bytes(0)];
    assert!(codec.encode_rows(HEAD, Side::Key, 0, &rows[64 * 64..80 * 64], &mut page).is_err());
    assert!(page.iter().all(|&byte| byte == 0x5a));
    // Finite input whose rotation overflows is refused too, not stored as infinity.
    let huge = vec![f32::MAX; 64];
    assert!(matches!(
        codec.encode_rows(HEAD, Side::Key, 0, &huge, &mut page),
        Err(CodecError::NotFinite { row: 0, .. })
    ));
}

#[test]
fn wrong_heads_and_shapes_are_refused() {
    let codec = codec(64, 1, Rule::Search, false);
    let mut page = vec![0; codec.head_bytes(0)];
    for (layer, head) in [(0, 1), (1, 0)] {
        let error = codec.encode_rows(HeadIndex { layer, head }, Side::Key, 0, &[], &mut page).unwrap_err();
        assert!(matches!(error, CodecError::UnknownHead { .. }), "{error}");
    }
    assert!(codec.encode_rows(HEAD, Side::Key, 0, &[0.0; 63], &mut page).is_err());
    assert!(codec.encode_rows(HEAD, Side::Key, 0, &[0.0; 65 * 64], &mut page).is_err());
    assert!(codec.encode_rows(HEAD, Side::Key, 0, &[0.0; 64], &mut page[1..]).is_err());
    assert!(
        CodeLayout::new(2, 64, 3).is_err()
            && CodeLayout::new(2, 0, 1).is_err()
            && CodeLayout::new(4, 64, 0).is_err()
    );
    assert!(CodeLayout::new(3, 64, 1).is_err() && CodeLayout::new(8, 64, 1).is_err());
    let wide = CodeLayout::new(4, 64, 1).unwrap();
    let wide_page = vec![0; wide.page_bytes()];
    assert!(crate::quartered::from_page(&wide, Side::Key, &wide_page).is_err());
    let encoder = |bits| {
        let layout = CodeLayout::new(bits, 64, 1).unwrap();
        HeadEncoder::codes(HeadTransform::identity(64), layout, Rule::MIN_MAX, false)
    };
    let build = |head_dim, layers, kv_heads, keys: usize, values: usize| {
        let encoders = |count| (0..count).map(|_| encoder(2)).collect::<Vec<_>>();
        let geometry = KvGeometry { layers, kv_heads, head_dim };
        PageCodec::new("x", geometry, encoders(keys), encoders(values))
    };
    assert!(build(64, 2, 2, 4, 4).is_ok());
    assert!(build(64, 2, 2, 3, 3).is_err() && build(64, 2, 1, 2, 1).is_err());
    assert!(build(128, 1, 1, 1, 1).is_err() && build(64, 0, 0, 0, 0).is_err());
    // Heads of a layer have one layout; layers may differ.
    let geometry = |layers, kv_heads| KvGeometry { layers, kv_heads, head_dim: 64 };
    let mixed = || vec![encoder(2), encoder(4)];
    let error = PageCodec::new("x", geometry(1, 2), mixed(), mixed()).unwrap_err();
    assert_eq!(error, CodecError::MixedLayouts { layer: 0 });
    assert!(PageCodec::new("x", geometry(2, 1), mixed(), mixed()).is_ok());
    assert!(PageCodec::new("x", geometry(1, 1), vec![encoder(2)], vec![encoder(4)]).is_err());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    /// A rotation keeps the norm of a row (to bf16) and undoing it gives the row back.
    #[test]
    fn rotations_keep_norms(seed: u64, dim in prop::sample::select(vec![32_usize, 48, 64, 96, 128])) {
        let rotation = Composition::RHPbr.compose(&random_rotation(dim, seed));
        let transform = HeadTransform::new(None, &rotation).unwrap();
        let row = Random::new(seed).normal_vec(dim);
        let (mut rotated, mut back) = (vec![0.0; dim], vec![0.0; dim]);
        transform.apply(&row, &mut rotated);
        let norm = |row: &[f32]| row.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>().sqrt();
        prop_assert!((norm(&rotated) / norm(&row) - 1.0).abs() < 4e-3);
        transform.undo(&rotated, &mut back);
        prop_assert!(relative_error(&row, &back) < 1e-5);
    }

    /// What a page decodes to is what its codes and scales say, for every shape.
    #[test]
    fn pages_round_trip(
        seed: u64,
        (dim, groups) in prop::sample::select(vec![(32, 2), (48, 1), (64, 1), (64, 4), (96, 1), (128, 2)]),
        tokens in 1_usize..=64,
        published: bool,
    ) {
        let codec = codec(dim, groups, Rule::Clip(0.96), published);
        let mut rows = Random::new(seed).normal_vec(tokens * dim);
        let exact = rows.clone();
        codec.round_trip(HEAD, Side::Value, 0, &mut rows).unwrap();
        prop_assert!(rows.iter().all(|x| x.is_finite()));
        prop_assert!(relative_error(&exact, &rows) < 0.75);
        let mut page = vec![0; codec.head_bytes(0)];
        codec.encode_rows(HEAD, Side::Value, 0, &exact, &mut page).unwrap();
        let mut decoded = vec![0.0; tokens * dim];
        codec.decode_rows(HEAD, Side::Value, 0, &page, &mut decoded).unwrap();
        prop_assert_eq!(decoded, rows);
    }
}
