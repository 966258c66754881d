//! Safetensors files and folders: what honest ones give, and how every lie is refused.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use oscar_kernels::DType;
use oscar_model::files::safetensors::parse_index;
use oscar_model::files::{FileError, Safetensors, TensorSource};
use serde_json::json;

/// A file with this header and data.
fn file(header: &serde_json::Value, data: &[u8]) -> Vec<u8> {
    raw_file(&header.to_string(), data)
}

fn raw_file(header: &str, data: &[u8]) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes(), header.as_bytes(), data].concat()
}

fn parse(bytes: Vec<u8>) -> Result<Safetensors, FileError> {
    Safetensors::parse(Arc::new(bytes), Path::new("dir/m.safetensors"))
}

fn refusal(header: &serde_json::Value, data: &[u8]) -> String {
    parse(file(header, data)).expect_err("the file lies").to_string()
}

/// A shard that holds one BF16 vector per name.
fn shard(names: &[&str]) -> Vec<u8> {
    let header: serde_json::Map<_, _> = names
        .iter()
        .enumerate()
        .map(|(at, &name)| {
            let info = json!({"dtype": "BF16", "shape": [2], "data_offsets": [at * 4, at * 4 + 4]});
            (name.to_owned(), info)
        })
        .collect();
    file(&header.into(), &(0..names.len() as u8 * 4).collect::<Vec<_>>())
}

#[test]
fn reads_every_supported_type() {
    let header = json!({
        "__metadata__": {"format": "pt"},
        "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "b": {"dtype": "F16", "shape": [3], "data_offsets": [24, 30]},
        "c": {"dtype": "BF16", "shape": [1, 1], "data_offsets": [30, 32]},
        "d": {"dtype": "I64", "shape": [1], "data_offsets": [32, 40]},
    });
    let data: Vec<u8> = (0..40).collect();
    let tensors = parse(file(&header, &data)).unwrap();
    assert_eq!(tensors.names().collect::<Vec<_>>(), ["a", "b", "c", "d"]);
    let a = tensors.get("a").unwrap().matrix().unwrap();
    assert_eq!((a.rows, a.cols, a.dtype, a.data().unwrap()), (2, 3, DType::F32, &data[..24]));
    let b = tensors.get("b").unwrap().vector().unwrap();
    assert_eq!((b.dtype, b.data().unwrap()), (DType::F16, &data[24..30]));
    let c = tensors.get("c").unwrap().matrix().unwrap();
    assert_eq!((c.dtype, c.data().unwrap()), (DType::BF16, &data[30..32]));
    let error = tensors.get("d").unwrap_err().to_string();
    assert!(
        error.starts_with("dir/m.safetensors: tensor `d` has type I64, which oscar cannot read"),
        "{error}"
    );
    assert_eq!(tensors.get("e").unwrap_err().to_string(), "dir/m.safetensors: tensor `e` is missing");
    let summary = tensors.summary();
    assert_eq!((summary.types["I64"].bytes, summary.types["I64"].supported), (8, false));
    assert_eq!((summary.total.tensors, summary.total.elements, summary.total.bytes), (4, 11, 40));
}

#[test]
fn truncated_and_overlong_files_are_refused() {
    let whole = shard(&["a", "b"]);
    for len in 0..whole.len() {
        assert!(matches!(parse(whole[..len].to_vec()), Err(FileError::Truncated { .. })), "prefix of {len}");
    }
    let error = parse(whole[..whole.len() - 3].to_vec()).unwrap_err().to_string();
    assert!(
        error.ends_with(&format!("at least {} bytes, it has {}", whole.len(), whole.len() - 3)),
        "{error}"
    );
    let error = parse([whole, vec![0]].concat()).unwrap_err().to_string();
    assert!(error.starts_with("dir/m.safetensors: tensor data: the header describes"), "{error}");
}

#[test]
fn header_length_is_bounded() {
    let error = parse([&u64::MAX.to_le_bytes()[..], b"{}"].concat()).unwrap_err().to_string();
    assert!(error.starts_with("dir/m.safetensors: header length: 18446744073709551615 is more"), "{error}");
}

#[test]
fn header_must_be_the_right_json() {
    for header in [
        "",
        "{",
        "[]",
        "{\"a\": 1}",
        "{\"a\": {\"dtype\": \"F99\", \"shape\": [], \"data_offsets\": [0, 0]}}",
    ] {
        let error = parse(raw_file(header, &[])).unwrap_err().to_string();
        assert!(error.starts_with("dir/m.safetensors: header: "), "{error}");
    }
}

#[test]
fn wrong_offsets_and_shapes_are_refused() {
    let entry = |shape: serde_json::Value, start: u64, end: u64| json!({"w": {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}});
    for header in [
        entry(json!([2]), 0, 4),
        entry(json!([1]), 4, 8),
        entry(json!([1]), 8, 4),
        entry(json!([1u64 << 62, 16]), 0, 8),
        entry(json!([-1]), 0, 8),
        json!({"v": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
               "w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}),
    ] {
        let message = refusal(&header, &[0; 8]);
        assert!(message.starts_with("dir/m.safetensors: header: "), "{message}");
    }
}

#[test]
fn offsets_near_the_largest_number_are_refused() {
    // Tensors of 2^60 bytes laid end to end, until adding the length of the header would overflow.
    let piece = 1u64 << 60;
    let mut header = serde_json::Map::new();
    for at in 0..16 {
        let (start, end) = (at * piece, (at + 1).saturating_mul(piece));
        let info = json!({"dtype": "U8", "shape": [end - start], "data_offsets": [start, end]});
        header.insert(format!("t{at}"), info);
    }
    let error = parse(file(&header.into(), &[0; 64])).unwrap_err();
    assert!(matches!(error, FileError::Truncated { expected: u64::MAX, .. }), "{error}");
}

#[test]
fn opens_the_usual_single_file() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("model.safetensors"), shard(&["a"])).unwrap();
    // Other safetensors files, such as adapters, do not disturb it.
    fs::write(folder.path().join("adapter.safetensors"), "junk").unwrap();
    let tensors = Safetensors::open_folder(folder.path()).unwrap();
    assert_eq!(tensors.get("a").unwrap().vector().unwrap().data().unwrap(), [0, 1, 2, 3]);
}

#[test]
fn opens_the_only_file_whatever_its_name() {
    let folder = tempfile::tempdir().unwrap();
    let message = |folder: &Path| Safetensors::open_folder(folder).unwrap_err().to_string();
    assert!(message(folder.path()).contains("found no `model.safetensors`"));
    fs::write(folder.path().join("weights.safetensors"), shard(&["a"])).unwrap();
    assert!(Safetensors::open_folder(folder.path()).unwrap().contains("a"));
    fs::write(folder.path().join("more.safetensors"), shard(&["b"])).unwrap();
    assert!(message(folder.path()).contains("found 2 safetensors files but no"));
    assert!(matches!(Safetensors::open_folder(&folder.path().join("absent")), Err(FileError::Io { .. })));
}

#[test]
fn opens_shards() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    // `extra` is in a shard but not in the index, and `a` is in both shards: the index decides.
    fs::write(path.join("one.safetensors"), shard(&["extra", "a"])).unwrap();
    fs::write(path.join("two.safetensors"), shard(&["a", "b", "c"])).unwrap();
    let index = json!({
        "metadata": {"total_size": 12},
        "weight_map": {"c": "two.safetensors", "a": "one.safetensors", "b": "two.safetensors"},
    });
    fs::write(path.join("model.safetensors.index.json"), index.to_string()).unwrap();
    let tensors = Safetensors::open_folder(path).unwrap();
    assert_eq!(tensors.names().collect::<Vec<_>>(), ["a", "b", "c"]);
    assert_eq!(tensors.shard_paths().count(), 2);
    let bytes = |name: &str| tensors.get(name).unwrap().vector().unwrap().data().unwrap().to_vec();
    assert_eq!(bytes("a"), [4, 5, 6, 7]);
    assert_eq!(bytes("b"), [4, 5, 6, 7]);
    assert_eq!(bytes("c"), [8, 9, 10, 11]);
    assert!(!tensors.contains("extra"));
    assert_eq!(tensors.summary().total.bytes, 12);
}

#[test]
fn shards_must_hold_what_the_index_says() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    let index_path = path.join("model.safetensors.index.json");
    fs::write(path.join("one.safetensors"), shard(&["a"])).unwrap();
    let refusal = |weight_map: serde_json::Value| {
        fs::write(&index_path, json!({ "weight_map": weight_map }).to_string()).unwrap();
        Safetensors::open_folder(path).unwrap_err().to_string()
    };
    let shown = index_path.display();
    assert_eq!(
        refusal(json!({"a": "one.safetensors", "b": "one.safetensors"})),
        format!("{shown}: weight_map entry `b`: shard `one.safetensors` has no such tensor")
    );
    assert_eq!(
        refusal(json!({"a": "one.safetensors", "b": "two.safetensors"})),
        format!("{shown}: shard `two.safetensors` named in the index is missing")
    );
    fs::write(path.join("two.safetensors"), &shard(&["b"])[..20]).unwrap();
    let broken = path.join("two.safetensors");
    let message = refusal(json!({"a": "one.safetensors", "b": "two.safetensors"}));
    assert!(
        message.starts_with(&format!("{}: header: the file is truncated", broken.display())),
        "{message}"
    );
}

#[test]
fn shard_names_cannot_leave_the_folder() {
    let names = ["../x.safetensors", "/etc/passwd", "a/b", "..", ".", "", "a\\b", "C:x", "a\0b"];
    for name in names {
        let index = json!({"weight_map": {"w": name}}).to_string();
        let error = parse_index(index.as_bytes(), Path::new("i.json")).unwrap_err().to_string();
        assert_eq!(error, format!("i.json: weight_map entry `w`: {name:?} is not a plain file name"));
    }
    assert!(parse_index(br#"{"weight_map": {"w": "a..b.safetensors"}}"#, Path::new("i.json")).is_ok());
}

#[test]
fn the_index_must_be_the_right_json() {
    for index in ["", "{}", "[]", r#"{"weight_map": []}"#, r#"{"weight_map": {"a": 1}}"#] {
        let error = parse_index(index.as_bytes(), Path::new("i.json")).unwrap_err();
        assert!(matches!(error, FileError::Json { .. }), "{index}: {error}");
        assert!(error.to_string().starts_with("i.json: "), "{error}");
    }
}
