//! Whether a rotation file can be trusted, and how two files differ.

use std::collections::BTreeMap;
use std::path::Path;

use oscar_codec::{Composition, KeyWidths, Rule, SquareMatrix};
use oscar_rotations::verify::{Findings, Severity, verify, verify_pt, verify_pt_pair};
use oscar_rotations::{LayerRotations, RotationFile, Scope, diff, pt, safetensors, shipped};

use crate::files::{DIM, LAYERS, Rotations, file};

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
            let layer = file.heads.as_mut().expect("heads").get_mut(&layer).expect("layer");
            (layer.keys.bands, layer.keys.unturned_means) = (None, None);
        }
    });
    one(some, Severity::Error, "bands of keys, layers 6-7: missing");
    let other_heads = with_keys(|file| (file.header.head_dim, file.widths) = (40, BTreeMap::new()));
    one(other_heads, Severity::Error, "bands need a multiple of 16 channels");
    let none = with_keys(|file| {
        file.heads
            .as_mut()
            .expect("heads")
            .values_mut()
            .for_each(|layer| (layer.keys.bands, layer.keys.unturned_means) = (None, None));
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
        file.heads
            .as_mut()
            .expect("heads")
            .values_mut()
            .for_each(|layer| (layer.keys.bands, layer.keys.unturned_means) = (None, None));
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
