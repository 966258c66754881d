//! The sealer on every path against the scalar codec, byte for byte.

use std::sync::Arc;

use half::bf16;
use oscar_codec::quantise::{RowFormat, quantise_row};
use oscar_codec::{
    BandLayout, BandRows, CodeLayout, CodecError, HeadEncoder, HeadIndex, HeadTransform, KeyTurning,
    KeyWidths, KvGeometry, PAGE_TOKENS, PageCodec, PageMeans, RopeLayout, RowEncoder, Rule, ScaleType, Side,
    SquareMatrix,
};

use super::kernel::Quantise;
use super::pack::Placement;
use super::quantise::BlockCodes;
use super::tests::{Noise, RULES};
use super::{SealScratch, Sealer};
use crate::cpu::attention::page::{page_elements, write_token};
use crate::cpu::isa::Isa;
use crate::cpu::simd::Simd;

const DIMS: [usize; 6] = [32, 48, 64, 96, 128, 256];
const SIDES: [Side; 2] = [Side::Key, Side::Value];
const HEADS: [HeadIndex; 2] = [HeadIndex { layer: 0, head: 1 }, HeadIndex { layer: 1, head: 0 }];

fn geometry(head_dim: usize) -> KvGeometry {
    KvGeometry { layers: 2, kv_heads: 2, head_dim }
}

fn int2(dim: usize, groups: usize, rule: Rule, published: bool) -> PageCodec {
    let mut noise = Noise::new(dim as u64);
    let scales = if groups == 4 { ScaleType::Bf16 } else { ScaleType::F16 };
    let layout = CodeLayout::new(2, dim, groups).unwrap().with_scales(scales);
    let mut encoders = |centred: bool| -> Vec<HeadEncoder> {
        let mut encoder = || {
            let rotation = noise.rotation(dim);
            let transform = if published {
                HeadTransform::published(&rotation)
            } else {
                HeadTransform::new(centred.then(|| noise.rows(dim)), &rotation)
            };
            HeadEncoder::codes(transform.unwrap(), layout, rule, published)
        };
        (0..4).map(|_| encoder()).collect()
    };
    let (keys, values) = (encoders(true), encoders(groups == 2));
    PageCodec::new("test", geometry(dim), keys, values).unwrap()
}

/// Keys in bands, with matrices that are no rotations, and centred values.
fn banded(layout: BandLayout) -> PageCodec {
    let dim = layout.head_dim();
    let mut noise = Noise::new(3 * dim as u64);
    let rows = RowEncoder::Banded(BandRows { layout, value_rule: Rule::Search });
    let mut encoder = |general: bool| {
        let (mean, rotation) = (Some(noise.rows(dim)), noise.rotation(dim));
        let transform = if general {
            let scaled = SquareMatrix::from_fn(dim, |i, j| rotation.get(i, j) * 0.97_f64.powi(j as i32));
            HeadTransform::general(mean, &scaled)
        } else {
            HeadTransform::new(mean, &rotation)
        };
        HeadEncoder { transform: transform.unwrap(), rows, page_means: None }
    };
    let keys = (0..4).map(|_| encoder(true)).collect();
    let values = (0..4).map(|_| encoder(false)).collect();
    PageCodec::new("bands", geometry(dim), keys, values).unwrap()
}

/// A 2-bit codec of one head.
fn one_head(transform: HeadTransform, rule: Rule) -> PageCodec {
    let layout = CodeLayout::new(2, transform.dim(), 1).unwrap();
    let geometry = KvGeometry { layers: 1, kv_heads: 1, head_dim: transform.dim() };
    let encoders = vec![HeadEncoder::codes(transform, layout, rule, false)];
    PageCodec::new("x", geometry, encoders.clone(), encoders).unwrap()
}

fn means(dim: usize) -> Vec<Vec<f32>> {
    let mut noise = Noise::new(77);
    (0..4).map(|_| noise.rows(dim).iter().map(|x| 5.0 * x).collect()).collect()
}

fn codecs(dim: usize) -> Vec<PageCodec> {
    let geometry = geometry(dim);
    let of_widths = KeyWidths::menu(dim).map(|widths| banded(BandLayout::of_widths(dim, widths).unwrap()));
    let others = vec![
        int2(dim, 1, Rule::Search, false),
        int2(dim, 2, Rule::Gaussian, false),
        int2(dim, 4, Rule::Clip(0.92), false),
        int2(dim, 1, Rule::Clip(0.96), true),
        banded(BandLayout::int15(dim).unwrap()),
        banded(BandLayout::high(dim).unwrap()),
        int2(dim, 2, Rule::Search, false).high().unwrap(),
        PageCodec::int4(geometry, None).unwrap(),
        PageCodec::int4(geometry, Some(means(dim))).unwrap(),
        PageCodec::fp8(geometry, None).unwrap(),
        PageCodec::fp8(geometry, Some(means(dim))).unwrap(),
        PageCodec::int4(geometry, None).unwrap().keep_bf16(&[1]).unwrap(),
    ];
    of_widths.chain(others).collect()
}

/// The paths of this machine, and the portable one that NEON machines run.
fn sealers(codec: PageCodec) -> Vec<(String, Sealer)> {
    let codec = Arc::new(codec);
    let make = |isa| Sealer::new(isa, codec.clone());
    let mut sealers: Vec<_> = Isa::available().map(|isa| (isa.to_string(), make(isa))).collect();
    let mut portable = make(Isa::Scalar);
    portable.simd = Simd::portable();
    sealers.push(("portable".into(), portable));
    sealers
}

fn bits(rows: &[f32]) -> Vec<u32> {
    rows.iter().map(|x| x.to_bits()).collect()
}

/// A bf16 page and the rows it holds.
fn page(dim: usize, keys: &[f32], values: &[f32]) -> (Vec<u16>, [Vec<f32>; 2]) {
    let mut page = vec![0; page_elements(dim)];
    for (token, (key, value)) in keys.chunks(dim).zip(values.chunks(dim)).enumerate() {
        write_token(&mut page, dim, token, key, value);
    }
    let round = |rows: &[f32]| rows.iter().map(|&x| bf16::from_f32(x).to_f32()).collect();
    (page, [round(keys), round(values)])
}

/// Seals on all paths and compares, verdict included, with the definition.
fn check(codec: PageCodec, head: HeadIndex, keys: &[f32], values: &[f32]) -> Result<(), CodecError> {
    let dim = codec.geometry().head_dim;
    let (page, [keys, values]) = page(dim, keys, values);
    let mut expected = vec![0xa5; codec.head_bytes(head.layer)];
    let verdict = codec.seal_page(head, &keys, &values, &mut expected);
    let format = codec.layout(head.layer);
    let mut scratch = SealScratch::default();
    for (path, sealer) in sealers(codec) {
        let mut out = vec![0xa5; expected.len()];
        assert_eq!(
            sealer.seal(head, None, &page, &mut out, &mut scratch),
            verdict,
            "{format:?} d={dim} {path}"
        );
        if let Some(at) = out.iter().zip(&expected).position(|(a, b)| a != b) {
            panic!("{format:?} d={dim} {path}: byte {at} is {:02x} not {:02x}", out[at], expected[at]);
        }
    }
    verdict
}

#[test]
fn pages_are_those_of_the_scalar_codec() {
    for dim in DIMS {
        for codec in codecs(dim) {
            for head in HEADS {
                let mut noise = Noise::new(head.layer as u64);
                check(codec.clone(), head, &noise.rows(64 * dim), &noise.rows(64 * dim)).unwrap();
            }
        }
    }
    for dim in [2, 20, 34, 100] {
        for codec in [PageCodec::int4(geometry(dim), None), PageCodec::fp8(geometry(dim), None)] {
            let mut noise = Noise::new(3);
            check(codec.unwrap(), HEADS[0], &noise.rows(64 * dim), &noise.rows(64 * dim)).unwrap();
        }
    }
}

#[test]
fn degenerate_pages() {
    for dim in [48, 64, 128] {
        let mut noise = Noise::new(4);
        let mut rows = noise.rows(64 * dim);
        let mut row = |token: usize, f: &dyn Fn(usize, f32) -> f32| {
            for (channel, x) in rows[token * dim..][..dim].iter_mut().enumerate() {
                *x = f(channel, *x);
            }
        };
        row(0, &|_, _| 0.0);
        row(1, &|_, _| -0.0);
        row(2, &|_, _| 2.5);
        row(3, &|_, _| -1e-30);
        row(17, &|channel, x| if channel == 5 { 3e4 } else { x });
        row(18, &|_, x| x + 1e6);
        row(19, &|_, x| x * 1e-40);
        row(33, &|_, x| x * 1e-7);
        row(34, &|_, x| x * 1e25);
        row(35, &|_, x| x.signum() * 3e38);
        row(62, &|channel, _| if channel % 32 == 0 { 1.0 } else { -0.0 });
        row(63, &|_, _| -3e38);
        let values: Vec<f32> = rows.iter().rev().copied().collect();
        for codec in codecs(dim) {
            for head in HEADS {
                check(codec.clone(), head, &rows, &values).unwrap();
            }
        }
    }
}

#[test]
fn what_is_not_finite_is_named_and_nothing_is_written() {
    let dim = 64;
    for codec in codecs(dim) {
        for bad in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MAX] {
            for (row, channel) in [(0, 0), (3, 63), (38, 5), (63, 31)] {
                let mut noise = Noise::new(6);
                let good = noise.rows(64 * dim);
                let mut broken = good.clone();
                broken[row * dim + channel] = bad;
                // A second one further on must not be the one that is named.
                broken[63 * dim + 40] = f32::NAN;
                for (keys, values) in [(&broken, &good), (&good, &broken)] {
                    let error = check(codec.clone(), HEADS[1], keys, values).unwrap_err();
                    assert_eq!(error, CodecError::NotFinite { row, channel });
                }
            }
        }
    }
}

#[test]
fn wrong_shapes_are_refused() {
    for (path, sealer) in sealers(PageCodec::int4(geometry(64), None).unwrap()) {
        let mut scratch = SealScratch::default();
        let page = vec![0; page_elements(64)];
        let mut out = vec![0; sealer.codec().head_bytes(0)];
        let short = out.len() - 1;
        assert!(sealer.seal(HEADS[0], None, &page[1..], &mut out, &mut scratch).is_err(), "{path}");
        assert!(sealer.seal(HEADS[0], None, &page, &mut out[..short], &mut scratch).is_err(), "{path}");
        let outside = HeadIndex { layer: 2, head: 0 };
        assert!(sealer.seal(outside, None, &page, &mut out, &mut scratch).is_err(), "{path}");
    }
    for (_, sealer) in sealers(PageCodec::fp8(geometry(33), None).unwrap()) {
        let mut out = vec![0; sealer.codec().head_bytes(0)];
        let error = sealer.seal(HEADS[0], None, &[0; 2 * 64 * 33], &mut out, &mut SealScratch::default());
        assert!(matches!(error, Err(CodecError::HeadDim { head_dim: 33, .. })));
    }
}

/// Four bits under every rule and in groups, which no codec above has.
#[test]
fn four_bit_blocks_are_those_of_the_scalar_quantiser() {
    for (dim, groups) in [(48, 3), (64, 1), (64, 4), (128, 2)] {
        let layout = CodeLayout::new(4, dim, groups).unwrap();
        for rule in RULES {
            for (published, scale_type) in
                [(false, ScaleType::F16), (true, ScaleType::F16), (false, ScaleType::Bf16)]
            {
                let format = RowFormat { groups, rule, scale_type, published, levels: 16 };
                for count in [1, 5, 8, 16, 30, 64] {
                    let rows = Noise::new(count as u64).rows(count * dim);
                    let mut blocks = vec![0.0; count.next_multiple_of(16) * dim];
                    for (at, x) in rows.iter().enumerate() {
                        let (row, channel) = (at / dim, at % dim);
                        blocks[(row / 16 * dim + channel) * 16 + row % 16] = *x;
                    }
                    for side in SIDES {
                        let mut expected = vec![0xa5; layout.page_bytes()];
                        for (token, row) in rows.chunks(dim).enumerate() {
                            let (mut codes, mut scales) = (vec![0; dim], vec![(0, 0); groups]);
                            quantise_row(row, &format, &mut codes, &mut scales).unwrap();
                            layout.write_token(&mut expected, side, token, &codes, &scales).unwrap();
                        }
                        for simd in Isa::available().map(Simd::new).chain([Simd::portable()]) {
                            let mut page = vec![0xa5; expected.len()];
                            let kernel = Quantise {
                                format: &format,
                                place: Placement::of(&layout, side),
                                dim: layout.head_dim(),
                                rows: count,
                                rotated: &blocks,
                                codes: &mut BlockCodes::default(),
                                page: &mut page,
                            };
                            simd.run(kernel);
                            assert!(
                                page == expected,
                                "{rule} d={dim} groups={groups} {count} {side:?} {simd:?}"
                            );
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn rows_are_transformed_as_the_definition_says() {
    for dim in [20, 33].into_iter().chain(DIMS) {
        let codecs = if DIMS.contains(&dim) {
            codecs(dim)
        } else {
            vec![PageCodec::int4(geometry(dim), Some(means(dim))).unwrap()]
        };
        for codec in codecs {
            for (path, sealer) in sealers(codec) {
                let mut scratch = SealScratch::default();
                // The scalar product is slow; large heads need few rows to show a difference.
                let counts = match dim {
                    64 => vec![0, 1, 2, 3, 4, 5, 6, 7, 8, 13, 48, 49, 100],
                    256 => vec![1, 7],
                    _ => vec![1, 2, 9, 49],
                };
                for count in counts {
                    let mut rows = Noise::new(dim as u64).rows(count * dim);
                    rows.iter_mut().step_by(7).for_each(|x| *x = -0.0);
                    for side in SIDES {
                        let transform = sealer.codec().transform(HEADS[1], side).unwrap();
                        let mut expected = vec![0.0; rows.len()];
                        for (row, out) in rows.chunks(dim).zip(expected.chunks_mut(dim)) {
                            transform.apply(row, out);
                        }
                        let mut got = rows.clone();
                        sealer.transform_rows(HEADS[1], side, &mut got, &mut scratch);
                        assert_eq!(bits(&got), bits(&expected), "{path} d={dim} {count} {side:?}");
                        assert_eq!(sealer.is_identity(HEADS[1], side), transform.is_identity());
                    }
                }
            }
        }
    }
}

#[test]
fn queries_follow_the_keys_and_values_come_back() {
    for dim in [20, 33, 40].into_iter().chain(DIMS) {
        let codec = if dim.is_multiple_of(2) && dim != 20 {
            int2(dim, 2, Rule::Gaussian, false)
        } else {
            PageCodec::int4(geometry(dim), Some(means(dim))).unwrap()
        };
        let head = HEADS[1];
        for count in [1, 2, 3, 6, 7, 12, 50] {
            let rows = Noise::new(count as u64).rows(count * dim);
            let multiply = |matrix: &[f32], row: &[f32]| -> Vec<f32> {
                (0..dim)
                    .map(|j| (0..dim).fold(0.0, |sum, i| row[i].mul_add(matrix[i * dim + j], sum)))
                    .collect()
            };
            let keys = codec.transform(head, Side::Key).unwrap();
            let queries: Vec<f32> =
                rows.chunks(dim).flat_map(|row| multiply(keys.query_matrix(), row)).collect();
            let values = codec.transform(head, Side::Value).unwrap();
            let mut undone = vec![0.0; rows.len()];
            for (row, out) in rows.chunks(dim).zip(undone.chunks_mut(dim)) {
                values.undo(row, out);
            }
            for (path, sealer) in sealers(codec.clone()) {
                let mut scratch = SealScratch::default();
                let mut got = rows.clone();
                sealer.rotate_queries(head, &mut got, &mut scratch);
                assert_eq!(bits(&got), bits(&queries), "{path} d={dim} {count}");
                let mut got = rows.clone();
                sealer.undo_values(head, &mut got, &mut scratch);
                for (got, expected) in got.iter().zip(&undone) {
                    assert!((got - expected).abs() < 1e-4, "{path} d={dim} {count}: {got} {expected}");
                }
            }
        }
    }
}

#[test]
fn identities_leave_queries_and_values_alone() {
    let dim = 48;
    let rows = Noise::new(9).rows(5 * dim);
    for (path, sealer) in sealers(PageCodec::fp8(geometry(dim), Some(means(dim))).unwrap()) {
        let mut scratch = SealScratch::default();
        assert!(!sealer.is_identity(HEADS[0], Side::Key) && sealer.is_identity(HEADS[0], Side::Value));
        let mut got = rows.clone();
        sealer.rotate_queries(HEADS[0], &mut got, &mut scratch);
        sealer.undo_values(HEADS[0], &mut got, &mut scratch);
        assert_eq!(got, rows, "{path}");
    }
    // A mean of values without a rotation is still added.
    let identity = SquareMatrix::identity(dim);
    let transform = HeadTransform::new(Some(vec![1.5; dim]), &identity).unwrap();
    let codec = one_head(transform, Rule::Gaussian);
    for (path, sealer) in sealers(codec) {
        let mut got = rows.clone();
        sealer.undo_values(HeadIndex { layer: 0, head: 0 }, &mut got, &mut SealScratch::default());
        for (got, x) in got.iter().zip(&rows) {
            assert!((got - x - 1.5).abs() < 1e-5, "{path}");
        }
    }
}

/// A broken activation must reach the seal, not be rounded into a number.
#[test]
fn broken_rows_stay_broken() {
    for dim in [48, 64, 100] {
        for codec in [
            PageCodec::int4(geometry(dim), Some(means(dim))).unwrap(),
            PageCodec::fp8(geometry(dim), None).unwrap(),
        ] {
            for (path, sealer) in sealers(codec) {
                for bad in [f32::NAN, f32::from_bits(0x7fff_ffff), f32::from_bits(0xffff_ffff), f32::INFINITY]
                {
                    let mut rows = Noise::new(10).rows(7 * dim);
                    rows[5 * dim + 17] = bad;
                    sealer.transform_rows(HEADS[0], Side::Key, &mut rows, &mut SealScratch::default());
                    let broken = |row: &[f32]| row.iter().any(|x| !bf16::from_f32(*x).is_finite());
                    for (index, row) in rows.chunks(dim).enumerate() {
                        assert_eq!(broken(row), index == 5, "{path} d={dim}");
                    }
                }
            }
        }
    }
}

#[test]
fn sealing_rows_that_were_transformed_gives_the_pages_of_the_scalar_codec() {
    let (dim, head) = (64, HeadIndex { layer: 0, head: 0 });
    let mut noise = Noise::new(20);
    let transform = HeadTransform::new(Some(noise.rows(dim)), &noise.rotation(dim)).unwrap();
    let codec = one_head(transform, Rule::Search);
    let (mut keys, mut values) = (noise.rows(PAGE_TOKENS * dim), noise.rows(PAGE_TOKENS * dim));
    let mut expected = vec![0; codec.head_bytes(0)];
    codec.encode_rows(head, Side::Key, 0, &keys, &mut expected).unwrap();
    codec.encode_rows(head, Side::Value, 0, &values, &mut expected).unwrap();
    let mut scratch = SealScratch::default();
    let sealer = Sealer::new(Isa::detect(), Arc::new(codec));
    sealer.transform_rows(head, Side::Key, &mut keys, &mut scratch);
    sealer.transform_rows(head, Side::Value, &mut values, &mut scratch);
    let mut out = vec![0; expected.len()];
    sealer.seal(head, None, &page(dim, &keys, &values).0, &mut out, &mut scratch).unwrap();
    assert!(out == expected);
}

/// Pages of keys in bands are centred by their own mean, on every instruction set as the definition has it.
#[test]
fn keys_are_sealed_less_the_mean_of_their_page() {
    let head = HeadIndex { layer: 0, head: 0 };
    for dim in [48, 64, 128] {
        let mut noise = Noise::new(30);
        let layout = BandLayout::int2(dim).unwrap();
        let rows = RowEncoder::Banded(BandRows { layout, value_rule: Rule::Gaussian });
        let turning = Arc::new(KeyTurning::new(vec![0.5, 0.01, 1e-4], RopeLayout::Interleaved));
        let keys = HeadEncoder {
            transform: HeadTransform::new(Some(noise.rows(dim)), &noise.rotation(dim)).unwrap(),
            rows,
            page_means: Some(PageMeans::new(&noise.rows(dim), turning).unwrap()),
        };
        let values = HeadEncoder { transform: HeadTransform::identity(dim), rows, page_means: None };
        let geometry = KvGeometry { layers: 1, kv_heads: 1, head_dim: dim };
        let codec = PageCodec::new("bands", geometry, vec![keys], vec![values]).unwrap();
        let (raw_keys, raw_values) = (noise.rows(PAGE_TOKENS * dim), noise.rows(PAGE_TOKENS * dim));
        let mut pages = Vec::new();
        for number in [0, 1, 400] {
            let mut expected = vec![0; codec.head_bytes(0)];
            codec.encode_rows(head, Side::Key, number, &raw_keys, &mut expected).unwrap();
            codec.encode_rows(head, Side::Value, number, &raw_values, &mut expected).unwrap();
            for (path, sealer) in sealers(codec.clone()) {
                let mut scratch = SealScratch::default();
                let (mut keys, mut values) = (raw_keys.clone(), raw_values.clone());
                sealer.transform_rows(head, Side::Key, &mut keys, &mut scratch);
                sealer.transform_rows(head, Side::Value, &mut values, &mut scratch);
                let mean = sealer.page_mean(head, number, &mut scratch).unwrap();
                let stored = codec.stored_page_mean(head, Side::Key, number).unwrap().unwrap();
                assert!(
                    mean.iter().zip(stored).all(|(&bits, x)| bf16::from_bits(bits).to_f32() == x),
                    "{path}"
                );
                let mut out = vec![0; expected.len()];
                sealer.seal(head, Some(&mean), &page(dim, &keys, &values).0, &mut out, &mut scratch).unwrap();
                assert!(out == expected, "{path} d={dim} page {number}");
            }
            pages.push(expected);
        }
        assert!(pages[0] != pages[1] && pages[1] != pages[2], "the mean turns");
    }
}
