//! Logits of tiny random checkpoints against those of the standard Python library.
//!
//! `tools/make_model_fixtures.py` wrote the checkpoints: for each family a folder or GGUF file and the logits that
//! `transformers` computes in f32 from the same stored weights. Every kernel path of the machine runs every one.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use oscar_codec::{ExactSlot, PAGE_TOKENS};
use oscar_kernels::backend::{Batch, SequenceRows};
use oscar_kernels::cpu::CpuBackend;
use oscar_kernels::cpu::isa::Isa;
use oscar_kernels::quant::dequantise;
use oscar_kernels::{Backend, DType};
use oscar_model::source::ModelPath;
use oscar_model::{Model, ModelFiles};
use safetensors::SafeTensors;

/// Keys and values are rounded to bf16 in the cache; the library keeps them in f32.
const BF16_TOLERANCE: f64 = 1e-2;

/// Where the library's keys and values were rounded like ours (see `tools/make_moe_fixtures.py`).
const SAME_CACHE_TOLERANCE: f64 = 1e-3;

/// Ways of cutting the same work.
const CHUNKING_TOLERANCE: f64 = 1e-3;

/// Tiles of AMX multiply bf16 with bf16, so activations lose bits that other paths keep: twice as far is as near as they get.
fn slack(isa: Isa) -> f64 {
    if isa == Isa::Amx { 2.0 } else { 1.0 }
}

/// A single position may be this much further off than the mean: random weights make some of them touchy.
const OUTLIER: f64 = 10.0;

pub(crate) fn fixtures() -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/models");
    let mut folders: Vec<PathBuf> =
        std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    folders.sort();
    assert!(folders.len() >= 53, "fixtures are missing");
    folders
}

pub(crate) fn open(folder: &Path) -> ModelFiles {
    let gguf = folder.join("model.gguf");
    let path = if gguf.exists() { ModelPath::Gguf(gguf) } else { ModelPath::Folder(folder.to_path_buf()) };
    ModelFiles::open(&path).unwrap()
}

fn tolerance(folder: &Path) -> f64 {
    let notes: serde_json::Value =
        serde_json::from_slice(&std::fs::read(folder.join("fixture.json")).unwrap()).unwrap();
    match notes["cache"].as_str() {
        Some("bf16") => SAME_CACHE_TOLERANCE,
        _ => BF16_TOLERANCE,
    }
}

pub(crate) struct Expected {
    pub(crate) tokens: Vec<u32>,
    pub(crate) logits: Vec<f32>,
}

pub(crate) fn expected(folder: &Path) -> Expected {
    let bytes = std::fs::read(folder.join("expected.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let words = |name: &str| -> Vec<[u8; 4]> {
        let data = file.tensor(name).unwrap().data().to_vec();
        data.chunks_exact(4).map(|word| word.try_into().unwrap()).collect()
    };
    Expected {
        tokens: words("input_ids").into_iter().map(u32::from_le_bytes).collect(),
        logits: words("logits").into_iter().map(f32::from_le_bytes).collect(),
    }
}

/// Runs tokens in chunks through a fresh cache and returns all logits. Pages are handed out in reverse order, so
/// that nothing can rely on their being neighbours.
pub(crate) fn run<B: Backend>(model: &Model<B>, tokens: &[u32], chunk: usize) -> Vec<f32> {
    let pages = tokens.len().div_ceil(PAGE_TOKENS);
    let slots = ExactSlot::table((1..=pages as u32).rev());
    let mut cache = model.cache(pages + 1).unwrap();
    let mut activations = model.activations(chunk, chunk).unwrap();
    let mut logits = Vec::new();
    for (index, chunk_tokens) in tokens.chunks(chunk).enumerate() {
        let rows = SequenceRows::exact(index * chunk, chunk_tokens.len(), &slots);
        let every: Vec<usize> = (0..chunk_tokens.len()).collect();
        let batch = Batch { tokens: chunk_tokens, sequences: &[rows] };
        model.forward(&batch, &every, &mut cache, &mut activations).unwrap();
        logits.extend(model.backend().read(activations.logits(), 0..chunk_tokens.len()).unwrap());
    }
    logits
}

/// `‖a - b‖ / ‖b‖` of the logits of one position: the mean over `positions`, or a tenth of the largest if that is more,
/// so that one wrong position cannot hide among the others.
pub(crate) fn distance(a: &[f32], b: &[f32], positions: usize) -> f64 {
    assert_eq!(a.len(), b.len());
    let square = |value: f64| value * value;
    let width = a.len() / positions;
    let each = a.chunks(width).zip(b.chunks(width)).map(|(a, b)| {
        let difference: f64 = a.iter().zip(b).map(|(&a, &b)| square(f64::from(a) - f64::from(b))).sum();
        let norm: f64 = b.iter().map(|&b| square(f64::from(b))).sum();
        (difference / norm).sqrt()
    });
    let (sum, largest) = each.fold((0.0, 0.0f64), |(sum, largest), value| (sum + value, largest.max(value)));
    (sum / positions as f64).max(largest / OUTLIER)
}

/// The output projection of a folder's model, `[vocabulary, hidden]`.
fn head(folder: &Path) -> Option<Vec<f32>> {
    let bytes = std::fs::read(folder.join("model.safetensors")).ok()?;
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let names = ["lm_head.weight", "model.embed_tokens.weight", "language_model.model.embed_tokens.weight"];
    let head = names.iter().find_map(|name| file.tensor(name).ok()).unwrap();
    let dtype = match head.dtype() {
        safetensors::Dtype::F32 => DType::F32,
        safetensors::Dtype::F16 => DType::F16,
        safetensors::Dtype::BF16 => DType::BF16,
        other => panic!("{other:?}"),
    };
    let mut values = vec![0.0; head.shape().iter().product()];
    dequantise(dtype, head.data(), &mut values);
    Some(values)
}

/// Hidden states after the final norm, projected here, are the library's logits.
#[test]
fn final_hidden_states_agree_with_the_python_library() {
    let mut compared = 0;
    for folder in fixtures() {
        let Some(head) = head(&folder) else { continue };
        let Expected { tokens, logits } = expected(&folder);
        let model = open(&folder).load_model(Arc::new(CpuBackend::new(2).unwrap())).unwrap();
        let pages = tokens.len().div_ceil(PAGE_TOKENS);
        let slots = ExactSlot::table(1..=pages as u32);
        let mut cache = model.cache(pages + 1).unwrap();
        let mut activations = model.activations(tokens.len(), 1).unwrap();
        let rows = SequenceRows::exact(0, tokens.len(), &slots);
        let batch = Batch { tokens: &tokens, sequences: &[rows] };
        model.forward(&batch, &[0], &mut cache, &mut activations).unwrap();
        let hidden = model.final_hidden(0..tokens.len(), &activations).unwrap();
        let width = model.config().hidden_size;
        let ours: Vec<f32> = hidden
            .chunks(width)
            .flat_map(|row| {
                let dot = |weights: &[f32]| weights.iter().zip(row).map(|(a, b)| a * b).sum::<f32>();
                head.chunks(width).map(dot).collect::<Vec<f32>>()
            })
            .collect();
        let distance = distance(&ours, &logits, tokens.len());
        assert!(distance < BF16_TOLERANCE, "{}: {distance:.2e}", folder.display());
        let last = model.final_hidden(tokens.len() - 1..tokens.len(), &activations).unwrap();
        assert_eq!(last, hidden[hidden.len() - width..]);
        compared += 1;
    }
    assert!(compared >= 6, "{compared} models compared");
}

#[test]
fn logits_agree_with_the_python_library() {
    let mut far = Vec::new();
    for folder in fixtures() {
        let name = folder.file_name().unwrap().to_string_lossy().into_owned();
        let expected = expected(&folder);
        for isa in Isa::available() {
            let model = open(&folder).load_model(Arc::new(CpuBackend::with_isa(2, isa))).unwrap();
            let distance = distance(
                &run(&model, &expected.tokens, expected.tokens.len()),
                &expected.logits,
                expected.tokens.len(),
            );
            println!("{name} {isa}: {distance:.2e}");
            if distance >= tolerance(&folder) * slack(isa) {
                far.push(format!("{name} on {isa}: {distance:.2e}"));
            }
        }
    }
    assert!(far.is_empty(), "{far:#?}");
}

#[test]
fn chunks_and_single_tokens_agree_with_one_pass() {
    let mut far = Vec::new();
    for folder in fixtures() {
        let name = folder.file_name().unwrap().to_string_lossy().into_owned();
        let tokens = expected(&folder).tokens;
        for isa in Isa::available() {
            let model = open(&folder).load_model(Arc::new(CpuBackend::with_isa(2, isa))).unwrap();
            let whole = run(&model, &tokens, tokens.len());
            for chunk in [1, 5, 64, 100] {
                let distance = distance(&run(&model, &tokens, chunk), &whole, tokens.len());
                println!("{name} {isa} {chunk}: {distance:.2e}");
                if distance >= CHUNKING_TOLERANCE * slack(isa) {
                    far.push(format!("{name} on {isa}, chunks of {chunk}: {distance:.2e}"));
                }
            }
        }
    }
    assert!(far.is_empty(), "{far:#?}");
}

#[test]
fn sequences_of_a_batch_do_not_see_each_other() {
    let folder = fixtures().into_iter().find(|folder| folder.ends_with("llama-tied")).unwrap();
    let tokens = expected(&folder).tokens;
    let (first, second) = (&tokens[..70], &tokens[30..95]);
    let backend = Arc::new(CpuBackend::new(2).unwrap());
    let model = open(&folder).load_model(backend.clone()).unwrap();
    let mut cache = model.cache(6).unwrap();
    let mut activations = model.activations(135, 135).unwrap();
    let tables = [[1, 4], [3, 2]].map(ExactSlot::table);
    let batch = Batch {
        tokens: &[first, second].concat(),
        sequences: &[SequenceRows::exact(0, 70, &tables[0]), SequenceRows::exact(0, 65, &tables[1])],
    };
    let every: Vec<usize> = (0..135).collect();
    model.forward(&batch, &every, &mut cache, &mut activations).unwrap();
    let together = backend.read(activations.logits(), 0..135).unwrap();
    let apart = [run(&model, first, 70), run(&model, second, 65)].concat();
    let distance = distance(&together, &apart, 135);
    assert!(distance < CHUNKING_TOLERANCE, "{distance:.2e}");
}

#[test]
fn bad_batches_are_errors() {
    let folder = fixtures().into_iter().find(|folder| folder.ends_with("llama-tied")).unwrap();
    let model = open(&folder).load_model(Arc::new(CpuBackend::new(1).unwrap())).unwrap();
    let mut cache = model.cache(3).unwrap();
    let mut activations = model.activations(8, 1).unwrap();
    let mut fails = |tokens: &[u32], sequences: &[SequenceRows<'_>], logits: &[usize], part: &str| {
        let error =
            model.forward(&Batch { tokens, sequences }, logits, &mut cache, &mut activations).unwrap_err();
        assert!(error.to_string().contains(part), "{error}");
    };
    let rows = SequenceRows::exact;
    let (inside, outside) = (ExactSlot::table([1]), ExactSlot::table([3]));
    fails(&[1, 2], &[rows(0, 1, &inside)], &[], "tokens of a batch");
    fails(&[1], &[rows(64, 1, &inside)], &[], "pages of a sequence");
    fails(&[1], &[rows(0, 1, &outside)], &[], "page slot 3");
    fails(&[1, 2], &[rows(0, 1, &inside), rows(0, 1, &inside)], &[], "two sequences");
    fails(&[u32::MAX], &[rows(0, 1, &inside)], &[], "vocabulary");
    fails(&[1; 9], &[rows(0, 9, &inside)], &[], "tokens of a step");
    fails(&[1, 2], &[rows(0, 2, &inside)], &[0, 1], "rows with logits");
    fails(&[1], &[rows(0, 1, &inside)], &[8], "hidden rows");
}
