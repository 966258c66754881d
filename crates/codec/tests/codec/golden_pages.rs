//! Pages byte for byte as an implementation of its own (`tools/make_codec_fixtures.py`, numpy) writes them.

use oscar_codec::{
    BandLayout, BandRows, CodeLayout, CodecError, HeadEncoder, HeadIndex, HeadTransform, KvGeometry,
    PageCodec, RowEncoder, Rule, ScaleType, Side, SquareMatrix,
};

const HEAD: HeadIndex = HeadIndex { layer: 0, head: 0 };

/// Multiples of 2⁻²⁰ within ±8, every 97th eight times larger, from a 64-bit linear congruential generator.
fn numbers(seed: u64, count: usize) -> Vec<f32> {
    let mut state = seed;
    (0..count)
        .map(|i| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let value = ((state >> 40) as f32 - 8_388_608.0) / 1_048_576.0;
            if i % 97 == 96 { value * 8.0 } else { value }
        })
        .collect()
}

struct Case {
    dim: usize,
    groups: usize,
    scale_type: ScaleType,
    published: bool,
    rules: [Rule; 2],
    centred: bool,
    seed: u64,
}

impl Case {
    fn encode(&self) -> Vec<u8> {
        let encoder = |side: u64| {
            let seed = self.seed + 10 * side;
            let values: Vec<f32> = numbers(seed + 2, self.dim * self.dim).iter().map(|x| x / 64.0).collect();
            let matrix = SquareMatrix::from_f32(self.dim, &values).unwrap();
            let mean = self.centred.then(|| numbers(seed + 1, self.dim));
            let transform = if self.published {
                HeadTransform::published(&matrix).unwrap()
            } else {
                HeadTransform::new(mean, &matrix).unwrap()
            };
            let layout = CodeLayout::new(2, self.dim, self.groups).unwrap().with_scales(self.scale_type);
            vec![HeadEncoder::codes(transform, layout, self.rules[side as usize], self.published)]
        };
        encode(self.dim, self.seed, encoder(0), encoder(1))
    }
}

fn widths(head_dim: usize, widths: &str) -> Result<BandLayout, CodecError> {
    BandLayout::of_widths(head_dim, widths.parse()?)
}

/// Keys in bands, centred values. The matrix of keys is any that has an inverse.
struct Banded {
    layout: fn(usize) -> Result<BandLayout, CodecError>,
    dim: usize,
    rule: Rule,
    seed: u64,
}

impl Banded {
    fn encode(&self) -> Vec<u8> {
        let layout = (self.layout)(self.dim).unwrap();
        let rows = RowEncoder::Banded(BandRows { layout, value_rule: self.rule });
        let encoder = |side: u64| {
            let seed = self.seed + 10 * side;
            let values: Vec<f32> = numbers(seed + 2, self.dim * self.dim).iter().map(|x| x / 64.0).collect();
            let matrix = SquareMatrix::from_f32(self.dim, &values).unwrap();
            let mean = Some(numbers(seed + 1, self.dim));
            vec![HeadEncoder {
                transform: HeadTransform::general(mean, &matrix).unwrap(),
                rows,
                page_means: None,
            }]
        };
        encode(self.dim, self.seed, encoder(0), encoder(1))
    }
}

fn encode(dim: usize, seed: u64, keys: Vec<HeadEncoder>, values: Vec<HeadEncoder>) -> Vec<u8> {
    let geometry = KvGeometry { layers: 1, kv_heads: 1, head_dim: dim };
    let codec = PageCodec::new("golden", geometry, keys, values).unwrap();
    let rows = |side: u64| numbers(seed + 10 * side, 64 * dim);
    let mut page = vec![0; codec.head_bytes(0)];
    codec.encode_rows(HEAD, Side::Key, 0, &rows(0), &mut page).unwrap();
    codec.encode_rows(HEAD, Side::Value, 0, &rows(1), &mut page).unwrap();
    page
}

fn assert_same(page: &[u8], golden: &[u8]) {
    assert_eq!(page.len(), golden.len());
    let different: Vec<usize> = (0..page.len()).filter(|&i| page[i] != golden[i]).collect();
    assert!(different.is_empty(), "{} bytes differ, first at {:?}", different.len(), &different[..1]);
}

macro_rules! golden {
    ($name:ident, $case:expr) => {
        #[test]
        fn $name() {
            assert_same(&$case.encode(), include_bytes!(concat!("../fixtures/", stringify!($name), ".page")));
        }
    };
}

golden!(
    paper_d64,
    Case {
        dim: 64,
        groups: 1,
        scale_type: ScaleType::F16,
        published: true,
        rules: [Rule::Clip(0.96), Rule::Clip(0.92)],
        centred: false,
        seed: 1,
    }
);
golden!(
    paper_d32_groups_bf16,
    Case {
        dim: 32,
        groups: 2,
        scale_type: ScaleType::Bf16,
        published: true,
        rules: [Rule::MIN_MAX, Rule::Clip(0.9)],
        centred: false,
        seed: 2,
    }
);
golden!(
    auto_d64_search,
    Case {
        dim: 64,
        groups: 1,
        scale_type: ScaleType::F16,
        published: false,
        rules: [Rule::Search, Rule::Clip(0.92)],
        centred: true,
        seed: 3,
    }
);
golden!(
    auto_d128_groups_bf16,
    Case {
        dim: 128,
        groups: 2,
        scale_type: ScaleType::Bf16,
        published: false,
        rules: [Rule::Gaussian, Rule::Search],
        centred: true,
        seed: 4,
    }
);
golden!(
    auto_d48_padded,
    Case {
        dim: 48,
        groups: 3,
        scale_type: ScaleType::F16,
        published: false,
        rules: [Rule::Clip(0.9), Rule::Gaussian],
        centred: true,
        seed: 5,
    }
);
golden!(
    auto_d96,
    Case {
        dim: 96,
        groups: 1,
        scale_type: ScaleType::F16,
        published: false,
        rules: [Rule::Gaussian, Rule::MIN_MAX],
        centred: false,
        seed: 6,
    }
);
golden!(
    auto_d80_padded,
    Case {
        dim: 80,
        groups: 1,
        scale_type: ScaleType::F16,
        published: false,
        rules: [Rule::Search, Rule::Gaussian],
        centred: true,
        seed: 7,
    }
);
golden!(
    auto_d256,
    Case {
        dim: 256,
        groups: 1,
        scale_type: ScaleType::F16,
        published: false,
        rules: [Rule::Search, Rule::Clip(0.92)],
        centred: true,
        seed: 8,
    }
);
golden!(banded_d48, Banded { layout: BandLayout::int2, dim: 48, rule: Rule::Gaussian, seed: 21 });
golden!(banded_d64, Banded { layout: BandLayout::int2, dim: 64, rule: Rule::Search, seed: 22 });
golden!(banded_d96, Banded { layout: BandLayout::int2, dim: 96, rule: Rule::Search, seed: 23 });
golden!(banded_d128, Banded { layout: BandLayout::int2, dim: 128, rule: Rule::Search, seed: 24 });
golden!(banded_d80, Banded { layout: BandLayout::int2, dim: 80, rule: Rule::Search, seed: 25 });
golden!(banded_d256, Banded { layout: BandLayout::int2, dim: 256, rule: Rule::Gaussian, seed: 26 });
golden!(int15_d48, Banded { layout: BandLayout::int15, dim: 48, rule: Rule::Gaussian, seed: 31 });
golden!(int15_d64, Banded { layout: BandLayout::int15, dim: 64, rule: Rule::Search, seed: 32 });
golden!(int15_d96, Banded { layout: BandLayout::int15, dim: 96, rule: Rule::Search, seed: 33 });
golden!(int15_d128, Banded { layout: BandLayout::int15, dim: 128, rule: Rule::Search, seed: 34 });
golden!(int15_d80, Banded { layout: BandLayout::int15, dim: 80, rule: Rule::Gaussian, seed: 35 });
golden!(int15_d256, Banded { layout: BandLayout::int15, dim: 256, rule: Rule::Search, seed: 36 });
golden!(high_d48, Banded { layout: BandLayout::high, dim: 48, rule: Rule::Gaussian, seed: 41 });
golden!(high_d64, Banded { layout: BandLayout::high, dim: 64, rule: Rule::Search, seed: 42 });
golden!(high_d96, Banded { layout: BandLayout::high, dim: 96, rule: Rule::MIN_MAX, seed: 43 });
golden!(high_d128, Banded { layout: BandLayout::high, dim: 128, rule: Rule::Search, seed: 44 });
golden!(high_d80, Banded { layout: BandLayout::high, dim: 80, rule: Rule::Search, seed: 45 });
golden!(high_d256, Banded { layout: BandLayout::high, dim: 256, rule: Rule::Gaussian, seed: 46 });
golden!(widths_4000_d64, Banded { layout: |d| widths(d, "4/0/0/0"), dim: 64, rule: Rule::Search, seed: 51 });
golden!(
    widths_4220_d64,
    Banded { layout: |d| widths(d, "4/2/2/0"), dim: 64, rule: Rule::Gaussian, seed: 52 }
);
golden!(widths_4422_d64, Banded { layout: |d| widths(d, "4/4/2/2"), dim: 64, rule: Rule::Search, seed: 53 });
golden!(
    widths_4200_d128,
    Banded { layout: |d| widths(d, "4/2/0/0"), dim: 128, rule: Rule::Search, seed: 54 }
);
golden!(
    widths_4222_d128,
    Banded { layout: |d| widths(d, "4/2/2/2"), dim: 128, rule: Rule::Gaussian, seed: 55 }
);
golden!(widths_4222_d64, Banded { layout: |d| widths(d, "4/2/2/2"), dim: 64, rule: Rule::Search, seed: 56 });
golden!(
    widths_4422_d256,
    Banded { layout: |d| widths(d, "4/4/2/2"), dim: 256, rule: Rule::Search, seed: 57 }
);
