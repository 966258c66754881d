//! Compares a card with the processor on the same model, text and cache: mean KL divergence of their next-token
//! distributions, and how often the most likely token is the same.
//!
//! `devices MODEL TEXT [TOKENS]`: for a bf16 cache and a 2-bit one, in pages of 64 tokens (the kernels of prompts) and token by
//! token (those of answers). Both devices read each position as an answer does: old pages sealed, recent ones in bf16.

use std::sync::Arc;

use oscar_codec::{ExactSlot, PAGE_TOKENS, PageCodec, PageWindows, SealedSlot};
use oscar_kernels::backend::{Batch, CacheSpec, HostSlots, SealPage, SealedRows, SealedSpec, SequenceRows};
use oscar_kernels::cpu::CpuBackend;
use oscar_kernels::cpu::pool::Pool;
use oscar_kernels::cuda::{CudaBackend, Device};
use oscar_kernels::{Backend, Inspect};
use oscar_lab::eval::divergence::Divergence;
use oscar_model::source::{FetchPolicy, ModelPath, Silent, resolve};
use oscar_model::{LoadedModel, ModelFiles};
use oscar_report::Report;
use oscar_rotations::{CacheOptions, CachePlan, CacheType, ModelIdentity};
use serde_json::json;

type AnyError = Box<dyn std::error::Error>;

const WINDOWS: PageWindows = PageWindows { sink: 1, recent: 4 };

fn main() -> Result<(), AnyError> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let (name, text, count) = match &arguments[..] {
        [name, text] => (name, text, 1024),
        [name, text, count] => (name, text, count.parse()?),
        _ => return Err("usage: devices MODEL TEXT [TOKENS]".into()),
    };
    let path = resolve(name, FetchPolicy::Allow, &Silent)?;
    let kernels = std::env::temp_dir().join("oscar-cuda-kernels");
    let device = Device::open(0, Some(kernels))?;
    let card = load(name, &path, CudaBackend::new(device, false)?)?;
    let processor = load(name, &path, CpuBackend::new(Pool::default_threads())?)?;
    let mut tokens = processor.0.tokenizer().encode(&std::fs::read_to_string(text)?, true)?;
    tokens.truncate(count);
    let mut report = Report::here();
    for sealed in [false, true] {
        for at_once in [PAGE_TOKENS, 1] {
            let ours = logits(&card, &tokens, sealed, at_once)?;
            let theirs = logits(&processor, &tokens, sealed, at_once)?;
            let mut total = Divergence::default();
            for (position, (ours, theirs)) in ours.iter().zip(&theirs).enumerate() {
                let next = tokens.get(position + 1).copied().unwrap_or(0);
                total.add(&Divergence::of_row(theirs, ours, next));
            }
            report.push(json!({
                "kv": if sealed { "int2" } else { "bf16" },
                "tokens_at_once": at_once,
                "tokens": tokens.len(),
                "kl": total.mean_kl(),
                "top1_agreement": total.top1_agreement(),
            }));
        }
    }
    println!("{}", report.json());
    Ok(())
}

type Loaded<B> = (Arc<LoadedModel<B>>, Arc<PageCodec>);

/// The model on a device, and the codec of its 2-bit cache.
fn load<B: Inspect>(name: &str, path: &ModelPath, backend: B) -> Result<Loaded<B>, AnyError> {
    let files = ModelFiles::open(path)?;
    let identity = ModelIdentity::of(name, &files)?;
    let model = Arc::new(files.load(Arc::new(backend))?);
    let wanted = CacheOptions { dtype: CacheType::Int2, ..CacheOptions::default() };
    let codec = CachePlan::settle(&model, &identity, &wanted)?.codec;
    Ok((model, codec.ok_or("the model has no rotations for a 2-bit cache")?))
}

/// The logits of every position, so many at a time.
fn logits<B: Backend>(
    (model, codec): &Loaded<B>,
    tokens: &[u32],
    sealed: bool,
    at_once: usize,
) -> Result<Vec<Vec<f32>>, AnyError> {
    let model = model.model();
    let (config, backend) = (model.config(), model.backend());
    let pages = tokens.len().div_ceil(PAGE_TOKENS);
    let exact = ExactSlot::first(pages);
    let mut sealed_pages: Vec<Option<SealedSlot>> = vec![None; pages];
    let mut cache = backend.cache(&CacheSpec {
        sealed: sealed.then(|| SealedSpec {
            codec: Arc::clone(codec),
            slots: pages + 1,
            windows: WINDOWS,
            sequence_pages: pages,
            high: None,
        }),
        host: HostSlots::default(),
        ..CacheSpec::exact(config.kv_geometry(), config.q_heads, pages + 1)
    })?;
    let mut activations = model.activations(at_once, at_once)?;
    let mut rows = Vec::with_capacity(tokens.len());
    for start in (0..tokens.len()).step_by(at_once) {
        let begun =
            start.is_multiple_of(PAGE_TOKENS).then(|| WINDOWS.history(start / PAGE_TOKENS, usize::MAX, 0));
        // The page that leaves the window when this page begins.
        if let Some(last) = begun.and_then(|history| history.last()).filter(|_| sealed) {
            let slot = SealedSlot::new(last as u32 + 1).ok_or("a slot")?;
            let page = SealPage { page: last, exact: exact[last].ok_or("a page")?, sealed: slot };
            backend.seal(0..config.layers, &[page], &mut cache)?;
            sealed_pages[last] = Some(slot);
        }
        let part = &tokens[start..(start + at_once).min(tokens.len())];
        let table = SealedRows { pages: &sealed_pages, exact_from: usize::MAX, sealed_until: 0 };
        let sequence =
            SequenceRows { start, len: part.len(), pages: &exact, sealed: sealed.then_some(table) };
        let batch = Batch { tokens: part, sequences: &[sequence] };
        let every: Vec<usize> = (0..part.len()).collect();
        model.forward(&batch, &every, &mut cache, &mut activations)?;
        let read = backend.read(activations.logits(), 0..part.len())?;
        rows.extend(read.chunks_exact(config.vocab_size).map(<[f32]>::to_vec));
    }
    Ok(rows)
}
