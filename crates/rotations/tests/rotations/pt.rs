//! Published rotation files against what torch reads from them, and files made to do harm.
//!
//! `tools/make_rotation_fixtures.py` writes the fixtures.

use std::fs;
use std::io::Cursor;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use oscar_rotations::pt::{self, PtFile, PtFormat};
use oscar_rotations::{PickleError, RotationError, import};
use serde_json::Value;

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/rotations")
}

fn read(name: &str) -> Result<PtFile, RotationError> {
    pt::read(&folder().join(format!("{name}.pt")))
}

fn integers(value: &Value) -> Vec<i64> {
    value.as_array().expect("numbers").iter().map(|number| number.as_i64().expect("number")).collect()
}

fn bits(value: f64) -> i64 {
    value.to_bits() as i64
}

#[test]
fn every_number_is_the_one_torch_reads() {
    let expected: Value =
        serde_json::from_str(&fs::read_to_string(folder().join("expected.json")).expect("expected.json"))
            .expect("JSON");
    let expected = expected.as_object().expect("files");
    assert!(expected.len() >= 9);
    for (name, expected) in expected {
        let file = read(name).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!(file.format_version, expected["format_version"].as_str().expect("version"), "{name}");
        assert_eq!(file.objective.as_deref(), expected["objective"].as_str(), "{name}");
        let layers = expected["layers"].as_object().expect("layers");
        assert_eq!(file.layers.len(), layers.len(), "{name}");
        for (id, tensors) in layers {
            let layer = &file.layers[&id.parse::<usize>().expect("id")];
            let rotations: Vec<i64> =
                layer.rotations.iter().flat_map(|matrix| matrix.values()).map(|&value| bits(value)).collect();
            assert_eq!(rotations, integers(&tensors["rotation"]["bits"]), "{name} layer {id}");
            let shape = integers(&tensors["rotation"]["shape"]);
            assert_eq!(file.heads.is_some(), shape.len() == 3, "{name}");
            assert_eq!(
                (layer.rotations.len(), file.head_dim),
                (file.heads.unwrap_or(1), shape[shape.len() - 1] as usize)
            );
            let eigenvalues = layer
                .eigenvalues
                .as_ref()
                .map(|values| values.iter().flatten().map(|&value| bits(value)).collect());
            assert_eq!(
                eigenvalues,
                tensors.get("eigenvalues").map(|tensor| integers(&tensor["bits"])),
                "{name}"
            );
        }
    }
}

#[test]
fn contents_that_cannot_be_rotations_are_named() {
    let cases = [
        ("bad_dims", "layers[0].rotation"),
        ("bad_four_axes", "layers[0].rotation"),
        ("bad_mixed_dims", "layers[1].rotation"),
        ("bad_eigenvalues", "layers[0].eigenvalues"),
    ];
    for (name, tensor) in cases {
        match read(name) {
            Err(RotationError::Tensor { tensor: found, .. }) => assert_eq!(found, tensor, "{name}"),
            other => panic!("{name}: {other:?}"),
        }
    }
    for (name, field) in
        [("bad_layer_id", "layers[0].layer_id"), ("bad_twice", "layers[0]"), ("bad_no_layers", "layers")]
    {
        match read(name) {
            Err(RotationError::Field { field: found, .. }) => assert_eq!(found, field, "{name}"),
            other => panic!("{name}: {other:?}"),
        }
    }
    assert!(
        matches!(read("bad_nan"), Err(RotationError::NotFinite { tensor, .. }) if tensor == "layers[0].rotation")
    );
    for (name, global) in [("bad_long_storage", "LongStorage"), ("bad_parameter", "_rebuild_parameter")] {
        match read(name) {
            Err(RotationError::Pickle { source: PickleError::Global { name: found, .. }, .. }) => {
                assert_eq!(found, global)
            }
            other => panic!("{name}: {other:?}"),
        }
    }
}

#[test]
fn attempts_to_run_code_end_with_the_name_of_what_was_asked_for() {
    for (name, global) in
        [("os_system", "system"), ("popen", "Popen"), ("eval", "eval"), ("getattr", "getattr")]
    {
        for protocol in [2, 4] {
            match read(&format!("hostile_{name}_{protocol}")) {
                Err(error @ RotationError::Pickle { source: PickleError::Global { .. }, .. }) => {
                    assert!(error.to_string().contains(&format!("{global:?}")), "{error}");
                    assert!(error.fix().expect("fix").contains("trust"), "{error}");
                }
                other => panic!("{name}: {other:?}"),
            }
        }
    }
}

#[test]
fn damaged_archives_and_bombs_are_refused_quickly() {
    let begun = Instant::now();
    let refused = |name: &str| match read(&format!("hostile_{name}")) {
        Err(error) => {
            assert!(error.to_string().contains(&format!("hostile_{name}.pt")), "{error}");
            error
        }
        Ok(_) => panic!("{name} was read"),
    };
    for name in ["truncated", "not_a_zip", "empty", "short_storage", "no_storage", "big_endian", "bomb_lies"]
    {
        let error = refused(name);
        assert!(matches!(error, RotationError::Archive { .. }), "{name}: {error:?}");
        assert!(error.fix().is_some(), "{name}");
    }
    assert!(matches!(refused("bomb"), RotationError::TooLarge { size: 4_194_304, .. }));
    assert!(matches!(
        refused("huge_storage"),
        RotationError::TooLarge { .. } | RotationError::Archive { .. }
    ));
    assert!(matches!(
        refused("cut_pickle"),
        RotationError::Pickle { source: PickleError::Truncated { .. }, .. }
    ));
    assert!(matches!(
        refused("view_outside"),
        RotationError::Pickle { source: PickleError::Malformed { .. }, .. }
    ));
    assert!(begun.elapsed() < Duration::from_secs(5));
    assert!(matches!(pt::read(&folder()), Err(RotationError::NotARotationFile { .. })));
    assert!(matches!(read("no_such_file"), Err(RotationError::Io { .. })));
}

#[test]
fn a_pair_becomes_one_file_and_back_bit_for_bit() {
    let (keys, values) = (read("format1_k").expect("keys"), read("format1_v").expect("values"));
    let file = import::from_pt(&keys, &values, "test").expect("import");
    assert_eq!((file.header.key_objective.as_str(), file.header.value_objective.as_str()), ("qqt", "sst"));
    assert_eq!(file.header.composition.expect("composition").to_string(), "r_h_pbr");
    assert!(file.heads.is_none());
    let folder = tempfile::tempdir().expect("folder");
    let pair = import::to_pt(Path::new("x"), &file, PtFormat::PerLayer).expect("export");
    assert_eq!(pair[1].path, Path::new("v_rotation_sst_r_h_pbr.pt"));
    for (exported, original) in pair.iter().zip([&keys, &values]) {
        let path = folder.path().join(&exported.path);
        pt::write(&path, exported).expect("write");
        let again = pt::read(&path).expect("read");
        assert_eq!(PtFile { path: original.path.clone(), ..again }, *original);
        let bytes = fs::read(&path).expect("bytes");
        pt::write(&path, exported).expect("write");
        assert_eq!(fs::read(&path).expect("bytes"), bytes, "the same input gives the same bytes");
    }
    let error = import::to_pt(Path::new("x"), &file, PtFormat::PerHead).expect_err("no heads");
    assert!(error.fix().expect("fix").contains("--format 1"));
}

#[test]
fn per_head_files_keep_their_axis() {
    let keys = read("format2_k").expect("keys");
    let values = PtFile { objective: Some("sst_r_h_pbr".to_owned()), ..keys.clone() };
    let file = import::from_pt(&keys, &values, "test").expect("import");
    assert_eq!((file.header.kv_heads, file.header.head_dim), (2, 8));
    let [exported, _] = import::to_pt(Path::new("x"), &file, PtFormat::PerHead).expect("export");
    let folder = tempfile::tempdir().expect("folder");
    let path = folder.path().join("k.pt");
    pt::write(&path, &exported).expect("write");
    assert_eq!(PtFile { path: keys.path.clone(), ..pt::read(&path).expect("read") }, keys);
}

#[test]
fn pairs_that_do_not_fit_are_refused() {
    let (keys, values) = (read("format1_k").expect("keys"), read("format1_v").expect("values"));
    let swapped = import::from_pt(&values, &keys, "test").expect_err("swapped");
    assert!(
        matches!(swapped, RotationError::Swapped { .. }) && swapped.to_string().contains("sst"),
        "{swapped}"
    );
    assert!(matches!(import::from_pt(&keys, &keys, "test"), Err(RotationError::Swapped { .. })));
    let missing = read("missing_layer").expect("keys");
    assert!(matches!(
        import::from_pt(&missing, &values, "test"),
        Err(RotationError::MissingLayer { layer: 2, .. })
    ));
    let heads = read("format2_k").expect("heads");
    assert!(matches!(import::from_pt(&heads, &values, "test"), Err(RotationError::Pair { .. })));
    let bad = read("not_orthogonal").expect("structure is fine");
    let other = PtFile { objective: Some("sst_r_h_pbr".to_owned()), ..bad.clone() };
    match import::from_pt(&bad, &other, "test") {
        Err(RotationError::NotOrthogonal { error, tensor, .. }) => {
            assert!((0.01..0.03).contains(&error));
            assert_eq!(tensor, "layers.0.keys.layer.rotation");
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_table_of_contents_with_too_many_lines_is_refused() {
    let mut archive = zip::ZipWriter::new(Cursor::new(Vec::new()));
    for member in 0..20_000 {
        archive.start_file(format!("a/{member}"), zip::write::SimpleFileOptions::default()).expect("member");
    }
    let bytes = archive.finish().expect("archive");
    let error = pt::read_from(Path::new("many.pt"), bytes).expect_err("too many");
    assert!(
        matches!(&error, RotationError::Archive { problem, .. } if problem.contains("20000 members")),
        "{error}"
    );
}
