//! Our own rotation file: round trips, strict reading, verification, comparison, and models it must not be
//! used with.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use oscar_codec::{Composition, KeyWidths, KvGeometry, Rule, SquareMatrix, hadamard};
use oscar_random::Random;
use oscar_rotations::find::RotationOrigin;
use oscar_rotations::interleaved::{from_interleaved, interleaved_order, to_interleaved};
use oscar_rotations::verify::{Findings, Severity, verify, verify_pt, verify_pt_pair};
use oscar_rotations::{
    LayerRotations, RotationError, RotationFile, RotationHeader, RotationSet, Scope, SideRotations,
    check_model, diff, find, pt, safetensors, shipped,
};
use proptest::prelude::*;
use serde_json::{Value, json};

const DIM: usize = 16;
const HEADS: usize = 2;
const LAYERS: usize = 3;

/// Random rotations and files of them.
struct Rotations(Random);

impl Rotations {
    fn new(seed: u64) -> Rotations {
        Rotations(Random::new(seed))
    }

    /// A rotation by Gram–Schmidt on random columns, rounded to float32 as files hold it.
    fn rotation(&mut self, dim: usize) -> SquareMatrix {
        let mut columns: Vec<Vec<f64>> = Vec::new();
        while columns.len() < dim {
            let mut column: Vec<f64> = (0..dim).map(|_| 2.0 * self.0.fraction() - 1.0).collect();
            for _ in 0..2 {
                for other in &columns {
                    let dot: f64 = column.iter().zip(other).map(|(a, b)| a * b).sum();
                    column.iter_mut().zip(other).for_each(|(a, b)| *a -= dot * b);
                }
            }
            let norm = column.iter().map(|x| x * x).sum::<f64>().sqrt();
            columns.push(column.into_iter().map(|x| x / norm).collect());
        }
        SquareMatrix::from_fn(dim, |i, j| columns[j][i])
    }

    /// Rotations in the default composition, with the metric their eigenvectors come from if they are for
    /// keys.
    fn side(&mut self, count: usize, keys: bool) -> SideRotations {
        let mut side = SideRotations {
            rotations: Vec::new(),
            eigenvalues: Vec::new(),
            means: keys.then(Vec::new),
            metrics: Some(Vec::new()),
            bands: keys.then(Vec::new),
            rules: Vec::new(),
        };
        for head in 0..count {
            let basis = self.rotation(DIM);
            let eigenvalues: Vec<f64> =
                (0..DIM).map(|i| f64::from((0.5 * 1.3f64.powi(i as i32)) as f32)).collect();
            let metric_basis = if keys { basis.clone() } else { self.rotation(DIM) };
            let spread = SquareMatrix::from_fn(DIM, |i, j| if i == j { eigenvalues[i] } else { 0.0 });
            let metric = metric_basis.multiply(&spread).multiply(&metric_basis.transpose());
            side.rotations.push(rounded(&Composition::RHPbr.compose(&basis)));
            side.eigenvalues.push(eigenvalues);
            let metrics = side.metrics.get_or_insert_default();
            metrics.push(rounded(&SquareMatrix::from_fn(DIM, |i, j| {
                0.5 * (metric.get(i, j) + metric.get(j, i))
            })));
            if let Some(means) = &mut side.means {
                means.push((0..DIM).map(|_| (2.0 * self.0.fraction() - 1.0) as f32).collect());
            }
            if let Some(bands) = &mut side.bands {
                bands.push(rounded(&SquareMatrix::from_fn(DIM, |i, j| {
                    basis.get(i, j) * 3.0 * 0.8_f64.powi(j as i32)
                })));
            }
            side.rules.push([Rule::Clip(0.96), Rule::Search, Rule::Gaussian][head % 3]);
        }
        side
    }

    fn set(&mut self, count: usize) -> RotationSet {
        let mut layer = || LayerRotations { keys: self.side(count, true), values: self.side(count, false) };
        (0..LAYERS).map(|id| (id, layer())).collect()
    }
}

fn rounded(matrix: &SquareMatrix) -> SquareMatrix {
    SquareMatrix::from_f32(matrix.dim(), &matrix.to_f32()).expect("same size")
}

fn file(seed: u64) -> RotationFile {
    let mut rotations = Rotations::new(seed);
    RotationFile {
        header: RotationHeader {
            model: "test \"model\"".to_owned(),
            model_fingerprint: Some("ab".repeat(32)),
            weight_fingerprint: Some("cd".repeat(32)),
            tokens: 16_384,
            corpus: Some("ef".repeat(32)),
            key_objective: "qqt".to_owned(),
            value_objective: "cs".to_owned(),
            composition: Some(Composition::RHPbr),
            kv_heads: HEADS,
            head_dim: DIM,
            seed: Some(7),
            ..RotationHeader::default()
        },
        heads: Some(rotations.set(HEADS)),
        layers: Some(rotations.set(1)),
        ..RotationFile::default()
    }
}

fn saved(file: &RotationFile) -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().expect("folder");
    let path = folder.path().join("test.safetensors");
    safetensors::write(&path, file).expect("write");
    (folder, path)
}

/// A file that was read, with the matrices that it holds in 16 bits as they were. They must be close to what was read.
fn unrounded(mut read: RotationFile, original: &RotationFile) -> RotationFile {
    let close = |found: &SquareMatrix, exact: &SquareMatrix, error: f64| {
        let largest = exact.values().iter().fold(0.0, |most, value| f64::max(most, value.abs()));
        let mut pairs = found.values().iter().zip(exact.values());
        assert!(pairs.all(|(found, exact)| (found - exact).abs() <= error * largest));
    };
    for (set, exact) in [(&mut read.heads, &original.heads), (&mut read.layers, &original.layers)] {
        let (Some(set), Some(exact)) = (set, exact) else { continue };
        for (layer, exact) in set.values_mut().zip(exact.values()) {
            for (side, exact) in [(&mut layer.keys, &exact.keys), (&mut layer.values, &exact.values)] {
                for (found, exact) in side.rotations.iter_mut().zip(&exact.rotations) {
                    assert!(found.orthogonality_error() < 1e-9, "made orthonormal again");
                    close(found, exact, 1e-3);
                    *found = exact.clone();
                }
                for (found, exact) in side.bands.iter_mut().flatten().zip(exact.bands.iter().flatten()) {
                    close(found, exact, 1e-3);
                    *found = exact.clone();
                }
                for (found, exact) in side.metrics.iter_mut().flatten().zip(exact.metrics.iter().flatten()) {
                    close(found, exact, 1.0 / 256.0);
                    *found = exact.clone();
                }
            }
        }
    }
    read
}

#[test]
fn a_file_comes_back_with_16_bits_of_its_matrices() {
    let original = file(1);
    let (_folder, path) = saved(&original);
    let again = safetensors::read(&path).expect("read");
    assert_eq!(unrounded(again, &original), original);
    let bytes = fs::read(&path).expect("bytes");
    safetensors::write(&path, &original).expect("write");
    assert_eq!(fs::read(&path).expect("bytes"), bytes, "the same input gives the same bytes");
    let summary = safetensors::read_summary(&path).expect("summary");
    assert_eq!((summary.header, summary.has_bands), (original.header.clone(), true));
}

#[test]
fn sparse_layers_missing_parts_and_means_of_heads_come_back() {
    let mut original = file(2);
    original.heads = None;
    original.header.seed = None;
    original.header.corpus = None;
    let layers = original.layers.take().expect("layers");
    let sparse = layers.into_iter().map(|(id, mut layer)| {
        layer.keys.metrics = None;
        layer.values.metrics = None;
        layer.values.eigenvalues = Vec::new();
        layer.keys.means = Some(vec![vec![0.5; DIM]; HEADS]);
        (3 + 4 * id, layer)
    });
    original.layers = Some(sparse.collect());
    let (_folder, path) = saved(&original);
    assert_eq!(unrounded(safetensors::read(&path).expect("read"), &original), original);
}

#[test]
fn exact_files_and_those_of_version_1_come_back_bit_for_bit() {
    let original = file(5);
    let folder = tempfile::tempdir().expect("folder");
    let path = folder.path().join("exact.safetensors");
    safetensors::write_exact(&path, &original).expect("write");
    assert_eq!(safetensors::read(&path).expect("read"), original);
    let old = with_header(&fs::read(&path).expect("bytes"), |header| {
        header["__metadata__"]["version"] = json!("1");
    });
    let read = safetensors::parse(&path, &old).expect("read");
    assert_eq!(read.header.version, 1);
    assert_eq!((read.heads, read.layers), (original.heads, original.layers));
}

#[test]
fn other_programs_can_read_the_file() {
    let original = file(3);
    let (_folder, path) = saved(&original);
    let bytes = fs::read(&path).expect("bytes");
    let read = ::safetensors::SafeTensors::deserialize(&bytes).expect("safetensors");
    let tensor = read.tensor("layers.1.keys.head.rotation").expect("tensor");
    assert_eq!(tensor.shape(), [HEADS, DIM, DIM]);
    let first = half::f16::from_le_bytes(tensor.data()[..2].try_into().expect("2 bytes"));
    let heads = original.heads.as_ref().expect("heads");
    assert!((first.to_f64() - heads[&1].keys.rotations[0].get(0, 0)).abs() < 1e-3);
    assert_eq!(read.tensor("layers.0.values.layer.metric").expect("metric").shape(), [DIM * (DIM + 1) / 2]);
    assert!(read.tensor("layers.0.values.head.mean").is_err(), "values are not centred here");
}

/// Changes the JSON header of a saved file.
fn with_header(bytes: &[u8], change: impl FnOnce(&mut Value)) -> Vec<u8> {
    let length = u64::from_le_bytes(bytes[..8].try_into().expect("8 bytes")) as usize;
    let mut header: Value = serde_json::from_slice(&bytes[8..8 + length]).expect("header");
    change(&mut header);
    let header = header.to_string();
    [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &bytes[8 + length..]].concat()
}

/// Rotations of heads that have a choice of widths.
fn wide_file() -> RotationFile {
    const DIM: usize = 64;
    let side = |bands: bool| SideRotations {
        rotations: vec![hadamard::matrix(DIM)],
        eigenvalues: Vec::new(),
        means: None,
        metrics: None,
        bands: bands.then(|| vec![hadamard::matrix(DIM)]),
        rules: vec![Rule::Search],
    };
    let layer = LayerRotations { keys: side(true), values: side(false) };
    RotationFile {
        header: RotationHeader { kv_heads: 1, head_dim: DIM, ..RotationHeader::default() },
        heads: Some((0..3).map(|id| (id, layer.clone())).collect()),
        ..RotationFile::default()
    }
}

#[test]
fn widths_of_keys_are_written_alone_and_with_everything_else() {
    let plain = wide_file();
    let (_folder, path) = saved(&plain);
    let bytes = fs::read(&path).expect("bytes");
    let widths = |text: &str| text.parse::<KeyWidths>().expect("widths");
    let chosen = BTreeMap::from([(0, widths("4/4/2/2")), (2, widths("4/0/0/0"))]);
    safetensors::write_widths(&path, &chosen).expect("widths");
    assert_eq!(safetensors::read(&path).expect("a file").widths, chosen);
    let (_other, whole) = saved(&RotationFile { widths: chosen, ..plain });
    assert!(fs::read(&path).expect("bytes") == fs::read(&whole).expect("bytes"), "the same bytes");
    safetensors::write_widths(&path, &BTreeMap::new()).expect("no widths");
    assert!(fs::read(&path).expect("bytes") == bytes, "as it was");
}

#[test]
fn widths_that_kernels_do_not_read_are_refused() {
    let (_folder, path) = saved(&wide_file());
    let bytes = fs::read(&path).expect("bytes");
    let refused = |widths: Value| {
        let bytes =
            with_header(&bytes, |header| header["__metadata__"]["key_widths"] = json!(widths.to_string()));
        safetensors::parse(Path::new("bad.safetensors"), &bytes).expect_err("refused").to_string()
    };
    for (bad, problem) in [
        (json!({"0": "8/8/8/8"}), "4/2/1/1"),
        (json!({"first": "4/2/1/1"}), "JSON"),
        (json!({"99999999999": "4/2/1/1"}), "too large"),
        (json!(["4/2/1/1"]), "JSON"),
        (json!("4/2/1/1"), "JSON"),
    ] {
        let error = refused(bad);
        assert!(error.contains("key_widths") && error.contains(problem), "{error}");
    }
}

#[test]
fn bad_files_are_refused_with_the_tensor_or_field() {
    let (_folder, path) = saved(&file(4));
    let bytes = fs::read(&path).expect("bytes");
    let refused =
        |bytes: Vec<u8>| safetensors::parse(Path::new("bad.safetensors"), &bytes).expect_err("refused");
    let meta = |name: &'static str, value: Value| {
        refused(with_header(&bytes, |header| header["__metadata__"][name] = value))
    };
    assert!(matches!(meta("version", json!("4")), RotationError::Version { found, .. } if found == "4"));
    assert!(matches!(meta("format", json!("weights")), RotationError::NotARotationFile { .. }));
    assert!(
        matches!(meta("head_dim", json!("many")), RotationError::Field { field, .. } if field == "head_dim")
    );
    assert!(matches!(meta("head_dim", json!("32")), RotationError::Tensor { .. }));
    assert!(matches!(
        meta("kv_heads", json!("0")),
        RotationError::Tensor { .. } | RotationError::Field { .. }
    ));
    assert!(matches!(meta("kv_heads", json!("99999999999999999999")), RotationError::Field { .. }));
    assert!(
        matches!(meta("composition", json!("h_h")), RotationError::Field { field, .. } if field == "composition")
    );
    assert!(matches!(meta("rules", json!("{}")), RotationError::NotARotationFile { .. }));
    assert!(matches!(meta("rules", json!("[")), RotationError::Field { field, .. } if field == "rules"));
    let renamed = refused(with_header(&bytes, |header| {
        let header = header.as_object_mut().expect("object");
        let tensor = header.remove("layers.2.values.head.rotation").expect("tensor");
        header.insert("layers.2.values.head.rotatiom".to_owned(), tensor);
    }));
    assert!(
        matches!(renamed, RotationError::Tensor { tensor, .. } if tensor == "layers.2.values.head.rotation")
    );
    let reshaped = refused(with_header(&bytes, |header| {
        header["layers.0.keys.head.rotation"]["shape"] = json!([DIM, HEADS, DIM]);
    }));
    assert!(
        matches!(reshaped, RotationError::Tensor { tensor, .. } if tensor == "layers.0.keys.head.rotation")
    );
    let overflowing = refused(with_header(&bytes, |header| {
        header["layers.0.keys.head.rotation"]["data_offsets"] = json!([0, u64::MAX]);
    }));
    assert!(matches!(overflowing, RotationError::NotARotationFile { .. }));
    for cut in [0, 7, 8, 100, bytes.len() - 1] {
        assert!(matches!(refused(bytes[..cut].to_vec()), RotationError::NotARotationFile { .. }), "{cut}");
    }
    // The first tensor is the rotation of layer 0's keys.
    let data = 8 + u64::from_le_bytes(bytes[..8].try_into().expect("8 bytes")) as usize;
    let mut with_nan = bytes.clone();
    with_nan[data..data + 4].copy_from_slice(&f32::NAN.to_le_bytes());
    assert!(
        matches!(refused(with_nan), RotationError::NotFinite { tensor, .. } if tensor == "layers.0.keys.head.rotation")
    );
    let mut scaled = bytes.clone();
    scaled[data..data + 4].copy_from_slice(&2.0f32.to_le_bytes());
    fs::write(&path, scaled).expect("write");
    let error = safetensors::read(&path).expect_err("not orthogonal");
    assert!(
        matches!(&error, RotationError::NotOrthogonal { tensor, .. } if tensor == "layers.0.keys.head.rotation[0]")
    );
    assert!(error.to_string().contains("test.safetensors") && error.fix().is_some(), "{error}");
    assert!(safetensors::read_unverified(&path).is_ok());
}

#[test]
fn what_cannot_be_read_is_not_written() {
    let folder = tempfile::tempdir().expect("folder");
    let path = folder.path().join("x.safetensors");
    let mut bad = file(5);
    bad.heads.as_mut().expect("heads").get_mut(&0).expect("layer").keys.rotations.pop();
    assert!(matches!(safetensors::write(&path, &bad), Err(RotationError::Tensor { .. })));
    let mut bad = file(5);
    let layer = bad.layers.as_mut().expect("layers").get_mut(&1).expect("layer");
    layer.values.rotations[0] = SquareMatrix::from_fn(DIM, |i, j| if i == j { 1.1 } else { 0.0 });
    assert!(matches!(safetensors::write(&path, &bad), Err(RotationError::NotOrthogonal { .. })));
    assert_eq!(fs::read_dir(folder.path()).expect("folder").count(), 0);
}

fn errors(findings: &Findings) -> Vec<String> {
    let errors = findings.findings.iter().filter(|finding| finding.severity == Severity::Error);
    errors.map(|finding| format!("{}: {}", finding.place, finding.message)).collect()
}

#[test]
fn verification_passes_a_good_file() {
    let findings = verify(&file(6));
    assert_eq!(errors(&findings), Vec::<String>::new());
    assert!(findings.is_sound() && findings.orthogonality() < 1e-6);
    assert_eq!(findings.layers.len(), LAYERS * 2 * 2);
    assert!(findings.not_checked.is_empty(), "{:?}", findings.not_checked);
}

#[test]
fn verification_finds_swapped_sides() {
    // Whole sides exchanged, metrics and all.
    let mut whole = file(7);
    // Rotations alone exchanged.
    let mut rotations = file(7);
    for id in 0..LAYERS {
        let layer = whole.heads.as_mut().expect("heads").get_mut(&id).expect("layer");
        // A value rotation of its own metric, so that the exchange puts it where a key rotation should be.
        std::mem::swap(&mut layer.keys, &mut layer.values);
        let layer = rotations.heads.as_mut().expect("heads").get_mut(&id).expect("layer");
        std::mem::swap(&mut layer.keys.rotations, &mut layer.values.rotations);
    }
    for swapped in [whole, rotations] {
        let errors = errors(&verify(&swapped));
        assert!(
            errors
                .iter()
                .any(|error| error.contains("keys per head, layers 0-2: keys and values are swapped")),
            "{errors:?}"
        );
        assert!(!errors.iter().any(|error| error.contains("per layer")), "{errors:?}");
    }
}

#[test]
fn verification_finds_each_kind_of_damage() {
    let damaged = |change: &dyn Fn(&mut LayerRotations)| {
        let mut bad = file(8);
        change(bad.heads.as_mut().expect("heads").get_mut(&1).expect("layer"));
        errors(&verify(&bad)).join("\n")
    };
    let found = damaged(&|layer| layer.keys.rotations[1] = Rotations::new(99).rotation(DIM));
    assert!(found.contains("keys per head, layer 1: rotations do not belong to their metric"), "{found}");
    let found = damaged(&|layer| layer.values.eigenvalues[0].swap(3, 9));
    assert!(found.contains("values per head, layer 1: eigenvalues are not in ascending order"), "{found}");
    let found = damaged(&|layer| layer.keys.eigenvalues[0].iter_mut().for_each(|value| *value *= 2.0));
    assert!(found.contains("not those of the metric"), "{found}");
    let found = damaged(&|layer| layer.values.eigenvalues[1][0] = -5.0);
    assert!(found.contains("below zero"), "{found}");
    let found = damaged(&|layer| {
        let skew = SquareMatrix::from_fn(DIM, |i, j| layer.values.rotations[0].get(i, j) + 0.01);
        layer.values.rotations[0] = skew;
    });
    assert!(found.contains("values per head, layer 1: not rotations"), "{found}");
    let mut gap = file(8);
    gap.heads.as_mut().expect("heads").remove(&1);
    let found = errors(&verify(&gap)).join("\n");
    assert!(found.contains("different layers"), "{found}");
    let mut uncentred = file(8);
    uncentred.heads.as_mut().expect("heads").values_mut().for_each(|layer| layer.keys.means = None);
    let findings = verify(&uncentred);
    assert!(
        findings
            .findings
            .iter()
            .any(|f| f.severity == Severity::Warning && f.message.contains("not centred"))
    );
}

/// A file that ships, with its keys changed.
fn with_keys(change: impl Fn(&mut RotationFile)) -> Vec<(Severity, String)> {
    let mut file = shipped::find("smollm2").expect("a shipped file").load().expect("rotations");
    change(&mut file);
    let of_keys = |place: &str| place.starts_with("bands of keys") || place.starts_with("bits of keys");
    let findings = verify(&file).findings.into_iter().filter(|finding| of_keys(&finding.place));
    findings.map(|finding| (finding.severity, format!("{}: {}", finding.place, finding.message))).collect()
}

/// The matrix of bands of one head.
fn head_bands(file: &mut RotationFile, layer: usize, head: usize) -> &mut SquareMatrix {
    let keys = &mut file.heads.as_mut().expect("heads").get_mut(&layer).expect("layer").keys;
    &mut keys.bands.as_mut().expect("bands")[head]
}

#[test]
fn verification_finds_each_kind_of_damaged_bands() {
    assert_eq!(with_keys(|_| {}), []);
    let one = |found: Vec<(Severity, String)>, severity: Severity, words: &str| {
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(found[0].0 == severity && found[0].1.contains(words), "{words}: {found:?}");
    };
    // A direction that is there twice, one that is nearly nothing, and bands in the opposite order.
    let twice = with_keys(|file| {
        let matrix = head_bands(file, 3, 1);
        *matrix = SquareMatrix::from_fn(64, |i, j| matrix.get(i, if j == 9 { 40 } else { j }));
    });
    one(twice, Severity::Error, "bands of keys, layer 3: a matrix has no inverse");
    let faint = with_keys(|file| {
        let matrix = head_bands(file, 4, 0);
        *matrix = SquareMatrix::from_fn(64, |i, j| matrix.get(i, j) * if j == 0 { 1e-10 } else { 1.0 });
    });
    one(faint, Severity::Error, "bands of keys, layer 4: a matrix can hardly be inverted");
    let reversed = with_keys(|file| {
        let matrix = head_bands(file, 5, 2);
        *matrix = SquareMatrix::from_fn(64, |i, j| matrix.get(i, 63 - j));
    });
    one(reversed, Severity::Warning, "bands of keys, layer 5: a band is weaker than one that has fewer bits");
    let some = with_keys(|file| {
        for layer in [6, 7] {
            file.heads.as_mut().expect("heads").get_mut(&layer).expect("layer").keys.bands = None;
        }
    });
    one(some, Severity::Error, "bands of keys, layers 6-7: missing");
    let other_heads = with_keys(|file| (file.header.head_dim, file.widths) = (40, BTreeMap::new()));
    one(other_heads, Severity::Error, "bands need a multiple of 16 channels");
    let none = with_keys(|file| {
        file.heads.as_mut().expect("heads").values_mut().for_each(|layer| layer.keys.bands = None);
        file.widths.clear();
    });
    one(none, Severity::Note, "`int2` has scalar codes");
    // A matrix of another size is found when the file is written or read.
    let mut file = file(8);
    *head_bands(&mut file, 1, 0) = SquareMatrix::identity(8);
    let folder = tempfile::tempdir().expect("folder");
    let error = safetensors::write(&folder.path().join("bad.safetensors"), &file).unwrap_err().to_string();
    assert!(
        error.contains("layers.1.keys.head.bands") && error.contains("8 channels, expected 16"),
        "{error}"
    );
}

#[test]
fn verification_finds_bits_of_layers_that_cannot_be() {
    let widths = |text: &str| -> KeyWidths { text.parse().expect("widths") };
    let found = |change: &dyn Fn(&mut RotationFile)| {
        let found = with_keys(change);
        found.into_iter().map(|(severity, text)| format!("{}: {text}", severity.name())).collect::<Vec<_>>()
    };
    // One layer of thirty has three bits a channel.
    let more = found(&|file| file.widths = BTreeMap::from([(2, widths("4/4/2/2"))]));
    assert!(
        more.len() == 1 && more[0].starts_with("warning: bits of keys: 2.033 bits a channel"),
        "{more:?}"
    );
    let even = BTreeMap::from([(2, widths("4/4/2/2")), (3, widths("4/0/0/0"))]);
    assert_eq!(found(&|file| file.widths = even.clone()), [""; 0]);
    let unknown = found(&|file| file.widths = BTreeMap::from([(30, widths("4/2/0/0"))]));
    assert!(unknown.len() == 1 && unknown[0].starts_with("error: bits of keys, layer 30"), "{unknown:?}");
    let unused = found(&|file| {
        file.heads.as_mut().expect("heads").values_mut().for_each(|layer| layer.keys.bands = None);
    });
    assert!(unused.iter().any(|text| text.starts_with("warning: bits of keys: of no use")), "{unused:?}");
    let mut small = file(8);
    small.widths.insert(1, widths("4/2/0/0"));
    let small = errors(&verify(&small)).join("\n");
    assert!(small.contains("bits of keys, layer 1: heads of 16 channels cannot have these bits"), "{small}");
}

#[test]
fn rotations_of_layers_are_checked_with_the_metrics_of_their_heads() {
    let mut file = file(14);
    let heads = file.heads.as_mut().expect("heads");
    let layers = file.layers.as_mut().expect("layers");
    for (id, layer) in layers.iter_mut() {
        // Heads that agree: their mean is either of them.
        let keys = &mut heads.get_mut(id).expect("layer").keys;
        keys.rotations[1] = keys.rotations[0].clone();
        let metrics = keys.metrics.as_mut().expect("metrics");
        metrics[1] = metrics[0].clone();
        layer.keys.rotations[0] = keys.rotations[0].clone();
        layer.keys.metrics = None;
    }
    let findings = verify(&file);
    assert!(findings.is_sound() && findings.not_checked.is_empty(), "{findings:?}");
    file.layers.as_mut().expect("layers").get_mut(&2).expect("layer").keys.rotations[0] =
        Rotations::new(8).rotation(DIM);
    let found = errors(&verify(&file)).join("\n");
    assert!(found.contains("keys per layer, layer 2: rotations do not belong to their metric"), "{found}");
}

fn fixture(name: &str) -> pt::PtFile {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/rotations");
    pt::read(&folder.join(format!("{name}.pt"))).expect("fixture")
}

#[test]
fn verification_of_published_files() {
    let pair = verify_pt_pair(&fixture("format1_k"), &fixture("format1_v"));
    assert_eq!(errors(&pair), Vec::<String>::new());
    assert!(pair.findings.iter().any(|finding| finding.message.contains("no key mean")));
    assert!(pair.not_checked.iter().any(|text| text.contains("fingerprint")));
    let swapped = verify_pt_pair(&fixture("format1_v"), &fixture("format1_k"));
    assert!(errors(&swapped)[0].contains("keys and values are swapped"));
    let hadamard = verify_pt(&fixture("shared_storage"));
    assert!(hadamard.findings.iter().any(|finding| finding.message.contains("Hadamard")));
    assert!(hadamard.findings.iter().any(|finding| finding.message.contains("every 4th")));
    assert!(errors(&verify_pt(&fixture("missing_layer")))[0].contains("layer 2 missing"));
    assert!(errors(&verify_pt(&fixture("not_orthogonal")))[0].contains("not rotations"));
    let mut renamed = fixture("format1_k");
    renamed.path = "v_rotation_qqt_r_h_pbr.pt".into();
    assert!(errors(&verify_pt(&renamed))[0].contains("named as the other side"));
}

#[test]
fn comparison_sees_what_changed_and_only_that() {
    let original = file(9);
    assert!(diff::diff(&original, &original).is_equal());
    let mut other = original.clone();
    other.header.tokens = 8192;
    let layer = other.heads.as_mut().expect("heads").get_mut(&2).expect("layer");
    // Signs of eigenvectors are arbitrary: the matrix is another one, the space the same.
    let basis = Composition::RHPbr.compose(&SquareMatrix::identity(DIM)).transpose();
    let vectors = layer.keys.rotations[0].multiply(&basis);
    let flipped =
        SquareMatrix::from_fn(DIM, |i, j| if j % 2 == 0 { -vectors.get(i, j) } else { vectors.get(i, j) });
    layer.keys.rotations[0] = Composition::RHPbr.compose(&flipped);
    layer.keys.rotations[1] = Rotations::new(1).rotation(DIM);
    layer.keys.rules[1] = Rule::MIN_MAX;
    layer.keys.means.as_mut().expect("means")[0].iter_mut().for_each(|value| *value *= 2.0);
    layer.values.eigenvalues[0].reverse();
    other.layers.as_mut().expect("layers").remove(&0);
    let found = diff::diff(&original, &other);
    assert_eq!(found.header, [("tokens", "16384".to_owned(), "8192".to_owned())]);
    assert_eq!((found.only_first, found.only_second), (vec![(Scope::Layer, 0)], vec![]));
    let changed: Vec<_> = found.differences.iter().filter(|difference| !difference.is_none()).collect();
    assert_eq!(changed.len(), 3);
    let [signs, random, values] = changed[..] else { panic!("three differences") };
    assert!(signs.rotation > 0.1 && (signs.alignment.expect("basis") - 1.0).abs() < 1e-5, "{signs:?}");
    assert!((signs.mean.expect("mean") - 0.5).abs() < 1e-6, "{signs:?}");
    assert!(random.alignment.expect("basis") < 0.9, "{random:?}");
    assert_eq!(random.rules, Some((Rule::Search, Rule::MIN_MAX)));
    assert!(values.rotation == 0.0 && values.eigenvalues.expect("spectrum") > 0.1, "{values:?}");
}

/// What `--allocate` changes, and what only another calibration changes.
#[test]
fn comparison_sees_bands_and_bits_of_layers() {
    let original = file(9);
    let widths: KeyWidths = "4/4/2/2".parse().expect("widths");
    let mut allocated = original.clone();
    allocated.widths.insert(1, widths);
    // The default is the default, said or not.
    allocated.widths.insert(0, KeyWidths::default());
    let found = diff::diff(&original, &allocated);
    assert!(!found.is_equal());
    assert_eq!(found.widths, [(1, KeyWidths::default(), widths)]);
    assert!(found.differences.iter().all(|difference| difference.is_none()), "{found:?}");

    let mut other = original.clone();
    let matrix = head_bands(&mut other, 2, 1);
    *matrix = SquareMatrix::from_fn(DIM, |i, j| 2.0 * matrix.get(i, j));
    other.heads.as_mut().expect("heads").get_mut(&0).expect("layer").keys.bands = None;
    let found = diff::diff(&original, &other);
    let changed: Vec<_> = found.differences.iter().filter(|difference| !difference.is_none()).collect();
    let bands: Vec<_> =
        changed.iter().map(|other| (other.name.layer, other.name.head, other.bands)).collect();
    assert_eq!(bands, [(0, 0, Some(1.0)), (0, 1, Some(1.0)), (2, 1, Some(0.5))]);
}

#[test]
fn interleaved_keys_are_the_same_keys() {
    assert_eq!(interleaved_order(8, 8), [0, 4, 1, 5, 2, 6, 3, 7]);
    assert_eq!(interleaved_order(8, 4), [0, 2, 1, 3, 4, 5, 6, 7]);
    for rotary in [DIM, DIM / 2] {
        let original = file(10);
        let moved = to_interleaved(&original, rotary);
        assert_eq!(from_interleaved(&moved, rotary), original);
        let (a, b) =
            (&original.heads.as_ref().expect("heads")[&0], &moved.heads.as_ref().expect("heads")[&0]);
        assert_eq!(a.values, b.values);
        // A key in the other order, rotated by the other file, gives the same numbers; so does its cost.
        let order = interleaved_order(DIM, rotary);
        let mut random = Random::new(4);
        let key: Vec<f64> = (0..DIM).map(|_| 2.0 * random.fraction() - 1.0).collect();
        let moved_key: Vec<f64> = order.iter().map(|&from| key[from]).collect();
        let rotate = |side: &SideRotations, key: &[f64]| {
            let mean = &side.means.as_ref().expect("means")[1];
            let centred: Vec<f64> = key.iter().zip(mean).map(|(key, &mean)| key - f64::from(mean)).collect();
            side.rotations[1].apply_to_row(&centred)
        };
        let cost = |side: &SideRotations, key: &[f64]| -> f64 {
            let metric = &side.metrics.as_ref().expect("metrics")[1];
            metric.apply_to_row(key).iter().zip(key).map(|(a, b)| a * b).sum()
        };
        let worst = rotate(&a.keys, &key)
            .iter()
            .zip(rotate(&b.keys, &moved_key))
            .map(|(a, b)| (a - b).abs())
            .fold(0.0, f64::max);
        assert!(worst < 1e-12);
        assert!((cost(&a.keys, &key) - cost(&b.keys, &moved_key)).abs() < 1e-9);
    }
}

#[test]
fn rotations_of_another_model_are_refused_unless_forced() {
    let geometry = KvGeometry { layers: LAYERS, kv_heads: HEADS, head_dim: DIM };
    let (own, other) = ("ab".repeat(32), "00".repeat(32));
    let mut file = file(11);
    assert!(matches!(check_model(&file, &own, geometry, false), Ok(None)));
    let error = check_model(&file, &other, geometry, false).expect_err("another model");
    assert!(error.fix().expect("fix").contains("--force-rotations"), "{error}");
    assert!(
        check_model(&file, &other, geometry, true)
            .expect("forced")
            .expect("warning")
            .contains("another model")
    );
    for wrong in [
        KvGeometry { head_dim: 32, ..geometry },
        KvGeometry { kv_heads: 1, ..geometry },
        KvGeometry { layers: LAYERS + 1, ..geometry },
        KvGeometry { layers: LAYERS - 1, ..geometry },
    ] {
        let error = check_model(&file, &own, wrong, true).expect_err("sizes cannot be forced");
        assert!(matches!(error, RotationError::OtherModel { can_force: false, .. }), "{error}");
    }
    file.header.model_fingerprint = None;
    assert!(
        check_model(&file, &own, geometry, false)
            .expect("sizes fit")
            .expect("warning")
            .contains("only its sizes")
    );
}

#[test]
fn the_cache_is_searched_by_fingerprint() {
    let folder = tempfile::tempdir().expect("folder");
    assert!(find::find(folder.path(), &"ab".repeat(32)).is_none());
    let mut other = file(12);
    other.header.model_fingerprint = Some("11".repeat(32));
    safetensors::write(&folder.path().join("a.safetensors"), &other).expect("write");
    safetensors::write(&folder.path().join("b.safetensors"), &file(13)).expect("write");
    fs::write(folder.path().join("broken.safetensors"), "not a file").expect("write");
    fs::write(folder.path().join(".x.partial"), "").expect("write");
    let found = find::find(folder.path(), &"ab".repeat(32)).expect("found").taken;
    assert_eq!(found.name, "b");
    assert_eq!(unrounded(found.load().expect("load"), &file(13)), file(13));
    let listed = find::available(folder.path());
    assert_eq!(listed.iter().take(3).map(Result::is_ok).collect::<Vec<_>>(), [true, true, false]);
}

/// A file of an earlier version must not take the place of one that ships with bands.
#[test]
fn files_without_bands_lose_against_those_that_ship_with_them() {
    let folder = tempfile::tempdir().expect("folder");
    let shipped = &shipped::SHIPPED[0];
    let mut own = shipped.load().expect("shipped");
    let fingerprint = own.header.model_fingerprint.clone().expect("a fingerprint");
    let chosen = || find::find(folder.path(), &fingerprint).expect("found");
    let path = folder.path().join("mine.safetensors");

    // As good as what ships, it is the user's that counts.
    safetensors::write(&path, &own).expect("write");
    let choice = chosen();
    assert_eq!((&*choice.taken.name, choice.passed_over.is_none()), ("mine", true));

    let layers = own.heads.iter_mut().flat_map(|heads| heads.values_mut());
    layers.for_each(|layer| layer.keys.bands = None);
    safetensors::write(&path, &own).expect("write");
    let choice = chosen();
    assert!(matches!(choice.taken.origin, RotationOrigin::Shipped(_)), "{:?}", choice.taken);
    assert_eq!(choice.passed_over.expect("the user's").name, "mine");

    // Where nothing ships it is used.
    own.header.model_fingerprint = Some("ab".repeat(32));
    safetensors::write(&path, &own).expect("write");
    let choice = find::find(folder.path(), &"ab".repeat(32)).expect("found");
    assert_eq!(
        (&*choice.taken.name, choice.taken.has_bands, choice.passed_over.is_none()),
        ("mine", false, true)
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16))]

    #[test]
    fn any_file_comes_back(seed in any::<u64>(), tokens in any::<usize>(), name in ".{0,40}") {
        let mut original = file(seed);
        original.header.tokens = tokens;
        original.header.model = name;
        let (_folder, path) = saved(&original);
        prop_assert_eq!(unrounded(safetensors::read(&path).expect("read"), &original), original);
    }

    #[test]
    fn hadamard_rotations_survive_every_order(half in 1usize..16) {
        let dim = 2 * half;
        let order = interleaved_order(dim, dim);
        let moved = hadamard::matrix(dim).permute_rows(&order);
        prop_assert!(moved.orthogonality_error() < 1e-12);
    }
}
