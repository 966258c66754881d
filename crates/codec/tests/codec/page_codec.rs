//! Pages of a whole cache: sizes, where heads lie, and that sealing means what the codecs of the lab mean.

use crate::support::{random_rotation, relative_error};
use oscar_codec::baselines::{self, KeyMeans};
use oscar_codec::{
    BandLayout, BandRows, CacheCodec, CodeLayout, CodecError, Composition, HeadEncoder, HeadIndex,
    HeadTransform, KvGeometry, PAGE_TOKENS, PageCodec, PageLayout, RowEncoder, Rule, ScaleType, Side,
};
use oscar_random::Random;

const DIMS: [usize; 6] = [32, 48, 64, 96, 128, 256];
const HEAD: HeadIndex = HeadIndex { layer: 1, head: 1 };

fn geometry(head_dim: usize) -> KvGeometry {
    KvGeometry { layers: 3, kv_heads: 2, head_dim }
}

fn int2(head_dim: usize, groups: usize, published: bool) -> PageCodec {
    let layout = CodeLayout::new(2, head_dim, groups).unwrap().with_scales(ScaleType::Bf16);
    let mut random = Random::new(head_dim as u64);
    let mut encoders = |rule| {
        let heads = 0..6_u64;
        heads
            .map(|head| {
                let rotation = Composition::RHPbr.compose(&random_rotation(head_dim, head));
                let mean = random.normal_vec(head_dim);
                let transform = if published {
                    HeadTransform::published(&rotation).unwrap()
                } else {
                    HeadTransform::new(Some(mean), &rotation).unwrap()
                };
                HeadEncoder::codes(transform, layout, rule, published)
            })
            .collect::<Vec<_>>()
    };
    let (keys, values) = (encoders(Rule::Search), encoders(Rule::Clip(0.92)));
    PageCodec::new("test", geometry(head_dim), keys, values).unwrap()
}

fn means(head_dim: usize) -> Vec<Vec<f32>> {
    let mut random = Random::new(40);
    (0..6).map(|_| random.normal_vec(head_dim).iter().map(|x| 30.0 * x).collect()).collect()
}

/// Rows as the cache would hold them.
fn transformed(codec: &PageCodec, head: HeadIndex, side: Side, rows: &[f32]) -> Vec<f32> {
    let transform = codec.transform(head, side).unwrap();
    let mut out = vec![0.0; rows.len()];
    for (row, out) in rows.chunks(transform.dim()).zip(out.chunks_mut(transform.dim())) {
        transform.apply(row, out);
    }
    out
}

/// Rows as a reader sees them, un-rotated, after a page was sealed.
fn read_back(codec: &PageCodec, head: HeadIndex, keys: &[f32], values: &[f32]) -> [Vec<f32>; 2] {
    let mut page = vec![0; codec.head_bytes(head.layer)];
    let sides = [(Side::Key, keys), (Side::Value, values)];
    let [stored_keys, stored_values] = sides.map(|(side, rows)| transformed(codec, head, side, rows));
    codec.seal_page(head, &stored_keys, &stored_values, &mut page).unwrap();
    let (mut keys, mut values) = (vec![0.0; keys.len()], vec![0.0; values.len()]);
    codec.decode_page(head, &page, &mut keys, &mut values).unwrap();
    [(Side::Key, keys), (Side::Value, values)].map(|(side, rows)| {
        let transform = codec.transform(head, side).unwrap();
        let mut out = vec![0.0; rows.len()];
        for (row, out) in rows.chunks(transform.dim()).zip(out.chunks_mut(transform.dim())) {
            transform.undo(row, out);
        }
        out
    })
}

#[test]
fn sizes_are_those_of_the_formats_and_heads_lie_one_after_the_other() {
    for dim in DIMS {
        let geometry = geometry(dim);
        let codecs = [
            (int2(dim, 2, false), 128 * dim.next_multiple_of(32) / 4 + 2 * 512),
            (PageCodec::int4(geometry, None).unwrap(), PageLayout::int4(dim, 1).unwrap().page_bytes()),
            (PageCodec::fp8(geometry, Some(means(dim))).unwrap(), PageLayout::fp8(dim).unwrap().page_bytes()),
        ];
        for (codec, small) in codecs {
            assert_eq!(codec.geometry(), geometry);
            assert_eq!(codec.page_bytes(), 6 * small);
            let layout = codec.layout(0);
            let mixed = codec.keep_bf16(&[1]).unwrap();
            assert_eq!((mixed.layout(0), mixed.layout(2)), (layout, layout));
            assert_eq!(mixed.layout(1), PageLayout::bf16(dim));
            let large = PageLayout::bf16(dim).page_bytes();
            assert_eq!(mixed.page_bytes(), 4 * small + 2 * large);
            let mut end = 0;
            for layer in 0..3 {
                assert_eq!(mixed.layer_offset(layer), end);
                for head in 0..2 {
                    let range = mixed.head_range(HeadIndex { layer, head }).unwrap();
                    assert_eq!((range.start, range.len()), (end, mixed.head_bytes(layer)));
                    // Whole cache lines, so that readers may assume alignment.
                    assert!(range.start.is_multiple_of(64));
                    end = range.end;
                }
            }
            assert_eq!(end, mixed.page_bytes());
            assert!(mixed.transform(HEAD, Side::Key).unwrap().is_identity());
        }
    }
}

/// Sealing what a window holds gives the bytes of rows that are encoded at once.
#[test]
fn windows_seal_to_the_bytes_of_their_rows() {
    for (dim, groups, published) in
        [(32, 1, false), (48, 2, false), (64, 1, true), (96, 1, false), (128, 4, true), (256, 1, false)]
    {
        let codec = int2(dim, groups, published);
        assert_eq!(codec.name(), "test");
        for head in [HEAD, HeadIndex { layer: 2, head: 0 }] {
            let mut random = Random::new(41);
            let (keys, values) = (random.normal_vec(64 * dim), random.normal_vec(64 * dim));
            let mut expected = vec![0; codec.head_bytes(head.layer)];
            codec.encode_rows(head, Side::Key, 0, &keys, &mut expected).unwrap();
            codec.encode_rows(head, Side::Value, 0, &values, &mut expected).unwrap();
            let mut page = vec![0xa5; expected.len()];
            let keys = transformed(&codec, head, Side::Key, &keys);
            let values = transformed(&codec, head, Side::Value, &values);
            codec.seal_page(head, &keys, &values, &mut page).unwrap();
            assert!(page == expected, "d={dim} groups={groups}");
        }
    }
}

/// The lab measures `int4` and `fp8` with codecs of their own; the cache must do as well.
#[test]
fn the_safe_tiers_do_what_the_lab_measures() {
    for dim in DIMS {
        let mut random = Random::new(42);
        let means = means(dim);
        let mean = means[HEAD.layer * 2 + HEAD.head].clone();
        let around = |random: &mut Random| -> Vec<f32> {
            (0..64 * dim).map(|i| mean[i % dim] + random.normal() as f32).collect()
        };
        let (keys, values) = (around(&mut random), random.normal_vec(64 * dim));
        let centre =
            |rows: &[f32]| -> Vec<f32> { rows.iter().enumerate().map(|(i, x)| x - mean[i % dim]).collect() };
        let lab_means = KeyMeans::new(2, means.clone()).unwrap();
        let mut lab = [keys.clone(), values.clone()];
        let baseline = baselines::by_name("int4", dim, Some(lab_means)).unwrap();
        baseline.round_trip(HEAD, Side::Key, 0, &mut lab[0]).unwrap();
        baseline.round_trip(HEAD, Side::Value, 0, &mut lab[1]).unwrap();
        let codec = PageCodec::int4(geometry(dim), Some(means.clone())).unwrap();
        assert_eq!(codec.name(), "int4");
        let ours = read_back(&codec, HEAD, &keys, &values);
        for (exact, ours, lab) in [
            (centre(&keys), centre(&ours[0]), centre(&lab[0])),
            (values.clone(), ours[1].clone(), lab[1].clone()),
        ] {
            let (ours, lab) = (relative_error(&exact, &ours), relative_error(&exact, &lab));
            assert!(ours < 0.015 && ours < 1.05 * lab + 1e-5, "int4 d={dim}: {ours} against {lab}");
        }

        // E4M3 is centred here and not in the lab: compare on centred keys.
        let mut lab = [centre(&keys), values.clone()];
        let baseline = baselines::by_name("fp8", dim, None).unwrap();
        baseline.round_trip(HEAD, Side::Key, 0, &mut lab[0]).unwrap();
        baseline.round_trip(HEAD, Side::Value, 0, &mut lab[1]).unwrap();
        let codec = PageCodec::fp8(geometry(dim), Some(means)).unwrap();
        let ours = read_back(&codec, HEAD, &keys, &values);
        for (exact, ours, lab) in
            [(centre(&keys), centre(&ours[0]), &lab[0]), (values.clone(), ours[1].clone(), &lab[1])]
        {
            let (ours, lab) = (relative_error(&exact, &ours), relative_error(&exact, lab));
            assert!(ours < 1e-3 && ours < 1.1 * lab, "fp8 d={dim}: {ours} against {lab}");
        }
    }
}

#[test]
fn centring_is_what_the_means_are_for() {
    let dim = 64;
    let means = means(dim);
    let mean = means[HEAD.layer * 2 + HEAD.head].clone();
    let mut random = Random::new(43);
    let keys: Vec<f32> = (0..64 * dim).map(|i| mean[i % dim] + random.normal() as f32).collect();
    let error = |codec: PageCodec| relative_error(&keys, &read_back(&codec, HEAD, &keys, &keys)[0]);
    let centred = error(PageCodec::int4(geometry(dim), Some(means.clone())).unwrap());
    assert!(centred < 0.1 * error(PageCodec::int4(geometry(dim), None).unwrap()));
    let centred = error(PageCodec::fp8(geometry(dim), Some(means)).unwrap());
    assert!(centred < 0.1 * error(PageCodec::fp8(geometry(dim), None).unwrap()));
}

#[test]
fn layers_kept_in_bf16_lose_nothing() {
    let dim = 48;
    let codec = int2(dim, 1, false).keep_bf16(&[1]).unwrap();
    let mut random = Random::new(44);
    let mut rows = || -> Vec<f32> {
        random.normal_vec(64 * dim).iter().map(|&x| half::bf16::from_f32(x).to_f32()).collect()
    };
    let (keys, values) = (rows(), rows());
    assert_eq!(read_back(&codec, HEAD, &keys, &values), [keys, values]);
}

/// Layers without a history take no bytes, and the others stay what they are.
#[test]
fn layers_without_history_take_no_bytes() {
    let dim = 64;
    for codec in [int2(dim, 1, false), PageCodec::bf16(geometry(dim)).unwrap()] {
        let small = codec.head_bytes(1);
        let mixed = codec.clone().without_history(&[0, 2]).unwrap();
        assert_eq!([0, 1, 2].map(|layer| mixed.has_history(layer)), [false, true, false]);
        assert_eq!([0, 1, 2].map(|layer| mixed.head_bytes(layer)), [0, small, 0]);
        assert_eq!((mixed.layer_offset(1), mixed.layer_offset(2)), (0, 2 * small));
        assert_eq!(mixed.page_bytes(), 2 * small);
        // As many bits for each element that is kept.
        assert_eq!(mixed.token_bytes(dim), codec.token_bytes(dim));
        let rows = Random::new(46).normal_vec(64 * dim);
        assert_eq!(read_back(&mixed, HEAD, &rows, &rows), read_back(&codec, HEAD, &rows, &rows));
        for side in [Side::Key, Side::Value] {
            let mut same = rows.clone();
            mixed.round_trip(HeadIndex { layer: 0, head: 1 }, side, 0, &mut same).unwrap();
            assert_eq!(same, rows);
            assert!(mixed.transform(HeadIndex { layer: 2, head: 0 }, side).unwrap().is_identity());
        }
        assert!(codec.without_history(&[3]).is_err());
    }
}

#[test]
fn bad_pages_are_refused_and_nothing_changes() {
    let dim = 64;
    let codecs = [
        int2(dim, 1, false),
        PageCodec::int4(geometry(dim), None).unwrap(),
        PageCodec::fp8(geometry(dim), None).unwrap(),
        PageCodec::fp8(geometry(dim), None).unwrap().keep_bf16(&[0, 1, 2]).unwrap(),
    ];
    for codec in codecs {
        let rows = Random::new(45).normal_vec(64 * dim);
        let mut page = vec![0x5a; codec.head_bytes(HEAD.layer)];
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut broken = rows.clone();
            broken[63 * dim + 5] = bad;
            broken[63 * dim + 9] = f32::NAN;
            for (keys, values) in [(&broken, &rows), (&rows, &broken)] {
                let error = codec.seal_page(HEAD, keys, values, &mut page).unwrap_err();
                assert_eq!(error, CodecError::NotFinite { row: 63, channel: 5 });
                assert!(page.iter().all(|&byte| byte == 0x5a), "{}", codec.name());
            }
        }
        assert!(codec.seal_page(HEAD, &rows[1..], &rows, &mut page).is_err());
        assert!(codec.seal_page(HEAD, &rows, &rows[dim..], &mut page).is_err());
        assert!(codec.seal_page(HEAD, &rows, &rows, &mut page[1..]).is_err());
        for (layer, head) in [(3, 0), (0, 2)] {
            let head = HeadIndex { layer, head };
            assert!(matches!(
                codec.seal_page(head, &rows, &rows, &mut page),
                Err(CodecError::UnknownHead { .. })
            ));
            assert!(codec.transform(head, Side::Key).is_err() && codec.head_range(head).is_err());
        }
        assert!(codec.keep_bf16(&[3]).is_err());
    }
    assert!(PageCodec::int4(geometry(0), None).is_err() && PageCodec::fp8(geometry(0), None).is_err());
    assert!(PageCodec::int4(geometry(dim), Some(vec![vec![0.0; dim]; 5])).is_err());
    assert!(PageCodec::int4(geometry(dim), Some(vec![vec![0.0; dim - 1]; 6])).is_err());
    let mut means = vec![vec![0.0; dim]; 6];
    means[4][2] = f32::NAN;
    assert_eq!(
        PageCodec::fp8(geometry(dim), Some(means)).unwrap_err(),
        CodecError::NotFinite { row: 4, channel: 2 }
    );
    assert!(PageCodec::fp8(geometry(33), None).unwrap().keep_bf16(&[0]).is_err());
}

/// Constant rows, zeros, one outlier, huge offsets and the largest numbers of bf16: finite codes in every format.
#[test]
fn degenerate_rows_seal_and_come_back_finite() {
    let dim = 64;
    let mut rows = Random::new(46).normal_vec(64 * dim);
    rows[..dim].fill(0.0);
    rows[dim..2 * dim].fill(-0.0);
    rows[2 * dim..3 * dim].fill(7.5);
    rows[3 * dim + 11] = 3e4;
    rows[4 * dim..5 * dim].iter_mut().for_each(|x| *x += 1e6);
    rows[5 * dim..6 * dim].iter_mut().for_each(|x| *x *= 1e-40);
    rows[6 * dim..7 * dim].iter_mut().for_each(|x| *x = x.signum() * 3e38);
    let rows: Vec<f32> = rows.iter().map(|&x| half::bf16::from_f32(x).to_f32()).collect();
    for codec in [
        int2(dim, 2, false),
        PageCodec::int4(geometry(dim), None).unwrap(),
        PageCodec::fp8(geometry(dim), None).unwrap(),
    ] {
        let mut page = vec![0; codec.head_bytes(0)];
        codec.seal_page(HEAD, &rows, &rows, &mut page).unwrap();
        let (mut keys, mut values) = (vec![0.0; PAGE_TOKENS * dim], vec![0.0; PAGE_TOKENS * dim]);
        codec.decode_page(HEAD, &page, &mut keys, &mut values).unwrap();
        assert!(keys.iter().chain(&values).all(|x| x.is_finite()), "{}", codec.name());
        assert!(keys[..2 * dim].iter().all(|x| x.abs() < 1e-6), "{}", codec.name());
        assert!(keys[2 * dim..3 * dim].iter().all(|x| (x - 7.5).abs() < 0.05), "{}", codec.name());
    }
}

#[test]
fn two_bits_have_four_beside_them_for_the_same_rows() {
    let mut random = Random::new(91);
    for head_dim in [48, 64, 128] {
        for (groups, published) in [(1, false), (2, false), (1, true)] {
            let two = int2(head_dim, groups, published).keep_bf16(&[0]).unwrap();
            let four = two.high().unwrap();
            assert_eq!((four.name(), four.geometry()), ("high", two.geometry()));
            // A layer in bf16 stays so.
            assert_eq!(four.layout(0), two.layout(0));
            let (keys, values) = (random.normal_vec(64 * head_dim), random.normal_vec(64 * head_dim));
            for side in [Side::Key, Side::Value] {
                let rows = |codec| transformed(codec, HEAD, side, &keys);
                assert_eq!(rows(&two), rows(&four), "windows are shared");
            }
            let [twos, fours] = [&two, &four].map(|codec| read_back(codec, HEAD, &keys, &values));
            for (exact, two, four) in [(&keys, &twos[0], &fours[0]), (&values, &twos[1], &fours[1])] {
                let (two, four) = (relative_error(exact, two), relative_error(exact, four));
                assert!(four < 0.4 * two, "d={head_dim}: {four} beside {two}");
            }
        }
        let geometry = geometry(head_dim);
        for codec in [
            PageCodec::int4(geometry, None).unwrap(),
            PageCodec::fp8(geometry, None).unwrap(),
            PageCodec::bf16(geometry).unwrap(),
        ] {
            assert!(codec.high().is_none(), "{}", codec.name());
        }
    }
}

#[test]
fn bands_of_all_channels_have_four_bits_beside_them() {
    let codec = |layout: BandLayout| {
        let rows = RowEncoder::Banded(BandRows { layout, value_rule: Rule::Clip(0.92) });
        let encoder =
            HeadEncoder { transform: HeadTransform::identity(layout.head_dim()), rows, page_means: None };
        PageCodec::new("bands", geometry(layout.head_dim()), vec![encoder.clone(); 6], vec![encoder; 6])
            .unwrap()
    };
    for head_dim in [48, 64, 96, 128, 256] {
        let high = codec(BandLayout::int2(head_dim).unwrap()).high().unwrap();
        assert_eq!(high.layout(0), PageLayout::Banded(BandLayout::high(head_dim).unwrap()));
        let RowEncoder::Banded(rows) = high.encoder(HEAD, Side::Value).unwrap().rows else { panic!("bands") };
        assert_eq!((rows.value_rule, rows.value_format().levels), (Rule::MIN_MAX, 16));
        // Channels that are not stored have no bits to add to, and four bits are what there is.
        assert!(codec(BandLayout::int15(head_dim).unwrap()).high().is_none());
        assert!(high.high().is_none());
    }
}
