//! Our own rotation file: round trips, strict reading, and models it must not be used with.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use oscar_codec::{Composition, KeyWidths, KvGeometry, Rule, SquareMatrix, hadamard};
use oscar_random::Random;
use oscar_rotations::find::RotationOrigin;
use oscar_rotations::interleaved::{from_interleaved, interleaved_order, to_interleaved};
use oscar_rotations::{
    LayerRotations, RotationError, RotationFile, RotationHeader, RotationSet, SideRotations, check_model,
    find, safetensors, shipped,
};
use proptest::prelude::*;
use serde_json::{Value, json};

pub(crate) const DIM: usize = 16;
const HEADS: usize = 2;
pub(crate) const LAYERS: usize = 3;

/// Random rotations and files of them.
pub(crate) struct Rotations(Random);

impl Rotations {
    pub(crate) fn new(seed: u64) -> Rotations {
        Rotations(Random::new(seed))
    }

    /// A rotation by Gram–Schmidt on random columns, rounded to float32 as files hold it.
    pub(crate) fn rotation(&mut self, dim: usize) -> SquareMatrix {
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
    pub(crate) fn side(&mut self, count: usize, keys: bool) -> SideRotations {
        let mut side = SideRotations {
            rotations: Vec::new(),
            eigenvalues: Vec::new(),
            means: keys.then(Vec::new),
            metrics: Some(Vec::new()),
            bands: keys.then(Vec::new),
            unturned_means: keys.then(Vec::new),
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
            if let Some(means) = &mut side.unturned_means {
                means.push((0..DIM).map(|_| (2.0 * self.0.fraction() - 1.0) as f32).collect());
            }
            side.rules.push([Rule::Clip(0.96), Rule::Search, Rule::Gaussian][head % 3]);
        }
        side
    }

    pub(crate) fn set(&mut self, count: usize) -> RotationSet {
        let mut layer = || LayerRotations { keys: self.side(count, true), values: self.side(count, false) };
        (0..LAYERS).map(|id| (id, layer())).collect()
    }
}

fn rounded(matrix: &SquareMatrix) -> SquareMatrix {
    SquareMatrix::from_f32(matrix.dim(), &matrix.to_f32()).expect("same size")
}

pub(crate) fn file(seed: u64) -> RotationFile {
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
        unturned_means: None,
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
fn means_of_pages_are_nothing_without_bands() {
    let mut halved = file(4);
    let layers = halved.heads.iter_mut().flat_map(|layers| layers.values_mut());
    layers.for_each(|layer| layer.keys.bands = None);
    let path = tempfile::tempdir().expect("folder").path().join("halved.safetensors");
    let error = safetensors::write(&path, &halved).expect_err("refused").to_string();
    assert!(error.contains("keys.head.bands") && error.contains("0 of them"), "{error}");
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
    assert!(matches!(meta("version", json!("5")), RotationError::Version { found, .. } if found == "5"));
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
    layers.for_each(|layer| (layer.keys.bands, layer.keys.unturned_means) = (None, None));
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
