//! What `tools/check-cuda-kernels` compiles of the kernels that only a whole model needs.

use oscar_codec::{BandLayout, CodeLayout, Fp8Layout, PageLayout};

use super::compile::{OPTIONS, Source};
use super::prefill::Products;
use super::tile_kind::TileKind;
use super::tuning::DecodeShape;
use super::{experts_few, multiply, norm, outputs, prefill, routed, sample, weights};

/// `OSCAR_WRITE=1` writes the file.
#[test]
fn the_list_of_configurations_is_that_of_the_product() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/src/cuda/kernels/configurations-backend.json");
    let entry = |name: String, source: Source| {
        assert!(!source.exact, "{name}");
        source.configuration(&name)
    };
    let mut kernels = vec![
        entry("weights".into(), weights::source()),
        entry("sampling".into(), sample::source()),
        entry("activations".into(), multiply::pack_source()),
        entry("norms".into(), norm::source()),
    ];
    let rings = multiply::Rings::new(232_448);
    for variant in multiply::Variant::ALL {
        // The mixed kernel has all others in it; one alone is listed, and all of those for single rows.
        for kind in TileKind::ALL.into_iter().map(Some).chain([None]) {
            if variant == multiply::Variant::ALL[0] || matches!(kind, None | Some(TileKind::Floats)) {
                let source = multiply::source(variant, kind, rings);
                kernels.push(entry(source.name.clone(), source));
            }
        }
    }
    kernels.push(entry("routing".into(), routed::route_source()));
    for tiles in routed::COLUMN_TILES {
        for kind in TileKind::ALL {
            let source = routed::experts_source(tiles, kind, rings);
            kernels.push(entry(source.name.clone(), source));
        }
    }
    for kind in TileKind::ALL {
        let source = experts_few::source(kind, rings);
        kernels.push(entry(source.name.clone(), source));
    }
    for head_dim in [64, 96, 128, 256] {
        let codes = |bits| PageLayout::Codes(CodeLayout::new(bits, head_dim, 1).unwrap());
        let bands = PageLayout::Banded(BandLayout::int2(head_dim).unwrap());
        let fp8 = PageLayout::Fp8(Fp8Layout::new(head_dim).unwrap());
        let high = PageLayout::Banded(BandLayout::high(head_dim).unwrap());
        let mut formats = vec![
            ("bf16", PageLayout::bf16(head_dim)),
            ("int2", codes(2)),
            ("int4", codes(4)),
            ("bands", bands),
            ("high", high),
            ("fp8", fp8),
        ];
        if head_dim >= 128 {
            formats.push(("int1.5", PageLayout::int15(head_dim).unwrap()));
        }
        if head_dim == 64 {
            let of = |widths: &str| BandLayout::of_widths(head_dim, widths.parse().unwrap()).unwrap();
            let widths = ["4/0/0/0", "4/2/0/0", "4/2/2/2", "4/4/2/2"];
            formats.extend(widths.map(|widths| (widths, PageLayout::Banded(of(widths)))));
        }
        for (name, sealed) in formats {
            let shape = DecodeShape { head_dim, kv_heads: 1, group: 1, sealed };
            let source = prefill::source(&shape, Products::Warps).unwrap();
            kernels.push(entry(format!("prefill {name} d{head_dim}"), source));
            if Products::of("sm_90a", head_dim) == Products::Warpgroups {
                let source = prefill::source(&shape, Products::Warpgroups).unwrap();
                kernels.push(entry(format!("prefill of warpgroups {name} d{head_dim}"), source));
            }
        }
        let source = outputs::source(head_dim);
        kernels.push(entry(format!("undo d{head_dim}"), source));
    }
    let expected = serde_json::json!({ "options": OPTIONS, "kernels": kernels });
    if std::env::var_os("OSCAR_WRITE").is_some() {
        std::fs::write(path, format!("{expected:#}\n")).unwrap();
    }
    let listed: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    assert_eq!(listed, expected, "run this test with OSCAR_WRITE=1");
}
