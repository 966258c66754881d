//! Every path against the scalar codec, byte for byte.

use half::bf16;
use oscar_codec::{
    CacheCodec, CodecError, HeadEncoder, HeadIndex, HeadTransform, Int2Codec, PAGE_TOKENS, Rule, ScaleType,
    Side, SquareMatrix, hadamard,
};

use super::{FastInt2, Int2Encoder, Scratch};
use crate::cpu::isa::Isa;

const HEAD: HeadIndex = HeadIndex { layer: 0, head: 0 };
const SIDES: [Side; 2] = [Side::Key, Side::Value];
pub(super) const RULES: [Rule; 6] =
    [Rule::Clip(0.96), Rule::Clip(0.92), Rule::MIN_MAX, Rule::Clip(0.3), Rule::Gaussian, Rule::Search];

/// Numbers in -1..1, the same for the same seed.
pub(super) struct Noise(pub(super) u64);

impl Noise {
    pub(super) fn next(&mut self) -> f32 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 40) as f32 / (1u32 << 23) as f32 - 1.0
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

    fn codec(&self, seed: u64) -> Int2Codec {
        let mut noise = Noise(seed);
        let rotation = noise.rotation(self.dim);
        let transform = if self.published {
            HeadTransform::published(&rotation).unwrap()
        } else {
            let mean = (0..self.dim).map(|_| noise.next() * 3.0).collect();
            HeadTransform::new(Some(mean), &rotation).unwrap()
        };
        let other = HeadTransform::new(None, &noise.rotation(self.dim)).unwrap();
        Int2Codec::new(
            "test",
            self.dim,
            1,
            self.groups,
            self.scale_type,
            self.published,
            vec![HeadEncoder::new(transform, self.rule)],
            vec![HeadEncoder::new(other, self.rule)],
        )
        .unwrap()
    }

    /// Compares all paths on `rows` with the scalar codec, which may refuse them.
    fn check(&self, codec: &Int2Codec, rows: &[f32]) {
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
            let mut expected = vec![0xa5; codec.layout().page_bytes()];
            let verdict = codec.encode_rows(HEAD, side, rows, &mut expected);
            for (path, encoder) in paths(codec, side) {
                let mut page = vec![0xa5; expected.len()];
                let mut scratch = Scratch::default();
                let result = encoder.encode_rows(side, rows, &mut page, &mut scratch);
                assert_eq!(result, verdict, "{name} {side:?} {path}");
                if let Some(at) = page.iter().zip(&expected).position(|(a, b)| a != b) {
                    panic!("{name} {side:?} {path}: byte {at} is {:02x} not {:02x}", page[at], expected[at]);
                }
            }
        }
    }
}

/// The paths of this machine, and the portable one that NEON machines run.
fn paths(codec: &Int2Codec, side: Side) -> Vec<(String, Int2Encoder)> {
    let format = codec.row_format(HEAD, side).unwrap();
    let make =
        |isa| Int2Encoder::new(isa, codec.encoder(HEAD, side).unwrap(), &format, *codec.layout()).unwrap();
    let mut paths: Vec<_> = Isa::available().map(|isa| (isa.to_string(), make(isa))).collect();
    let mut portable = make(Isa::Scalar);
    portable.isa = Isa::Neon;
    paths.push(("portable".into(), portable));
    paths
}

#[test]
fn every_rule_and_size_gives_the_bytes_of_the_scalar_codec() {
    let mut noise = Noise(1);
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
    let mut noise = Noise(2);
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
    let mut noise = Noise(4);
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
                    let encoders = vec![HeadEncoder::new(transform.clone(), rule)];
                    let codec = Int2Codec::new(
                        "test",
                        dim,
                        1,
                        groups,
                        scale_type,
                        published,
                        encoders.clone(),
                        encoders,
                    );
                    case.check(&codec.unwrap(), &rows);
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
                let mut rows = Noise(6).rows(40 * 64);
                rows[row * 64 + channel] = bad;
                if bad.is_finite() {
                    // A row that only its rotation takes out of range.
                    rows[row * 64..][..64].fill(bad);
                }
                // A second one further on must not be the one that is named.
                rows[39 * 64 + 40] = f32::NAN;
                let page = &mut vec![0; codec.layout().page_bytes()];
                let error = codec.encode_rows(HEAD, Side::Key, &rows, page).unwrap_err();
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
    let encoders = vec![HeadEncoder::new(transform, Rule::Gaussian)];
    let codec = Int2Codec::new("test", 32, 1, 1, ScaleType::F16, false, encoders.clone(), encoders).unwrap();
    codec.encode_rows(HEAD, Side::Key, &mean, &mut vec![0; codec.layout().page_bytes()]).unwrap();
    Case::new(32, 1, Rule::Gaussian).check(&codec, &mean);
}

#[test]
fn bf16_rows_and_rotated_rows_encode_alike() {
    let dim = 96;
    for rule in RULES {
        let case = Case::new(dim, 2, rule);
        let codec = case.codec(7);
        let rows: Vec<bf16> = Noise(8).rows(37 * dim).into_iter().map(bf16::from_f32).collect();
        let widened: Vec<f32> = rows.iter().map(|x| x.to_f32()).collect();
        for side in SIDES {
            let mut expected = vec![0; codec.layout().page_bytes()];
            codec.encode_rows(HEAD, side, &widened, &mut expected).unwrap();
            for (path, encoder) in paths(&codec, side) {
                let mut scratch = Scratch::default();
                let mut page = vec![0; expected.len()];
                encoder.encode_rows(side, &rows, &mut page, &mut scratch).unwrap();
                assert_eq!(page, expected, "{rule} {side:?} {path}");
                let mut rotated = vec![0.0; rows.len()];
                encoder.rotate_rows(&rows, &mut rotated, &mut scratch).unwrap();
                let mut rotated: Vec<bf16> = rotated.into_iter().map(bf16::from_f32).collect();
                page.fill(0);
                encoder.encode_rotated_rows(side, &rotated, &mut page, &mut scratch).unwrap();
                assert_eq!(page, expected, "{rule} {side:?} {path}");
                rotated[20 * dim + 3] = bf16::NEG_INFINITY;
                let error = encoder.encode_rotated_rows(side, &rotated, &mut page, &mut scratch);
                assert_eq!(error, Err(CodecError::NotFinite { row: 20, channel: 3 }), "{path}");
                assert_eq!(page, expected);
            }
        }
    }
}

#[test]
fn pages_decode_as_the_scalar_codec_decodes_them() {
    for (dim, groups) in [(20, 1), (48, 4), (64, 1), (128, 2)] {
        let case = Case::new(dim, groups, Rule::Gaussian);
        let codec = case.codec(9);
        for side in SIDES {
            let mut page = vec![0; codec.layout().page_bytes()];
            codec.encode_rows(HEAD, side, &Noise(10).rows(PAGE_TOKENS * dim), &mut page).unwrap();
            for count in [1, 16, 30, 64] {
                let mut expected = vec![0.0; count * dim];
                codec.decode_rows(HEAD, side, &page, &mut expected).unwrap();
                for (path, encoder) in paths(&codec, side) {
                    let mut scratch = Scratch::default();
                    let mut rows = vec![0.0; count * dim];
                    encoder.decode_rows(side, &page, &mut rows, &mut scratch).unwrap();
                    for (row, expected) in rows.iter().zip(&expected) {
                        assert!((row - expected).abs() < 1e-4, "d={dim} {side:?} {path}: {row} {expected}");
                    }
                    encoder.decode_rotated_rows(side, &page, &mut rows, &mut scratch).unwrap();
                    let mut row = vec![0.0; dim];
                    for (token, rows) in rows.chunks_exact(dim).enumerate() {
                        codec.layout().decode_token(&page, side, token, ScaleType::F16, &mut row).unwrap();
                        assert_eq!(rows, row, "d={dim} {side:?} {path}");
                    }
                }
            }
        }
    }
}

#[test]
fn the_wrapper_round_trips_many_pages() {
    let dim = 64;
    let case = Case::new(dim, 1, Rule::Search);
    let codec = case.codec(11);
    for isa in Isa::available() {
        let fast = FastInt2::new(isa, codec.clone());
        assert_eq!(fast.token_bytes(dim), codec.token_bytes(dim));
        assert_eq!(fast.name(), "test");
        for count in [1, 63, 64, 65, 130] {
            for side in SIDES {
                let before = Noise(count as u64).rows(count * dim);
                let (mut expected, mut rows) = (before.clone(), before.clone());
                codec.round_trip(HEAD, side, &mut expected).unwrap();
                fast.round_trip(HEAD, side, &mut rows).unwrap();
                for (row, expected) in rows.iter().zip(&expected) {
                    assert!((row - expected).abs() < 1e-4, "{isa} {count} {side:?}: {row} {expected}");
                }
                let mut bad = before.clone();
                *bad.last_mut().unwrap() = f32::NAN;
                let untouched: Vec<u32> = bad.iter().map(|x| x.to_bits()).collect();
                let error = fast.round_trip(HEAD, side, &mut bad).unwrap_err();
                assert_eq!(error, CodecError::NotFinite { row: count - 1, channel: dim - 1 });
                assert_eq!(bad.iter().map(|x| x.to_bits()).collect::<Vec<_>>(), untouched);
            }
        }
        let outside = HeadIndex { layer: 1, head: 0 };
        assert!(fast.round_trip(outside, Side::Key, &mut vec![0.0; dim]).is_err());
    }
}

/// Page after page: a page edge must not change a byte, nor touch the tokens behind the last row.
#[test]
fn many_rows_fill_the_pages_of_the_scalar_codec() {
    for (dim, groups, rule) in [(48, 2, Rule::Gaussian), (64, 1, Rule::Search), (128, 1, Rule::Clip(0.96))] {
        let codec = Case::new(dim, groups, rule).codec(13);
        let page_bytes = codec.layout().page_bytes();
        for count in [1, 64, 65, 130] {
            let rows = Noise(count as u64).rows(count * dim);
            for side in SIDES {
                let mut expected = vec![0xa5; count.div_ceil(PAGE_TOKENS) * page_bytes];
                for (rows, page) in rows.chunks(PAGE_TOKENS * dim).zip(expected.chunks_exact_mut(page_bytes))
                {
                    codec.encode_rows(HEAD, side, rows, page).unwrap();
                }
                for isa in Isa::available() {
                    let fast = FastInt2::new(isa, codec.clone());
                    let mut pages = vec![0xa5; expected.len()];
                    fast.encode_rows(HEAD, side, &rows, &mut pages, &mut Scratch::default()).unwrap();
                    assert!(pages == expected, "{isa} d={dim} {count} rows {side:?}");
                }
            }
        }
    }
}

#[test]
fn wrong_lengths_are_refused() {
    let codec = Case::new(32, 1, Rule::Gaussian).codec(12);
    for (path, encoder) in paths(&codec, Side::Key) {
        let mut scratch = Scratch::default();
        let mut page = vec![0; codec.layout().page_bytes()];
        let short = page.len() - 1;
        let mut rows = vec![0.0; 65 * 32];
        assert!(encoder.encode_rows(Side::Key, &rows, &mut page, &mut scratch).is_err(), "{path}");
        assert!(encoder.encode_rows(Side::Key, &rows[..33], &mut page, &mut scratch).is_err(), "{path}");
        assert!(encoder.encode_rows(Side::Key, &rows[..32], &mut page[..short], &mut scratch).is_err());
        assert!(encoder.decode_rows(Side::Key, &page, &mut rows, &mut scratch).is_err(), "{path}");
        assert!(encoder.decode_rows(Side::Key, &page[..short], &mut rows[..32], &mut scratch).is_err());
        assert!(encoder.rotate_rows(&[0.0_f32; 32], &mut rows[..64], &mut scratch).is_err());
        encoder.encode_rows::<f32>(Side::Key, &[], &mut page, &mut scratch).unwrap();
        assert!(page.iter().all(|&byte| byte == 0));
    }
}
