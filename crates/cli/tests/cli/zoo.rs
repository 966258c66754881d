//! `oscar zoo` on published files: conversions, verification, and files made to do harm.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::support::{Machine, fixture};

/// A rotation file of the lab's fixtures.
fn rotation(name: &str) -> String {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../rotations/tests/fixtures/rotations");
    folder.join(format!("{name}.pt")).to_str().expect("path").to_owned()
}

fn text(path: &Path) -> &str {
    path.to_str().expect("path")
}

/// The fixture pair as one file.
fn imported(machine: &Machine, name: &str) -> PathBuf {
    let path = machine.path(name);
    let (keys, values) = (rotation("format1_k"), rotation("format1_v"));
    let outcome =
        machine.run(["zoo", "import", &keys, &values, "-o", text(&path), "--model-name", "tiny"]).success();
    assert_eq!(outcome.stdout.trim_end(), text(&path));
    path
}

#[test]
fn a_published_pair_goes_in_and_comes_out() {
    let machine = Machine::new();
    let file = imported(&machine, "tiny.safetensors");
    let folder = machine.path("published");
    let outcome =
        machine.run(["zoo", "export", text(&file), "--output-dir", text(&folder), "--json"]).success();
    let rows = outcome.json()["rows"].as_array().expect("rows").len();
    assert_eq!(rows, 2);
    let pair = ["k_rotation_qqt_r_h_pbr.pt", "v_rotation_sst_r_h_pbr.pt"].map(|name| folder.join(name));
    let again = machine.path("again.safetensors");
    machine
        .run(["zoo", "import", text(&pair[0]), text(&pair[1]), "-o", text(&again), "--model-name", "tiny"])
        .success();
    assert_eq!(fs::read(&file).expect("file"), fs::read(&again).expect("again"));
    let same = machine.run(["zoo", "diff", text(&file), text(&again)]).success();
    assert_eq!(same.stdout.trim_end(), "the files hold the same rotations");
    machine
        .run(["zoo", "export", text(&file), "--output-dir", text(&folder), "--format", "2"])
        .failure(1, &["no per-head rotations", "--format 1"]);
}

#[test]
fn verification_says_what_is_wrong_and_what_was_not_checked() {
    let machine = Machine::new();
    let file = imported(&machine, "tiny.safetensors");
    let outcome = machine.run(["zoo", "verify", text(&file)]).success();
    for words in ["per layer, layers 0-2", "qqt / sst, r_h_pbr", "sound", "not checked: which model"] {
        assert!(outcome.stdout.contains(words), "{words:?} is not in {}", outcome.stdout);
    }
    let json = machine
        .run(["zoo", "verify", &rotation("format1_k"), &rotation("format1_v"), "--json"])
        .success()
        .json();
    assert_eq!(
        (json["rows"][0]["sound"].as_bool(), json["rows"][0]["layers"].as_array().map(Vec::len)),
        (Some(true), Some(6))
    );
    assert!(
        json["rows"][0]["findings"][0]["message"].as_str().is_some_and(|text| text.contains("no key mean"))
    );
    let swapped = machine.run(["zoo", "verify", &rotation("format1_v"), &rotation("format1_k")]);
    swapped.failure(1, &["keys and values are swapped"]);
    machine.run(["zoo", "verify", &rotation("missing_layer")]).failure(1, &["layer 2 missing"]);
    machine
        .run(["zoo", "verify", &rotation("not_orthogonal")])
        .failure(1, &["not rotations", "oscar calibrate"]);
    let hadamard = machine.run(["zoo", "verify", &rotation("shared_storage")]).success();
    assert!(
        hadamard.stdout.contains("Hadamard") && hadamard.stdout.contains("every 4th"),
        "{}",
        hadamard.stdout
    );
}

/// Bits of layers are what `oscar calibrate --allocate` changes, and nothing else.
#[test]
fn bits_of_layers_are_compared_and_checked() {
    let machine = Machine::new();
    let zoo = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../zoo/smollm2.safetensors");
    let widths = |layers: &str| {
        let bytes = fs::read(&zoo).expect("the shipped file");
        let (length, rest) = bytes.split_first_chunk::<8>().expect("a header");
        let (header, tensors) = rest.split_at(u64::from_le_bytes(*length) as usize);
        let mut header: Value = serde_json::from_slice(header).expect("a header");
        header["__metadata__"]["key_widths"] = layers.into();
        let header = header.to_string();
        let path = machine.path("changed.safetensors");
        let length = (header.len() as u64).to_le_bytes();
        fs::write(&path, [&length[..], header.as_bytes(), tensors].concat()).expect("write");
        path
    };
    let none = widths("{}");
    let told = machine.run(["zoo", "diff", text(&none), text(&zoo)]).success().stdout;
    assert!(
        told.contains("bits of keys in layers 0-1, 11-13, 16, 19, 21, 25, 27-29: 4/2/1/1 | 4/2/0/0"),
        "{told}"
    );
    assert!(told.contains("rotations, means and bands are the same"), "{told}");
    let json = machine.run(["zoo", "diff", text(&none), text(&zoo), "--json"]).success().json();
    assert_eq!(json["rows"][0], serde_json::json!({ "layer": 0, "key_widths": ["4/2/1/1", "4/2/0/0"] }));
    machine.run(["zoo", "verify", text(&none)]).success();
    let more = machine.run(["zoo", "verify", text(&widths(r#"{"0":"4/4/2/2"}"#))]).success().stdout;
    assert!(more.contains("2.033 bits a channel on average"), "{more}");
    let unknown = machine.run(["zoo", "verify", text(&widths(r#"{"99":"4/2/0/0"}"#))]);
    unknown.failure(1, &["bits of keys, layer 99"]);
}

#[test]
fn a_foreign_model_is_found() {
    let machine = Machine::new();
    let model = fixture("qwen3");
    let outcome = machine.run(["zoo", "verify", &rotation("format1_k"), "--model", text(&model)]);
    outcome.failure(1, &["was made for another model", "channels"]);
}

#[test]
fn hostile_files_are_one_line() {
    let machine = Machine::new();
    machine
        .run(["zoo", "verify", &rotation("hostile_os_system_2")])
        .failure(1, &["system", "nothing is imported or run"]);
    machine.run(["zoo", "verify", &rotation("hostile_bomb")]).failure(1, &["more than the"]);
    machine.run(["zoo", "verify", &rotation("hostile_truncated")]).failure(1, &["not a PyTorch archive"]);
    machine.run(["zoo", "verify", &rotation("bad_nan")]).failure(1, &["layers[0].rotation", "not finite"]);
    machine.run(["zoo", "verify", &rotation("hostile_empty")]).failure(1, &["not a PyTorch archive"]);
    let output = machine.path("x.safetensors");
    machine
        .run(["zoo", "import", &rotation("format1_v"), &rotation("format1_k"), "-o", text(&output)])
        .failure(1, &["swapped", "key file first"]);
    machine
        .run(["zoo", "import", &rotation("hostile_eval_4"), &rotation("format1_v"), "-o", text(&output)])
        .failure(1, &["eval"]);
    assert!(!output.exists());
    machine.run(["zoo", "verify", text(&machine.path("none"))]).failure(1, &["none"]);
    let model = fixture("qwen3").join("model.safetensors");
    machine.run(["zoo", "verify", text(&model)]).failure(1, &["does not say that it holds rotations"]);
    machine
        .run(["zoo", "diff", &rotation("format1_k"), &rotation("format1_v")])
        .failure(1, &["half of a published pair"]);
}

#[test]
fn the_cache_is_listed() {
    let machine = Machine::new();
    machine.run(["zoo", "list"]).success();
    fs::create_dir_all(machine.path("cache/rotations")).expect("folder");
    imported(&machine, "cache/rotations/mine.safetensors");
    fs::write(machine.path("cache/rotations/broken.safetensors"), "x").expect("write");
    let outcome = machine.run(["zoo", "list", "--json"]).success();
    let rows = outcome.json()["rows"].as_array().expect("rows").clone();
    let mine = rows.iter().find(|row| row["name"] == "mine").expect("mine");
    assert_eq!((&mine["model"], &mine["origin"]), (&Value::from("tiny"), &Value::from("cache")));
    assert!(outcome.stderr.contains("broken.safetensors"), "{}", outcome.stderr);
    assert_eq!((&mine["bands"], &mine["key_widths"]), (&Value::from(false), &serde_json::json!({})));
    let shipped = |name: &str| {
        let found = rows.iter().find(|row| row["name"] == name && row["origin"] == "shipped").expect(name);
        (found["version"].as_u64(), found["bands"].as_bool(), found["key_widths"]["0"].as_str())
    };
    assert_eq!(shipped("smollm2"), (Some(4), Some(true), Some("4/2/0/0")));
    assert_eq!(shipped("qwen2.5-coder-1.5b"), (Some(4), Some(true), None));
    let table = machine.run(["zoo", "list"]).success().stdout;
    let line = |name: &str| table.lines().find(|line| line.starts_with(name)).expect(name);
    assert!(line("smollm2").contains("by layer") && line("qwen2.5-coder-1.5b").contains("yes"), "{table}");
    assert!(
        table.contains("mine") && table.contains("tiny") && table.contains("qqt / sst, r_h_pbr"),
        "{table}"
    );
}

#[test]
fn names_without_rotations_have_a_way_forward() {
    let machine = Machine::new();
    machine
        .run(["zoo", "pull", "org/rotations"])
        .failure(1, &["hf download org/rotations", "oscar zoo import"]);
    machine.run(["zoo", "pull", "smolm2"]).failure(1, &["did you mean smollm2"]);
    machine.run(["zoo"]).failure(2, &["Usage"]);
}
