//! Every path against the scalar codec, byte for byte.

use oscar_codec::{
    CacheCodec, CodeLayout, CodecError, HeadEncoder, HeadIndex, HeadTransform, KvGeometry, PageCodec, Rule,
    ScaleType, Side, SquareMatrix, hadamard,
};
use oscar_random::Random;

use super::{FastCodec, SealScratch};
use crate::cpu::isa::Isa;

const HEAD: HeadIndex = HeadIndex { layer: 0, head: 0 };
const SIDES: [Side; 2] = [Side::Key, Side::Value];
pub(super) const RULES: [Rule; 6] =
    [Rule::Clip(0.96), Rule::Clip(0.92), Rule::MIN_MAX, Rule::Clip(0.3), Rule::Gaussian, Rule::Search];

/// Random rows and rotations.
pub(super) struct Noise(Random);

impl Noise {
    pub(super) fn new(seed: u64) -> Noise {
        Noise(Random::new(seed))
    }

    /// A number in -1..1.
    pub(super) fn next(&mut self) -> f32 {
        self.0.signed()
    }

    pub(super) fn rows(&mut self, len: usize) -> Vec<f32> {
        (0..len).map(|_| (self.next() + self.next() + self.next()) * 2.0).collect()
    }

    /// Nearly orthogonal is enough: no test depends on more.
    pub(super) fn rotation(&mut self, dim: usize) -> SquareMatrix {
        let skew =
            SquareMatrix::new(dim, (0..dim * dim).map(|_| f64::from(self.next()) * 0.05).collect()).unwrap();
        let sum = skew.values().iter().zip(hadamard::matrix(dim).values()).map(|(a, b)| a + b).collect();
        SquareMatrix::new(dim, sum).unwrap()
    }
}

struct Case {
    dim: usize,
    groups: usize,
    rule: Rule,
    scale_type: ScaleType,
    published: bool,
}

impl Case {
    fn new(dim: usize, groups: usize, rule: Rule) -> Self {
        Case { dim, groups, rule, scale_type: ScaleType::F16, published: false }
    }

    fn codec(&self, seed: u64) -> PageCodec {
        let mut noise = Noise::new(seed);
        let rotation = noise.rotation(self.dim);
        let transform = if self.published {
            HeadTransform::published(&rotation).unwrap()
        } else {
            let mean = (0..self.dim).map(|_| noise.next() * 3.0).collect();
            HeadTransform::new(Some(mean), &rotation).unwrap()
        };
        let other = HeadTransform::new(None, &noise.rotation(self.dim)).unwrap();
        self.with_transforms(transform, other)
    }

    fn with_transforms(&self, keys: HeadTransform, values: HeadTransform) -> PageCodec {
        let layout = CodeLayout::new(2, self.dim, self.groups).unwrap().with_scales(self.scale_type);
        let encoder = |transform| vec![HeadEncoder::codes(transform, layout, self.rule, self.published)];
        let geometry = KvGeometry { layers: 1, kv_heads: 1, head_dim: self.dim };
        PageCodec::new("test", geometry, encoder(keys), encoder(values)).unwrap()
    }

    /// Compares all paths on `rows` with the scalar codec, which may refuse them.
    fn check(&self, codec: &PageCodec, rows: &[f32]) {
        let name = format!(
            "d={} groups={} {} {} published={} rows={}",
            self.dim,
            self.groups,
            self.rule,
            self.scale_type,
            self.published,
            rows.len() / self.dim
        );
        for side in SIDES {
            // A page that is not empty: tokens that are not written must stay as they are.
            let mut expected = vec![0xa5; codec.head_bytes(0)];
            let verdict = codec.encode_rows(HEAD, side, 0, rows, &mut expected);
            for (path, fast) in paths(codec) {
                let mut page = vec![0xa5; expected.len()];
                let result = encode_rows(&fast, side, rows, &mut page);
                assert_eq!(result, verdict, "{name} {side:?} {path}");
                if let Some(at) = page.iter().zip(&expected).position(|(a, b)| a != b) {
                    panic!("{name} {side:?} {path}: byte {at} is {:02x} not {:02x}", page[at], expected[at]);
                }
            }
        }
    }
}

/// The paths of this machine, and the portable one that NEON machines run.
fn paths(codec: &PageCodec) -> Vec<(String, FastCodec)> {
    let make = |isa| FastCodec::new(isa, codec.clone());
    let mut paths: Vec<_> = Isa::available().map(|isa| (isa.to_string(), make(isa))).collect();
    paths.push(("portable".into(), FastCodec::portable(codec.clone())));
    paths
}

/// Transforms rows and writes them to a page.
fn encode_rows(fast: &FastCodec, side: Side, rows: &[f32], page: &mut [u8]) -> Result<(), CodecError> {
    let (mut rows, mut scratch) = (rows.to_vec(), SealScratch::default());
    fast.transform_rows(HEAD, side, &mut rows, &mut scratch)?;
    fast.write_rows(HEAD, side, &rows, page, &mut scratch)
}

#[test]
fn every_rule_and_size_gives_the_bytes_of_the_scalar_codec() {
    let mut noise = Noise::new(1);
    let mut counts = [1, 2, 15, 16, 17, 31, 33, 48, 63, 64].into_iter().cycle();
    for dim in [32, 48, 64, 96, 128, 256] {
        for groups in [1, 2, 4] {
            for rule in RULES {
                for published in [false, true] {
                    let case = Case { published, ..Case::new(dim, groups, rule) };
                    // Large heads in whole pages are slow on the scalar path; few suffice.
                    let count = counts.next().unwrap().min(if dim > 128 { 17 } else { 64 });
                    case.check(&case.codec(dim as u64), &noise.rows(count * dim));
                }
            }
        }
    }
}

#[test]
fn bf16_scales_and_odd_sizes() {
    let mut noise = Noise::new(2);
    for (dim, groups) in [(1, 1), (7, 1), (20, 5), (33, 3), (40, 2), (100, 4), (128, 8), (64, 4)] {
        for rule in RULES {
            for published in [false, true] {
                let case = Case { published, scale_type: ScaleType::Bf16, ..Case::new(dim, groups, rule) };
                case.check(&case.codec(3), &noise.rows(19 * dim));
            }
        }
    }
}

#[test]
fn degenerate_rows() {
    let dim = 64;
    let mut noise = Noise::new(4);
    let mut rows = Vec::new();
    let mut outlier = noise.rows(dim);
    outlier[17] = 3e4;
    let huge_offset = noise.rows(dim).iter().map(|x| x + 1e6).collect();
    let denormal = noise.rows(dim).iter().map(|x| x * 1e-40).collect();
    let small = noise.rows(dim).iter().map(|x| x * 1e-7).collect();
    // The sum of squares overflows, and in the last the sum as well.
    let large = noise.rows(dim).iter().map(|x| x * 1e25).collect();
    let largest = noise.rows(dim).iter().map(|x| x.signum() * 3e36).collect();
    let mostly_zero = (0..dim).map(|i| if i % 32 == 0 { 1.0 } else { -0.0 }).collect();
    let zeros = vec![0.0; dim];
    for row in [
        zeros,
        vec![-0.0; dim],
        vec![2.5; dim],
        vec![-1e-30; dim],
        vec![3e36; dim],
        outlier,
        huge_offset,
        denormal,
        small,
        large,
        largest,
        mostly_zero,
    ] {
        rows.extend_from_slice(&row);
    }
    let transforms = [
        HeadTransform::identity(dim),
        HeadTransform::published(&hadamard::matrix(dim)).unwrap(),
        HeadTransform::new(Some(vec![2.5; dim]), &SquareMatrix::identity(dim)).unwrap(),
    ];
    for transform in transforms {
        for rule in RULES {
            for published in [false, true] {
                for (scale_type, groups) in [(ScaleType::F16, 1), (ScaleType::Bf16, 4)] {
                    let case = Case { dim, groups, rule, scale_type, published };
                    case.check(&case.with_transforms(transform.clone(), transform.clone()), &rows);
                }
            }
        }
    }
}

#[test]
fn bad_numbers_are_refused_as_the_scalar_codec_does() {
    let case = Case::new(64, 1, Rule::Search);
    let published = Case { published: true, ..Case::new(64, 1, Rule::Clip(0.96)) };
    let all_ones = f32::from_bits(0x7fff_ffff);
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -f32::NAN, f32::MAX, all_ones] {
        for (row, channel) in [(0, 0), (3, 63), (18, 5), (39, 31)] {
            for case in [&case, &published] {
                let codec = case.codec(5);
                let mut rows = Noise::new(6).rows(40 * 64);
                rows[row * 64 + channel] = bad;
                if bad.is_finite() {
                    // A row that only its rotation takes out of range.
                    rows[row * 64..][..64].fill(bad);
                }
                // A second one further on must not be the one that is named.
                rows[39 * 64 + 40] = f32::NAN;
                let page = &mut vec![0; codec.head_bytes(0)];
                let error = codec.encode_rows(HEAD, Side::Key, 0, &rows, page).unwrap_err();
                assert!(matches!(error, CodecError::NotFinite { row: r, .. } if r == row), "{error}");
                case.check(&codec, &rows);
            }
        }
    }
}

#[test]
fn lanes_without_a_row_cannot_refuse_one() {
    // Zeros minus this mean overflow in the rotation, the row itself does not.
    let mean = vec![3e38; 32];
    let transform = HeadTransform::new(Some(mean.clone()), &hadamard::matrix(32)).unwrap();
    let case = Case::new(32, 1, Rule::Gaussian);
    let codec = case.with_transforms(transform.clone(), transform);
    codec.encode_rows(HEAD, Side::Key, 0, &mean, &mut vec![0; codec.head_bytes(0)]).unwrap();
    case.check(&codec, &mean);
}

#[test]
fn transformed_rows_are_those_of_the_scalar_codec() {
    for dim in [20, 48, 96, 128] {
        let codec = Case::new(dim, 1, Rule::Search).codec(7);
        let rows = Noise::new(8).rows(37 * dim);
        for side in SIDES {
            let mut expected = vec![0.0; rows.len()];
            for (row, out) in rows.chunks(dim).zip(expected.chunks_mut(dim)) {
                codec.transform(HEAD, side).unwrap().apply(row, out);
            }
            for (path, fast) in paths(&codec) {
                let (mut got, mut scratch) = (rows.clone(), SealScratch::default());
                fast.transform_rows(HEAD, side, &mut got, &mut scratch).unwrap();
                assert_eq!(got, expected, "d={dim} {side:?} {path}");
                got[20 * dim + 3] = f32::NEG_INFINITY;
                let mut page = vec![0xa5; codec.head_bytes(0)];
                let error = fast.write_rows(HEAD, side, &got, &mut page, &mut scratch);
                assert_eq!(error, Err(CodecError::NotFinite { row: 20, channel: 3 }), "{path}");
                assert!(page.iter().all(|&byte| byte == 0xa5), "{path}");
            }
        }
    }
}

#[test]
fn every_format_round_trips_as_the_scalar_codec_does() {
    let dim = 64;
    let geometry = KvGeometry { layers: 1, kv_heads: 1, head_dim: dim };
    let codecs = [
        Case::new(dim, 1, Rule::Search).codec(11),
        Case::new(dim, 4, Rule::Gaussian).codec(12),
        PageCodec::int4(geometry, None).unwrap(),
        PageCodec::fp8(geometry, None).unwrap(),
        PageCodec::fp8(geometry, None).unwrap().keep_bf16(&[0]).unwrap(),
    ];
    for codec in codecs {
        for (path, fast) in paths(&codec) {
            assert_eq!(fast.token_bytes(dim), codec.token_bytes(dim));
            assert_eq!(fast.name(), codec.name());
            for count in [1, 63, 64, 65, 130] {
                for side in SIDES {
                    let before = Noise::new(count as u64).rows(count * dim);
                    let (mut expected, mut rows) = (before.clone(), before.clone());
                    codec.round_trip(HEAD, side, 0, &mut expected).unwrap();
                    fast.round_trip(HEAD, side, 0, &mut rows).unwrap();
                    for (row, expected) in rows.iter().zip(&expected) {
                        assert!((row - expected).abs() < 1e-4, "{path} {count} {side:?}: {row} {expected}");
                    }
                    let mut bad = before.clone();
                    *bad.last_mut().unwrap() = f32::NAN;
                    let untouched: Vec<u32> = bad.iter().map(|x| x.to_bits()).collect();
                    let error = fast.round_trip(HEAD, side, 0, &mut bad).unwrap_err();
                    assert_eq!(error, CodecError::NotFinite { row: count - 1, channel: dim - 1 });
                    assert_eq!(bad.iter().map(|x| x.to_bits()).collect::<Vec<_>>(), untouched);
                }
            }
            let outside = HeadIndex { layer: 1, head: 0 };
            assert!(fast.round_trip(outside, Side::Key, 0, &mut vec![0.0; dim]).is_err());
        }
    }
}

#[test]
fn wrong_lengths_are_refused() {
    let codec = Case::new(32, 1, Rule::Gaussian).codec(12);
    for (path, fast) in paths(&codec) {
        let mut scratch = SealScratch::default();
        let mut page = vec![0; codec.head_bytes(0)];
        let short = page.len() - 1;
        let rows = vec![0.0; 65 * 32];
        assert!(fast.write_rows(HEAD, Side::Key, &rows, &mut page, &mut scratch).is_err(), "{path}");
        assert!(fast.write_rows(HEAD, Side::Key, &rows[..33], &mut page, &mut scratch).is_err(), "{path}");
        assert!(fast.write_rows(HEAD, Side::Key, &rows[..32], &mut page[..short], &mut scratch).is_err());
        fast.write_rows(HEAD, Side::Key, &[], &mut page, &mut scratch).unwrap();
        assert!(page.iter().all(|&byte| byte == 0));
    }
}
