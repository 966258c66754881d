//! Compares a model with reference logits of the same tokens: mean KL divergence and top-1 agreement.
//!
//! `teacher_forced MODEL.gguf --reference REF.safetensors [--threads N]`, where the reference holds `input_ids`
//! (I32, n) and `logits` (F32, n x vocabulary); see `tools/README.md`.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use oscar_codec::{ExactSlot, PAGE_TOKENS};
use oscar_kernels::Backend;
use oscar_kernels::backend::{Batch, SequenceRows};
use oscar_kernels::cpu::CpuBackend;
use oscar_kernels::cpu::pool::Pool;
use oscar_lab::eval::divergence::Divergence;
use oscar_model::ModelFiles;
use oscar_model::source::ModelPath;
use oscar_report::Report;
use safetensors::SafeTensors;
use serde_json::json;

type AnyError = Box<dyn std::error::Error>;

fn main() -> Result<(), AnyError> {
    let mut arguments = std::env::args().skip(1);
    let mut model = None;
    let mut reference = None;
    let mut threads = Pool::default_threads();
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--reference" => reference = arguments.next(),
            "--threads" => threads = arguments.next().ok_or("--threads needs a number")?.parse()?,
            "--json" => {}
            _ => model = Some(argument),
        }
    }
    let (Some(model), Some(reference)) = (model, reference) else {
        return Err("usage: teacher_forced MODEL --reference FILE.safetensors [--threads N]".into());
    };
    let path = PathBuf::from(&model);
    let path = if path.is_dir() { ModelPath::Folder(path) } else { ModelPath::Gguf(path) };
    let backend = Arc::new(CpuBackend::new(threads)?);
    let model = ModelFiles::open(&path)?.load_model(backend.clone())?;
    let (tokens, expected) = read_reference(Path::new(&reference), model.config().vocab_size)?;

    // Slot 0 is the dummy.
    let slots = ExactSlot::first(tokens.len().div_ceil(PAGE_TOKENS));
    let mut cache = model.cache(slots.len() + 1)?;
    let mut activations = model.activations(tokens.len(), tokens.len())?;
    let rows = SequenceRows::exact(0, tokens.len(), &slots);
    let every: Vec<usize> = (0..tokens.len()).collect();
    let batch = Batch { tokens: &tokens, sequences: &[rows] };
    model.forward(&batch, &every, &mut cache, &mut activations)?;
    let ours = backend.read(activations.logits(), 0..tokens.len())?;

    let vocab = model.config().vocab_size;
    let width = expected.len() / tokens.len();
    let (mut total, mut first) = (Divergence::default(), 0.0);
    for row in 0..tokens.len() {
        let ours = &ours[row * vocab..][..width.min(vocab)];
        let theirs = &expected[row * width..][..width.min(vocab)];
        let compared = Divergence::of_row(theirs, ours, 0);
        if row == 0 {
            first = compared.kl;
        }
        total.add(&compared);
    }
    let mut report = Report::here();
    let count = tokens.len() as f64;
    report.push(json!({
        "tokens": tokens.len(),
        "kl": total.mean_kl(),
        // The first position can hold activations so large that eight bits for them lose it altogether.
        "kl_first": first,
        "kl_rest": (total.kl - first) / (count - 1.0).max(1.0),
        "top1_agreement": total.top1_agreement(),
        "threads": threads,
    }));
    println!("{}", report.json());
    Ok(())
}

fn read_reference(path: &Path, vocab: usize) -> Result<(Vec<u32>, Vec<f32>), AnyError> {
    let bytes = std::fs::read(path)?;
    let file = SafeTensors::deserialize(&bytes)?;
    let words = |name: &str| -> Result<Vec<[u8; 4]>, AnyError> {
        let data = file.tensor(name)?.data().to_vec();
        Ok(data.chunks_exact(4).map(|word| [word[0], word[1], word[2], word[3]]).collect())
    };
    let tokens: Vec<u32> = words("input_ids")?.into_iter().map(u32::from_le_bytes).collect();
    let logits: Vec<f32> = words("logits")?.into_iter().map(f32::from_le_bytes).collect();
    if tokens.is_empty() || logits.len() < tokens.len() || logits.len() / tokens.len() > vocab {
        return Err(format!("{}: the reference does not fit this model", path.display()).into());
    }
    Ok((tokens, logits))
}
