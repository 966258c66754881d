//! The codec that a rotation file makes: which encoder, and that logits survive it.

use std::collections::BTreeMap;
use std::sync::Arc;

use oscar_codec::{
    CacheCodec, HeadIndex, KeyTurning, KvGeometry, PageCodec, PageLayout, RopeLayout, Rule, Side,
    SquareMatrix, hadamard,
};
use oscar_random::Random;
use oscar_rotations::codec::{int2_codec, int15_codec};
use oscar_rotations::rotation::{LayerRotations, RotationFile, RotationHeader, SideRotations};
use oscar_rotations::{Int2Encoder, Int2Options, RotationError};

const DIM: usize = 64;
const GEOMETRY: KvGeometry = KvGeometry { layers: 1, kv_heads: 1, head_dim: DIM };
const HEAD: HeadIndex = HeadIndex { layer: 0, head: 0 };

/// Keys whose channels fall in strength, and bands that say so.
fn file(bands: bool) -> RotationFile {
    let side = |bands: Option<Vec<SquareMatrix>>| SideRotations {
        rotations: vec![hadamard::matrix(DIM)],
        eigenvalues: Vec::new(),
        means: Some(vec![vec![0.25; DIM]]),
        metrics: None,
        bands,
        unturned_means: None,
        rules: vec![Rule::Search],
    };
    let scaled = SquareMatrix::from_fn(DIM, |i, j| if i == j { 1.0 / strength(i) } else { 0.0 });
    let layer = LayerRotations { keys: side(bands.then(|| vec![scaled])), values: side(None) };
    let header = RotationHeader { kv_heads: 1, head_dim: DIM, ..RotationHeader::default() };
    let heads = Some(BTreeMap::from([(0, layer)]));
    RotationFile { header, heads, ..RotationFile::default() }
}

fn strength(channel: usize) -> f64 {
    8.0 * 0.93_f64.powi(channel as i32)
}

fn options(encoder: Int2Encoder) -> Int2Options {
    Int2Options { encoder, ..Int2Options::default() }
}

#[test]
fn bands_are_used_where_they_are_and_nothing_speaks_against_them() {
    let layout = |file: &RotationFile, options: &Int2Options| {
        int2_codec("int2", file, GEOMETRY, options).map(|codec| codec.layout(0))
    };
    let (with, without) = (file(true), file(false));
    let auto = options(Int2Encoder::Auto);
    assert!(matches!(layout(&with, &auto), Ok(PageLayout::Banded(_))));
    assert!(matches!(layout(&without, &auto), Ok(PageLayout::Codes(_))));
    assert!(matches!(layout(&with, &options(Int2Encoder::Scalar)), Ok(PageLayout::Codes(_))));
    let grouped = Int2Options { group: Some(32), ..Int2Options::default() };
    assert!(matches!(layout(&with, &grouped), Ok(PageLayout::Codes(_))));
    let error = layout(&without, &options(Int2Encoder::Band)).expect_err("no bands");
    assert!(error.to_string().contains("oscar calibrate"), "{error}");
}

#[test]
fn a_matrix_that_cannot_be_undone_is_refused() {
    let mut broken = file(true);
    let layer = broken.heads.as_mut().and_then(|heads| heads.get_mut(&0)).expect("a layer");
    layer.keys.bands = Some(vec![SquareMatrix::from_fn(DIM, |i, _| i as f64)]);
    let error = int2_codec("int2", &broken, GEOMETRY, &options(Int2Encoder::Auto)).expect_err("singular");
    assert!(error.to_string().contains("inverse"), "{error}");
}

/// Bands read logits of uneven keys far better than scalar codes of the same size do, and do not shrink them.
#[test]
fn bands_keep_logits_of_uneven_keys() {
    let mut random = Random::new(5);
    let mut key = || -> Vec<f32> {
        (0..DIM).map(|channel| (strength(channel) * random.normal()) as f32 + 0.25).collect()
    };
    let keys: Vec<Vec<f32>> = (0..256).map(|_| key()).collect();
    let error = |codec: Result<PageCodec, RotationError>| {
        let codec = codec.expect("a codec");
        let mut stored = keys.concat();
        codec.round_trip(HEAD, Side::Key, 0, &mut stored).expect("finite rows");
        let mut noise = Random::new(6);
        let (mut error, mut along, mut energy) = (0.0, 0.0, 0.0);
        for (key, stored) in keys.iter().zip(stored.chunks_exact(DIM)) {
            let query: Vec<f32> = (0..DIM).map(|_| noise.normal() as f32).collect();
            let dot = |row: &[f32]| -> f64 {
                row.iter().zip(&query).map(|(k, q)| f64::from(k - 0.25) * f64::from(*q)).sum()
            };
            let (exact, read) = (dot(key), dot(stored));
            error += (read - exact).powi(2);
            along += read * exact;
            energy += exact * exact;
        }
        (error / energy, along / energy, codec.page_bytes())
    };
    let int2 = |encoder: Int2Encoder| int2_codec("int2", &file(true), GEOMETRY, &options(encoder));
    let (bands, scalar) = (error(int2(Int2Encoder::Band)), error(int2(Int2Encoder::Scalar)));
    assert_eq!(bands.2, scalar.2, "the same bytes");
    assert!(bands.0 < 0.5 * scalar.0, "{bands:?} against {scalar:?}");
    assert!((bands.1 - 1.0).abs() < 0.03, "{bands:?}");
    // Three quarters of the bytes, and little worse than scalar codes.
    let smaller = error(int15_codec("int1.5", &file(true), GEOMETRY, &[]));
    assert_eq!((smaller.2, bands.2), (1856, 2560));
    assert!(bands.0 < smaller.0 && smaller.0 < 1.3 * scalar.0, "{smaller:?} against {scalar:?}");
    // Four bits for the same rows. The strongest band has them already.
    for (encoder, two_bits, most) in [(Int2Encoder::Band, bands, 0.4), (Int2Encoder::Scalar, scalar, 0.15)] {
        let high = error(Ok(int2(encoder).expect("a codec").high().expect("four bits")));
        assert_eq!(high.2, 4608);
        assert!(high.0 < most * two_bits.0 && (high.1 - 1.0).abs() < 0.01, "{high:?} against {two_bits:?}");
    }
}

#[test]
fn the_smaller_format_needs_bands() {
    let error = int15_codec("int1.5", &file(false), GEOMETRY, &[]).expect_err("no bands");
    assert!(error.to_string().contains("oscar calibrate"), "{error}");
}

/// Keys whose mean turns are read back far better from pages that are centred by their own mean, and that needs to be known how
/// they turn.
#[test]
fn keys_that_turn_are_centred_page_by_page() {
    let turning = Arc::new(KeyTurning::new(vec![0.01, 1e-3, 1e-4, 1e-5], RopeLayout::Halves));
    let unturned: Vec<f32> = (0..DIM).map(|channel| if channel % 4 == 0 { 30.0 } else { -5.0 }).collect();
    let mut file = file(true);
    let keys = &mut file.heads.as_mut().expect("heads").get_mut(&0).expect("a layer").keys;
    keys.unturned_means = Some(vec![unturned.clone()]);
    let missing = int2_codec("int2", &file, GEOMETRY, &Int2Options::default()).expect_err("nothing turns");
    assert!(missing.to_string().contains("means that turn"), "{missing}");
    let mut error = |by_page: bool| {
        let keys = &mut file.heads.as_mut().expect("heads").get_mut(&0).expect("a layer").keys;
        keys.unturned_means = by_page.then(|| vec![unturned.clone()]);
        let options = Int2Options { turnings: vec![turning.clone()], ..Int2Options::default() };
        let codec = int2_codec("int2", &file, GEOMETRY, &options).expect("a codec");
        assert_eq!(codec.has_page_means(0), by_page);
        assert_eq!(codec.page_mean_bytes(), if by_page { 2 * DIM } else { 0 });
        let mut random = Random::new(9);
        let (mut squares, first) = (0.0, 20_000);
        let keys: Vec<f32> = (first..first + 150)
            .flat_map(|position| {
                let mut key = unturned.clone();
                key.iter_mut().enumerate().for_each(|(at, x)| *x += strength(at) as f32 * random.signed());
                turning.by(position as f64).apply(&mut key);
                key
            })
            .collect();
        let mut read = keys.clone();
        codec.round_trip(HEAD, Side::Key, first, &mut read).expect("finite keys");
        keys.iter().zip(&read).for_each(|(key, read)| squares += f64::from(key - read).powi(2));
        squares
    };
    let (one_mean, own_means) = (error(false), error(true));
    assert!(own_means < 0.2 * one_mean, "{own_means} against {one_mean}");
    let smaller = int15_codec("int1.5", &file, GEOMETRY, &[turning]).expect("a codec");
    assert!(smaller.has_page_means(0) && smaller.high().is_none_or(|high| high.has_page_means(0)));
}
