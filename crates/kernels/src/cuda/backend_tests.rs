//! What `tools/check-cuda-kernels` compiles of the kernels that only a whole model needs.

use oscar_codec::{BandLayout, CodeLayout, Fp8Layout, PageLayout};

use super::compile::{OPTIONS, Source};
use super::tuning::DecodeShape;
use super::{prefill, products, sample, weights};

/// `OSCAR_WRITE=1` writes the file.
#[test]
fn the_list_of_configurations_is_that_of_the_product() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/src/cuda/kernels/configurations-backend.json");
    let entry = |name: String, texts: &[&str], source: Source| {
        assert!(!source.exact, "{name}");
        let defines: serde_json::Map<String, serde_json::Value> =
            source.defines.into_iter().map(|(key, value)| (key.to_owned(), value.into())).collect();
        serde_json::json!({ "name": name, "sources": texts, "defines": defines })
    };
    let mut kernels = vec![
        entry("weights".into(), &["tiles.cu", "repack.cu"], weights::source()),
        entry("sampling".into(), &["tiles.cu", "sample.cu"], sample::source()),
        entry("activations".into(), &["tiles.cu", "pack.cu"], products::pack_source()),
    ];
    for tiles in products::COLUMN_TILES {
        let name = format!("products of {} rows", 8 * tiles);
        kernels.push(entry(name, &["tiles.cu", "multiply.cu"], products::multiply_source(tiles)));
    }
    for head_dim in [64, 96, 128, 256] {
        let codes = |bits| PageLayout::Codes(CodeLayout::new(bits, head_dim, 1).unwrap());
        let bands = PageLayout::Banded(BandLayout::int2(head_dim).unwrap());
        let fp8 = PageLayout::Fp8(Fp8Layout::new(head_dim).unwrap());
        for (name, sealed) in [
            ("bf16", PageLayout::bf16(head_dim)),
            ("int2", codes(2)),
            ("int4", codes(4)),
            ("bands", bands),
            ("fp8", fp8),
        ] {
            let shape = DecodeShape { head_dim, kv_heads: 1, group: 1, sealed };
            let source = prefill::source(&shape).unwrap();
            kernels.push(entry(
                format!("prefill {name} d{head_dim}"),
                &["primitives.cu", "band_order.cu", "prefill.cu"],
                source,
            ));
        }
        let source = prefill::undo_source(head_dim);
        kernels.push(entry(format!("undo d{head_dim}"), &["tiles.cu", "undo.cu"], source));
    }
    let expected = serde_json::json!({ "options": OPTIONS, "kernels": kernels });
    if std::env::var_os("OSCAR_WRITE").is_some() {
        std::fs::write(path, format!("{expected:#}\n")).unwrap();
    }
    let listed: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    assert_eq!(listed, expected, "run this test with OSCAR_WRITE=1");
}
