//! FP8 matrices whose scales lie in another shard, as in published files, which are cut wherever a shard is full.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::Arc;

use oscar_kernels::cpu::CpuBackend;
use oscar_kernels::cpu::isa::Isa;
use serde_json::{Map, Value, json};

use crate::logits::{Expected, expected, fixtures, open, run};

const SHARDS: [&str; 2] = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"];

/// Copies a checkpoint of one file and puts the scales of its matrices into a second shard. Returns how many there are.
fn split(folder: &Path, to: &Path) -> usize {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|ending| ending == "json") {
            fs::copy(&path, to.join(path.file_name().unwrap())).unwrap();
        }
    }
    let bytes = fs::read(folder.join("model.safetensors")).unwrap();
    let (length, rest) = bytes.split_first_chunk::<8>().unwrap();
    let (header, data) = rest.split_at(u64::from_le_bytes(*length) as usize);
    let header: Map<String, Value> = serde_json::from_slice(header).unwrap();
    let (mut shards, mut weight_map) = ([Map::new(), Map::new()], BTreeMap::new());
    let mut parts: [Vec<u8>; 2] = Default::default();
    for (name, mut info) in header.into_iter().filter(|(name, _)| name != "__metadata__") {
        let shard = usize::from(name.ends_with("weight_scale_inv") || name.ends_with("weight_scale"));
        let [from, until] = [0, 1].map(|index| info["data_offsets"][index].as_u64().unwrap() as usize);
        let part = &mut parts[shard];
        info["data_offsets"] = json!([part.len(), part.len() + until - from]);
        part.extend_from_slice(&data[from..until]);
        weight_map.insert(name.clone(), SHARDS[shard]);
        shards[shard].insert(name, info);
    }
    let scales = shards[1].len();
    for ((name, header), part) in SHARDS.into_iter().zip(shards).zip(parts) {
        let header = Value::from(header).to_string();
        let length = (header.len() as u64).to_le_bytes();
        fs::write(to.join(name), [&length[..], header.as_bytes(), &part].concat()).unwrap();
    }
    let index = json!({ "metadata": {}, "weight_map": weight_map }).to_string();
    fs::write(to.join("model.safetensors.index.json"), index).unwrap();
    scales
}

#[test]
fn scales_in_another_shard_are_those_of_their_matrices() {
    let names =
        ["qwen3-fp8-blocks", "qwen3-moe-fp8-blocks", "glm4-moe-fp8-channels", "minimax-m2-fp8-tensors"];
    for name in names {
        let folder = fixtures().into_iter().find(|folder| folder.ends_with(name)).unwrap();
        let split_folder = tempfile::tempdir().unwrap();
        assert!(split(&folder, split_folder.path()) > 4, "{name}: every matrix has a scale");
        let Expected { tokens, .. } = expected(&folder);
        let logits = |folder: &Path| {
            let backend = Arc::new(CpuBackend::with_isa(2, Isa::detect()));
            run(&open(folder).load_model(backend).unwrap(), &tokens, tokens.len())
        };
        assert!(logits(&folder) == logits(split_folder.path()), "{name}");
        // A shard that the download left out is named.
        fs::remove_file(split_folder.path().join(SHARDS[1])).unwrap();
        let path = oscar_model::source::ModelPath::Folder(split_folder.path().to_path_buf());
        let error = oscar_model::ModelFiles::open(&path).map(|_| ()).unwrap_err().to_string();
        assert!(error.contains(SHARDS[1]), "{error}");
    }
}
