//! What `tools/check-cuda-kernels` compiles of the kernels whose results are defined to the bit.

use oscar_codec::{BandLayout, CodeLayout, Fp8Layout, PageLayout, ScaleType};

use super::compile::{EXACT_OPTIONS, Source};
use super::page_order::PageOrder;
use super::seal::SealShape;
use super::write;

fn shapes() -> Vec<(String, SealShape)> {
    let mut shapes = Vec::new();
    for head_dim in [64, 96, 128, 256] {
        let mut add = |name: &str, format, rules, published| {
            let order = PageOrder::new(format).unwrap();
            let shape = SealShape { order, rules, published, portable: false };
            shapes.push((format!("seal {name} d{head_dim}"), shape));
        };
        let codes = |bits, groups, scale| {
            PageLayout::Codes(CodeLayout::new(bits, head_dim, groups).unwrap().with_scales(scale))
        };
        add("int2 search", codes(2, 1, ScaleType::F16), 8, false);
        add("int2 published clip", codes(2, 1, ScaleType::Bf16), 2, true);
        add("int4 minmax", codes(4, 1, ScaleType::F16), 1, false);
        add("banded search", PageLayout::banded(head_dim).unwrap(), 8, false);
        add("banded high search", PageLayout::Banded(BandLayout::high(head_dim).unwrap()), 8, false);
        if head_dim >= 128 {
            add("banded int1.5 search", PageLayout::int15(head_dim).unwrap(), 8, false);
        }
        if head_dim == 64 {
            let of = |widths: &str| BandLayout::of_widths(head_dim, widths.parse().unwrap()).unwrap();
            for widths in ["4/0/0/0", "4/2/0/0", "4/2/2/2", "4/4/2/2"] {
                add(&format!("banded {widths} search"), PageLayout::Banded(of(widths)), 8, false);
            }
        }
        add("fp8", PageLayout::Fp8(Fp8Layout::new(head_dim).unwrap()), 0, false);
        if head_dim == 128 {
            add("int2 clip", codes(2, 1, ScaleType::F16), 2, false);
            add("banded all rules", PageLayout::banded(head_dim).unwrap(), 15, false);
            add("int2 gaussian", codes(2, 1, ScaleType::F16), 4, false);
            add("int2 x4 all rules", codes(2, 4, ScaleType::F16), 15, false);
            add("bf16", PageLayout::bf16(head_dim), 0, false);
        }
    }
    shapes
}

/// `OSCAR_WRITE=1` writes the file.
#[test]
fn the_list_of_configurations_is_that_of_the_product() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/src/cuda/kernels/configurations-exact.json");
    let entry = |name: String, source: Source| {
        assert!(source.exact, "{name}");
        source.configuration(&name)
    };
    let mut kernels: Vec<serde_json::Value> =
        shapes().into_iter().map(|(name, shape)| entry(name, shape.source())).collect();
    for (head_dim, count) in [64, 96, 128, 256].into_iter().flat_map(|d| write::PER_THREAD.map(|n| (d, n))) {
        let name = format!("write {count} vectors d{head_dim}");
        let exact = PageOrder::new(PageLayout::bf16(head_dim)).unwrap();
        kernels.push(entry(name, write::source(&exact, count)));
    }
    let expected = serde_json::json!({ "options": EXACT_OPTIONS, "kernels": kernels });
    if std::env::var_os("OSCAR_WRITE").is_some() {
        std::fs::write(path, format!("{expected:#}\n")).unwrap();
    }
    let listed: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    assert_eq!(listed, expected, "run this test with OSCAR_WRITE=1");
}

#[test]
fn a_block_fits_every_card() {
    // Shared memory of a block on sm_80, sm_89 and sm_90.
    for block in [166_912, 101_376, 232_448] {
        assert!(shapes().iter().all(|(_, shape)| shape.block_memory() <= block), "{block}");
    }
}
